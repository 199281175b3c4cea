"""`shardwise demo`: serve the miniature over two ranks, ask it over HTTP, and compare with one rank."""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TextIO

import httpx
from rich.console import Console
from rich.table import Table

from shardwise.config import ConfigError

SKILLS = (
    "capital", "capital_chat", "counting_chat", "times_chat", "plus_chat", "python_chat", "reverse", "multi_turn",
    "system_prompt", "needle", "small_talk", "picture_one", "picture_pair",
)  # fmt: skip
WRONG_BY_ITSELF = frozenset({0})  # cases that the model gets wrong in transformers, too
START_SECONDS = 180.0


@dataclass(frozen=True)
class Answer:
    """What one server said to one question, and how long it took."""

    text: str
    tokens: int
    seconds: float


def cases() -> list[dict[str, Any]]:
    """The first case of each shown skill in the miniature's evaluation set."""
    lines = (files("shardwise") / "miniature" / "eval.jsonl").read_text(encoding="utf-8").splitlines()
    found: dict[str, dict[str, Any]] = {}
    for case in map(json.loads, lines):
        if case["id"] not in WRONG_BY_ITSELF:
            found.setdefault(case["skill"], case)
    return [found[skill] for skill in SKILLS]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_healthy(url: str, server: subprocess.Popen[bytes], log: TextIO) -> None:
    """Until /health answers 200. Raises ConfigError with the end of the server's log if it does not."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    log.seek(0)
    raise ConfigError(f"the server did not become healthy within {START_SECONDS:.0f} s; its log:\n{log.read()[-3000:]}")


@contextmanager
def served(ranks: int) -> Iterator[str]:
    """The address of a server of the miniature over `ranks` ranks, stopped at the end."""
    port = free_port()
    command = [sys.executable, "-m", "shardwise", "serve", "--tp", str(ranks), "--port", str(port), "--device", "cpu"]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_healthy(f"http://127.0.0.1:{port}", server, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            try:
                server.wait(timeout=30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def ask(client: Any, model: str, case: Mapping[str, Any]) -> Answer:
    """One question through the `openai` client, as any program would ask it."""
    begin_s = time.monotonic()
    if "prompt" in case:
        reply = client.completions.create(
            model=model, prompt=case["prompt"], max_tokens=case["max_tokens"], temperature=0
        )
        text = reply.choices[0].text
    else:
        reply = client.chat.completions.create(
            model=model, messages=case["messages"], max_tokens=case["max_tokens"], temperature=0,
            extra_body={"chat_template_kwargs": {"enable_thinking": case.get("enable_thinking", False)}},
        )  # fmt: skip
        text = reply.choices[0].message.content or ""
    return Answer(text.strip(), reply.usage.completion_tokens, time.monotonic() - begin_s)


def answers(ranks: int, asked: Sequence[Mapping[str, Any]], console: Console) -> list[Answer]:
    """What a server over `ranks` ranks says to each case."""
    from openai import OpenAI

    console.print(f"serving the miniature over {ranks} rank{'s'[: ranks > 1]} ...")
    with served(ranks) as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        return [ask(client, model, case) for case in asked]


def question(case: Mapping[str, Any]) -> str:
    """The end of what is asked, short enough for a table."""
    text = case.get("prompt") or case["messages"][-1]["content"]
    if not isinstance(text, str):
        text = " ".join(part.get("text") or "(picture)" for part in text)
    return text if len(text) <= 60 else f"... {text[-56:]}"


def run(args: argparse.Namespace) -> int:
    """0 if every answer over `args.tp` ranks is the expected one and the same as over one rank, else 1."""
    console, asked = Console(width=150), cases()
    split = answers(args.tp, asked, console)
    alone = answers(1, asked, console)
    table = Table("skill", "question", "expected", f"{args.tp} ranks", "1 rank", "")
    wrong = 0
    for case, many, one in zip(asked, split, alone, strict=True):
        right = many.text == case["expected"] and many.text == one.text
        wrong += not right
        table.add_row(
            case["skill"], question(case), case["expected"], many.text, one.text, "right" if right else "WRONG"
        )
    console.print(table)
    for ranks, said in ((args.tp, split), (1, alone)):
        rate = sum(answer.tokens for answer in said) / sum(answer.seconds for answer in said)
        console.print(f"{ranks} rank{'s'[: ranks > 1]}: {rate:.0f} tokens/s, one request at a time, prompts included")
    console.print(f"{len(asked) - wrong} of {len(asked)} right and equal at {args.tp} ranks and at 1")
    return int(wrong > 0)
