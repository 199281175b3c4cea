"""/v1/messages through the real `anthropic` client, over uvicorn and a FakeEngine."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.fake_engine import READY, FakeEngine
from tests.unit.server_fixtures import MODEL, client, make_app, saying, tokenizer
from tests.unit.test_server_chat import serving

USER: list[Any] = [{"role": "user", "content": "What is 2 + 2?"}]
TOOL: Any = {
    "name": "add",
    "description": "Add.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}},
}
CALL = (
    '<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=note>\né "x"\n</parameter>\n'
    "</function>\n</tool_call>"
)
REPLY = f"Easy é😀.\n</think>\n\nIt is four.\n{CALL}"


@contextlib.asynccontextmanager
async def speaking(engine: FakeEngine, **options: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with serving(engine, **options) as other:
        url = str(other.base_url).removesuffix("/v1/")
        async with anthropic.AsyncAnthropic(base_url=url, api_key="secret", max_retries=0, timeout=20) as client:
            yield client


async def ask(client: anthropic.AsyncAnthropic, **options: Any) -> anthropic.types.Message:
    given = {"model": MODEL.name, "messages": USER, "max_tokens": 200, "tools": [TOOL], **options}
    return await client.messages.create(**given)


async def test_whole_answer() -> None:
    engine = FakeEngine(saying(REPLY))
    async with speaking(engine, api_key="secret") as client:
        answer = await ask(client, thinking={"type": "enabled", "budget_tokens": 1024}, system="Be brief.")
    thought, text, call = answer.content
    assert thought.type == "thinking"
    assert thought.thinking == "Easy é😀."
    assert text.type == "text"
    assert text.text == "It is four."
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("add", {"a": 2, "note": 'é "x"'})
    assert call.id.startswith("toolu_")
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("tool_use", None, "assistant")
    prompt = tokenizer().decode(engine.requests[0][1])
    assert "Be brief." in prompt
    assert prompt.endswith("<think>\n")
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == len(engine.requests[0][1])
    assert answer.usage.cache_read_input_tokens == 2
    assert answer.usage.output_tokens == len(tokenizer().encode(REPLY)) + 1


@pytest.mark.parametrize("step", [1, 4])
async def test_stream(step: int) -> None:
    engine = FakeEngine(saying(REPLY))
    engine.tokens_per_message = step
    kinds: list[str] = []
    async with (
        speaking(engine) as client,
        client.messages.stream(
            model=MODEL.name, messages=USER, max_tokens=200, tools=[TOOL], thinking={"type": "adaptive"}
        ) as stream,
    ):
        kinds += [event.type async for event in stream]
        answer = await stream.get_final_message()
    whole = await whole_of(engine)
    assert [block.model_dump(exclude={"id"}) for block in answer.content] == [
        block.model_dump(exclude={"id"}) for block in whole.content
    ]
    assert answer.usage == whole.usage
    assert answer.stop_reason == "tool_use"
    order = [kind for kind in kinds if kind.startswith(("message", "content_block_st"))]
    assert order == [
        "message_start", *["content_block_start", "content_block_stop"] * 3, "message_delta", "message_stop",
    ]  # fmt: skip


async def whole_of(engine: FakeEngine) -> anthropic.types.Message:
    async with speaking(engine) as client:
        return await ask(client, thinking={"type": "adaptive"})


async def test_thinking_is_off_unless_asked_for() -> None:
    engine = FakeEngine(saying("Four."))
    async with speaking(engine) as client:
        answer = await ask(client)
        await ask(client, thinking={"type": "disabled"})
    assert [block.type for block in answer.content] == ["text"]
    assert answer.stop_reason == "end_turn"
    assert all(tokenizer().decode(prompt).endswith("<think>\n\n</think>\n\n") for _, prompt, _ in engine.requests)


async def test_why_an_answer_ended() -> None:
    engine = FakeEngine(saying("one two three four"))
    async with speaking(engine) as client:
        answer = await ask(client, stop_sequences=["zzz", " three"])
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " three")
        assert answer.content[0].model_dump()["text"] == "one two"
        assert (await ask(client, max_tokens=2)).stop_reason == "max_tokens"
        await ask(client, max_tokens=100_000)  # cut down to what is left, as agents ask for their model's limit
    prompt, sampling = engine.requests[-1][1:]
    assert sampling.max_tokens == READY.max_model_len - len(prompt)


async def test_a_call_that_was_cut_is_left_out() -> None:
    async with speaking(FakeEngine(saying(CALL))) as client:
        answer = await ask(client, max_tokens=12)
        assert (answer.content, answer.stop_reason) == ([], "max_tokens")
        async with client.messages.stream(model=MODEL.name, messages=USER, max_tokens=12, tools=[TOOL]) as stream:
            parts = [event.partial_json async for event in stream if event.type == "input_json"]
    assert "".join(parts).startswith('{"a": ')


async def test_turns_with_tools() -> None:
    engine = FakeEngine(saying(REPLY))
    async with speaking(engine) as client:
        first = await ask(client, thinking={"type": "adaptive"})
        call = first.content[2]
        assert call.type == "tool_use"
        results: list[Any] = [
            {"type": "text", "text": "Well?"},
            {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "4"}]},
        ]
        messages = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        await ask(client, messages=messages, thinking={"type": "adaptive"})
        counted = await client.messages.count_tokens(
            model=MODEL.name, messages=messages, tools=[TOOL], thinking={"type": "adaptive"}
        )
    prompt = tokenizer().decode(engine.requests[1][1])
    assert "It is four.\n\n" + CALL + "<|im_end|>" in prompt
    assert prompt.index("<tool_response>\n4\n</tool_response>") < prompt.index("Well?")
    assert counted.input_tokens == len(engine.requests[1][1])


async def test_parallel_calls_can_be_forbidden() -> None:
    engine = FakeEngine(saying(f"{CALL}\n{CALL}"))
    async with speaking(engine) as client:
        assert len((await ask(client)).content) == 2
        one = await ask(client, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        none = await ask(client, tool_choice={"type": "none"})
    assert (len(one.content), one.stop_reason) == (1, "tool_use")
    assert none.content[0].type == "text"


async def test_errors_are_anthropics() -> None:
    engine = FakeEngine(saying(REPLY))
    async with speaking(engine, api_key="secret") as client:
        with pytest.raises(anthropic.AuthenticationError, match="API key"):
            await ask(client.with_options(api_key="wrong"))
        with pytest.raises(anthropic.NotFoundError, match="not served here"):
            await ask(client, model="claude")
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            await ask(client, extra_body={"temperature": 9})
        with pytest.raises(anthropic.BadRequestError, match="last one must be"):
            await ask(client, messages=[*USER, {"role": "assistant", "content": "It"}])
        with pytest.raises(anthropic.BadRequestError, match="web_search"):
            await ask(client, tools=[{"type": "web_search_20250305", "name": "web_search"}])
        engine.fail_after = 3
        with pytest.raises(anthropic.InternalServerError, match="a rank died"):
            await ask(client)
        with pytest.raises(anthropic.APIStatusError, match="a rank died"):
            async with client.messages.stream(model=MODEL.name, messages=USER, max_tokens=50) as stream:
                [event async for event in stream]


async def test_error_shape_and_unknown_parameters() -> None:
    async with client(make_app(FakeEngine(saying("x")))) as http:
        body = {"model": MODEL.name, "messages": USER, "max_tokens": 5}
        answer = await http.post("/v1/messages", json={**body, "nonsense": 1})
        assert answer.status_code == 400
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert "nonsense" in answer.json()["error"]["message"]
        picture = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
        messages = [{"role": "user", "content": [picture]}]
        answer: httpx.Response = await http.post("/v1/messages", json={**body, "messages": messages})
        assert (answer.status_code, "messages[0].content[0].source" in answer.text) == (400, True)
