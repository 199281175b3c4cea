"""/v1/responses through the real `openai` client, over uvicorn and a FakeEngine; and /tokenize."""

import json
from typing import Any

import openai
import pytest

from shardwise.server.responses_api.body import ResponsesBody, chat_messages
from shardwise.server.responses_api.store import Kept, ResponseStore
from tests.fake_engine import FakeEngine
from tests.unit.server_fixtures import MODEL, client, make_app, saying, tokenizer
from tests.unit.test_server_chat import serving

TOOL: Any = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": False,
}
CALL = "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>"
REPLY = f"Easy é😀.\n</think>\n\nIt is four.\n{CALL}"


async def ask(client: openai.AsyncOpenAI, **options: Any) -> Any:
    return await client.responses.create(**{"model": MODEL.name, "input": "2 + 2?", "tools": [TOOL], **options})


async def test_whole_answer() -> None:
    engine = FakeEngine(saying(REPLY))
    async with serving(engine) as client:
        answer = await ask(client, instructions="Be brief.", metadata={"a": "b"})
    thought, message, call = answer.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "Easy é😀.")
    assert (message.type, answer.output_text, message.status) == ("message", "It is four.", "completed")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 2})
    assert (answer.status, answer.metadata, answer.instructions) == ("completed", {"a": "b"}, "Be brief.")
    usage = answer.usage
    assert usage.input_tokens == len(engine.requests[0][1])
    assert usage.output_tokens == len(tokenizer().encode(REPLY)) + 1
    assert usage.input_tokens_details.cached_tokens == 2
    assert usage.output_tokens_details.reasoning_tokens == len(tokenizer().encode("Easy é😀.\n</think>"))
    assert "Be brief." in tokenizer().decode(engine.requests[0][1])


@pytest.mark.parametrize("step", [1, 4])
async def test_stream(step: int) -> None:
    engine = FakeEngine(saying(REPLY))
    engine.tokens_per_message = step
    events: list[Any] = []
    async with serving(engine) as client:
        events += [event async for event in await ask(client, stream=True)]
        whole = await ask(client)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if not event.type.endswith(".delta")]
    block = ["response.output_item.added", "response.content_part.added"]
    assert kinds == [
        "response.created", "response.in_progress",
        *block, "response.reasoning_text.done", "response.content_part.done", "response.output_item.done",
        *block, "response.output_text.done", "response.content_part.done", "response.output_item.done",
        block[0], "response.function_call_arguments.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    final = events[-1].response
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.model_dump() for item in done] == [item.model_dump() for item in final.output]

    def bare(response: Any) -> list[Any]:
        return [item.model_dump(exclude={"id", "call_id"}) for item in response.output]

    assert bare(final) == bare(whole)
    assert final.usage == whole.usage
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == "It is four."


async def test_the_clients_own_accumulator_agrees() -> None:
    async with (
        serving(FakeEngine(saying(REPLY))) as client,
        client.responses.stream(model=MODEL.name, input="2 + 2?", tools=[TOOL]) as stream,
    ):
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]


async def test_conversation_by_id() -> None:
    engine = FakeEngine(saying(REPLY))
    async with serving(engine) as client:
        first = await ask(client)
        call = first.output[2].call_id
        result = [{"type": "function_call_output", "call_id": call, "output": "4"}]
        second = await ask(client, previous_response_id=first.id, input=result, stream=False)
        by_hand = [{"role": "user", "content": "2 + 2?"}, *[item.model_dump() for item in first.output], *result]
        await ask(client, input=by_hand)
        assert engine.requests[1][1] == engine.requests[2][1]
        assert second.previous_response_id == first.id
        assert (await client.responses.retrieve(first.id)).output == first.output
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError, match="whole conversation"):
            await ask(client, previous_response_id=first.id)
        unkept = await ask(client, store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unkept.id)
        third = await ask(client, previous_response_id=second.id)
        assert third.status == "completed"
    prompt = tokenizer().decode(engine.requests[1][1])
    assert f"It is four.\n\n{CALL}<|im_end|>" in prompt
    assert "<tool_response>\n4\n</tool_response>" in prompt


