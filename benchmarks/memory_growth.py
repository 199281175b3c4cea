"""Does memory grow with the number of requests? Short ones of every kind against a server of the miniature, and the
resident memory of every process of it: the API process, the launcher, each rank.

    python -m benchmarks.memory_growth --requests 20000 --ranks 1 --json benchmarks/results/memory-1-rank.json
    python -m benchmarks.memory_growth --requests 20000 --fake --json benchmarks/results/memory-api.json

`--fake`: the API process alone, over an engine that answers at once. Growth is counted after the first --warm requests:
by then caches that are bounded are full. Answers under /v1/responses are not stored, as up to 256 MiB of them would be.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from shardwise.commands.demo import free_port, wait_healthy

CONCURRENT = 64
SAMPLE_EVERY = 250
LIMIT = 0.05
WORDS = ("the", "capital", "of", "France", "is", "a", "city", "two", "plus", "three", "make", "five", "nine", "sixty")
OPTIONS = "--device cpu --kv-tokens 8192 --max-model-len 512 --max-num-seqs 64 --snapshot-rows 32 --host-cache-gib 0.02"
KINDS: Mapping[str, int] = {
    "completion": 50, "stream": 15, "chat": 12, "responses": 6, "messages": 6, "tokenize": 2, "leaves": 4, "bad": 5,
}  # fmt: skip
PATHS: Mapping[str, str] = {
    "chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages", "tokenize": "/tokenize",
}  # fmt: skip


def body(kind: str, source: random.Random) -> dict[str, Any]:
    """A request that is answered within a token or two, unlike those before it."""
    text = " ".join(source.choices(WORDS, k=source.randint(1, 30)))
    messages, few = [{"role": "user", "content": text}], source.randint(1, 2)
    match kind:
        case "chat":
            tools = [{"type": "function", "function": {"name": f"f{source.randint(0, 999)}"}}]
            return {"messages": messages, "max_tokens": few, "tools": tools if few == 1 else None}
        case "responses":
            return {"input": text, "max_output_tokens": few, "store": False}
        case "messages":
            return {"model": "miniature", "messages": messages, "max_tokens": few}
        case "tokenize":
            return {"prompt": text}
        case "bad":
            return source.choice(({"prompt": []}, {"prompt": text, "temperature": 3}, {"x" + text: 1}, {"prompt": 1}))
    prompt = [source.randint(5, 1900) for _ in range(source.randint(1, 48))]
    stream = kind in ("stream", "leaves")
    return {"prompt": prompt, "max_tokens": 40 if kind == "leaves" else few, "stream": stream, "ignore_eos": True}


async def send(client: httpx.AsyncClient, kind: str, source: random.Random) -> str:
    """One request: what came of it."""
    async with client.stream("POST", PATHS.get(kind, "/v1/completions"), json=body(kind, source)) as reply:
        if kind == "leaves":
            async for _ in reply.aiter_bytes():
                return "left"
        text = await reply.aread()
    right = reply.status_code == (400 if kind == "bad" else 200) and (b'"error":{' in text) == (kind == "bad")
    return "as it should be" if right else f"wrong: {kind}: {reply.status_code}"


def processes(root: psutil.Process) -> dict[str, psutil.Process]:
    """The server's processes, by what they are."""
    found = {"API": root}
    for child in root.children(recursive=True):
        line = child.cmdline()
        if "shardwise.engine.worker" in line:
            found[f"rank {child.environ()['RANK']}"] = child
        else:
            found["launcher"] = child
    return found


