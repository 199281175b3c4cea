"""Tool calls in an answer's text, parsed while it streams: the XML form of Qwen3.5, the JSON form of older templates.

A call is what begins with <tool_call> and names a function that the request declared; all else stays text, such as
prose about the mark. Only what may yet turn out to be a mark is held back.
"""

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from shardwise.server.coercion import coerce, parameter_types

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MAX_NAME_CHARACTERS = 300
MAX_UNDECIDED_CHARACTERS = 1 << 16  # of a JSON call that does not begin with its name
_JSON_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')

Form = Literal["auto", "xml", "json"]


@dataclass
class CallDelta:
    """What is new of the index-th call of an answer. id and name come with the first delta; done: with the last."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None
    done: bool = False

    def extend(self, later: "CallDelta") -> None:
        self.arguments += later.arguments
        self.done = later.done


def merged(deltas: list[CallDelta]) -> list[CallDelta]:
    """One delta a call, in the order of the calls."""
    calls: dict[int, CallDelta] = {}
    for delta in deltas:
        if delta.index in calls:
            calls[delta.index].extend(delta)
        else:
            calls[delta.index] = CallDelta(delta.index, delta.arguments, delta.id, delta.name, delta.done)
    return list(calls.values())


def _may_begin(text: str, *marks: str) -> bool:
    """Whether `text` is the start of a mark, and not all of it."""
    return any(len(text) < len(mark) and mark.startswith(text) for mark in marks)


def _tail(text: str, *marks: str) -> int:
    """How many characters at the end of `text` may be the start of a mark."""
    longest = min(len(text), max(map(len, marks)) - 1)
    return next((k for k in range(longest, 0, -1) if _may_begin(text[len(text) - k :], *marks)), 0)


def _quoted(text: str) -> str:
    """`text` within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class ToolCallParser:
    """Parts one answer's text into content and calls."""

    def __init__(self, tools: Mapping[str, Any], form: Form = "auto", single: bool = False) -> None:
        """tools: schemas of the functions' parameters, by name. single: the answer is over after one call."""
        self._tools = tools
        self._xml, self._json = form != "json", form != "xml"
        self._single = single
        self._state = self._text
        self._held = ""
        self._content: list[str] = []
        self._deltas: list[CallDelta] = []
        self._begun = 0
        self._done = 0
        self._skip_space = False
        self._name = ""
        self._empty = True  # no argument of the open call has been written yet
        self._types: frozenset[str] = frozenset()
        self._value: list[str] = []  # of an argument that is coerced once it is whole
        self._depth, self._in_string, self._escaped = 0, False, False

    @property
    def finished(self) -> bool:
        """Whether the answer may have no more."""
        return self._single and self._done > 0

    @property
    def called(self) -> bool:
        """Whether the answer ends in whole calls."""
        return 0 < self._done == self._begun

    def add(self, text: str) -> tuple[str, list[CallDelta]]:
        """New (content, calls) that are certain."""
        self._held += text
        while not self.finished and self._state():
            pass
        return self._take()

    def finish(self, complete: bool) -> tuple[str, list[CallDelta]]:
        """What was held back. complete: the model ended by itself, so that an open call of its is closed; one that
        was cut stays unfinished JSON, and nobody can take it for whole."""
        if self._state == self._text:
            if not self.finished:
                self._say(self._held)
        elif complete and self._state in (self._between, self._in_value):
            if self._state == self._in_value:
                value, mark, rest = self._held.rpartition(PARAMETER_END)
                self._end_value((value if mark and not rest.strip() else self._held).removesuffix("\n"))
            self._close()
        self._held = ""
        return self._take()

    def _take(self) -> tuple[str, list[CallDelta]]:
        content, deltas = "".join(self._content), merged(self._deltas)
        self._content, self._deltas = [], []
        return content, deltas

    def _say(self, text: str) -> None:
        if self._skip_space:
            text = text.lstrip()
            self._skip_space = not text
        self._content.append(text)

    def _argue(self, text: str) -> None:
        self._deltas.append(CallDelta(self._begun - 1, text))

    # Each state takes what it can from `_held`, and says whether there may be more to take.

    def _text(self) -> bool:
        at = self._held.find(CALL)
        before = self._held if at < 0 else self._held[:at]
        certain = before[: len(before) - _tail(before, CALL)].rstrip() if at < 0 else before.rstrip()
        if certain:
            self._say(certain)
            self._held = self._held[len(certain) :]
            at -= len(certain)
        if at < 0:
            return False
        called = self._called(self._held[at + len(CALL) :].lstrip())
        if called is False:  # the mark is text like any other
            self._say(self._held[: at + len(CALL)])
            self._held = self._held[at + len(CALL) :]
        return called is not None

    def _called(self, rest: str) -> bool | None:
        """Whether a call follows the mark, which is then begun; None: not to be told yet."""
        if not rest or (self._xml and _may_begin(rest, FUNCTION)):
            return None
        if self._xml and rest.startswith(FUNCTION):
            name, end, after = rest[len(FUNCTION) :].partition(">")
            if not end:
                return None if len(name) < MAX_NAME_CHARACTERS and "\n" not in name else False
            return self._begin(name.strip(), after, self._between)
        if not (self._json and rest.startswith("{")):
            return False
        head = _JSON_HEAD.match(rest)
        if head is not None:
            self._depth, self._in_string, self._escaped = 0, False, False
            return self._begin(_text_or_none(head[1]), rest[head.end() :], self._in_json)
        body, end, after = rest.partition(CALL_END)
        if not end:
            return None if len(rest) < MAX_UNDECIDED_CHARACTERS else False
        name, arguments = _whole_call(body)
        if arguments is None or not self._begin(name, CALL_END + after, self._after):
            return False
        self._argue(arguments)
        self._end_call()
        return True

    def _begin(self, name: str | None, rest: str, state: Any) -> bool:
        if name is None or name not in self._tools:
            return False
        self._deltas.append(CallDelta(self._begun, id=f"call_{uuid.uuid4().hex[:24]}", name=name))
        self._begun += 1
        self._name, self._held, self._state, self._empty = name, rest, state, True
        return True

    def _end_call(self) -> None:
        self._deltas.append(CallDelta(self._begun - 1, done=True))
        self._done += 1
        self._state = self._after

    def _close(self) -> None:
        self._argue("{}" if self._empty else "}")
        self._end_call()

    def _between(self) -> bool:
        """Before a parameter or the end of the function."""
        held = self._held = self._held.lstrip()
        if held.startswith(PARAMETER):
            key, end, rest = held[len(PARAMETER) :].partition(">")
            # The first line break after > belongs to the form, so it has to be seen.
            if not end or not rest:
                return False
            self._held = rest.removeprefix("\n")
            self._types = parameter_types(self._tools[self._name], key.strip())
            quote = '"' if self._streamed else ""
            self._argue(f"{'{' if self._empty else ', '}{json.dumps(key.strip(), ensure_ascii=False)}: {quote}")
            self._empty, self._value, self._state = False, [], self._in_value
            return True
        if held.startswith((FUNCTION_END, CALL_END)):
            self._held = held.removeprefix(FUNCTION_END)
            self._close()
            return True
        if not held or _may_begin(held, PARAMETER, FUNCTION_END, CALL_END):
            return False
        self._held = held[max(1, held.find("<", 1)) :] if "<" in held[1:] else ""
        return True

    @property
    def _streamed(self) -> bool:
        return self._types == {"string"}

    def _in_value(self) -> bool:
        at = self._held.find(PARAMETER_END)
        if at < 0:
            kept = _tail(self._held, "\n" + PARAMETER_END, PARAMETER_END)
            self._value_part(self._held[: len(self._held) - kept])
            self._held = self._held[len(self._held) - kept :]
            return False
        after = self._held[at + len(PARAMETER_END) :]
        following = after.lstrip()
        if following.startswith((PARAMETER, FUNCTION_END, CALL_END)):
            self._end_value(self._held[:at].removesuffix("\n"))
            self._held, self._state = after, self._between
            return True
        if not following or _may_begin(following, PARAMETER, FUNCTION_END, CALL_END):
            return False
        self._value_part(self._held[: at + len(PARAMETER_END)])  # a value that has the mark in it
        self._held = after
        return True

    def _value_part(self, text: str) -> None:
        if self._streamed:
            self._argue(_quoted(text))
        else:
            self._value.append(text)

    def _end_value(self, text: str) -> None:
        self._value_part(text)
        if self._streamed:
            self._argue('"')
            return
        value = coerce("".join(self._value), self._types)
        self._argue(json.dumps(value, ensure_ascii=False))

    def _in_json(self) -> bool:
        """Within the arguments, which go out as they are, up to the brace that ends them."""
        for i, character in enumerate(self._held):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = not self._escaped and character == "\\"
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self._argue(self._held[: i + 1])
                    self._held = self._held[i + 1 :].lstrip().removeprefix("}")
                    self._end_call()
                    return True
        self._argue(self._held)
        self._held = ""
        return False

    def _after(self) -> bool:
        """After the arguments: what ends the call."""
        held = self._held = self._held.lstrip().removeprefix("}").lstrip()
        if not held or _may_begin(held, CALL_END):
            return False
        self._held = held.removeprefix(CALL_END)
        self._state, self._skip_space = self._text, True
        return True


def _text_or_none(quoted: str) -> str | None:
    try:
        return msgspec.json.decode(quoted, type=str)
    except msgspec.DecodeError:
        return None


def _whole_call(body: str) -> tuple[str | None, str | None]:
    """Name and arguments (as JSON) of a call that is all there; None for what is none."""
    try:
        call = msgspec.json.decode(body)
        arguments = call.get("arguments", call.get("parameters", {})) if isinstance(call, dict) else None
        if isinstance(arguments, str):
            arguments = msgspec.json.decode(arguments)
    except (ValueError, RecursionError):
        return None, None
    if not isinstance(call, dict) or not isinstance(arguments, dict):
        return None, None
    name = call.get("name")
    return (name if isinstance(name, str) else None), json.dumps(arguments, ensure_ascii=False)
