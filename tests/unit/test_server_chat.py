"""/v1/chat/completions through the real `openai` client, over uvicorn and a FakeEngine."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from tests.fake_engine import FakeEngine
from tests.unit.server_fixtures import MODEL, make_app, saying, tokenizer

THOUGHT = "2 + 2\nis é😀 4"
REPLY = f"{THOUGHT}\n</think>\n\nIt is four."
USER: list[Any] = [{"role": "user", "content": "What is 2 + 2?"}]


@contextlib.asynccontextmanager
async def serving(engine: FakeEngine, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(make_app(engine, **options), log_level="warning", lifespan="off"))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        try:
            async with openai.AsyncOpenAI(base_url=url, api_key="secret", max_retries=0, timeout=20) as client:
                yield client
        finally:
            server.should_exit = True
            await task


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


async def test_models() -> None:
    async with serving(FakeEngine(saying("x")), served_model_name=("one", "org/two")) as client:
        assert [model.id async for model in client.models.list()] == ["one", "org/two"]
        assert (await client.models.retrieve("org/two")).id == "org/two"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("three")


async def test_whole_answer() -> None:
    engine = FakeEngine(saying(REPLY))
    async with serving(engine) as client:
        answer = await client.chat.completions.create(model=MODEL.name, messages=USER, n=2)
    for choice in answer.choices:
        assert choice.message.content == "It is four."
        assert choice.message.model_dump()["reasoning_content"] == THOUGHT
        assert choice.finish_reason == "stop"
    assert answer.usage
    assert answer.usage.completion_tokens == 2 * (len(tokenizer().encode(REPLY)) + 1)
    expected = "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert engine.requests[0][1] == tokenizer().encode(expected)


@pytest.mark.parametrize("step", [1, 4])
async def test_stream(step: int) -> None:
    engine = FakeEngine(saying(REPLY))
    engine.tokens_per_message = step
    reasoning = content = ""
    roles, finish, usage = [], [], None
    async with serving(engine) as client:
        async for chunk in await client.chat.completions.create(
            model=MODEL.name, messages=USER, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                delta = choice.delta.model_dump()
                reasoning += delta.get("reasoning_content") or ""
                content += delta["content"] or ""
                roles += [delta["role"]] if delta["role"] else []
                finish += [choice.finish_reason] if choice.finish_reason else []
    assert (reasoning, content, roles, finish) == (THOUGHT, "It is four.", ["assistant"], ["stop"])
    assert usage
    assert usage.completion_tokens == len(tokenizer().encode(REPLY)) + 1


async def test_thinking_can_be_off_or_left_in() -> None:
    engine = FakeEngine(saying("Four."))
    async with serving(engine) as client:
        answer = await client.chat.completions.create(
            model=MODEL.name, messages=USER, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
        )
    assert answer.choices[0].message.content == "Four."
    assert "reasoning_content" not in answer.choices[0].message.model_dump()
    assert tokenizer().decode(engine.requests[0][1]).endswith("<think>\n\n</think>\n\n")
    async with serving(FakeEngine(saying(REPLY)), reasoning_parser="none") as client:
        answer = await client.chat.completions.create(model=MODEL.name, messages=USER)
    assert answer.choices[0].message.content == REPLY


async def test_stop_strings_hold_for_the_answer() -> None:
    async with serving(FakeEngine(saying(REPLY))) as client:
        answer = await client.chat.completions.create(model=MODEL.name, messages=USER, stop=["\n", "is", " four"])
    assert answer.choices[0].message.model_dump()["reasoning_content"] == THOUGHT
    assert answer.choices[0].message.content == "It "


async def test_logprobs() -> None:
    async with serving(FakeEngine(saying("é</think>ok"))) as client:
        answer = await client.chat.completions.create(model=MODEL.name, messages=USER, logprobs=True, top_logprobs=3)
        parts = [
            entry
            async for chunk in await client.chat.completions.create(
                model=MODEL.name, messages=USER, logprobs=True, top_logprobs=3, stream=True
            )
            for choice in chunk.choices
            if choice.logprobs
            for entry in choice.logprobs.content or []
        ]
    logprobs = answer.choices[0].logprobs
    assert logprobs
    assert logprobs.content
    data = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert data.decode() == "é</think>ok"
    assert all(len(entry.top_logprobs) == 3 for entry in logprobs.content)
    assert parts == logprobs.content


async def test_turns_with_tools() -> None:
    engine = FakeEngine(saying("</think>x"))
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
    async with serving(engine) as client:
        first = await client.chat.completions.create(model=MODEL.name, messages=USER, tools=[tool])
        call: Any = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}
        messages: list[Any] = [
            {"role": "developer", "content": "Be brief."},
            *USER,
            first.choices[0].message,
            {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "now?"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "done"},
        ]
        await client.chat.completions.create(model=MODEL.name, messages=messages, tools=[tool])
        await client.chat.completions.create(model=MODEL.name, messages=USER, tools=[tool], tool_choice="none")
    prompts = [tokenizer().decode(prompt) for _, prompt, _ in engine.requests]
    assert (
        '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": true}}'
        in prompts[0]
    )
    assert "system\n# Tools" in prompts[1]
    assert "Be brief." in prompts[1]
    assert "And now?" in prompts[1]
    assert '<parameter=a>\n[1, "é"]\n</parameter>' in prompts[1]
    assert "Tools" not in prompts[2]


async def test_failure_in_a_stream_is_its_last_event() -> None:
    engine = FakeEngine(saying(REPLY))
    engine.fail_after, engine.delay_s = 3, 0.01
    async with serving(engine) as client:
        stream = aiter(await client.chat.completions.create(model=MODEL.name, messages=USER, stream=True))
        assert (await anext(stream)).choices
        with pytest.raises(openai.APIError, match="a rank died"):
            [chunk async for chunk in stream]
        with pytest.raises(openai.InternalServerError, match="a rank died"):
            await client.chat.completions.create(model=MODEL.name, messages=USER)


async def test_given_up_answer_is_an_error() -> None:
    engine = FakeEngine(saying("x"))
    engine.finish_reason = "error"
    async with serving(engine) as client:
        with pytest.raises(openai.InternalServerError, match="given up"):
            await client.chat.completions.create(model=MODEL.name, messages=USER)


async def test_refusal_has_its_status_in_a_stream_too() -> None:
    engine = FakeEngine(saying("x"))
    engine.refuse = ("no room, ever", "messages")
    async with serving(engine) as client:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="no room, ever") as caught:
                await client.chat.completions.create(model=MODEL.name, messages=USER, stream=stream)
            assert caught.value.param == "messages"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hang_after", [0, 5])
async def test_client_that_leaves_cancels_its_answers(stream: bool, hang_after: int) -> None:
    engine = FakeEngine(saying(REPLY))
    engine.hang_after = hang_after
    async with serving(engine) as client:

        async def ask() -> None:
            create: Any = client.chat.completions.create
            answer = await create(model=MODEL.name, messages=USER, n=3, stream=stream)
            if stream:
                async for _ in answer:
                    pass

        task = asyncio.create_task(ask())
        await until(lambda: len(engine.running) == 3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not engine.running)
    assert len(engine.cancelled) == 3


async def test_reader_that_stops_early_cancels() -> None:
    engine = FakeEngine(saying(REPLY))
    engine.delay_s = 0.02
    async with serving(engine) as client:
        stream = await client.chat.completions.create(model=MODEL.name, messages=USER, stream=True)
        await anext(aiter(stream))
        await stream.close()
        await until(lambda: engine.cancelled)


async def test_keys_and_body_limit_over_a_socket() -> None:
    engine = FakeEngine(saying("x"))
    async with serving(engine, api_key="secret", max_body_bytes=200_000) as client:
        assert await client.models.list()
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(model=MODEL.name, prompt="a" * 600_000)
        assert caught.value.status_code == 413

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(10):
                yield b" " * 60_000

        async with httpx.AsyncClient(headers={"authorization": "Bearer secret"}) as http:
            answer = await http.post(f"{client.base_url}completions", content=chunks())
        assert answer.status_code == 413
