"""Values of XML tool calls are bare text; what they are is in the tool's schema."""

from collections.abc import Mapping
from typing import Any

import msgspec

TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
MAX_DEPTH = 8  # of references and unions that are followed to find out a type


def _kind(value: Any) -> str:
    """The JSON type of a value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds = {str: "string", int: "integer", float: "number", dict: "object", list: "array"}
    return kinds.get(type(value), "string")


def _referenced(reference: Any, root: Mapping[str, Any]) -> Any:
    """What a local reference points to, else None."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for part in reference[2:].split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def schema_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """JSON types that `schema`, a part of `root`, admits; empty: it does not say."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return frozenset()
    declared = schema.get("type")
    if isinstance(declared, str | list):
        named = [declared] if isinstance(declared, str) else declared
        return frozenset(name for name in named if isinstance(name, str) and name in TYPES)
    if "const" in schema:
        return frozenset({_kind(schema["const"])})
    if isinstance(schema.get("enum"), list):
        return frozenset(map(_kind, schema["enum"]))
    if "$ref" in schema:
        return schema_types(_referenced(schema["$ref"], root), root, depth + 1)
    for union in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(union), list):
            branches = [schema_types(branch, root, depth + 1) for branch in schema[union][:64]]
            known = [branch for branch in branches if branch]
            if union != "allOf" and len(known) < len(branches):
                return frozenset()  # one branch takes anything
            return frozenset().union(*known)
    return frozenset({"object"} if "properties" in schema else {"array"} if "items" in schema else ())


def parameter_types(parameters: Any, key: str) -> frozenset[str]:
    """JSON types of a function's parameter `key`; empty: not declared."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return schema_types(properties.get(key), parameters) if isinstance(properties, Mapping) else frozenset()


def coerce(text: str, types: frozenset[str]) -> Any:
    """`text` as a value of one of `types`; empty: of any. What is none of them stays a text, for the tool to judge."""
    allowed = types or TYPES
    bare = text.strip()
    lowered = bare.lower()
    if "boolean" in allowed and lowered in ("true", "false"):
        return lowered == "true"
    if "null" in allowed and lowered in ("null", "none"):
        return None
    try:
        value = msgspec.json.decode(bare)
    except (ValueError, RecursionError):
        return text
    kind = _kind(value)
    if kind == "number" and "number" not in allowed and "integer" in allowed and value == int(value):
        return int(value)
    return value if kind in allowed - {"string"} or (kind == "integer" and "number" in allowed) else text
