"""/v1/completions over a FakeEngine: shapes, batches, echo, logprobs, stops, streams."""

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from shardwise.server import responses
from tests.fake_engine import FakeEngine
from tests.unit.server_fixtures import ANSWER, MODEL, client, echo, make_app, saying, tokenizer

PATH = "/v1/completions"


async def post(engine: FakeEngine, body: dict[str, Any]) -> dict[str, Any]:
    async with client(make_app(engine)) as http:
        answer = await http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    TypeAdapter(responses.Completion).validate_python(answer.json(), strict=True)
    return answer.json()


async def stream(engine: FakeEngine, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with client(make_app(engine)) as http:
        answer = await http.post(PATH, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    for chunk in chunks:
        TypeAdapter(responses.Completion).validate_python(chunk, strict=True)
    return chunks


async def test_whole_answer() -> None:
    engine = FakeEngine(saying(ANSWER))
    answer = await post(engine, {"prompt": "Hello there"})
    generated = len(tokenizer().encode(ANSWER))
    assert answer["object"] == "text_completion"
    assert answer["model"] == MODEL.name
    assert answer["choices"] == [
        {"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    prompt_tokens = len(tokenizer().encode("Hello there"))
    assert answer["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated + 1,
        "total_tokens": prompt_tokens + generated + 1,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    _, prompt, sampling = engine.requests[0]
    assert prompt == tokenizer().encode("Hello there")
    assert sampling.temperature == 0  # do_sample is false in generation_config.json
    assert sampling.max_tokens == 512 - prompt_tokens
    assert not engine.running
    assert not engine.cancelled


async def test_stream_equals_the_whole() -> None:
    for step in (1, 3):
        engine = FakeEngine(saying(ANSWER))
        engine.tokens_per_message = step
        chunks = await stream(engine, {"prompt": "a", "stream_options": {"include_usage": True}})
        assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == ANSWER
        assert not any("\ufffd" in c["choices"][0]["text"] for c in chunks[:-1])
        assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
        assert all(c["usage"] is None for c in chunks[:-1])
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == len(tokenizer().encode(ANSWER)) + 1
        assert len({c["id"] for c in chunks}) == 1


async def test_usage_in_every_chunk() -> None:
    chunks = await stream(
        FakeEngine(saying("one two three")), {"prompt": "a", "stream_options": {"continuous_usage_stats": True}}
    )
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len(tokenizer().encode("one two three")) + 1
    chunks = await stream(FakeEngine(saying("one")), {"prompt": "a"})
    assert not any("usage" in c for c in chunks)


async def test_prompts_of_every_kind() -> None:
    ids = tokenizer().encode("some words")
    for prompt, expected in (
        ("some words", [ids]),
        (["some words", "x"], [ids, tokenizer().encode("x")]),
        (ids, [ids]),
        ([ids, [5]], [ids, [5]]),
        ([[7]], [[7]]),
    ):
        engine = FakeEngine(echo)
        answer = await post(engine, {"prompt": prompt, "return_token_ids": True})
        assert [request[1] for request in sorted(engine.requests)] == expected
        for i, choice in enumerate(answer["choices"]):
            assert choice["index"] == i
            assert choice["prompt_token_ids"] == expected[i]
            assert choice["token_ids"] == [*expected[i], engine.stop_token]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_n_answers_to_each_prompt() -> None:
    engine = FakeEngine(echo)
    answer = await post(engine, {"prompt": ["a", "b b"], "n": 2, "best_of": 2, "seed": 5, "temperature": 1})
    assert [choice["text"] for choice in answer["choices"]] == ["a", "a", "b b", "b b"]
    assert sorted(s.seed for _, _, s in engine.requests if s.seed) == [5, 5, 6, 6]
    assert answer["usage"]["prompt_tokens"] == len(tokenizer().encode("a")) + len(tokenizer().encode("b b"))
    chunks = await stream(FakeEngine(echo), {"prompt": ["a", "b b"], "n": 2})
    texts = ["", "", "", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["a", "a", "b b", "b b"]


@pytest.mark.parametrize("step", [1, 2, 50])
async def test_stop_string_across_tokens(step: int) -> None:
    engine = FakeEngine(saying(ANSWER))
    engine.tokens_per_message = step
    engine.delay_s = 0.001
    body = {"prompt": "a", "stop": ["never", "ck bro"]}
    choice = (await post(engine, body))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("the qui", "stop", "ck bro")
    assert not engine.running
    assert bool(engine.cancelled) is True  # the engine was told
    chunks = await stream(engine, body | {"include_stop_str_in_output": True})
    assert "".join(c["choices"][0]["text"] for c in chunks) == "the quick bro"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_held_back_text_comes_at_the_end() -> None:
    choice = (await post(FakeEngine(saying("half a sto")), {"prompt": "a", "stop": "stop"}))["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("half a sto", None)


async def test_min_tokens_keeps_stop_strings_away() -> None:
    first = tokenizer().encode("stop stop")
    choice = (await post(FakeEngine(saying("stop stop")), {"prompt": "a", "stop": "stop", "min_tokens": len(first)}))[
        "choices"
    ][0]
    assert choice["text"].startswith("stop")


async def test_stop_token() -> None:
    engine = FakeEngine(saying("abc"))
    ids = {"stop_token_ids": [2036], "return_token_ids": True, "prompt": "a", "skip_special_tokens": False}
    choice = (await post(engine, ids))["choices"][0]
    assert (choice["text"], choice["stop_reason"], choice["token_ids"][-1]) == ("abc", 2036, 2036)
    choice = (await post(engine, ids | {"include_stop_str_in_output": True}))["choices"][0]
    assert choice["text"] == "abc<|im_end|>"
    assert engine.requests[0][2].stop_token_ids == (2036,)


async def test_length() -> None:
    answer = await post(FakeEngine(saying(ANSWER)), {"prompt": "a", "max_tokens": 3})
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


async def test_logprobs() -> None:
    text = "é it is"
    tokens = tokenizer().encode(text)
    body = {"prompt": "a", "logprobs": 2}
    whole = (await post(FakeEngine(saying(text)), body))["choices"][0]["logprobs"]
    assert whole["token_logprobs"] == [-0.5] * len(tokens)
    assert whole["tokens"][:2] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert "".join(whole["tokens"][2:]) == " it is"
    assert whole["text_offset"][:3] == [0, 0, 1]
    for token, top in zip(whole["tokens"], whole["top_logprobs"], strict=True):
        assert len(top) == 2
        assert top[token] == -0.5
    chunks = await stream(FakeEngine(saying(text)), body)
    parts = [c["choices"][0]["logprobs"] for c in chunks]
    for name in whole:
        assert [item for part in parts for item in part[name]] == whole[name]
    none = (await post(FakeEngine(saying(text)), {"prompt": "a", "logprobs": 0}))["choices"][0]["logprobs"]
    assert none["top_logprobs"][-1] == {none["tokens"][-1]: -0.5}


async def test_echo_with_logprobs() -> None:
    prompt = "the cat sat"
    tokens = tokenizer().encode(prompt)
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 2}
    engine = FakeEngine(saying(" on it now"))
    choice = (await post(engine, body))["choices"][0]
    assert choice["text"].startswith(prompt + " on")
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [None] + [-0.5] * (len(tokens) + 1)
    assert logprobs["top_logprobs"][0] is None
    assert "".join(logprobs["tokens"]) == choice["text"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    assert engine.requests[0][2].prompt_logprobs == 1
    chunks = await stream(FakeEngine(saying(" on it now")), body)
    assert "".join(c["choices"][0]["text"] for c in chunks) == choice["text"]
    assert [x for c in chunks for x in c["choices"][0]["logprobs"]["text_offset"]] == logprobs["text_offset"]


async def test_echo_alone() -> None:
    engine = FakeEngine(saying("x"))
    answer = await post(engine, {"prompt": tokenizer().encode("the cat"), "echo": True, "max_tokens": 0})
    assert answer["choices"][0]["text"] == "the cat"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert not engine.requests
    answer = await post(engine, {"prompt": "the cat", "echo": True, "max_tokens": 0, "logprobs": 0})
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == len(tokenizer().encode("the cat"))
    assert answer["choices"][0]["text"] == "the cat"
    assert engine.requests[0][2].max_tokens == 0


async def test_every_parameter_reaches_the_engine() -> None:
    engine = FakeEngine(saying("x"))
    given = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.2, "frequency_penalty": -0.3,
        "repetition_penalty": 1.1, "seed": 7, "max_tokens": 9, "min_tokens": 2, "ignore_eos": True,
    }  # fmt: skip
    await post(engine, {"prompt": "a", "logit_bias": {"12": 3, "7": -100}, "user": "me", "metadata": {}} | given)
    sampling = engine.requests[0][2]
    assert {name: getattr(sampling, name) for name in given} == given
    assert sampling.logit_bias == {12: 3.0, 7: -100.0}
    await post(engine, {"prompt": "a", "top_p": 0, "top_k": -1, "temperature": None})
    sampling = engine.requests[1][2]
    assert 0 < sampling.top_p < 1e-3
    assert sampling.top_k == 0
    assert sampling.temperature == 0
