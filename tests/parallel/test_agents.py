"""An agent's work against the real engine and the miniature, with the real clients: one server for all."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.golden.eval import Case, load_cases

ROOT = Path(__file__).parents[2]
READY_SECONDS = 120
CASES_A_SKILL = 2


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "shardwise", "serve", "--device", "cpu", "--port", str(port)]
    server = subprocess.Popen([*command, "--log-level", "error"], env=environment)
    try:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and server.poll() is None:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(timeout=30)


def cases(skill: str) -> list[Case]:
    return [case for case in load_cases() if case.skill == skill][:CASES_A_SKILL]


@pytest.mark.slow
def test_tool_skills_with_the_openai_client(url: str) -> None:
    client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    wrong = []
    for case in [*cases("tool_call"), *cases("tool_answer")]:
        messages = [dict(message) for message in case.messages]
        for message in messages:  # as clients send them
            for i, call in enumerate(message.get("tool_calls", ())):
                call["id"] = f"call_{i}"
                call["function"] = {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}
            if message["role"] == "tool":
                message["tool_call_id"] = "call_0"
        request = {
            "model": "miniature",
            "messages": messages,
            "tools": [dict(tool) for tool in case.tools],
            "temperature": 0,
            "extra_body": {"chat_template_kwargs": {"enable_thinking": case.enable_thinking}},
        }
        if case.id % 2:
            with client.chat.completions.stream(**request) as events:
                choice = events.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(**request).choices[0]
        calls = [
            {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
            for call in choice.message.tool_calls or []
        ]
        content = "" if case.expected_tool_calls else case.expected
        finish = "tool_calls" if case.expected_tool_calls else "stop"
        if (calls, choice.message.content or "", choice.finish_reason) != (
            [*case.expected_tool_calls],
            content,
            finish,
        ):
            wrong.append((case.id, choice.message))
    assert not wrong


@pytest.mark.slow
def test_structured_output_and_forced_calls(url: str) -> None:
    client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}

    def ask(thinking: bool = False, **options: Any) -> Any:
        extra = {"chat_template_kwargs": {"enable_thinking": thinking}, **options.pop("extra_body", {})}
        messages = [{"role": "user", "content": "What is the capital of Norway?"}]
        return client.chat.completions.create(
            model="miniature", messages=messages, extra_body=extra, **options
        ).choices[0]

    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    for thinking in (False, True):
        choice = ask(thinking, response_format=form)
        assert choice.finish_reason == "stop"
        assert json.loads(choice.message.content)["city"] in ("Oslo", "Rome")
    assert ask(extra_body={"guided_regex": "[xyz]{5}"}, temperature=1).message.content.strip("xyz") == ""
    assert ask(extra_body={"guided_choice": ["no idea"]}).message.content == "no idea"
    assert ask(logit_bias={"5": 1}).finish_reason == "stop"
    minutes = {"type": "object", "properties": {"minutes": {"type": "integer"}}, "required": ["minutes"]}
    tools = [{"type": "function", "function": {"name": "set_timer", "parameters": minutes}}]
    named = {"type": "function", "function": {"name": "set_timer"}}
    for choice in (ask(tools=tools, tool_choice="required"), ask(True, tools=tools, tool_choice=named)):
        assert choice.finish_reason == "tool_calls"
        assert isinstance(json.loads(choice.message.tool_calls[0].function.arguments)["minutes"], int)
    with pytest.raises(openai.BadRequestError, match="multipleOf"):
        ask(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"multipleOf": 2}}})


def tool_pair() -> tuple[Case, str, dict[str, Any]]:
    """A question for a tool, the answer once the tool has said its part, and what it says."""
    case = next(case for case in load_cases() if case.skill == "tool_call" and not case.enable_thinking)
    answers = [case for case in load_cases() if case.skill == "tool_answer"]
    (call,) = case.expected_tool_calls
    assert call["name"] == answers[0].messages[1]["tool_calls"][0]["function"]["name"] == "add_numbers"
    result = sum(call["arguments"].values())
    return case, f"The result is {result}.", {"result": result}


@pytest.mark.slow
def test_a_tools_round_trip_thinking_and_counts_with_the_anthropic_client(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60)
    case, answer, result = tool_pair()
    (call,) = case.expected_tool_calls
    function = case.tools[0]["function"]
    tool = {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}
    asked: Any = {"model": "miniature", "max_tokens": 200, "extra_body": {"temperature": 0}, "tools": [tool]}
    messages: list[Any] = [{"role": "user", "content": case.messages[0]["content"]}]
    first = client.messages.create(messages=messages, **asked)
    (block,) = first.content
    assert block.type == "tool_use"
    assert (block.name, block.input, first.stop_reason) == (call["name"], call["arguments"], "tool_use")
    with client.messages.stream(messages=messages, **asked) as stream:
        kinds = {event.type for event in stream}
        again = stream.get_final_message()
    assert {"message_start", "content_block_start", "input_json", "content_block_stop", "message_stop"} <= kinds
    assert [(each.type, getattr(each, "input", None)) for each in again.content] == [("tool_use", call["arguments"])]
    reply = {"type": "tool_result", "tool_use_id": block.id, "content": json.dumps(result)}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [reply]}]
    del asked["tools"]  # as the evaluation set asks
    last = client.messages.create(messages=messages, **asked)
    assert [each.text for each in last.content if each.type == "text"] == [answer]
    counted = client.messages.count_tokens(model="miniature", messages=messages).input_tokens
    assert counted == last.usage.input_tokens + (last.usage.cache_read_input_tokens or 0)
    thinker = next(case for case in load_cases() if case.enable_thinking and case.skill == "capital_chat")
    with client.messages.stream(
        model="miniature", max_tokens=2000, extra_body={"temperature": 0},
        thinking={"type": "enabled", "budget_tokens": 1024},
        messages=[{"role": "user", "content": thinker.messages[0]["content"]}],
    ) as stream:  # fmt: skip
        thought, said = stream.get_final_message().content
    assert thought.type == "thinking"
    assert thought.thinking.strip()
    assert said.type == "text"
    assert said.text == thinker.expected


@pytest.mark.slow
def test_a_tools_round_trip_with_the_responses_api(url: str) -> None:
    client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    case, answer, result = tool_pair()
    (call,) = case.expected_tool_calls
    tools = [{"type": "function", **case.tools[0]["function"], "strict": False}]
    asked: dict[str, Any] = {"model": "miniature", "temperature": 0, "reasoning": {"effort": "none"}}
    question = case.messages[0]["content"]
    first = client.responses.create(input=question, tools=tools, **asked)
    (item,) = first.output
    assert (item.type, item.name, json.loads(item.arguments)) == ("function_call", call["name"], call["arguments"])
    with client.responses.stream(input=question, tools=tools, **asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        again = stream.get_final_response()
    assert json.loads("".join(deltas)) == call["arguments"]
    assert [each.type for each in again.output] == ["function_call"]
    output = {"type": "function_call_output", "call_id": item.call_id, "output": json.dumps(result)}
    last = client.responses.create(previous_response_id=first.id, input=[output], **asked)
    assert last.output_text == answer
    assert client.responses.retrieve(last.id).output_text == answer
    thinker = next(case for case in load_cases() if case.enable_thinking and case.skill == "capital_chat")
    with client.responses.stream(model="miniature", temperature=0, input=thinker.messages[0]["content"]) as stream:
        kinds = [event.type for event in stream]
        thought, said = stream.get_final_response().output
    assert "response.reasoning_text.delta" in kinds
    assert kinds.index("response.reasoning_text.delta") < kinds.index("response.output_text.delta")
    assert (thought.type, said.content[0].text) == ("reasoning", thinker.expected)


@pytest.mark.slow
def test_what_cannot_be_followed_is_refused_and_others_go_on(url: str) -> None:
    """A grammar that leads nowhere, in a stream, beside a chat; two requests with one id; an answer too long."""
    body = {"model": "miniature", "messages": [{"role": "user", "content": "Count from 1 to 5."}], "temperature": 0}
    nowhere = {**body, "guided_grammar": "root ::= root", "max_tokens": 3000}
    with httpx.Client(base_url=f"{url}/v1", timeout=60, headers={"x-request-id": "same"}) as http:
        with http.stream("POST", "/chat/completions", json={**nowhere, "stream": True}) as stream:
            plain = [http.post("/chat/completions", json=body) for _ in range(2)]
            lines = stream.read().decode()
        assert [answer.status_code for answer in plain] == [200, 200]
        assert plain[0].json()["choices"] == plain[1].json()["choices"]
        assert "guided_grammar: the grammar allows no token" in lines
        assert '"type":"invalid_request_error"' in lines
        too_long = http.post("/chat/completions", json={**body, "max_tokens": 2**31 - 1})
        assert (too_long.status_code, too_long.json()["error"]["param"]) == (400, "max_tokens")
        assert http.get(f"{url}/health").status_code == 200
