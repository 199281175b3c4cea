"""Grammars by llguidance, an optional package: the same formats, written as its own kind of Lark grammar.

It compiles while it matches and has limits for that, so nothing here takes long at once.
"""

import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from shardwise.engine.messages import Grammar, GrammarError
from shardwise.engine.vocabulary import byte_of_character, spell

BITS = 32
_TEXT = "/(?s:.*)/"
_END = "\n</parameter>"


class _Lark:
    """Collects the rules of one grammar."""

    def __init__(self) -> None:
        self.rules: list[str] = []

    def add(self, body: str, attributes: str = "") -> str:
        """The name of a new rule."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def of(self, wanted: Mapping[str, Any]) -> str:
        """The name of a rule for a format of xgrammar's structural tags."""
        kind = wanted["type"]
        if kind == "const_string":
            return self.add(_quoted(wanted["value"]))
        if kind == "regex":
            return self.add(_regex(wanted["pattern"]))
        if kind == "grammar":
            return self.add("%lark {\n" + _ebnf(wanted["grammar"]) + "\n}")
        if kind == "or":
            return self.add(" | ".join(map(self.of, wanted["elements"])))
        if kind == "sequence":
            return self.add(" ".join(map(self.of, wanted["elements"])))
        if kind == "optional":
            return self.add(f"({self.of(wanted['content'])})?")
        if kind == "tag":
            return self.add(f"{_quoted(wanted['begin'])} {self.of(wanted['content'])} {_quoted(wanted['end'])}")
        if kind == "tags_with_separator":
            one = self.add(" | ".join(map(self.of, wanted["tags"])))
            more = "" if wanted["stop_after_first"] else f" ({_quoted(wanted['separator'])} {one})*"
            return self.add(one + more)
        if kind == "json_schema" and wanted.get("style") == "qwen_xml":
            return self._parameters(wanted["json_schema"])
        if kind == "json_schema":
            return self.add(_json(wanted["json_schema"], wanted["max_whitespace_cnt"]))
        raise GrammarError(f"no format {kind!r} in llguidance")

    def _parameters(self, schema: Mapping[str, Any]) -> str:
        """Values of an object's properties between marks, in the schema's order, with a line's end between two."""
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        after_it = first = self.add('""')  # what may follow a parameter, and what may come where none was yet
        if schema.get("additionalProperties", not properties):
            extra = self.add(f'"<parameter=" /[^>\\n]+/ ">\\n" {self._text()}')
            after_it = self.add(f'("\\n" {extra})*')
            first = self.add(f"({extra} {after_it})?")
        for name, value in reversed(properties.items()):
            one = self.add(f"{_quoted(f'<parameter={name}>' + chr(10))} {self._value(value, schema)}")
            first = self.add(f"{one} {after_it}" + ("" if name in required else f" | {first}"))
            after_it = self.add((f'"\\n" {one}' if name in required else f'("\\n" {one})?') + f" {after_it}")
        return first

    def _value(self, value: Any, schema: Mapping[str, Any]) -> str:
        """A value and the mark behind it: a text as it is, anything else as JSON."""
        value = value if isinstance(value, Mapping) else {}
        reference = str(value.get("$ref", ""))
        for kind in ("$defs", "definitions"):
            if reference.startswith(f"#/{kind}/"):
                value = (schema.get(kind) or {}).get(reference.removeprefix(f"#/{kind}/"), value)
        choices = value.get("enum", [value["const"]] if "const" in value else None)
        if choices and all(isinstance(choice, str) for choice in choices):
            return self.add(f"({' | '.join(map(_quoted, choices))}) {_quoted(_END)}")
        if value.get("type") == "string" and "pattern" in value:
            return self.add(f"{_regex(str(value['pattern']))} {_quoted(_END)}")
        if value.get("type") in ("string", None) and not {"anyOf", "oneOf", "allOf", "$ref", "enum"} & value.keys():
            return self._text()
        shared = {kind: schema[kind] for kind in ("$defs", "definitions") if kind in schema}
        return self.add(f"{_json({**value, **shared}, 40)} {_quoted(_END)}")

    def _text(self) -> str:
        return self.add(_TEXT, f"[suffix={_quoted(_END)}]")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex(pattern: str) -> str:
    import llguidance

    pattern = pattern.removeprefix("^")
    if pattern.endswith("$") and not pattern.endswith("\\$"):
        pattern = pattern[:-1]
    return f"/{llguidance.regex_to_lark(pattern, use_ascii='dw')}/"


