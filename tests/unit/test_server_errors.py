"""What is refused and how; health, metrics, request ids, logs; and bodies that hypothesis makes up."""

import json
import logging
import re
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import hypothesis.strategies as st
import msgspec
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings

from shardwise.config import ConfigError
from shardwise.engine.messages import Stats
from shardwise.server.messages_api.body import MessagesBody
from shardwise.server.requests import ChatBody, CompletionBody, StreamOptions, StructuredOutputs
from shardwise.server.responses_api.body import ResponsesBody
from shardwise.server.sampling import GenerationDefaults
from shardwise.server.tokenize import DetokenizeBody, TokenizeBody
from tests.fake_engine import READY, FakeEngine
from tests.unit.server_fixtures import client, make_app, saying

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


async def post(path: str, body: Any, engine: FakeEngine | None = None, **options: Any) -> httpx.Response:
    async with client(make_app(engine or FakeEngine(saying("x")), **options)) as http:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await http.post(path, content=content)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [5, True]}, "prompt"),
        ({"prompt": [2048]}, "prompt"),
        ({"prompt": [[5], [-1]]}, "prompt"),
        ({"prompt": "a", "nonsense": 1}, "nonsense"),
        ({"prompt": "a", "messages": []}, "messages"),
        ({"prompt": "a", "temperature": 2.5}, "temperature"),
        ({"prompt": "a", "temperature": "1"}, "temperature"),
        ({"prompt": "a", "top_p": -0.1}, "top_p"),
        ({"prompt": "a", "top_k": -2}, "top_k"),
        ({"prompt": "a", "min_p": 2}, "min_p"),
        ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt": "a", "presence_penalty": 3}, "presence_penalty"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 2.0}, "n"),
        ({"prompt": "a", "n": True}, "n"),
        ({"prompt": ["a"] * 1024, "n": 2}, "n"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 512}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 10**30}, "max_tokens"),
        ({"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"prompt": "a " * 600}, "prompt"),
        ({"prompt": "a", "stop": ""}, "stop"),
        ({"prompt": "a", "stop": ["a", 5]}, "stop[1]"),
        ({"prompt": "a", "stop_token_ids": [2048]}, "stop_token_ids"),
        ({"prompt": "a", "stop_token_ids": "5"}, "stop_token_ids"),
        ({"prompt": "a", "logit_bias": {"2048": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "seed": 2**63}, "seed"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"prompt": "a", "stream_options": {}}, "stream_options"),
        ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ],
)
async def test_wrong_completions(body: dict[str, Any], param: str) -> None:
    answer = await post(COMPLETIONS, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert param.split("[")[0].split(".")[0] in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].image_url.url",
        ),
        ({"messages": [{"role": "user", "content": "x", "what": 1}]}, "messages[0].what"),
        ({"messages": [*USER, {"role": "system", "content": "x"}]}, "messages"),
        ({"messages": USER, "prompt": "x"}, "prompt"),
        ({"messages": USER, "echo": True}, "echo"),
        ({"messages": USER, "logprobs": 5}, "logprobs"),
        ({"messages": USER, "top_logprobs": 5}, "top_logprobs"),
        ({"messages": USER, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": USER, "max_completion_tokens": 600}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "a " * 600}]}, "messages"),
        ({"messages": USER, "response_format": {"type": "xml"}}, "response_format.type"),
        ({"messages": USER, "tools": [{"type": "other"}]}, "tools[0].type"),
        ({"messages": USER, "tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"messages": USER, "tool_choice": "required"}, "tool_choice"),
        ({"messages": USER, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"messages": USER, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"messages": USER, "chat_template_kwargs": 5}, "chat_template_kwargs"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
async def test_wrong_chats(body: dict[str, Any], param: str) -> None:
    answer = await post(CHAT, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"[" * 9999, b'{"a":1}x'],
)
async def test_bad_json(body: bytes) -> None:
    for path in (COMPLETIONS, CHAT):
        answer = await post(path, body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]


async def test_too_long_says_the_numbers_and_the_flag() -> None:
    message = (await post(COMPLETIONS, {"prompt": [5] * 100, "max_tokens": 500})).json()["error"]["message"]
    for part in ("100 tokens", "500", "512", "at most 412", "--max-model-len"):
        assert part in message
    engine = FakeEngine(saying("x"))
    engine.ready = msgspec.structs.replace(READY, kv_tokens=64)
    answer = await post(COMPLETIONS, {"prompt": [5] * 64}, engine)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "--kv-tokens" in answer.text
    assert (await post(COMPLETIONS, {"prompt": [5] * 63}, engine)).status_code == 200


async def test_unknown_model_and_path() -> None:
    answer = await post(COMPLETIONS, {"prompt": "a", "model": "gpt"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert (await post(COMPLETIONS, {"prompt": "a", "model": "b"}, served_model_name=("a", "b"))).json()["model"] == "b"
    for path in ("/v1/nothing", "/nothing", "/v1/completions/", "//v1/models"):
        answer = await post(path, {})
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "invalid_request_error")
    async with client(make_app(FakeEngine(saying("x")))) as http:
        answer = await http.get(COMPLETIONS)
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize(
    "header", [None, "Bearer", "Bearer ", "Bearer wrong", "Basic secret", "secret", "Bearer secre", "Bearer secrét"]
)
async def test_wrong_key(header: str | None) -> None:
    async with client(make_app(FakeEngine(saying("x")), api_key="secret")) as http:
        for path in ("/v1/models", "/v1/nothing", "/v1"):
            answer = await http.get(path, headers=[(b"authorization", header.encode())] if header else [])
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/v1/models", headers={"authorization": "bearer secret"})).status_code == 200


async def test_body_limit() -> None:
    exact = json.dumps({"prompt": "a"}).encode()
    limit = len(exact)
    assert (await post(COMPLETIONS, exact, max_body_bytes=limit)).status_code == 200
    answer = await post(COMPLETIONS, exact + b" ", max_body_bytes=limit)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


async def test_engine_not_ready() -> None:
    engine = FakeEngine(saying("x"))
    engine.ready = None
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER, "stream": True})):
        answer = await post(path, body, engine)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_not_ready")
        assert answer.headers["retry-after"]
    async with client(make_app(engine)) as http:
        assert (await http.get("/health")).status_code == 503
        assert (await http.get("/v1/models")).json()["data"][0]["max_model_len"] is None
        engine.ready = READY
        assert (await http.get("/health")).json() == {"status": "ok"}
        engine.draining = True
        answer = await http.post(COMPLETIONS, json={"prompt": "a"})
        assert answer.status_code == 503
        assert "shutting down" in answer.text


async def test_bug_is_a_500_without_its_inside(caplog: pytest.LogCaptureFixture) -> None:
    def broken(prompt: Any, sampling: Any) -> list[int]:
        raise KeyError("inside")

    for stream in (False, True):
        answer = await post(COMPLETIONS, {"prompt": "a", "stream": stream}, FakeEngine(broken))
        assert answer.status_code == 500
        assert "inside" not in answer.text
        assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]
        assert answer.headers["x-request-id"] in caplog.text
        assert "inside" in caplog.text


async def test_request_ids_and_no_prompt_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "shardwise")
    async with client(make_app(FakeEngine(saying("rhubarb")), api_key="secret")) as http:
        headers = {"authorization": "Bearer secret", "x-request-id": "mine-1"}
        answer = await http.post(COMPLETIONS, json={"prompt": "parsnip"}, headers=headers)
        assert answer.headers["x-request-id"] == "mine-1"
        assert "mine-1" in caplog.text
        answer = await http.post(COMPLETIONS, json={"prompt": "parsnip", "top_p": 9}, headers=headers)
        assert answer.json()["error"]["request_id"] == "mine-1"
        for bad in (b"a b", b"x" * 200, "é".encode()):
            answer = await http.get("/health", headers=[(b"x-request-id", bad)])
            assert len(answer.headers["x-request-id"]) == 32
        await http.get("/a%0Ab?key=turnip")
    ours = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("shardwise"))
    assert not any(word in ours for word in ("parsnip", "rhubarb", "secret", "turnip", "a\nb"))


