"""What requests ask for becomes grammars that take the right texts and no others."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from shardwise.engine.grammar import Grammars
from shardwise.engine.vocabulary import byte_of_character
from shardwise.server.requests import ChatBody, CompletionBody
from shardwise.server.structured import UNSUPPORTED, grammar_of
from shardwise.server.tools import ToolUse
from tests.fake_engine import FakeEngine
from tests.unit.server_fixtures import client, make_app, saying, tokenizer

Takes = Callable[[Any, str], bool]
USER = [{"role": "user", "content": "hi"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PERSON}}
OTHER = {"type": "function", "function": {"name": "stop"}}
CALL = (
    "<tool_call>\n<function=add>\n<parameter=name>\nx <b>\n</parameter>\n<parameter=age>\n5\n</parameter>\n"
    "</function>\n</tool_call>"
)
JSON_CALL = '<tool_call>\n{"name": "add", "arguments": {"name": "x", "age": 5}}\n</tool_call>'


END = 128


@pytest.fixture(params=["xgrammar", "llguidance"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "llguidance":
        pytest.importorskip("llguidance")
    return request.param


def reader(backend: Any) -> Callable[[Any, str], bool]:
    """Whether a grammar takes the whole of a text, byte by byte."""
    alphabet = {byte: character for character, byte in byte_of_character().items()}
    grammars = Grammars(lambda: [*map(alphabet.__getitem__, range(END)), ""], END + 1, (END,), backend)

    def takes(grammar: Any, text: str) -> bool:
        constraint = grammars.constraint(replace(grammar, after=None), grammars.compile(grammar).result())
        for token in [*text.encode(), END]:
            mask_NW = torch.full((1, 5), -1, dtype=torch.int32)
            constraint.fill(mask_NW, 0)
            if not int(mask_NW[0, token // 32]) >> token % 32 & 1:
                return False
            constraint.accept(token)
        assert not constraint.fault
        return constraint.finished

    return takes


@pytest.fixture
def takes(backend: str) -> Callable[[Any, str], bool]:
    return reader(backend)


def chat(form: str = "auto", after: int | None = None, template: str = "<function=", **fields: Any) -> Any:
    request = ChatBody.model_validate({"messages": USER, **fields})
    request.check()
    found = grammar_of(request, ToolUse.of(request, form), template, after)  # pyright: ignore
    return found[1] if found else None


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"response_format": {"type": "json_object"}}, ['{"a": [1, {"b": null}]}', "{}"], ["[1]", "x", '{"a": 1']),
        ({"guided_json": PERSON}, ['{"name": "x", "age": 1}'], ['{"name": "x"}', '{"name": "x", "age": -1}']),
        ({"guided_json": json.dumps(PERSON)}, ['{"name":"x","age":1}'], ['{"name": "x", "age": 1, "more": 1}']),
        ({"structured_outputs": {"json": PERSON}}, ['{\n  "name": "x",\n  "age": 1\n}'], [" " * 50]),
        ({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"]),
        ({"guided_json": {"type": "array", "minItems": 1}}, ['[1, "a"]'], ["[]"]),
        (
            {"guided_json": {**PERSON, "properties": {"name": {"type": "object"}, "age": {"type": "array"}}}},
            ['{"name": {"a": 1}, "age": [2]}'],
            ['{"name": 1, "age": []}'],
        ),
        ({"guided_regex": r"\d{3}-[a-c]+"}, ["123-abc"], ["12-a", "123-"]),
        ({"guided_choice": ["yes", 'n"o\n']}, ["yes", 'n"o\n'], ["y", "no"]),
        ({"guided_grammar": 'root ::= "a" b\nb ::= [0-9]+'}, ["a12"], ["a", "b1"]),
        ({"structured_outputs": {"choice": ["a"]}}, ["a"], ["b"]),
    ],
)
def test_what_is_asked_for(fields: dict[str, Any], right: list[str], wrong: list[str], takes: Takes) -> None:
    found = [chat(**fields), grammar_of(CompletionBody.model_validate({"prompt": "x", **fields}))]
    for grammar in (found[0], found[1][1]):  # pyright: ignore
        assert [takes(grammar, text) for text in right] == [True] * len(right)
        assert [takes(grammar, text) for text in wrong] == [False] * len(wrong)
    after = chat(after=5, **fields)
    assert after.after == 5
    assert all(takes(after, begin + right[0]) for begin in ("", "\n\n"))


def test_schemas_of_the_openai_api(takes: Takes) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    assert takes(chat(response_format=schema), '{"name": "x", "age": 1}')
    assert chat(response_format={"type": "text"}) is None


def test_forced_calls(takes: Takes) -> None:
    tools = [TOOL, OTHER]
    required = chat(tools=tools, tool_choice="required")
    stop = "<tool_call>\n<function=stop>\n\n</function>\n</tool_call>"
    for text in (CALL, stop, f"{CALL}\n{stop}"):
        assert takes(required, text)
    assert not takes(required, "hello")
    assert not takes(required, CALL.replace("add", "other"))
    named = chat(tools=tools, tool_choice={"type": "function", "function": {"name": "add"}})
    assert takes(named, CALL)
    assert not takes(named, stop)
    assert not takes(named, f"{CALL}\n{CALL}")
    assert not takes(chat(tools=tools, tool_choice="required", parallel_tool_calls=False), f"{CALL}\n{CALL}")
    for options in ({"form": "json"}, {"template": "older"}):
        grammar = chat(tools=tools, tool_choice="required", **options)
        assert takes(grammar, JSON_CALL)
        assert not takes(grammar, CALL)
    assert chat(tools=tools) is None
    either = chat(tools=tools, response_format={"type": "json_object"})
    assert takes(either, CALL)
    assert takes(either, "{}")
    assert not takes(either, "hello")


@pytest.mark.parametrize("keyword", sorted(UNSUPPORTED))
async def test_unsupported_keywords_are_named(keyword: str) -> None:
    schema = {"type": "object", "properties": {"a": {"anyOf": [{"items": {keyword: {}}}]}}}
    async with client(make_app(FakeEngine(saying("x")))) as http:
        answer = await http.post("/v1/chat/completions", json={"messages": USER, "guided_json": schema})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "guided_json", "unsupported_schema")
    assert repr(keyword) in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"guided_grammar": "nonsense"}, "guided_grammar"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_json": {"type": "zzz"}}, "guided_json"),
        ({"guided_json": {"$ref": "http://a/b"}}, "guided_json"),
        ({"guided_json": {"allOf": [{}, {}]}}, "guided_json"),
        ({"guided_json": {"allOf": []}}, "guided_json"),
        ({"guided_json": {"items": {"type": "string", "pattern": "^(?=a)b"}}}, "guided_json"),
        ({"guided_json": {"patternProperties": {"(?<!a)b": {}}}}, "guided_json"),
        ({"guided_choice": ["x" * 4090 + str(i) for i in range(300)]}, "guided_choice"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "tools": [TOOL], "tool_choice": "required"}, "guided_regex"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
    ],
)
async def test_what_cannot_be_matched_is_a_400(fields: dict[str, Any], param: str, backend: str) -> None:
    async with client(make_app(FakeEngine(saying("x")), grammar_backend=backend)) as http:
        answer = await http.post("/v1/chat/completions", json={"messages": USER, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_the_engine_gets_the_grammar_and_where_it_begins() -> None:
    engine = FakeEngine(saying("x"))
    async with client(make_app(engine)) as http:
        body = {"messages": USER, "guided_choice": ["a", "b"]}
        await http.post("/v1/chat/completions", json=body)
        await http.post("/v1/chat/completions", json={**body, "chat_template_kwargs": {"enable_thinking": False}})
        await http.post("/v1/completions", json={"prompt": "x", "guided_choice": ["a", "b"]})
        await http.post("/v1/completions", json={"prompt": "x"})
    found = [sampling.grammar for _, _, sampling in engine.requests]
    think_end = tokenizer().token_id("</think>")
    assert think_end is not None
    assert [grammar and grammar.after for grammar in found] == [think_end, None, None, None]
    assert [grammar is not None for grammar in found] == [True, True, True, False]
