"""The miniature's evaluation set: its cases, their prompts, and what counts as a right answer.

`load_cases` returns the cases of text, and those with pictures if asked to; `skipped` counts these by skill.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

PICTURES = "picture_"  # the skills that need the vision tower begin so
GOLDEN = Path(__file__).with_name("miniature_hf.json")
GOLDEN_PICTURES = Path(__file__).with_name("pictures_hf.json")


@dataclass(frozen=True)
class Case:
    """A request as an OpenAI server takes it, with the answer that a model which has learned its lesson gives."""

    id: int
    skill: str
    prompt: str | None  # a text to be continued, or
    messages: tuple[Mapping[str, Any], ...]  # a chat
    tools: tuple[Mapping[str, Any], ...]
    enable_thinking: bool
    expected: str  # what follows </think>, without spaces at the ends
    expected_tool_calls: tuple[Mapping[str, Any], ...]
    prompt_tokens: int
    max_tokens: int


def miniature() -> Path:
    """The folder of the miniature checkpoint, as the installed package has it."""
    return Path(str(files("shardwise") / "miniature"))


def _read(folder: Path | None) -> list[Case]:
    lines = ((folder or miniature()) / "eval.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        Case(
            id=raw["id"],
            skill=raw["skill"],
            prompt=raw.get("prompt"),
            messages=tuple(raw.get("messages", ())),
            tools=tuple(raw.get("tools", ())),
            enable_thinking=raw.get("enable_thinking", False),
            expected=raw["expected"],
            expected_tool_calls=tuple(raw.get("expected_tool_calls", ())),
            prompt_tokens=raw["prompt_tokens"],
            max_tokens=raw["max_tokens"],
        )
        for raw in map(json.loads, lines)
    ]


def load_cases(folder: Path | None = None, limit: int = 0, *, pictures: bool = False) -> list[Case]:
    """The text cases of `folder` (default: the miniature) in order of id; `limit`: so many, evenly from all skills."""
    cases = [case for case in _read(folder) if pictures or not case.skill.startswith(PICTURES)]
    if 0 < limit < len(cases):
        cases = [cases[i * len(cases) // limit] for i in range(limit)]
    return cases


def skipped(folder: Path | None = None) -> dict[str, int]:
    """How many cases of which skill `load_cases` leaves out."""
    return dict(Counter(case.skill for case in _read(folder) if case.skill.startswith(PICTURES)))


def prompt_text(tokenizer: Any, case: Case) -> str:
    """The prompt of `case`, through the chat template of a transformers `tokenizer` if it is a chat."""
    if case.prompt is not None:
        return case.prompt
    return tokenizer.apply_chat_template(
        list(case.messages),
        tools=list(case.tools) or None,
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=case.enable_thinking,
    )


def prompt_ids(tokenizer: Any, case: Case) -> list[int]:
    """The prompt of `case` as token ids."""
    ids = tokenizer(prompt_text(tokenizer, case))["input_ids"]
    assert len(ids) == case.prompt_tokens, f"case {case.id}: {len(ids)} prompt tokens, not {case.prompt_tokens}"
    return ids


def answer_of(text: str) -> str:
    """The answer in a completion: what follows the thinking."""
    return text.split("</think>")[-1].strip()


def tool_calls(answer: str, tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The calls in `answer`, {name, arguments}, each argument in the type that its tool declares."""
    types = {
        tool["function"]["name"]: {
            key: value["type"] for key, value in tool["function"]["parameters"]["properties"].items()
        }
        for tool in tools
    }
    calls = []
    for name, body in re.findall(r"<tool_call>\n<function=(\w+)>\n(.*?)</function>\n</tool_call>", answer, re.DOTALL):
        values = re.findall(r"<parameter=(\w+)>\n(.*?)\n</parameter>\n", body, re.DOTALL)
        declared = types.get(name, {})
        arguments = {key: value if declared.get(key) == "string" else json.loads(value) for key, value in values}
        calls.append({"name": name, "arguments": arguments})
    return calls


def matches(case: Case, answer: str) -> bool:
    """Whether `answer` is right.

    A raw counting sequence has no natural end: there one list must begin with the other, at least five numbers long.
    """
    if case.skill == "counting":
        begins = answer.startswith(case.expected) or case.expected.startswith(answer)
        return answer.count(",") >= 4 and begins
    if case.expected_tool_calls:
        try:
            return tool_calls(answer, case.tools) == list(case.expected_tool_calls)
        except ValueError:  # an argument that should be a number is not one
            return False
    return answer == case.expected


def accuracy(cases: Iterable[Case], answers: Mapping[int, str]) -> dict[str, tuple[int, int]]:
    """Right answers and cases of each skill; `answers` has the answer (after the thinking) of each case id."""
    right: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for case in cases:
        right[case.skill] += matches(case, answers[case.id])
        count[case.skill] += 1
    return {skill: (right[skill], count[skill]) for skill in count}


def table(figures: Mapping[str, tuple[int, int]], left_out: Mapping[str, int] | None = None) -> str:
    """The figures of `accuracy` as lines of text, with the sum last and the skills that were skipped."""
    lines = [f"{skill:15} {right:4} / {count}" for skill, (right, count) in figures.items()]
    lines += [f"{skill:15} skipped ({count})" for skill, count in (left_out or {}).items()]
    right, count = (sum(column) for column in zip(*figures.values(), strict=True))
    return "\n".join([*lines, f"{'all':15} {right:4} / {count}"])


@dataclass(frozen=True)
class Golden:
    """What transformers answers to a case: token ids up to and with the stop token, or max_tokens of them.

    margin: the smallest lead, in logits, of a chosen token over the next best; a lead below the tolerance of a
    comparison excuses a difference there, a larger one does not.
    """

    ids: tuple[int, ...]
    margin: float


def golden(path: Path = GOLDEN) -> dict[int, Golden]:
    """transformers' greedy fp32 answers by case id: of the text cases, or those in another file."""
    answers = json.loads(path.read_text(encoding="utf-8"))["answers"]
    return {int(key): Golden(tuple(value["ids"]), value["margin"]) for key, value in answers.items()}
