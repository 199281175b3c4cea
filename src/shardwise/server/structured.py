"""Structured output: what a request asks for becomes one grammar, checked here before the engine compiles it."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from shardwise.engine.grammar import parse
from shardwise.engine.messages import Grammar, GrammarError
from shardwise.server.errors import invalid
from shardwise.server.requests import ChatBody, GenerateBody
from shardwise.server.services import Services
from shardwise.server.tools import ToolUse

MAX_WHITESPACE = 40  # between two parts of a JSON text: a deep indentation, and no endless row of spaces
MAX_DEPTH = 64
MAX_GRAMMAR_CHARACTERS = 1 << 20
UNSUPPORTED = frozenset({
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "multipleOf",
    "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef", "propertyNames",
})  # fmt: skip
_ONE_SCHEMA = ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "additionalItems")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions")
LOOKAROUND = re.compile(r"\(\?<?[=!]")
Format = dict[str, Any]


def _inner(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas within a schema."""
    for key in _ONE_SCHEMA:
        yield key, schema.get(key)
    for key in _LISTS:
        yield from ((key, item) for item in (schema.get(key) if isinstance(schema.get(key), list) else ()))  # pyright: ignore[reportOptionalIterable]
    for key in _MAPPINGS:
        inner = schema.get(key)
        yield from ((key, item) for item in (inner.values() if isinstance(inner, Mapping) else ()))


def _keys(mapping: Any) -> Iterator[Any]:
    yield from mapping if isinstance(mapping, Mapping) else ()


def check_schema(schema: Any, param: str, depth: int = 0) -> None:
    """Raises ApiError (400) that names the first keyword which a grammar cannot keep to."""
    if not isinstance(schema, Mapping):
        return
    if depth > MAX_DEPTH:
        raise invalid(f"{param}: the schema is nested more than {MAX_DEPTH} deep", param)
    for keyword in schema:
        if keyword in UNSUPPORTED:
            raise invalid(f"{param}: the schema's keyword {keyword!r} is not supported", param, "unsupported_schema")
    reference = schema.get("$ref")
    if isinstance(reference, str) and not (reference == "#" or reference.startswith("#/")):
        raise invalid(f"{param}: the schema's '$ref' {reference[:80]!r} is not within it", param, "unsupported_schema")
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) != 1:
        raise invalid(f"{param}: the schema's keyword 'allOf' is supported with one entry", param, "unsupported_schema")
    for pattern in (schema.get("pattern"), *_keys(schema.get("patternProperties"))):
        if isinstance(pattern, str) and LOOKAROUND.search(pattern):
            raise invalid(
                f"{param}: the schema's 'pattern' {pattern[:80]!r} looks ahead or behind, which is not supported",
                param,
                "unsupported_schema",
            )
    for _, inner in _inner(schema):
        check_schema(inner, param, depth + 1)


def opened(schema: Any, depth: int = 0) -> Any:
    """`schema` with what it leaves unsaid: where properties are declared there are no others, plain objects and arrays
    are open. (By itself xgrammar would close both, and llguidance neither.)"""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return schema
    result = dict(schema)
    for key in _ONE_SCHEMA:
        if key in result:
            result[key] = opened(result[key], depth + 1)
    for key in _LISTS:
        if isinstance(result.get(key), list):
            result[key] = [opened(item, depth + 1) for item in result[key]]
    for key in _MAPPINGS:
        if isinstance(result.get(key), Mapping):
            result[key] = {name: opened(item, depth + 1) for name, item in result[key].items()}
    kinds = result.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "properties" in result and not {"patternProperties", "unevaluatedProperties"} & result.keys():
        result.setdefault("additionalProperties", False)
    elif "object" in kinds and not {"patternProperties", "unevaluatedProperties"} & result.keys():
        result.setdefault("additionalProperties", True)
    if "array" in kinds and not {"prefixItems", "unevaluatedItems"} & result.keys():
        result.setdefault("items", True)
    return result