async def test_metrics() -> None:
    engine = FakeEngine(saying("one two three"))
    app = make_app(engine)

    def stats(preemptions: int = 4) -> Stats:
        return Stats(2, 3, 64, 256, 2, 8, preemptions, prompt_tokens=0, generated_tokens=0, steps=0)

    async with client(app) as http:

        async def values() -> dict[str, float]:
            lines = (await http.get("/metrics")).text.splitlines()
            return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[0] != "#"}

        empty = await values()
        assert empty["shardwise_num_requests_running"] == 0
        assert empty['shardwise_request_success_total{finished_reason="stop"}'] == 0
        usage = (await http.post(COMPLETIONS, json={"prompt": "a b c"})).json()["usage"]
        engine.fail_after = 1
        await http.post(COMPLETIONS, json={"prompt": "a b c"})
        engine.stats = stats()
        seen = await values()
        assert seen["shardwise_num_requests_running"] == 2
        assert seen["shardwise_num_requests_waiting"] == 3
        assert seen["shardwise_kv_cache_usage_perc"] == 0.25
        assert seen["shardwise_num_preemptions_total"] == 4
        assert seen["shardwise_prompt_tokens_total"] == 2 * usage["prompt_tokens"]
        assert seen["shardwise_generation_tokens_total"] == usage["completion_tokens"] + 1
        assert seen["shardwise_time_to_first_token_seconds_count"] == 2
        assert seen["shardwise_inter_token_latency_seconds_count"] == usage["completion_tokens"] - 1
        assert seen["shardwise_e2e_request_latency_seconds_count"] == 2
        assert seen['shardwise_request_success_total{finished_reason="stop"}'] == 1
        assert seen['shardwise_request_success_total{finished_reason="error"}'] == 1
        engine.stats = stats(preemptions=1)  # a restarted engine's
        assert (await values())["shardwise_num_preemptions_total"] == 5
        assert (await values())["shardwise_num_preemptions_total"] == 5


