"""What a chat request says of its tools: which there are, whether one must be called, and how calls are read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.server.requests import ChatBody
from shardwise.server.toolcalls import ToolCallParser

Choice = Literal["auto", "none", "required"]
ParserName = Literal["auto", "xml", "json", "none"]


@dataclass(frozen=True)
class ToolUse:
    """tools: schemas of parameters, by name; only those that may be called. choice `required`: one of them must be."""

    tools: Mapping[str, Any]
    choice: Choice
    single: bool
    form: ParserName

    @classmethod
    def of(cls, request: ChatBody, form: ParserName) -> "ToolUse":
        """The request has been checked: a tool that it names is there."""
        choice = request.tool_choice or "auto"
        declared = {
            tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in request.tool_definitions()
        }
        named = request.named_tool()
        if named is not None:
            declared, choice = {named: declared[named]}, "required"
        single = request.parallel_tool_calls is False or named is not None
        return cls(declared, "required" if choice == "required" else "auto" if declared else "none", single, form)

    def parser(self) -> ToolCallParser | None:
        """For one answer; None if it may have no calls."""
        if not self.tools or self.form == "none":
            return None
        return ToolCallParser(self.tools, self.form, self.single)
