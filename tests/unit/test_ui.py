"""The page's files and the figures of its live view, without a browser; with one, see tests/browser."""

import re
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from shardwise.cache.budget import Budget
from shardwise.config import ServeConfig
from shardwise.engine.build import blueprint
from shardwise.engine.memory import Device, rank_memory
from shardwise.engine.messages import RankMemory, Stats
from shardwise.server.gpus import GpuReading, Gpus
from shardwise.server.ui import TYPES, UiState, read_assets
from shardwise.shard import local_bytes
from tests.fake_engine import READY, FakeEngine
from tests.unit.server_fixtures import MODEL, client, make_app, saying

MEMORY = (
    RankMemory(
        device="A", device_id="a", memory_bytes=1000, weights_bytes={"experts": 300, "norms": 5},
        state_bytes=90, state_row_bytes=10, kv_bytes=4160, kv_token_bytes=1.0,
    ),
    RankMemory(weights_bytes={"experts": 200}, state_bytes=0, state_row_bytes=0, kv_bytes=2080, kv_token_bytes=0.5),
)  # fmt: skip
STATS = Stats(
    running=2, waiting=3, kv_tokens_used=65, kv_tokens=4096, state_rows_used=2, state_rows=8, preemptions=1,
    prompt_tokens=0, generated_tokens=0, steps=9,
)  # fmt: skip


async def get(path: str, engine: FakeEngine | None = None, headers: Any = None, **options: Any) -> httpx.Response:
    async with client(make_app(engine or FakeEngine(saying("x")), **options)) as http:
        return await http.get(path, headers=headers)


