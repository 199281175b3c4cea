"""Stop strings and the split at </think>, in pieces of every size."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from shardwise.server.text import ReasoningSplitter, StopStrings


def pieces(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def stopped(text: str, stops: list[str], size: int, include: bool = False) -> tuple[str, str | None]:
    search = StopStrings(stops, include)
    out = ""
    for piece in pieces(text, size):
        out += search.add(piece)
        if search.matched is not None:
            return out, search.matched
    return out + search.finish(), None


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("hello END there", ["END"], ("hello ", "END")),
        ("hello EN there", ["END"], ("hello EN there", None)),
        ("aaab", ["aab"], ("a", "aab")),
        ("xababac", ["ababac", "abac"], ("x", "ababac")),
        ("one\n\ntwo", ["\n\n", "two"], ("one", "\n\n")),
        ("stop", ["stop"], ("", "stop")),
        ("a😀é", ["😀"], ("a", "😀")),
        ("plain", [], ("plain", None)),
        ("almost EN", ["END"], ("almost EN", None)),
    ],
)
def test_stop_strings(text: str, stops: list[str], expected: tuple[str, str | None], size: int) -> None:
    assert stopped(text, stops, size) == expected


def test_stop_string_can_be_included() -> None:
    for size in (1, 2, 50):
        assert stopped("a b END c", ["END"], size, include=True) == ("a b END", "END")


def test_only_a_possible_prefix_is_held_back() -> None:
    search = StopStrings(["<end>"])
    assert search.add("abc <e") == "abc "
    assert search.add("x<") == "<ex"
    assert search.add("b") == "<b"


def test_not_scanned_text_cannot_stop() -> None:
    search = StopStrings(["ab"])
    assert search.add("ab", scan=False) == "ab"
    assert search.add("a", scan=False) == "a"
    assert search.add("b") == "b"  # its "a" was given out before stopping was allowed
    assert search.add("ab") == ""
    assert search.matched == "ab"


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 7),
)
def test_stop_strings_like_a_search_of_the_whole(text: str, stops: list[str], size: int) -> None:
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    expected = (text[: min(ends)[0] + min(ends)[1]], min(ends)[2]) if ends else (text, None)
    assert stopped(text, stops, size) == expected


def split(prompt: str, text: str, size: int) -> tuple[str, str]:
    splitter = ReasoningSplitter(prompt)
    thought = answer = ""
    for piece in [*pieces(text, size), None]:
        new_thought, new_answer = splitter.finish() if piece is None else splitter.add(piece)
        assert not (answer and new_thought)
        thought, answer = thought + new_thought, answer + new_answer
    return thought, answer


OPEN, CLOSED = "assistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        (OPEN, "2 + 2\nis 4\n</think>\n\nFour.", ("2 + 2\nis 4", "Four.")),
        (OPEN, "\n</think>\n\nFour.\n", ("", "Four.\n")),
        (OPEN, "cut in the midst", ("cut in the midst", "")),
        (OPEN, "cut </thi", ("cut </thi", "")),
        (OPEN, "a < b </ c </think>x </think> y", ("a < b </ c", "x </think> y")),
        (OPEN, "a\n\n  b\n</think>", ("a\n\n  b", "")),
        (CLOSED, "Four.", ("", "Four.")),
        (CLOSED, "  indented", ("", "indented")),
        (CLOSED, "<b>bold</b>", ("", "<b>bold</b>")),
        ("assistant\n", "<think>\nhm\n</think>\n\nFour.", ("hm", "Four.")),
        ("assistant\n", "Say <think> twice.", ("", "Say <think> twice.")),
        ("assistant\n", "<thi", ("", "<thi")),
    ],
)
def test_reasoning(prompt: str, text: str, expected: tuple[str, str], size: int) -> None:
    if text.startswith("  "):
        expected = (expected[0], text)
    assert split(prompt, text, size) == expected


@given(st.text("a \n</think>", max_size=40), st.integers(1, 9))
def test_reasoning_does_not_depend_on_pieces(text: str, size: int) -> None:
    assert split(OPEN, text, size) == split(OPEN, text, 1000)
    assert split("x", text, size) == split("x", text, 1000)