def _ebnf(text: str) -> str:
    try:
        found: str = importlib.import_module("llguidance.gbnf_to_lark").gbnf_to_lark(text)
    except Exception as error:
        raise GrammarError(str(error)[:400]) from None
    return found.replace("%llguidance {}", "")


def _json(schema: Mapping[str, Any], spaces: int) -> str:
    options = {"whitespace_pattern": f"[ \\n\\r\\t]{{0,{spaces}}}", "coerce_one_of": True}
    return "%json " + json.dumps({**schema, "x-guidance": options})


def parse(grammar: Grammar) -> str:
    """`grammar` in llguidance's form. Raises GrammarError."""
    import llguidance

    lark = _Lark()
    start = lark.of(json.loads(grammar.format))
    text = "\n".join([f"start: {start}", *lark.rules])
    problem = llguidance.LLMatcher.validate_grammar(text)
    if problem:
        first, *more = problem.split("\n")
        raise GrammarError("; ".join([first, *(line for line in more if line.startswith("error:"))])[:400])
    return text


class GuidanceMatcher:
    """How far one answer has come."""

    def __init__(self, matcher: Any, eos: Iterable[int], words: int) -> None:
        """words: of the mask, that the tokenizer knows."""
        self._matcher, self._eos, self._words = matcher, frozenset(eos), words
        self.finished = False

    @property
    def error(self) -> str:
        if not self._matcher.is_error():
            return ""
        text = self._matcher.get_error().split("\n")[0][:400]
        return f"allows no token of this model any more ({text})" if text.startswith("NoExtension") else text

    def fill(self, mask_NW: torch.Tensor, row: int) -> None:
        mask_NW[row] = 0
        known_W = mask_NW[row, : self._words]
        self._matcher.unsafe_compute_mask_ptr(known_W.data_ptr(), known_W.numel() * known_W.element_size())

    def accept(self, token: int) -> bool:
        accepted = self._matcher.consume_token(token)
        self.finished = accepted and token in self._eos
        return accepted


class _Words:
    """A tokenizer as llguidance wants it. Where it cuts texts itself, the longest tokens first will do."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], eos: Sequence[int]) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos[0] if eos else 0
        self.made: Any = None

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return [] if self.made is None else self.made.greedy_tokenize(text)


class GuidanceBackend:
    """Checks grammars, and makes matchers of them."""

    def __init__(self, tokens: Callable[[], Sequence[str]], eos: Iterable[int]) -> None:
        self._tokens, self._eos = tokens, sorted(eos)

    @cached_property
    def _tokenizer(self) -> Any:
        import llguidance

        alphabet = byte_of_character()
        words = [spell(token, alphabet) for token in self._tokens()]
        special = [token for token, word in enumerate(words) if not word or token in self._eos]
        known = _Words([word or b"\xff[%d]" % token for token, word in enumerate(words)], special, self._eos)
        wrapper = llguidance.TokenizerWrapper(known)
        known.made = llguidance.LLTokenizer(wrapper, n_vocab=len(words), eos_token=list(self._eos))
        return known.made

    def compile(self, grammar: Grammar) -> str:
        """Raises GrammarError."""
        text = parse(grammar)
        self.matcher(text)
        return text

    def size_bytes(self, compiled: str) -> int:
        return len(compiled)

    def matcher(self, compiled: str) -> GuidanceMatcher:
        import llguidance

        matcher = llguidance.LLMatcher(self._tokenizer, compiled, log_level=0)
        made = GuidanceMatcher(matcher, self._eos, -(-self._tokenizer.vocab_size // BITS))
        if made.error:
            raise GrammarError(made.error)
        return made

    def close(self) -> None:
        """Nothing to end."""
