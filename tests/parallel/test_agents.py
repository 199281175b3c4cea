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
