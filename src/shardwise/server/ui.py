"""The page at `/`: its files, which come with the package, and the figures of its live view."""

import asyncio
import hashlib
import importlib.resources
import time
from collections.abc import Mapping
from pathlib import PurePath

from fastapi import FastAPI
from prometheus_client import Counter, Histogram
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from shardwise.engine.messages import RankMemory, Stats
from shardwise.server.gpus import GpuReading, Gpus
from shardwise.server.services import Services
from shardwise.server.stream import json_bytes

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing from elsewhere, and no script or style but our files: whatever a model says, it stays text.
SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Held(TypedDict):
    """Bytes; `total` is what was taken at the start, and `used` is of that."""

    used: int
    total: int


class RankState(TypedDict):
    """memory_bytes: of the device; null on a CPU or another host. gpu_*: null without NVIDIA's library."""

    rank: int
    device: str
    weights_bytes: dict[str, int]
    state_bytes: Held
    kv_bytes: Held
    memory_bytes: int | None
    gpu_memory_used_bytes: int | None
    gpu_utilisation: float | None


class Limits(TypedDict):
    max_model_len: int
    kv_tokens: int
    max_num_seqs: int
    ranks: int
    restarts: int


class Latency(TypedDict):
    """counts: observations up to each bound, and all of them last. They only grow."""

    sum_s: float
    bounds_s: list[float]
    counts: list[int]


class UiState(TypedDict):
    """at_s: by a clock that only grows, as counters do; rates are the reader's to take. limits: null at the start."""

    at_s: float
    status: str
    models: list[str]
    vision: bool
    limits: Limits | None
    requests: dict[str, int]
    kv_tokens: Held
    state_rows: Held
    counters: dict[str, int]
    latency: dict[str, Latency]
    ranks: list[RankState]


def _total(counter: Counter) -> int:
    return int(next(s.value for metric in counter.collect() for s in metric.samples if s.name.endswith("_total")))


def _latency(histogram: Histogram) -> Latency:
    samples = [sample for metric in histogram.collect() for sample in metric.samples]
    buckets = [(float(s.labels["le"]), int(s.value)) for s in samples if s.name.endswith("_bucket")]
    return {
        "sum_s": next(s.value for s in samples if s.name.endswith("_sum")),
        "bounds_s": [bound for bound, _ in buckets[:-1]],
        "counts": [count for _, count in buckets],
    }


def _rank(rank: int, memory: RankMemory, stats: Stats | None, reading: GpuReading | None, sharers: int) -> RankState:
    """sharers: ranks on this one's device, which are taken to have equal parts of it."""
    used_rows, used_tokens = (stats.state_rows_used, stats.kv_tokens_used) if stats else (0, 0)
    return {
        "rank": rank,
        "device": memory.device,
        "weights_bytes": memory.weights_bytes,
        "state_bytes": {"used": used_rows * memory.state_row_bytes, "total": memory.state_bytes},
        "kv_bytes": {"used": round(used_tokens * memory.kv_token_bytes), "total": memory.kv_bytes},
        "memory_bytes": memory.memory_bytes // sharers or None,
        "gpu_memory_used_bytes": reading.memory_used_bytes // sharers if reading else None,
        "gpu_utilisation": reading.utilisation if reading else None,
    }


async def ui_state(services: Services, gpus: Gpus) -> UiState:
    """What the live view shows, now."""
    engine, metrics = services.engine, services.metrics
    ready, stats = engine.ready, engine.stats
    memory = ready.memory if ready else ()
    ids = [each.device_id for each in memory]
    readings = await asyncio.to_thread(gpus.read, ids)
    limits: Limits | None = None
    if ready is not None:
        limits = {
            "max_model_len": ready.max_model_len,
            "kv_tokens": ready.kv_tokens,
            "max_num_seqs": ready.max_num_seqs,
            "ranks": ready.ranks,
            "restarts": ready.restarts,
        }
    return {
        "at_s": time.monotonic(),
        "status": "draining" if engine.draining else "starting" if ready is None else "ready",
        "models": list(services.names),
        "vision": services.media is not None,
        "limits": limits,
        "requests": {
            "running": stats.running if stats else 0,
            "waiting": stats.waiting if stats else 0,
            "preemptions": stats.preemptions if stats else 0,
        },
        "kv_tokens": {"used": stats.kv_tokens_used if stats else 0, "total": ready.kv_tokens if ready else 0},
        "state_rows": {"used": stats.state_rows_used if stats else 0, "total": ready.max_num_seqs if ready else 0},
        "counters": {
            "prompt_tokens": _total(metrics.prompt_tokens),
            "cached_tokens": _total(metrics.cached_tokens),
            "generated_tokens": _total(metrics.generated_tokens),
        },
        "latency": {"first_token": _latency(metrics.first_token), "next_token": _latency(metrics.next_token)},
        "ranks": [
            _rank(rank, each, stats, reading, ids.count(each.device_id) if each.device_id else 1)
            for rank, (each, reading) in enumerate(zip(memory, readings, strict=True))
        ],
    }


def read_assets() -> Mapping[str, bytes]:
    """The page's files by name."""
    folder = importlib.resources.files("shardwise.server") / "web"
    return {each.name: each.read_bytes() for each in folder.iterdir() if PurePath(each.name).suffix in TYPES}


def add_ui(app: FastAPI, services: Services) -> None:
    """Mount the page. Its files need no key, as they tell nothing; its figures do."""
    assets, gpus = read_assets(), Gpus()
    tags = {name: f'"{hashlib.sha256(data).hexdigest()[:32]}"' for name, data in assets.items()}

    def answer(request: Request, name: str) -> Response:
        if name not in assets:
            raise HTTPException(404, "Not Found")
        headers = {**HEADERS, "etag": tags[name]}
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(assets[name], headers={**headers, "content-type": TYPES[PurePath(name).suffix]})

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        return answer(request, "index.html")

    @app.get("/ui/state", include_in_schema=False)
    async def state() -> Response:
        body = json_bytes(await ui_state(services, gpus))
        return Response(body, headers={"cache-control": "no-store"}, media_type="application/json")

    @app.api_route("/ui/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def asset(request: Request) -> Response:
        return answer(request, request.path_params["name"])
