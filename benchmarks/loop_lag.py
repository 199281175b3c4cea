"""How late the API process is with what is due while it reads large and wrong requests.

    python -m benchmarks.loop_lag --json benchmarks/results/loop-lag.json

The application runs in a process of its own, over an engine that answers at once. In its event loop something is due
every 10 ms; `late` is how much later it came (wall time: other work on the machine counts). Other work does not change
`own`, the computing time that all threads of the process took from one of these moments to the next, which is at most
what they could make it late by, nor `callback`, what the loop's callbacks took, one by one. Milliseconds.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from shardwise.commands.demo import free_port, wait_healthy

BEAT_SECONDS = 0.01
LIMIT_MS = 50.0
KEY = "right"
PROMPT_TOKENS = 32_000
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
Make = Callable[[random.Random], tuple[str, bytes, dict[str, str]]]


def words(source: random.Random, count: int) -> str:
    return " ".join("".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=source.randint(2, 9))) for _ in range(count))


def chat(text: str, **more: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 2, **more}).encode()


def tools(source: random.Random) -> list[dict[str, Any]]:
    """About 1 MB of schemas."""
    made = []
    for number in range(100):
        fields = {f"field_{i}": {"type": "string", "description": words(source, 12)} for i in range(90)}
        made.append(
            {
                "type": "function",
                "function": {"name": f"f{number}", "parameters": {"type": "object", "properties": fields}},
            }
        )
    return made


def deep(levels: int) -> bytes:
    return b'{"messages": ' + b"[" * levels + b"]" * levels + b"}"


def many_messages(source: random.Random) -> bytes:
    """10 MB in 100,000 messages."""
    each = [{"role": "user", "content": words(source, 9)} for _ in range(100_000)]
    return json.dumps({"messages": each, "max_tokens": 2}).encode()


def kinds(source: random.Random) -> dict[str, tuple[int, list[tuple[str, bytes, dict[str, str]]]]]:
    """By name: how many at once, and the requests."""
    auth = {"authorization": f"Bearer {KEY}"}
    ids = json.dumps({"prompt": [77] * 1_000_000}).encode()
    forced = chat("hello", tools=tools(source)[:80], tool_choice="required")
    long = [(CHAT, chat(words(source, PROMPT_TOKENS // 3)), auth) for _ in range(4)]
    return {
        "nothing": (1, []),
        "prompts of 32,000 tokens": (4, long * 60),
        "bodies of 10 MB, one text": (2, [(CHAT, chat("x " * 5_000_000), auth)] * 6),
        "bodies of 10 MB, 100,000 messages": (2, [(CHAT, many_messages(source), auth)] * 4),
        "bodies of 5 MB, a list of 1,000,000 token ids": (2, [(COMPLETIONS, ids, auth)] * 6),
        "1 MB of tool schemas": (2, [(CHAT, chat("hello", tools=tools(source)), auth)] * 8),
        "1 MB of tool schemas, forced": (2, [(CHAT, forced, auth)] * 4),
        "JSON 100,000 deep": (4, [(CHAT, deep(100_000), auth)] * 40),
        "bad UTF-8, 1 MB": (4, [(CHAT, b'{"messages": "' + b"\xff" * 1_000_000 + b'"}', auth)] * 40),
        "wrong keys": (16, [(MESSAGES, chat("x"), {"x-api-key": f"wrong {i}"}) for i in range(400)]),
        "small chats": (16, [(CHAT, chat("hello there"), auth)] * 200),
    }  # fmt: skip


def quantiles(found: Sequence[float]) -> dict[str, float]:
    ordered = sorted(found) or [0.0]
    at = {"p50": 0.5, "p99": 0.99, "worst": 1.0}
    return {
        name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000, 1) for name, share in at.items()
    }


class Measured:
    """The application, with a beat in its loop; GET /lag tells what was found since it was asked last."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._late: list[float] = []
        self._own: list[float] = []
        self._callbacks: list[float] = []
        self._beating: asyncio.Task[None] | None = None
        run, thread = asyncio.Handle._run, threading.main_thread()

        def timed(handle: asyncio.Handle) -> None:
            begin_s = time.thread_time()
            run(handle)
            if threading.current_thread() is thread:
                self._callbacks.append(time.thread_time() - begin_s)

        asyncio.Handle._run = timed

    async def _beat(self) -> None:
        while True:
            due_s, own_s = time.perf_counter() + BEAT_SECONDS, time.process_time()
            await asyncio.sleep(BEAT_SECONDS)
            self._late.append(time.perf_counter() - due_s)
            self._own.append(time.process_time() - own_s)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/lag":
            await self._app(scope, receive, send)
            return
        self._beating = self._beating or asyncio.create_task(self._beat())
        found = {"late": self._late, "own": self._own, "callback": self._callbacks}
        body = json.dumps({name: quantiles(values) for name, values in found.items()}).encode()
        self._late, self._own, self._callbacks = [], [], []
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body})


def serve(port: int) -> None:
    import msgspec
    import uvicorn

    from shardwise.config import ServeConfig, load_model_config
    from shardwise.server.app import create_app
    from shardwise.server.sampling import GenerationDefaults
    from shardwise.server.tokenizer import Tokenizer
    from tests.fake_engine import READY, FakeEngine
    from tests.golden import eval as evaluation

    folder = evaluation.miniature()
    engine = FakeEngine(lambda prompt, sampling: [5, 6, 7])
    engine.ready = msgspec.structs.replace(READY, max_model_len=65536, kv_tokens=1 << 20)
    config = ServeConfig(model=str(folder), api_key=KEY)
    app = create_app(config, engine, Tokenizer.load(folder), load_model_config(folder), GenerationDefaults())
    uvicorn.run(Measured(app), port=port, log_level="warning", loop="asyncio")


async def measure(url: str, seed: int) -> list[dict[str, Any]]:
    found = []
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        for name, (at_once, requests) in kinds(random.Random(seed)).items():
            left, statuses = list(requests), dict[str, int]()

            async def worker(left: list[Any] = left, statuses: dict[str, int] = statuses) -> None:
                while left:
                    path, body, headers = left.pop()
                    reply = await client.post(path, content=body, headers=headers)
                    statuses[str(reply.status_code)] = statuses.get(str(reply.status_code), 0) + 1

            await client.get("/lag")
            begin_s = time.monotonic()
            await asyncio.gather(*(worker() for _ in range(at_once)))
            await asyncio.sleep(0 if requests else 2)
            took_s = time.monotonic() - begin_s
            lag = (await client.get("/lag")).json()
            found.append({"what": name, "at_once": at_once, "statuses": statuses, "seconds": round(took_s, 2), **lag})
            print(f"{name:46} {took_s:6.2f} s  {lag}  {statuses}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--as-server", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_server:
        serve(options.as_server)
        return 0
    port = free_port()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        command = [sys.executable, "-m", "benchmarks.loop_lag", "--as-server", str(port)]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_healthy(f"http://127.0.0.1:{port}", process, log)
            found = asyncio.run(measure(f"http://127.0.0.1:{port}", options.seed))
        finally:
            process.terminate()
            process.wait(timeout=30)
    passed = all(each["callback"]["p99"] < LIMIT_MS and "500" not in each["statuses"] for each in found)
    passed &= next(each for each in found if "32,000" in each["what"])["own"]["p99"] < LIMIT_MS
    report = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "passed": passed, "measured": found}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"load {report['load']:.1f} on {report['cores']} cores; passed: {passed}")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