@pytest.mark.parametrize("name", ["", *(f"ui/{name}" for name in read_assets())])
async def test_files_have_their_type_and_policy(name: str) -> None:
    answer = await get(f"/{name}", api_key="k")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == TYPES["." + (name or "index.html").rpartition(".")[2]]
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = await get(f"/{name}", headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_other_files_are_not_to_be_had() -> None:
    for path in ("/ui/nothing.js", "/ui/__init__.py", "/ui/..%2fui.py", "/ui/%2e%2e%2fui.py", "/ui/"):
        assert (await get(path)).status_code == 404, path


def test_files_need_nothing_from_elsewhere() -> None:
    assets = {name: data.decode() for name, data in read_assets().items()}
    assert {"index.html", "app.js", "style.css"} <= set(assets)
    for name, text in assets.items():
        urls = set(re.findall(r"\w+://[^\s\"'<>]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not urls, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), name
        assert not re.search(r"""src=["']//|@import|url\(""", text), name
    page = assets["index.html"]
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?![^>]* src=)", page), "the policy forbids what is inline"
    named = {*re.findall(r'(?:src|href)="ui/([^"]+)"', page)}
    named |= {name for text in assets.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert named == set(assets) - {"index.html"}


@pytest.mark.parametrize("path", ["/", "/ui/app.js", "/ui/state"])
async def test_no_ui(path: str) -> None:
    assert (await get(path, ui=False)).status_code == 404
    assert (await get(path)).status_code == 200


async def test_figures_need_the_key_and_the_files_do_not() -> None:
    assert (await get("/ui/state", api_key="k")).status_code == 401
    assert (await get("/ui/state", api_key="k", headers={"authorization": "Bearer x"})).status_code == 401
    assert (await get("/ui/state", api_key="k", headers={"authorization": "Bearer k"})).status_code == 200


async def test_state_while_the_engine_starts() -> None:
    engine = FakeEngine(saying("x"))
    engine.ready = None
    state = msgspec.json.decode((await get("/ui/state", engine)).content, type=UiState)
    assert (state["status"], state["limits"], state["ranks"]) == ("starting", None, [])


async def test_state_of_a_running_engine() -> None:
    engine = FakeEngine(saying("one two three"))
    engine.ready = msgspec.structs.replace(READY, ranks=2, memory=MEMORY)
    engine.stats = STATS
    async with client(make_app(engine, served_model_name=("m", "n"))) as http:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        usage = (await http.post("/v1/chat/completions", json=body)).json()["usage"]
        raw = (await http.get("/ui/state")).content
    state = msgspec.json.decode(raw, type=UiState)
    assert state["status"] == "ready"
    assert state["models"] == ["m", "n"]
    assert state["vision"] is False
    assert state["requests"] == {"running": 2, "waiting": 3, "preemptions": 1}
    assert state["kv_tokens"] == {"used": 65, "total": 4096}
    assert state["state_rows"] == {"used": 2, "total": 8}
    assert state["counters"] == {"prompt_tokens": usage["prompt_tokens"], "cached_tokens": 2, "generated_tokens": 3}
    for name, count in (("first_token", 1), ("next_token", 2)):
        latency = state["latency"][name]
        assert len(latency["counts"]) == len(latency["bounds_s"]) + 1
        assert latency["counts"][-1] == count
        assert latency["counts"] == sorted(latency["counts"])
        assert latency["bounds_s"] == sorted(latency["bounds_s"])
        assert latency["sum_s"] >= 0
    first, second = state["ranks"]
    assert first["weights_bytes"] == {"experts": 300, "norms": 5}
    assert first["state_bytes"] == {"used": 20, "total": 90}
    assert first["kv_bytes"] == {"used": 65, "total": 4160}
    assert first["memory_bytes"] == 1000
    assert first["gpu_utilisation"] is None
    assert (second["rank"], second["memory_bytes"], second["kv_bytes"]["used"]) == (1, None, 32)


def fake_library(broken: bool = False) -> Any:
    def handle(name: str) -> str:
        if broken or name != "GPU-a":
            raise RuntimeError("Not Found")
        return name

    return SimpleNamespace(
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=700),
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=40),
    )


def test_gpus_are_read_by_id() -> None:
    assert Gpus(fake_library).read(["a", "", "b"]) == [GpuReading(0.4, 700), None, None]
    assert Gpus(lambda: fake_library(broken=True)).read(["a"]) == [None]
    assert Gpus(lambda: None).read(["a"]) == [None]
    starts: list[int] = []
    gpus = Gpus(lambda: starts.append(1))
    assert gpus.read(["", ""]) == [None, None]
    assert not starts
    gpus.read(["a"])
    gpus.read(["b"])
    assert starts == [1]


async def test_ranks_that_share_a_device_share_its_memory() -> None:
    engine = FakeEngine(saying("x"))
    engine.ready = msgspec.structs.replace(READY, ranks=3, memory=(MEMORY[0], MEMORY[1], MEMORY[0]))
    ranks = (await get("/ui/state", engine)).json()["ranks"]
    assert [rank["memory_bytes"] for rank in ranks] == [500, None, 500]


@pytest.mark.parametrize("ratio", [(1.0,), (5.0, 3.0), (1.0, 0.0, 2.0)])
def test_memory_of_ranks_is_what_the_shard_spec_says(ratio: tuple[float, ...]) -> None:
    made = blueprint(ServeConfig(model=str(MODEL), ranks=len(ratio), ratio=ratio, device="cpu"))
    limits = Budget(4, 64, 100, rows=5, pages=7, page_tokens=64, snapshot_rows=2)
    ranks = len(ratio)
    memory = rank_memory(made.specs, made.caches, made.partitions, limits, ranks, [Device("X", "x", 99)])
    assert [each.device for each in memory] == ["X", *[""] * (ranks - 1)]
    for rank, each in enumerate(memory):
        assert sum(each.weights_bytes.values()) == sum(
            local_bytes(spec, made.partitions, rank) for spec in made.specs.values()
        )
        assert each.state_bytes == 7 * each.state_row_bytes == 7 * made.caches.row_bytes(made.partitions, rank)
        assert each.kv_bytes == 7 * made.caches.page_bytes(made.partitions, rank)
        assert each.kv_token_bytes * 64 == made.caches.page_bytes(made.partitions, rank)
    assert {"vocabulary", "attention", "delta", "experts", "mlp", "norms"} <= set(memory[0].weights_bytes)
