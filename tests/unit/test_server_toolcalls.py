"""Tool calls parsed out of text that comes in pieces of any size."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.server.coercion import coerce, parameter_types
from shardwise.server.toolcalls import CallDelta, ToolCallParser, merged

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "on": {"type": "boolean"},
        "items": {"type": "array"},
        "more": {"$ref": "#/$defs/more"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "mode": {"enum": ["a", "1"]},
        "any": {},
    },
    "$defs": {"more": {"type": "object"}},
}
TOOLS = {"f": SCHEMA, "g": {}, "send.mail-2": {}}


def xml(name: str = "f", **arguments: str) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def parse(
    text: str, step: int = 10**9, complete: bool = True, **options: Any
) -> tuple[str, list[CallDelta], ToolCallParser]:
    parser = ToolCallParser(TOOLS, **options)
    content, deltas = "", []
    for start in range(0, len(text), step):
        said, new = parser.add(text[start : start + step])
        content += said
        deltas += new
    said, new = parser.finish(complete)
    return content + said, merged(deltas + new), parser


def calls(deltas: list[CallDelta]) -> list[tuple[str | None, Any]]:
    return [(delta.name, json.loads(delta.arguments)) for delta in deltas]


CASES: list[tuple[str, str, list[tuple[str, Any]]]] = [
    (xml(), "", [("f", {})]),
    (xml(text="a", count="5"), "", [("f", {"text": "a", "count": 5})]),
    ("Let me see.\n\n" + xml(text="x"), "Let me see.", [("f", {"text": "x"})]),
    (xml(text="x") + "\n" + xml("g", a="1") + "\n", "", [("f", {"text": "x"}), ("g", {"a": 1})]),
    (xml(text="x") + "\n\nDone. ", "Done. ", [("f", {"text": "x"})]),
    (xml(text='a\n\n"b" <c> \\ é日😀 </d>\n'), "", [("f", {"text": 'a\n\n"b" <c> \\ é日😀 </d>\n'})]),
    (xml(text="if a < b:\n    pass </parameter> x"), "", [("f", {"text": "if a < b:\n    pass </parameter> x"})]),
    (xml(text="<tool_call>\n<function=f>"), "", [("f", {"text": "<tool_call>\n<function=f>"})]),
    (xml(text=""), "", [("f", {"text": ""})]),
    (xml(text="5", mode="1"), "", [("f", {"text": "5", "mode": "1"})]),
    (xml(share="5", on="True", items='["<", 1]'), "", [("f", {"share": 5, "on": True, "items": ["<", 1]})]),
    (xml(more='{"a": null}', maybe="null", any="no"), "", [("f", {"more": {"a": None}, "maybe": None, "any": "no"})]),
    (xml(count="five", on="1"), "", [("f", {"count": "five", "on": "1"})]),
    (xml("send.mail-2", to="é"), "", [("send.mail-2", {"to": "é"})]),
    ("<tool_call><function=f><parameter=text>a b</parameter></function></tool_call>", "", [("f", {"text": "a b"})]),
    (xml(text="a").replace("</function>\n", ""), "", [("f", {"text": "a"})]),
    (xml(text="a").removesuffix("\n</tool_call>"), "", [("f", {"text": "a"})]),
    (xml(text="a").removesuffix("</function>\n</tool_call>"), "", [("f", {"text": "a"})]),
    (xml(text="a").removesuffix("\n</parameter>\n</function>\n</tool_call>"), "", [("f", {"text": "a"})]),
    ("The mark <tool_call> begins a call, </tool_call> ends it. ", "...", []),
    ("Write `<tool_call>\n<function=NAME>` first.", "...", []),
    ("Nearly: <tool_call> {not json} </tool_call>\n", "...", []),
    ("a <tool_call> <tool_call>\n<function=f>\n</function>\n</tool_call>", "a <tool_call>", [("f", {})]),
    ("x <tool_", "...", []),
    ("x \n\n", "...", []),
    (xml("unknown", a="1"), "...", []),
    (
        '<tool_call>\n{"name": "f", "arguments": {"text": "}\\"{", "items": [{}]}}\n</tool_call>',
        "", [("f", {"text": '}"{', "items": [{}]})],
    ),
    ('<tool_call>\n{"arguments": {"a": 1}, "name": "g"}\n</tool_call>\nok', "ok", [("g", {"a": 1})]),
    ('<tool_call>{"name": "g", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("g", {"a": 1})]),
    (
        '<tool_call>{"name": "g"}</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "", [("g", {}), ("f", {})],
    ),
    ('<tool_call>{"name": "h", "arguments": {}}</tool_call>', "...", []),
    ('<tool_call>{"name": "g", "arguments": [1]}</tool_call>', "...", []),
]  # fmt: skip


@pytest.mark.parametrize("step", [1, 2, 3, 7, 10**9])
@pytest.mark.parametrize(("text", "content", "expected"), CASES)
def test_calls_and_text(text: str, content: str, expected: list[Any], step: int) -> None:
    said, deltas, parser = parse(text, step)
    assert (said, calls(deltas)) == (text if content == "..." else content, expected)
    assert all(delta.done and delta.id for delta in deltas)
    assert parser.called == bool(expected)
    assert len({delta.id for delta in deltas}) == len(deltas)


@pytest.mark.parametrize(
    "text",
    [
        xml(text="one two\nthree", count="12"),
        '<tool_call>{"name": "f", "arguments": {"text": "one", "count": 12}}',
    ],
)
def test_a_call_cut_anywhere_is_never_whole(text: str) -> None:
    for end in range(len(text)):
        _, deltas, parser = parse(text[:end], 1, complete=False)
        for delta in deltas:
            whole = delta.done
            assert whole == parser.called
            if not whole:
                with pytest.raises(ValueError):  # noqa: PT011
                    json.loads(delta.arguments)


def test_strings_stream_as_they_come() -> None:
    parser = ToolCallParser(TOOLS)
    parser.add("<tool_call>\n<function=f>\n<parameter=text>\n")
    for word in ("one", " two", ' "three"'):
        (delta,) = parser.add(word)[1]
        assert json.loads(f'"{delta.arguments}"') == word
        assert delta.id is None


def test_text_is_held_back_no_longer_than_needed() -> None:
    parser = ToolCallParser(TOOLS)
    assert parser.add("a <") == ("a", [])
    assert parser.add("b") == (" <b", [])
    assert parser.add(" <tool_call>") == ("", [])
    assert parser.add("x") == (" <tool_call>x", [])


def test_one_form_only() -> None:
    both = xml() + '<tool_call>{"name": "g"}</tool_call>'
    assert [call.name for call in parse(both, form="xml")[1]] == ["f"]
    assert [call.name for call in parse(both, form="json")[1]] == ["g"]


def test_single_ends_after_the_first_call() -> None:
    content, deltas, parser = parse("a " + xml() + "\n" + xml("g"), 1, single=True)
    assert (content, calls(deltas), parser.finished) == ("a", [("f", {})], True)


@given(st.text(alphabet='<>/tool_cafunin=prme{}"\\:\n 1', max_size=60), st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_pieces_do_not_matter(text: str, step: int) -> None:
    for whole in (text, "<tool_call>\n<function=f>\n<parameter=text>\n" + text, '<tool_call>{"name": "f", ' + text):
        content, deltas, _ = parse(whole)
        again = parse(whole, step)
        assert again[0] == content
        assert [(d.name, d.arguments, d.done) for d in again[1]] == [(d.name, d.arguments, d.done) for d in deltas]


@given(st.dictionaries(st.sampled_from(sorted(SCHEMA["properties"])), st.none() | st.integers() | st.text(max_size=20)))
@settings(deadline=None)
def test_strings_survive(arguments: dict[str, Any]) -> None:
    strings = {key: value for key, value in arguments.items() if isinstance(value, str)}
    if any(mark in value for value in strings.values() for mark in ("</parameter>", "\r")):
        return
    text = xml("f", **{key: value if key in strings else json.dumps(value) for key, value in arguments.items()})
    _, (call,), _ = parse(text, 3)
    found = json.loads(call.arguments)
    assert found.keys() == arguments.keys()
    if "text" in strings:
        assert found["text"] == strings["text"]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, " 12\n", 12),
        ({"type": "integer"}, "12.0", 12),
        ({"type": "integer"}, "12.5", "12.5"),
        ({"type": "integer"}, str(10**30), 10**30),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "integer"]}, "7", 7),
        ({"oneOf": [{"type": "boolean"}, {"const": "auto"}]}, "auto", "auto"),
        ({"oneOf": [{"type": "boolean"}, {}]}, "[1]", [1]),
        ({"type": "object"}, "{'a': 1}", "{'a': 1}"),
        ({"properties": {}}, "{}", {}),
        ({"$ref": "#/nowhere"}, "true", True),
        ({"allOf": [{"type": "string"}]}, "true", "true"),
        ({"type": "array"}, "[" * 5000, "[" * 5000),
        ("nonsense", "x", "x"),
    ],
)
def test_types(schema: Any, text: str, value: Any) -> None:
    found = coerce(text, parameter_types({"properties": {"a": schema}}, "a"))
    assert found == value
    assert type(found) is type(value)