def json_format(schema: Any, param: str) -> Format:
    """A JSON text of `schema`. Raises ApiError."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError):
            raise invalid(f"{param}: must be a JSON schema", param) from None
    if not isinstance(schema, dict):
        raise invalid(f"{param}: must be a JSON schema", param)
    check_schema(schema, param)
    return {"type": "json_schema", "json_schema": opened(schema), "max_whitespace_cnt": MAX_WHITESPACE}


def _asked(request: GenerateBody) -> Iterator[tuple[str, Format]]:
    """All that the request asks for: parameter and format."""
    given = request.response_format
    if given is not None and given.type == "json_object":
        yield "response_format", json_format({"type": "object"}, "response_format")
    elif given is not None and given.type == "json_schema":
        schema = given.json_schema.schema_ if given.json_schema is not None else None
        yield "response_format", json_format({} if schema is None else schema, "response_format")
    outputs = request.structured_outputs
    pairs: list[tuple[str, str, Any]] = [
        ("guided_json", "json", request.guided_json),
        ("guided_regex", "regex", request.guided_regex),
        ("guided_choice", "choice", request.guided_choice),
        ("guided_grammar", "grammar", request.guided_grammar),
    ]
    if outputs is not None:
        names = ("regex", "choice", "grammar")
        pairs += [("structured_outputs", name, getattr(outputs, name)) for name in names]
        schema = {"type": "object"} if outputs.json_object else None
        pairs += [("structured_outputs", "json", outputs.json_), ("structured_outputs", "json", schema)]
    for param, kind, value in pairs:
        if value is not None:
            yield param, _format(kind, value, param)


def _format(kind: str, value: Any, param: str) -> Format:
    if kind == "json":
        return json_format(value, param)
    if kind == "regex":
        return {"type": "regex", "pattern": value}
    if kind == "choice":
        return {"type": "or", "elements": [{"type": "const_string", "value": choice} for choice in value]}
    return {"type": "grammar", "grammar": value}


def _calls(use: ToolUse, form: str) -> Format:
    """One or more calls of the tools that may be called, as the model writes them."""

    def tag(name: str, parameters: Any) -> Format:
        content: Format = {"type": "json_schema", "json_schema": opened({"type": "object", **(parameters or {})})}
        if form == "json":
            begin, end = f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": ', "}\n</tool_call>"
        else:
            content["style"] = "qwen_xml"
            begin, end = f"<tool_call>\n<function={name}>\n", "\n</function>\n</tool_call>"
        return {"type": "tag", "begin": begin, "content": {**content, "max_whitespace_cnt": MAX_WHITESPACE}, "end": end}

    tags = [tag(name, parameters) for name, parameters in use.tools.items()]
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": use.single,
    }


def grammar_of(
    request: GenerateBody, use: ToolUse | None = None, template: str = "", after: int | None = None
) -> tuple[str, Grammar] | None:
    """The parameter at fault if it fails, and the grammar; None if the request asks for none. Raises ApiError.

    template: the chat template's source, which tells how calls are written. after: the token that ends the thinking.
    """
    asked = list(_asked(request))
    if len(asked) > 1:
        first, second = asked[0][0], asked[1][0]
        raise invalid(f"{second}: with {first}, which is one more thing to match; give one", second)
    forced = use is not None and use.choice == "required"
    if forced and asked:
        raise invalid(f"{asked[0][0]}: a tool call is required, which is not of that form", asked[0][0])
    if not asked and not forced:
        return None
    for name in ("min_tokens", "ignore_eos"):
        if getattr(request, name):
            raise invalid(f"{name}: not with structured output, which says itself when the answer ends", name)
    param, wanted = asked[0] if asked else ("tools", {})
    if use is not None and use.tools and use.form != "none":
        form = use.form if use.form in ("xml", "json") else "xml" if "<function=" in template else "json"
        calls = _calls(use, form)
        wanted = calls if forced else {"type": "or", "elements": [wanted, calls]}
    if isinstance(request, ChatBody) and after is not None:
        lines = {"type": "optional", "content": {"type": "const_string", "value": "\n\n"}}
        wanted = {"type": "sequence", "elements": [lines, wanted]}
    grammar = Grammar(json.dumps(wanted, ensure_ascii=False), after, param)
    if len(grammar.format) > MAX_GRAMMAR_CHARACTERS:
        raise invalid(
            f"{param}: the grammar has {len(grammar.format)} characters, over the limit of {MAX_GRAMMAR_CHARACTERS}",
            param,
        )
    return param, grammar


async def checked_grammar(
    services: Services, request: GenerateBody, use: ToolUse | None = None, after: int | None = None
) -> Grammar | None:
    """What the answers must match. Raises ApiError (400) if that is no grammar."""

    def check() -> Grammar | None:
        found = grammar_of(request, use, services.tokenizer.chat_template, after)
        if found is None:
            return None
        param, grammar = found
        try:
            parse(grammar, services.config.grammar_backend)
        except GrammarError as error:
            raise invalid(f"{param}: {error}", param) from None
        return grammar

    wanted = request.response_format or request.structured_outputs or request.guided_json is not None
    guided = (request.guided_regex, request.guided_choice, request.guided_grammar)
    if not wanted and all(value is None for value in guided) and (use is None or use.choice != "required"):
        return None
    return await services.tokenizer.in_thread(check)