async def test_cut_answers_are_incomplete() -> None:
    async with serving(FakeEngine(saying(REPLY))) as client:
        answer = await ask(client, max_output_tokens=5)
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert answer.output[-1].status == "incomplete"
        events = [event async for event in await ask(client, max_output_tokens=5, stream=True)]
    assert events[-1].type == "response.incomplete"


async def test_thinking_off_and_hosted_tools_left_out() -> None:
    engine = FakeEngine(saying("Four."))
    async with serving(engine) as client:
        await ask(client, reasoning={"effort": "none"}, tools=[{"type": "web_search"}, TOOL])
    prompt = tokenizer().decode(engine.requests[0][1])
    assert prompt.endswith("<think>\n\n</think>\n\n")
    assert "web_search" not in prompt
    assert '"add"' in prompt


async def test_errors() -> None:
    engine = FakeEngine(saying(REPLY))
    async with serving(engine) as client:
        for options in ({"background": True}, {"temperature": 3}, {"input": []}, {"extra_body": {"nonsense": 1}}):
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(client, **options)
            assert caught.value.param in ("background", "temperature", "input", "nonsense")
        engine.fail_after = 3
        with pytest.raises(openai.InternalServerError, match="a rank died"):
            await ask(client)
        engine.delay_s = 0.01
        events = [event async for event in await ask(client, stream=True)]
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert "a rank died" in events[-2].message == events[-1].response.error.message


def test_items_become_turns() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}

    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"role": "user", "content": "u"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        call("f"),
        call("g"),
        {"type": "function_call_output", "call_id": "f", "output": "1"},
        call("h"),
        {"type": "reasoning", "summary": []},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    body = ResponsesBody.model_validate({"input": items, "instructions": "i"})
    messages = chat_messages(body.items())
    shape = [(m["role"], m["content"], [c["id"] for c in m.get("tool_calls", [])]) for m in messages]
    assert shape == [
        ("developer", "d", []), ("user", "u", []), ("assistant", "a", ["f", "g"]), ("tool", "1", []),
        ("assistant", "", ["h"]), ("assistant", [{"type": "text", "text": text} for text in "bc"], []),
    ]  # fmt: skip
    assert messages[2]["reasoning_content"] == "t"
    assert body.chat(messages).messages[0].content == "i\n\nd"


def test_store_is_bounded() -> None:
    def kept(size: int) -> Kept:
        return Kept([{"role": "user", "content": "x" * size}], {})

    store = ResponseStore(max_entries=3, max_bytes=1000)
    for name in "abcd":
        store.put(name, kept(10))
    assert [store.get(name) is not None for name in "abcd"] == [False, True, True, True]
    store.get("b")
    store.put("e", kept(10))  # c was used longest ago
    assert [store.get(name) is not None for name in "bcde"] == [True, False, True, True]
    store.put("f", kept(800))
    assert store.size_bytes <= 1000
    store.put("g", kept(2000))
    assert store.get("g") is None
    store.put("f", kept(10))
    for name in "abcdefg":
        store.delete(name)
    assert (len(store), store.size_bytes) == (0, 0)


async def test_tokenize_and_back() -> None:
    engine = FakeEngine(saying("x"))
    async with client(make_app(engine, api_key="k"), headers={"authorization": "Bearer k"}) as http:
        text = "é日本😀 <think> hello"
        found = (await http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
        assert found["tokens"] == tokenizer().encode(text)
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
        assert (await http.post("/detokenize", json={"tokens": found["tokens"]})).json() == {"prompt": text}
        messages = [{"role": "user", "content": "hi"}]
        chat = (await http.post("/tokenize", json={"messages": messages})).json()
        await http.post("/v1/chat/completions", json={"messages": messages})
        assert chat["tokens"] == engine.requests[0][1]
        for body in ({}, {"prompt": "a", "messages": messages}, {"prompt": "a", "tools": []}, {"prompt": 5}):
            status = (await http.post("/tokenize", json=body)).status_code
            assert status == (200 if body.get("tools") == [] else 400)
        assert (await http.post("/detokenize", json={"tokens": [4000]})).status_code == 400
    async with client(make_app(engine, api_key="k")) as http:
        assert (await http.post("/tokenize", json={"prompt": "a"})).status_code == 401
        assert (await http.post("/tokenize", json={"prompt": "a"}, headers={"x-api-key": "k"})).status_code == 200
