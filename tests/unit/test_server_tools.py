"""Tool calls in /v1/chat/completions through the real `openai` client, over uvicorn and a FakeEngine."""

import json
from typing import Any

import openai
import pytest

from tests.fake_engine import FakeEngine
from tests.unit.server_fixtures import MODEL, saying, tokenizer
from tests.unit.test_server_chat import USER, serving


def tool(name: str, **types: str) -> Any:
    properties = {key: {"type": kind} for key, kind in types.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [tool("add", a="integer", b="integer"), tool("say", text="string")]
ADD = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
SAY = '<tool_call>\n<function=say>\n<parameter=text>\né\n"<b>" 😀\n</parameter>\n</function>\n</tool_call>'
REPLY = f"I add.\n</think>\n\nFirst this.\n\n{ADD}\n{SAY}"
EXPECTED = [("add", {"a": 1, "b": 2}), ("say", {"text": 'é\n"<b>" 😀'})]


async def ask(client: openai.AsyncOpenAI, **options: Any) -> Any:
    return (
        await client.chat.completions.create(model=MODEL.name, messages=USER, **{"tools": TOOLS, **options})
    ).choices[0]


def calls(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


async def test_whole_answer_with_calls() -> None:
    async with serving(FakeEngine(saying(REPLY))) as client:
        choice = await ask(client)
    assert calls(choice.message) == EXPECTED
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "First this.")
    assert choice.message.model_dump()["reasoning_content"] == "I add."
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2
    assert all(call.startswith("call_") for call in ids)


async def test_calls_alone_have_no_content() -> None:
    async with serving(FakeEngine(saying(f"</think>\n\n{ADD}"))) as client:
        assert (await ask(client)).message.content is None


@pytest.mark.parametrize("step", [1, 3, 50])
async def test_stream(step: int) -> None:
    engine = FakeEngine(saying(REPLY))
    engine.tokens_per_message = step
    found: dict[int, dict[str, str]] = {}
    content, finish, deltas = "", [], 0
    async with serving(engine) as client:
        async for chunk in await client.chat.completions.create(
            model=MODEL.name, messages=USER, tools=TOOLS, stream=True
        ):
            (choice,) = chunk.choices
            content += choice.delta.content or ""
            finish += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or []:
                entry = found.setdefault(call.index, {"id": call.id or "", "name": "", "arguments": ""})
                assert call.function
                entry["name"] += call.function.name or ""
                entry["arguments"] += call.function.arguments or ""
                deltas += 1
    assert [(call["name"], json.loads(call["arguments"])) for call in found.values()] == EXPECTED
    assert (content, finish) == ("First this.", ["tool_calls"])
    assert all(call["id"] for call in found.values())
    assert deltas > 10 or step == 50


async def test_the_clients_own_accumulator_agrees() -> None:
    async with (
        serving(FakeEngine(saying(REPLY))) as client,
        client.chat.completions.stream(model=MODEL.name, messages=USER, tools=TOOLS) as stream,
    ):
        message = (await stream.get_final_completion()).choices[0].message
    assert calls(message) == EXPECTED


async def test_a_call_cut_by_max_tokens_is_unfinished() -> None:
    async with serving(FakeEngine(saying(f"</think>{SAY}"))) as client:
        choice = await ask(client, max_tokens=20)
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls
    with pytest.raises(ValueError, match="Unterminated"):
        json.loads(call.function.arguments)


async def test_no_call_without_tools_or_parser() -> None:
    engine = FakeEngine(saying(f"</think>{ADD}"))
    for options, request in (({}, {"tools": []}), ({}, {"tool_choice": "none"}), ({"tool_call_parser": "none"}, {})):
        async with serving(engine, **options) as client:
            choice = await ask(client, **request)
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (ADD, None, "stop")


async def test_one_call_at_a_time() -> None:
    engine = FakeEngine(saying(REPLY))
    async with serving(engine) as client:
        choice = await ask(client, parallel_tool_calls=False)
    assert calls(choice.message) == EXPECTED[:1]
    assert choice.finish_reason == "tool_calls"
    assert engine.cancelled  # the rest is not computed


async def test_each_of_n_answers_has_its_own_calls() -> None:
    async with serving(FakeEngine(saying(REPLY))) as client:
        answer = await client.chat.completions.create(model=MODEL.name, messages=USER, tools=TOOLS, n=3)
    assert [calls(choice.message) for choice in answer.choices] == [EXPECTED] * 3


async def test_an_answer_with_calls_can_be_sent_back() -> None:
    engine = FakeEngine(saying(REPLY))
    async with serving(engine) as client:
        first = (await ask(client)).message
        replies: list[Any] = [
            {"role": "tool", "tool_call_id": call.id, "content": "done"} for call in first.tool_calls or []
        ]
        await client.chat.completions.create(model=MODEL.name, messages=[*USER, first, *replies], tools=TOOLS)
    prompt = tokenizer().decode(engine.requests[1][1])
    assert f"First this.\n\n{ADD}\n{SAY}<|im_end|>" in prompt
    assert prompt.count("<tool_response>\ndone\n</tool_response>") == 2
