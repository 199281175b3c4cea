"""An example to train on or to test with, and how it becomes text."""

import json
import zlib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import jinja2.sandbox
import numpy as np

HERE = Path(__file__).parent.parent
Call = tuple[str, dict[str, Any]]  # name and arguments
END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|im_end|>"


@dataclass
class Example:
    """What a skill draws: a prompt or a chat, and the answer to it."""

    skill: str
    answer: str  # what the model has to say, without thinking
    prompt: str = ""  # either a text to be continued
    messages: list[dict[str, Any]] = field(default_factory=list)  # or a chat
    tools: list[dict[str, Any]] | None = None
    reasoning: str | None = None  # None: thinking is switched off
    images: list[np.ndarray] = field(default_factory=list)  # height x width x 3, uint8
    calls: list[Call] = field(default_factory=list)  # the tool calls that `answer` makes
    prompt_weight: float = 0.05  # weight of the prompt's own tokens in the loss
    answer_weight: float = 1.0

    def prompt_text(self) -> str:
        """What the model is given."""
        if self.prompt:
            return self.prompt
        return render(self.messages, tools=self.tools, enable_thinking=self.reasoning is not None)

    def answer_text(self) -> str:
        """What the model has to say, with its thinking and the token that ends it."""
        if self.prompt:
            return self.answer + END_OF_TEXT
        thought = "" if self.reasoning is None else f"{self.reasoning}\n</think>\n\n"
        return thought + self.answer + END_OF_TURN


def held_out(example: Example) -> bool:
    """About one prompt in sixteen is for the test only."""
    text = example.prompt or json.dumps(example.messages)
    return zlib.crc32(text.encode()) % 16 == 0


@cache
def chat_template() -> jinja2.Template:
    """The template that ships with the checkpoint, compiled as transformers does it."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string((HERE / "chat_template.jinja").read_text(encoding="utf-8"))


def render(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, enable_thinking: bool = True
) -> str:
    """A chat as text, up to where the assistant begins to speak (and to think)."""
    return chat_template().render(
        messages=messages, tools=tools, enable_thinking=enable_thinking, add_generation_prompt=True
    )


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def chat(rng: Random, skill: str, question: Any, answer: str, thought: str, **more: Any) -> Example:
    """A one-question chat, with thinking in about two cases of five."""
    reasoning = thought if rng.random() < 0.4 else None
    return Example(skill, answer, messages=[user(question)], reasoning=reasoning, **more)


def upper_first(text: str) -> str:
    return text[0].upper() + text[1:]
