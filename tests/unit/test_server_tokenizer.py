"""The checkpoint's tokenizer and chat template, and text that comes in pieces."""

import asyncio
import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from shardwise.config import ConfigError
from shardwise.server.tokenizer import ChatTemplateError, Tokenizer
from tests.unit.server_fixtures import MODEL, tokenizer


@given(st.text(max_size=60))
@settings(deadline=None)
def test_pieces_add_up_to_the_whole(text: str) -> None:
    tokens = tokenizer().encode(text)
    detokenizer = tokenizer().detokenizer(skip_special_tokens=False)
    found = [detokenizer.add(token) for token in tokens]
    assert "".join(found) + detokenizer.finish() == tokenizer().decode(tokens)
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in found)


@given(st.lists(st.integers(0, 2047), max_size=40))
@settings(deadline=None)
def test_any_ids_decode_as_transformers_does(tokens: list[int]) -> None:
    backend = tokenizer()._backend
    assert tokenizer().decode(tokens) == backend.decode(tokens, skip_special_tokens=False)
    assert tokenizer().decode(tokens, skip_special_tokens=True) == backend.decode(tokens, skip_special_tokens=True)
    detokenizer = tokenizer().detokenizer()
    text = "".join(detokenizer.add(token) for token in tokens) + detokenizer.finish()
    assert text == backend.decode(tokens, skip_special_tokens=True)


def test_character_over_several_tokens_comes_with_the_last() -> None:
    tokens = tokenizer().encode("😀")
    assert len(tokens) == 4
    detokenizer = tokenizer().detokenizer()
    assert [detokenizer.add(token) for token in tokens] == ["", "", "", "😀"]
    assert b"".join(tokenizer().token_bytes(token) for token in tokens) == "😀".encode()


def test_cut_character_ends_in_one_replacement() -> None:
    detokenizer = tokenizer().detokenizer()
    assert [detokenizer.add(token) for token in tokenizer().encode("😀")[:2]] == ["", ""]
    assert detokenizer.finish() == "\ufffd"


def test_ids_outside_the_vocabulary_are_empty() -> None:
    assert tokenizer().token_bytes(10**6) == b""
    assert tokenizer().token_bytes(-1) == b""


def test_chat_template_as_transformers_has_it() -> None:
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(MODEL)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather in Rome?"}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    for kwargs in ({}, {"enable_thinking": False}):
        text = tokenizer().render_chat(messages, tools, kwargs)
        assert tokenizer().encode(text) == hf.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_dict=False, **kwargs
        )
        assert text.endswith("<think>\n\n</think>\n\n" if kwargs else "<think>\n")


def test_chat_template_errors_are_the_callers() -> None:
    user = {"role": "user", "content": "hi"}
    with pytest.raises(ChatTemplateError, match="must come first"):
        tokenizer().render_chat([user, {"role": "system", "content": "x"}], [], {})
    for name in ("chat_template", "tokenize", "conversation", "tools", "add_generation_prompt"):
        with pytest.raises(ChatTemplateError, match=f"cannot set {name}"):
            tokenizer().render_chat([user], [], {name: "{{ 7 * 7 }}"})


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no such file"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        Tokenizer.load(tmp_path)


async def test_long_texts_do_not_block_the_loop() -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 20_000
    task = asyncio.create_task(tokenizer().run(len(text), tokenizer().encode, text))
    worst_s, start_s, last_s = 0.0, time.monotonic(), time.monotonic()
    while not task.done():
        await asyncio.sleep(0.002)
        worst_s, last_s = max(worst_s, time.monotonic() - last_s), time.monotonic()
    whole_s = time.monotonic() - start_s
    assert len(await task) > 100_000
    assert worst_s < 0.5 * whole_s, f"the loop stood still for {worst_s:.3f} of {whole_s:.3f} s"
