"""Many requests at once against a server of the miniature: answers of random lengths, clients that leave, bad bodies.

Every answer must be what transformers says (tests/golden/miniature_hf.json), every bad body be refused in the API's
error shape, and in the end no page of KV cache and no row of state be in use.

    python -m benchmarks.soak --requests 500 --ranks 2 --json benchmarks/results/soak-cpu.json
    python -m benchmarks.soak --requests 256 --streams --json benchmarks/results/soak-streams-cpu.json

`--streams`: all are streams of mixed length. Some clients read slowly through small buffers (and get all in the end),
some vanish in the middle; long answers to one question must be the same whoever reads them.
"""

import argparse
import asyncio
import json
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from transformers import AutoTokenizer

from shardwise.commands.demo import served
from tests.golden import eval as evaluation

NEAR_TIE = 1e-3  # logits; what closer leads decide is up to rounding
SETTLE_SECONDS = 30.0
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "state_rows_used")
STREAMS = {"stream": 40, "slow stream": 20, "long stream": 10, "slow long stream": 10, "leaves a stream": 20}
LONG_TOKENS = 400
SLOW_SECONDS = 0.02  # between two events
SMALL_BUFFER_BYTES = 4096
KINDS = {"whole": 45, "stream": 30, "leaves a stream": 10, "leaves": 5, "bad": 10}  # shares, of 100
BAD: tuple[tuple[str, Any, int], ...] = (
    ("no JSON", b'{"prompt": ', 400),
    ("not UTF-8", b"\xff\xfe", 400),
    ("a list", [], 400),
    ("unknown parameter", {"prompt": "a", "max_tokens": 1, "tempratur": 1}, 400),
    ("wrong type", {"prompt": "a", "max_tokens": "many"}, 400),
    ("out of range", {"prompt": "a", "max_tokens": 1, "temperature": -1}, 400),
    ("token out of range", {"prompt": [10**6], "max_tokens": 1}, 400),
    ("longer than the limit", {"prompt": [5] * 9000, "max_tokens": 1}, 400),
    ("answer over the limit", {"prompt": [5], "max_tokens": 10**6}, 400),
    ("empty prompt", {"prompt": [], "max_tokens": 1}, 400),
    ("another model", {"model": "gpt-4", "prompt": "a", "max_tokens": 1}, 404),
)


@dataclass(frozen=True)
class Ask:
    """One request. expected: the tokens of the right answer; empty for a bad body, which gets `status`."""

    kind: str
    body: Any
    expected: tuple[int, ...] = ()
    excused: bool = False  # its answer hangs on a near-tie
    status: int = 200
    leave_after: int = 0  # events, or hundredths of a second without a stream


@dataclass(frozen=True)
class Report:
    """outcomes: how many requests ended how; `wrong` says which should not have, and gauges are those at the end."""

    requests: int
    outcomes: Mapping[str, int]
    wrong: list[str]
    gauges: Mapping[str, float]
    seconds: float
    answered_tokens: int

    @property
    def passed(self) -> bool:
        return not self.wrong and not any(self.gauges.values())


