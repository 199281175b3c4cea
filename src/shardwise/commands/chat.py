"""`shardwise chat`: a conversation in the terminal, with a running server or with one started for it."""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from shardwise.commands.prepare import resolve_model
from shardwise.commands.serve import bind
from shardwise.config import ConfigError, ServeConfig
from shardwise.engine.folder import RunFolder

START_SECONDS = 600.0
HELP = "Ctrl-D or /exit ends, /new starts over."


@contextlib.contextmanager
def started_server(config: ServeConfig) -> Iterator[str]:
    """The address of a server that runs for as long as the context. Raises ConfigError if it does not get ready."""
    with bind(msgspec.structs.replace(config, port=0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="shardwise-chat-") as path:
        folder = RunFolder(Path(path))
        folder.write_config(msgspec.structs.replace(config, port=port, log_level="warning"))
        ours = ["--config-file", str(folder.config_file), "--parent", str(os.getpid())]
        server = subprocess.Popen(
            [sys.executable, "-m", "shardwise", "serve", *ours],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt from the terminal ends an answer, not the server
        )
        try:
            url = f"http://{config.host}:{port}"
            wait_healthy(url, server)
            yield url
        finally:
            server.terminate()
            try:
                server.wait(timeout=15)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def wait_healthy(url: str, server: subprocess.Popen[bytes]) -> None:
    """Until /health answers 200. Raises ConfigError if the server ends first; it has said why."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise ConfigError("the server did not start; its reason is above")
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.2)
    raise ConfigError(f"the server was not ready within {START_SECONDS:.0f} s")


def request(url: str, api_key: str, body: dict[str, Any] | None = None) -> urllib.request.Request:
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {api_key}"} if api_key else {})}
    return urllib.request.Request(url, json.dumps(body).encode() if body else None, headers)


def model_name(url: str, api_key: str) -> str:
    """The first model that the server names. Raises ConfigError if it cannot be asked."""
    try:
        with urllib.request.urlopen(request(f"{url}/v1/models", api_key), timeout=10) as reply:
            return json.load(reply)["data"][0]["id"]
    except (OSError, ValueError, LookupError) as error:
        raise ConfigError(f"--url {url}: no answer from a server of the OpenAI API ({error})") from None


def stream_answer(url: str, api_key: str, body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Pieces of an answer: ("reasoning" or "content", text). Raises RuntimeError, in the server's words."""
    try:
        with urllib.request.urlopen(request(f"{url}/v1/chat/completions", api_key, body)) as reply:
            for line in reply:
                data = line.decode().strip().removeprefix("data:").strip()
                if not data or data == "[DONE]" or data.startswith(":"):
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                for choice in event["choices"]:
                    delta = choice["delta"]
                    if text := delta.get("reasoning_content"):
                        yield "reasoning", text
                    if text := delta.get("content"):
                        yield "content", text
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        with contextlib.suppress(ValueError, LookupError):
            text = json.loads(text)["error"]["message"]
        raise RuntimeError(text) from None
    except OSError as error:
        raise RuntimeError(str(error)) from None


def printable(text: str) -> str:
    """Without the control characters that would command the terminal."""
    return "".join(character for character in text if character.isprintable() or character in "\n\t")


def converse(url: str, options: argparse.Namespace, console: Console) -> None:
    """Read lines, show answers as they come, until the input ends."""
    url = url.rstrip("/").removesuffix("/v1")
    start = [{"role": "system", "content": options.system}] if options.system else []
    settings = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    body = {"model": model_name(url, options.api_key), "stream": True}
    body |= {name: value for name, value in settings.items() if value is not None}
    messages = list(start)
    console.print(f"{body['model']} at {url}. {HELP}", markup=False)
    while True:
        try:
            line = console.input("> ").strip()
        except EOFError:
            return
        if line in ("/exit", "/quit"):
            return
        if line == "/new":
            messages = list(start)
        if not line or line == "/new":
            continue
        messages.append({"role": "user", "content": line})
        said, last = "", ""
        try:
            for kind, text in stream_answer(url, options.api_key, {**body, "messages": messages}):
                said += text if kind == "content" else ""
                if (last, kind) == ("reasoning", "content"):
                    console.print()
                last = kind
                console.out(printable(text), end="", highlight=False, style="dim" if kind == "reasoning" else None)
            console.print()
        except KeyboardInterrupt:  # ends this answer, not the conversation
            console.print("\n(stopped)")
        except RuntimeError as error:
            console.print(f"\nerror: {error}", markup=False, style="red")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": said})


def run(options: argparse.Namespace, config: ServeConfig) -> int:
    """Talk until the input ends. Raises ConfigError."""
    console = Console()
    if options.url:
        converse(options.url, options, console)
        return 0
    with started_server(resolve_model(config)) as url:
        converse(url, options, console)
    return 0
