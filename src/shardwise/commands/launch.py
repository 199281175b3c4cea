"""`shardwise launch AGENT`: write a coding agent's configuration for this server, and take it back with --undo.

What a file was before is kept beside it, so that --undo restores it to the byte.
"""

import argparse
import json
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from shardwise.commands.chat import request
from shardwise.config import ConfigError

BEGIN, END = "# >>> shardwise >>>", "# <<< shardwise <<<"
KEPT = ".shardwise-before"
CHANGED = ".shardwise-changed"
CONTEXT_TOKENS = 32768  # told to an agent that wants a number, if the server was not asked


@dataclass(frozen=True)
class Server:
    """Where an agent is to be sent. key: empty for none."""

    url: str
    model: str
    key: str
    context_tokens: int


class Before(msgspec.Struct, frozen=True):
    """original: the file's text before, None if there was none. written: what we put there."""

    original: str | None
    written: str


@dataclass(frozen=True)
class Agent:
    """file: its configuration, from the home folder. make: the new text from the old. start: how it is run then."""

    file: str
    make: Callable[[str, Server], str]
    start: str


def merged(text: str, changes: Mapping[str, Any]) -> str:
    """A JSON file with `changes` merged in, object by object. Raises ValueError."""

    def merge(old: Any, new: Any) -> Any:
        if not isinstance(old, dict) or not isinstance(new, Mapping):
            return new
        return {**old, **{key: merge(old.get(key), value) for key, value in new.items()}}

    old = json.loads(text) if text.strip() else {}
    if not isinstance(old, dict):
        raise ValueError("it holds no JSON object")
    return json.dumps(merge(old, changes), indent=2, ensure_ascii=False) + "\n"


def claude(text: str, server: Server) -> str:
    names = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")))
    environment = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key or "none",
        **dict.fromkeys(names, server.model),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return merged(text, {"env": environment})


def codex(text: str, server: Server) -> str:
    before, _, rest = text.partition(BEGIN)
    before += rest.partition(END)[2].lstrip("\n")
    found = tomllib.loads(before)
    if "shardwise" in found.get("model_providers", {}) or "shardwise" in found.get("profiles", {}):
        raise ValueError("it has a provider or a profile named shardwise that is not ours; rename it")
    quoted = {name: json.dumps(value, ensure_ascii=False) for name, value in vars(server).items()}
    lines = [
        BEGIN,
        "[model_providers.shardwise]",
        'name = "shardwise"',
        f"base_url = {json.dumps(server.url + '/v1')}",
        'wire_api = "responses"',
        *([f"experimental_bearer_token = {quoted['key']}"] if server.key else []),
        "",
        "[profiles.shardwise]",
        'model_provider = "shardwise"',
        f"model = {quoted['model']}",
        END,
    ]
    made = before + "\n" * (bool(before) and not before.endswith("\n")) + "\n".join(lines) + "\n"
    tomllib.loads(made)
    return made


def opencode(text: str, server: Server) -> str:
    limit = {"context": server.context_tokens, "output": server.context_tokens // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "shardwise",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key or "none"},
        "models": {server.model: {"name": server.model, "limit": limit}},
    }
    schema = {"$schema": "https://opencode.ai/config.json"}
    return merged(text, {**schema, "provider": {"shardwise": provider}, "model": f"shardwise/{server.model}"})


def qwen(text: str, server: Server) -> str:
    auth = {"selectedType": "openai", "apiKey": server.key or "none", "baseUrl": f"{server.url}/v1"}
    return merged(text, {"security": {"auth": auth}, "model": {"name": server.model}})


def agents() -> dict[str, Agent]:
    """The agents whose configuration we know."""
    return {
        "claude": Agent(".claude/settings.json", claude, "claude"),
        "codex": Agent(".codex/config.toml", codex, "codex --profile shardwise"),
        "opencode": Agent(".config/opencode/opencode.json", opencode, "opencode"),
        "qwen": Agent(".qwen/settings.json", qwen, "qwen"),
    }


def find_server(options: argparse.Namespace) -> Server:
    """The server and its model; it is asked for what was not given. Raises ConfigError."""
    url = options.url.rstrip("/").removesuffix("/v1")
    if options.model:
        return Server(url, options.model, options.api_key, CONTEXT_TOKENS)
    try:
        with urllib.request.urlopen(request(f"{url}/v1/models", options.api_key), timeout=10) as reply:
            model = json.load(reply)["data"][0]
    except (urllib.error.URLError, OSError, ValueError, LookupError) as error:
        raise ConfigError(f"{url}: cannot be asked for its model ({error}); start it, or give --model NAME") from None
    return Server(url, model["id"], options.api_key, model.get("max_model_len") or CONTEXT_TOKENS)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None


def _write(path: Path, text: str) -> None:
    """As its owner's alone, since a key may be in it; whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".shardwise-new")
    new.touch(mode=0o600)
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def configure(path: Path, agent: Agent, server: Server) -> Before:
    """What the file was and would be; nothing is written. Raises ConfigError."""
    current, kept = _read(path), _kept(path)
    original = kept.original if kept is not None and current == kept.written else current
    try:
        return Before(original, agent.make(original or "", server))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; mend it, or move it away") from None


def _kept(path: Path) -> Before | None:
    text = _read(path.with_name(path.name + KEPT))
    try:
        return None if text is None else msgspec.json.decode(text, type=Before)
    except msgspec.DecodeError:
        raise ConfigError(f"{path}{KEPT}: is not what we wrote; move it away") from None


def undo(path: Path, console: Console) -> None:
    """Restore what was before. A file that was changed since is kept beside it. Raises ConfigError."""
    kept = _kept(path)
    if kept is None:
        raise ConfigError(f"{path}: nothing of ours to undo")
    current = _read(path)
    if current is not None and current != kept.written:
        aside = path.with_name(path.name + CHANGED)
        _write(aside, current)
        console.print(f"{path} was changed meanwhile; that is kept as {aside}", soft_wrap=True, markup=False)
    if kept.original is None:
        path.unlink(missing_ok=True)
    else:
        _write(path, kept.original)
    path.with_name(path.name + KEPT).unlink()
    console.print(f"restored {path}", soft_wrap=True, markup=False)


def run(options: argparse.Namespace) -> int:
    """Write, print or undo the configuration of one agent. Raises ConfigError."""
    agent, console = agents()[options.agent], Console(highlight=False)
    path = Path.home() / agent.file
    if options.undo:
        undo(path, console)
        return 0
    before = configure(path, agent, find_server(options))
    if options.dry_run:
        console.print(f"# {path}", soft_wrap=True, markup=False)
        console.print(before.written, end="", soft_wrap=True, markup=False)
        return 0
    _write(path.with_name(path.name + KEPT), msgspec.json.encode(before).decode())
    _write(path, before.written)
    console.print(
        f"wrote {path}\nstart it with: {agent.start}\nundo with: shardwise launch {options.agent} --undo",
        soft_wrap=True, markup=False,
    )  # fmt: skip
    return 0