def asks(count: int, seed: int, kinds: Mapping[str, int] = KINDS) -> Iterator[Ask]:
    """`count` requests; the same for the same seed."""
    source = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(evaluation.miniature())
    golden, cases = evaluation.golden(), evaluation.load_cases()
    for kind in source.choices(list(kinds), list(kinds.values()), k=count):
        if kind == "bad":
            name, body, status = source.choice(BAD)
            yield Ask(f"bad: {name}", body, status=status)
            continue
        case = source.choice(cases)
        right = golden[case.id]
        most = source.randint(1, case.max_tokens)
        if "long" in kind:
            prompt = evaluation.prompt_ids(tokenizer, cases[0])
            body = {"prompt": prompt, "max_tokens": LONG_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
            yield Ask(kind, {**body, "return_token_ids": True})
            continue
        body = {
            "prompt": evaluation.prompt_ids(tokenizer, case), "max_tokens": most, "temperature": 0,
            "return_token_ids": True, "stream": "stream" in kind,
        }  # fmt: skip
        leave_after = source.randint(1, 8) if kind.startswith("leaves") else 0
        yield Ask(kind, body, right.ids[:most], right.margin <= NEAR_TIE, leave_after=leave_after)


async def send(client: httpx.AsyncClient, ask: Ask) -> tuple[str, int]:
    """What came of one request, and how many tokens it was answered with."""
    content = ask.body if isinstance(ask.body, bytes) else json.dumps(ask.body).encode()
    request = client.build_request("POST", "/v1/completions", content=content)
    if ask.kind == "leaves":
        try:
            async with asyncio.timeout(ask.leave_after / 100):
                reply = await client.send(request)
        except TimeoutError:
            return "left", 0
    elif ask.kind.endswith("stream"):
        return await send_stream(client, request, ask)
    else:
        reply = await client.send(request)
    answer = reply.json()
    if ask.status != 200:
        refused = reply.status_code == ask.status and bool(answer["error"]["message"]) and "param" in answer["error"]
        return ("refused" if refused else f"wrong: {reply.status_code} {answer}"), 0
    if reply.status_code != 200:
        return f"wrong: {reply.status_code} {answer}", 0
    return judge(ask, answer["choices"][0]["token_ids"], answer["choices"][0]["finish_reason"])


async def send_stream(client: httpx.AsyncClient, request: httpx.Request, ask: Ask) -> tuple[str, int]:
    tokens, reason, events = list[int](), None, 0
    reply = await client.send(request, stream=True)
    try:
        async for line in reply.aiter_lines():
            data = line.removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                return f"wrong: {event}", 0
            events += 1
            if "slow" in ask.kind:
                await asyncio.sleep(SLOW_SECONDS)
            tokens += event["choices"][0]["token_ids"]
            reason = event["choices"][0]["finish_reason"] or reason
            if ask.leave_after and events >= ask.leave_after and not reason:
                right = ask.excused or tuple(tokens) == ask.expected[: len(tokens)]
                return ("left" if right else f"wrong: began {tokens}, not {ask.expected}"), len(tokens)
    finally:
        await reply.aclose()
    return judge(ask, tokens, reason)


def judge(ask: Ask, tokens: list[int], reason: str | None) -> tuple[str, int]:
    if "long" in ask.kind:
        return (f"ran {hash(tuple(tokens))}" if len(tokens) == LONG_TOKENS else f"wrong: {len(tokens)} tokens"), len(
            tokens
        )
    if not ask.excused and (tuple(tokens) != ask.expected or reason not in ("stop", "length")):
        return f"wrong: {tokens} ({reason}), not {list(ask.expected)}", len(tokens)
    return "right", len(tokens)


async def gauges(client: httpx.AsyncClient) -> dict[str, float]:
    """The engine's gauges by name, as /metrics has them."""
    lines = (await client.get("/metrics")).text.splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(found[f"shardwise_{name}"]) for name in GAUGES}


async def settled(client: httpx.AsyncClient) -> dict[str, float]:
    """The gauges once all are zero, or what they are after SETTLE_SECONDS."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while any((left := await gauges(client)).values()) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    return left


async def soak(url: str, count: int, seed: int, kinds: Mapping[str, int] = KINDS) -> Report:
    """Send all requests at once."""
    limits = httpx.Limits(max_connections=None)
    buffer = [(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)] if kinds is STREAMS else None
    transport = httpx.AsyncHTTPTransport(limits=limits, socket_options=buffer)
    async with httpx.AsyncClient(base_url=url, timeout=None, transport=transport) as client:
        made = list(asks(count, seed, kinds))
        begin_s = time.monotonic()
        results = await asyncio.gather(*(send(client, ask) for ask in made))
        seconds = time.monotonic() - begin_s
        left = await settled(client)
        healthy = (await client.get("/health")).status_code == 200
    outcomes = Counter(
        f"{ask.kind}: {result.partition(':')[0].partition(' ')[0]}"
        for ask, (result, _) in zip(made, results, strict=True)
    )
    wrong = [f"{ask.kind}: {result}" for ask, (result, _) in zip(made, results, strict=True) if "wrong" in result]
    wrong += [] if healthy else ["/health is not 200"]
    if len(long := {result for ask, (result, _) in zip(made, results, strict=True) if "long" in ask.kind}) > 1:
        wrong.append(f"{len(long)} different long answers to one question")
    return Report(count, dict(sorted(outcomes.items())), wrong, left, seconds, sum(tokens for _, tokens in results))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server of the miniature; default: one is started")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--streams", action="store_true")
    options = parser.parse_args()
    kinds = STREAMS if options.streams else KINDS
    if options.url:
        report = asyncio.run(soak(options.url, options.requests, options.seed, kinds))
    else:
        with served(options.ranks) as url:
            report = asyncio.run(soak(url, options.requests, options.seed, kinds))
    text = json.dumps(
        {"ranks": options.ranks, "seed": options.seed, "passed": report.passed, **asdict(report)}, indent=1
    )
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    return int(not report.passed)


if __name__ == "__main__":
    sys.exit(main())
