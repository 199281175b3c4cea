"""Under load: a full queue is told with 429, long prompts are refused before they are tokenised."""

import asyncio
import threading
import time
from typing import Any

import msgspec
import pytest

from shardwise.server.requests import parse
from shardwise.server.services import INLINE_BODY_BYTES
from shardwise.server.tokenizer import Tokenizer
from tests.fake_engine import READY, FakeEngine
from tests.unit.server_fixtures import client, make_app, saying, tokenizer
from tests.unit.test_server_chat import until

USER = [{"role": "user", "content": "hi"}]


async def test_a_full_queue_is_a_429_until_it_is_not() -> None:
    engine = FakeEngine(saying("one two three"))
    engine.ready = msgspec.structs.replace(READY, max_num_seqs=2)
    engine.hang_after = 1
    async with client(make_app(engine, max_queued_requests=2)) as http:
        tasks = [asyncio.create_task(http.post("/v1/chat/completions", json={"messages": USER})) for _ in range(4)]
        await until(lambda: len(engine.running) == 4)
        for path, body in (
            ("/v1/chat/completions", {"messages": USER}),
            ("/v1/completions", {"prompt": "a", "stream": True}),
            ("/v1/responses", {"input": "a"}),
            ("/v1/messages", {"model": "miniature", "messages": USER, "max_tokens": 5}),
        ):
            answer = await http.post(path, json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1"), answer.text
            assert answer.json()["error"]["type"] == "rate_limit_error"
        assert (await http.get("/v1/models")).status_code == 200
        tasks[0].cancel()
        await until(lambda: len(engine.running) == 3)
        engine.hang_after = None
        assert (await http.post("/v1/chat/completions", json={"messages": USER})).status_code == 200
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert not engine.running


async def test_no_limit() -> None:
    engine = FakeEngine(saying("one"))
    engine.ready = msgspec.structs.replace(READY, max_num_seqs=1)
    async with client(make_app(engine, max_queued_requests=0)) as http:
        answers = await asyncio.gather(*[http.post("/v1/completions", json={"prompt": "a", "n": 9}) for _ in range(9)])
    assert {answer.status_code for answer in answers} == {200}


def test_the_longest_token_bounds_every_text() -> None:
    longest = tokenizer().longest_token_bytes
    assert longest == max(len(tokenizer().token_bytes(token)) for token in range(tokenizer().vocab_size))
    for text in ("é日本😀 hello" * 50, "<|im_end|>" * 9, " " * 999, "\n" * 50):
        assert len(text.encode()) <= longest * len(tokenizer().encode(text))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_over_long_prompts_are_refused_unread(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "word " * 40_000
    body: dict[str, Any] = (
        {"prompt": text} if path == "/v1/completions" else {"messages": [{**USER[0], "content": text}]}
    )
    app = make_app(FakeEngine(saying("x")))
    monkeypatch.setattr(Tokenizer, "encode", lambda *args, **kwargs: pytest.fail("tokenised"))
    async with client(app) as http:
        answer = await http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "512" in error["message"]


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("/v1/chat/completions", {"messages": USER * 10_001}, "messages"),
        ("/v1/responses", {"input": USER * 10_001}, "input"),
        ("/v1/messages", {"model": "miniature", "max_tokens": 3, "messages": USER * 10_001}, "messages"),
    ],
)
async def test_too_many_messages_are_a_400(path: str, more: dict[str, Any], param: str) -> None:
    async with client(make_app(FakeEngine(saying("x")))) as http:
        answer = await http.post(path, json=more)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{param}: List should have at most 10000 items")


async def test_a_million_token_ids_do_not_hold_up_the_event_loop() -> None:
    """The longest that a callback of the loop takes, in its own computing time."""
    longest_s, run = 0.0, asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        nonlocal longest_s
        begin_s = time.thread_time()
        run(handle)
        longest_s = max(longest_s, time.thread_time() - begin_s)

    body = msgspec.json.encode({"prompt": [77] * 1_000_000})
    async with client(make_app(FakeEngine(saying("x")))) as http:
        await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio.Handle, "_run", timed)
            answer = await http.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert longest_s < 0.03


async def test_long_bodies_are_not_parsed_in_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def recording(model: Any, body: bytes) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return parse(model, body)

    monkeypatch.setattr("shardwise.server.services.parse", recording)
    async with client(make_app(FakeEngine(saying("x")))) as http:
        for size in (10, INLINE_BODY_BYTES + 1):
            body = {"messages": [{**USER[0], "name": "x" * size}], "max_tokens": 5}
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    assert threads == [True, False]
