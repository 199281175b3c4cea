"""Hostile requests: each a 4xx that names the thing, soon, and without an effect on the requests beside it."""

import asyncio
import json
import socket
import time
from typing import Any

import pytest

from shardwise.commands.serve import http_server
from shardwise.config import ServeConfig
from shardwise.server.tokenizer import Tokenizer
from tests.fake_engine import FakeEngine
from tests.unit.server_fixtures import client, make_app, saying

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER = [{"role": "user", "content": "hi"}]
SECONDS = 5.0  # for any of them, on a busy machine


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": USER, **fields}).encode()


def raw(name: str, value: str) -> bytes:
    """A chat with a value that Python's JSON would not write."""
    return json.dumps({"messages": USER}).encode()[:-1] + f', "{name}": {value}}}'.encode()


def content(parts: Any) -> bytes:
    return chat(messages=[{"role": "user", "content": parts}])


def tool(parameters: Any) -> bytes:
    return chat(
        tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}], tool_choice="required"
    )


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


CASES: list[tuple[bytes, str | None]] = [
    *((chat(max_tokens=value), "max_tokens") for value in (2**31, 10**30, 2**31 - 1, -1, 0, 1.5, "5")),
    *((raw("temperature", value), "temperature") for value in ("NaN", "Infinity", "1e999", "-1e-9", "3", '"1"')),
    *((raw("top_p", value), "top_p") for value in ("NaN", "-Infinity", "1.0000001")),
    (raw("seed", "9" * 100_000), None),
    *((raw(name, deep(100_000)), None) for name in ("messages", "metadata", "tools", "guided_json", "stop")),
    (raw("guided_json", '{"items":' * 100 + "{}" + "}" * 100), "guided_json"),
    (chat(guided_json={"type": "zzz"}), "guided_json"),
    (chat(stop=["x"] * 10_000), "stop"),
    (chat(stop=["x" * 2000]), "stop"),
    (chat(logit_bias={str(i): 1 for i in range(100_000)}), "logit_bias"),
    (chat(logit_bias={"99999": 1}), "logit_bias"),
    (chat(logit_bias={"5": 1e9}), "logit_bias"),
    (raw("logit_bias", '{"5": NaN}'), "logit_bias"),
    *((content(parts), "messages") for parts in (1, {}, [1], [{"type": "text", "text": 1}], [{"type": "image_url"}])),
    *((content([{"type": kind}]), "messages") for kind in (1, "input_audio", "text", "x" * 100_000)),
    (chat(guided_regex="(" * 5000 + ")" * 5000), "guided_regex"),
    (chat(guided_regex="x" * 1_100_000), "guided_regex"),
    (chat(guided_grammar="root ::= " + "(" * 50_000), "guided_grammar"),
    *((tool(schema), "tools") for schema in ([], "x")),
    (chat(tools=[{"type": "function", "function": {"name": f"a{i}"}} for i in range(2000)]), "tools"),
    (
        chat(response_format={"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}}),
        "response_format",
    ),
    (chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs"),
    (b'{"messages": "' + b"\xff" * 1_000_000 + b'"}', None),
    (b"\x00" * 1000, None),
    (json.dumps({"messages": USER}).encode("utf-16"), None),
]


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
async def test_each_is_refused_by_name_and_nobody_else_notices(backend: str) -> None:
    if backend == "llguidance":
        pytest.importorskip("llguidance")
    engine = FakeEngine(saying("I think.</think>well"))
    app = make_app(engine, grammar_backend=backend)
    wrong = list[Any]()
    async with client(app) as http:
        for body, param in CASES:
            good = asyncio.create_task(http.post(CHAT, content=chat()))
            begin_s = time.monotonic()
            answer = await http.post(CHAT, content=body)
            took_s, error = time.monotonic() - begin_s, answer.json().get("error", {})
            beside = (await good).json()["choices"][0]["message"]["content"]
            named = param is None or str(error.get("param")).startswith(param)
            if (
                answer.status_code != 400
                or not named
                or len(answer.content) > 3000
                or took_s > SECONDS
                or beside != "well"
            ):
                wrong.append((body[:80], answer.status_code, answer.text[:300], round(took_s, 1), beside))
    assert not wrong
    assert len(engine.requests) == len(CASES)
    assert not engine.running


async def test_one_request_id_for_many_requests_is_no_conflict() -> None:
    engine = FakeEngine(saying("I think.</think>well"))
    engine.delay_s = 0.002
    async with client(make_app(engine), headers={"x-request-id": "same"}) as http:
        answers = await asyncio.gather(*[http.post(CHAT, content=chat(n=2)) for _ in range(8)])
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
    assert len({answer.json()["id"] for answer in answers}) == 8


HEADS = {
    "a header of 1 MB": b"x-a: " + b"y" * 1_000_000,
    "a negative length": b"content-length: -5",
    "a length of 23 digits": b"content-length: " + b"9" * 23,
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
async def test_heads_that_are_none(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the server's own HTTP, which goes on to serve."""
    monkeypatch.setattr(Tokenizer, "close", lambda self: None)  # other tests use it after this server's end
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(9)
        server = http_server(ServeConfig(model=""), make_app(FakeEngine(saying("x"))))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        statuses = list[bytes]()
        for each in (head, b"content-length: 0"):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n" + each + b"\r\n\r\n")
            line = await asyncio.wait_for(reader.readline(), 10)
            statuses.append(line.split()[1])
            writer.close()
        server.should_exit = True
        await serving
    assert statuses == [b"400", b"400"]