async def drive(url: str, root: psutil.Process, count: int, warm: int, seed: int) -> dict[str, Any]:
    """Send warm + count requests, CONCURRENT at a time, and look at memory meanwhile."""
    source, outcomes, taken = random.Random(seed), Counter[str](), 0
    watched = processes(root)
    samples: dict[str, list[tuple[int, float]]] = {name: [] for name in watched}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=CONCURRENT, keepalive_expiry=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:

        async def worker() -> None:
            nonlocal taken
            while taken < warm + count:
                taken += 1
                if taken % SAMPLE_EVERY == 0:
                    for name, process in watched.items():
                        samples[name].append((taken, process.memory_info().rss / (1 << 20)))
                kind = source.choices(list(KINDS), list(KINDS.values()))[0]
                try:
                    outcomes[await send(client, kind, source)] += 1
                except httpx.TransportError as error:
                    outcomes[f"wrong: {kind}: {type(error).__name__} at request {taken}"] += 1
                    if not root.is_running() or root.status() == psutil.STATUS_ZOMBIE:
                        raise

        begin_s = time.monotonic()
        await asyncio.gather(*(worker() for _ in range(CONCURRENT)))
        took_s = time.monotonic() - begin_s
    memory = {name: growth(points, warm) for name, points in samples.items()}
    wrong = [text for text in outcomes if text.startswith("wrong")]
    return {
        "requests": count, "warm": warm, "concurrent": CONCURRENT, "seconds": round(took_s, 1),
        "cores": os.cpu_count(), "load": os.getloadavg()[1], "outcomes": dict(outcomes), "memory": memory,
        "passed": not wrong and all(each["growth"] < LIMIT for each in memory.values()),
    }  # fmt: skip


def growth(points: list[tuple[int, float]], warm: int) -> dict[str, Any]:
    """MiB at the first and last tenth of what came behind the warm-up, and by how much they differ."""
    behind = [mib for at, mib in points if at > warm]
    tenth = max(1, len(behind) // 10)
    first, last = (sum(part) / len(part) for part in (behind[:tenth], behind[-tenth:]))
    curve = [round(mib, 1) for _, mib in points[:: max(1, len(points) // 20)]]
    return {
        "first_mib": round(first, 1),
        "last_mib": round(last, 1),
        "growth": round(last / first - 1, 4),
        "mib": curve,
    }


@contextmanager
def server(ranks: int, fake: bool) -> Iterator[tuple[str, psutil.Process]]:
    """Its address and its process, ended at the end."""
    port = free_port()
    real = ["-m", "shardwise", "serve", "--tp", str(ranks), "--port", str(port), *OPTIONS.split()]
    command = [sys.executable, *(["-m", "benchmarks.memory_growth", "--as-server", str(port)] if fake else real)]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_healthy(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
        except httpx.TransportError:
            log.seek(0)
            print(log.read()[-4000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait(timeout=60)


def serve_fake(port: int) -> None:
    """The HTTP application over an engine without a model."""
    import uvicorn

    from shardwise.config import ServeConfig, load_model_config
    from shardwise.server.app import create_app
    from shardwise.server.sampling import GenerationDefaults
    from shardwise.server.tokenizer import Tokenizer
    from tests.fake_engine import FakeEngine
    from tests.golden import eval as evaluation

    class Forgetting(FakeEngine):
        """Keeps no record of what it was asked."""

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            self.requests.clear()
            self.cancelled.clear()
            return super().generate(*args, **kwargs)

    folder = evaluation.miniature()
    engine = Forgetting(lambda prompt, sampling: list(range(5, 105)))
    app = create_app(
        ServeConfig(model=str(folder)), engine, Tokenizer.load(folder), load_model_config(folder), GenerationDefaults()
    )
    uvicorn.run(app, port=port, log_level="warning")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20000)
    parser.add_argument("--warm", type=int, default=3000)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--as-server", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_server:
        serve_fake(options.as_server)
        return 0
    with server(options.ranks, options.fake) as (url, root):
        report = asyncio.run(drive(url, root, options.requests, options.warm, options.seed))
    report = {"server": "API process over a made-up engine" if options.fake else f"{options.ranks} ranks", **report}
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(not report["passed"])


if __name__ == "__main__":
    sys.exit(main())