async def test_openapi_document() -> None:
    async with client(make_app(FakeEngine(saying("x")))) as http:
        document = (await http.get("/openapi.json")).json()
    text = json.dumps(document)
    for reference in {part.split('"')[0] for part in text.split('"$ref": "#/components/schemas/')[1:]}:
        assert reference in document["components"]["schemas"]
    operation = document["paths"][CHAT]["post"]
    assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ChatBody")
    assert "top_k" in document["components"]["schemas"]["ChatBody"]["properties"]
    assert "422" not in text
    assert "400" in operation["responses"]


def test_generation_defaults() -> None:
    assert GenerationDefaults.parse({}) == GenerationDefaults()
    found = GenerationDefaults.parse({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "x": 1})
    assert (found.temperature, found.top_k, found.top_p) == (0.6, 20, 0.95)
    assert GenerationDefaults.parse({"do_sample": False, "temperature": 0.6}).temperature == 0
    for bad in ({"top_p": "x"}, {"temperature": -1}, {"top_k": True}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            GenerationDefaults.parse(bad)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["user", "assistant", "text", "function", "a", 0, 1, 2047, 2048]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]),
        "content": st.text(max_size=8) | ANYTHING,
    },
    optional={"tool_calls": ANYTHING, "name": ANYTHING, "reasoning_content": ANYTHING},
)
SMALL = st.integers(0, 5) | st.none()
PARAMETERS = {
    "stream": st.booleans(), "n": SMALL, "temperature": st.floats(0, 2), "top_p": st.floats(0, 1), "seed": SMALL,
    "logprobs": SMALL | st.booleans(), "top_logprobs": SMALL, "max_tokens": SMALL, "min_tokens": SMALL,
    "stop": st.lists(st.text(min_size=1, max_size=3), max_size=3), "echo": st.booleans(),
    "stop_token_ids": st.lists(st.integers(0, 2050), max_size=3), "include_stop_str_in_output": st.booleans(),
    "logit_bias": st.dictionaries(st.integers(-1, 2050).map(str), st.floats(-101, 101), max_size=2),
    "return_token_ids": st.booleans(), "skip_special_tokens": st.booleans(), "tools": ANYTHING,
    "chat_template_kwargs": ANYTHING, "response_format": ANYTHING, "tool_choice": ANYTHING, "user": ANYTHING,
}  # fmt: skip
BODY = st.fixed_dictionaries(
    {},
    optional={
        "prompt": st.text(min_size=1, max_size=20) | st.lists(st.integers(0, 2047), max_size=5) | ANYTHING,
        "messages": st.lists(MESSAGE, min_size=1, max_size=3) | ANYTHING,
    },
)


@cache
def fuzzed() -> tuple[FakeEngine, FastAPI]:
    engine = FakeEngine(saying("well <think> é😀 stop"))
    return engine, make_app(engine)


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """A body of either API: mostly sound, with a few parameters of their kind or of none."""
    body = draw(BODY)
    for name in draw(st.lists(st.sampled_from(sorted(PARAMETERS)), max_size=3, unique=True)):
        body[name] = draw(PARAMETERS[name] if draw(st.integers(0, 3)) else ANYTHING)
    return body


@given(bodies(), st.sampled_from([COMPLETIONS, CHAT]), st.integers(1, 4))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
async def test_no_body_is_a_500(body: dict[str, Any], path: str, step: int) -> None:
    engine, app = fuzzed()
    engine.tokens_per_message = step
    async with client(app) as http:
        answer = await http.post(path, content=json.dumps(body).encode())
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    elif body.get("stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in answer.text
    else:
        assert answer.json()["choices"]
    assert not engine.running


async def test_headers_do_not_wait_for_a_slow_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.server.stream.HEADER_DELAY_S", 0.01)
    engine = FakeEngine(saying("x"))
    engine.delay_s, engine.fail_after = 0.2, 0
    answer = await post(COMPLETIONS, {"prompt": "a", "stream": True}, engine)
    assert answer.status_code == 200  # what goes wrong after them is an event
    assert json.loads(answer.text.removeprefix("data: "))["error"]["code"] == "engine_failed"


def test_document_names_every_parameter() -> None:
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    models = (ChatBody, CompletionBody, ResponsesBody, MessagesBody, TokenizeBody, DetokenizeBody)
    for model in (*models, StreamOptions, StructuredOutputs):
        for name, field in model.model_fields.items():
            shown = field.alias or name
            assert re.search(rf"`(\w+\.)?{shown}[`.]", text), f"{model.__name__}.{shown}"
