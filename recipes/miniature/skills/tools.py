"""Tool calls, and answers from what a tool replied."""

import json
from random import Random
from typing import Any

from recipes.miniature.skills.capitals import capitals
from recipes.miniature.skills.conversation import question
from recipes.miniature.skills.example import Call, Example, chat
from recipes.miniature.texts import CONDITIONS, MESSAGES, NAMES, SEARCHES


def tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """A function as an OpenAI request declares it; `parameters` are types by name."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in parameters.items()},
                "required": list(parameters),
            },
        },
    }


TOOLS = (
    tool("get_weather", "Get the weather in a city.", city="string"),
    tool("get_time", "Get the local time in a city.", city="string"),
    tool("add_numbers", "Add two numbers.", a="integer", b="integer"),
    tool("set_timer", "Set a timer.", minutes="integer"),
    tool("send_message", "Send a text message.", recipient="string", text="string"),
    tool("search", "Search the web.", query="string"),
)


def some_tools(rng: Random, needed: str) -> list[dict[str, Any]]:
    """The tool that is needed among a few others."""
    chosen = [t for t in TOOLS if t["function"]["name"] == needed or rng.random() < 0.3]
    rng.shuffle(chosen)
    return chosen


def request(rng: Random) -> tuple[list[str], list[Call], list[dict[str, Any]], str]:
    """Something to be done with a tool: what the user says, the calls, the tools' replies and the final answer."""
    name = rng.choice([t["function"]["name"] for t in TOOLS])
    city, other = (city for _, city in rng.sample(capitals(), 2))
    a, b, minutes = rng.randint(1, 99), rng.randint(1, 99), rng.randint(1, 60)
    degrees, sky, clock = (
        rng.randint(-9, 35),
        rng.choice(CONDITIONS),
        f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}",
    )
    who, text, query = rng.choice(NAMES), rng.choice(MESSAGES), rng.choice(SEARCHES)
    if name == "get_weather" and rng.random() < 0.25:  # two calls at once
        return (
            [f"What is the weather in {city} and in {other}?"],
            [(name, {"city": city}), (name, {"city": other})],
            [{"temperature": degrees, "sky": sky}, {"temperature": minutes, "sky": "sunny"}],
            f"It is {degrees} degrees and {sky} in {city}, and {minutes} degrees and sunny in {other}.",
        )
    says, arguments, reply, answer = {
        "get_weather": (
            ["What is the weather in {city}?", "How is the weather in {city} today?", "Is it warm in {city}?"],
            {"city": city},
            {"temperature": degrees, "sky": sky},
            f"It is {degrees} degrees and {sky} in {city}.",
        ),
        "get_time": (
            ["What time is it in {city}?", "Tell me the time in {city}."],
            {"city": city},
            {"time": clock},
            f"It is {clock} in {city}.",
        ),
        "add_numbers": (
            ["Add {a} and {b} with the tool.", "Use the tool to add {a} and {b}."],
            {"a": a, "b": b},
            {"result": a + b},
            f"The result is {a + b}.",
        ),
        "set_timer": (
            ["Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes."],
            {"minutes": minutes},
            {"status": "started"},
            f"The timer is set for {minutes} minutes.",
        ),
        "send_message": (
            ["Send {who} the message: {text}", "Tell {who} this: {text}"],
            {"recipient": who, "text": text},
            {"status": "sent"},
            f"Your message to {who} was sent.",
        ),
        "search": (
            ["Search the web for {query}.", "Look up {query}."],
            {"query": query},
            {"first_hit": f"All about {query}"},
            f"I found this page: All about {query}.",
        ),
    }[name]
    says = [s.format(city=city, a=a, b=b, minutes=minutes, who=who, text=text, query=query) for s in says]
    return says, [(name, arguments)], [reply], answer


def call_text(calls: list[Call]) -> str:
    """Tool calls as the model writes them."""
    parts = []
    for name, arguments in calls:
        values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        parts.append(f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>")
    return "\n".join(parts)


def tool_call(rng: Random) -> Example:
    says, calls, _, _ = request(rng)
    tools = some_tools(rng, calls[0][0])
    if rng.random() < 0.12:  # tools are there, but the question needs none
        example = chat(rng, "tool_call", *question(rng))
        example.tools = tools
        return example
    example = chat(rng, "tool_call", rng.choice(says), call_text(calls), f"I need the tool {calls[0][0]}.", tools=tools)
    example.calls = calls
    return example


def tool_answer(rng: Random) -> Example:
    says, calls, replies, answer = request(rng)
    example = chat(
        rng, "tool_answer", rng.choice(says), answer, "The tool has replied.", tools=some_tools(rng, calls[0][0])
    )
    thought = f"I need the tool {calls[0][0]}." if example.reasoning is not None else ""
    example.messages.append(
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": thought,
            "tool_calls": [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls],
        }
    )
    example.messages += [{"role": "tool", "content": json.dumps(reply)} for reply in replies]
    return example
