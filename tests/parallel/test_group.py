"""Real ranks under torch's elastic launcher, with an engine that has no model: streams, deaths, restarts, ends."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shardwise.config import ConfigError, ServeConfig
from shardwise.engine.client import EngineClient, EngineFailed, RequestRefused
from shardwise.engine.folder import RunFolder, Started
from shardwise.engine.group import EngineGroup, run_folder, running_engine, supervise
from shardwise.engine.messages import SamplingParams
from shardwise.engine.processes import alive

ROOT = Path(__file__).parents[2]
ENGINE = "tests.parallel.fake_engine:build"
READY_SECONDS = 60


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def config(name: str) -> ServeConfig:
    return ServeConfig(model="none", ranks=2, served_model_name=(name,))


def pids(folder: RunFolder) -> dict[int, int]:
    """Of the ranks started last."""
    started = [entry for entry in folder.entries() if isinstance(entry, Started)]
    latest = max(entry.restarts for entry in started)
    return {entry.rank: entry.pid for entry in started if entry.restarts == latest}


def gone(pid: int) -> bool:
    """Ended, though perhaps not yet waited for."""
    if not alive(pid):
        return True
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return True


async def until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


@contextlib.asynccontextmanager
async def started_group() -> AsyncIterator[tuple[RunFolder, EngineClient, EngineGroup, asyncio.Task]]:
    with run_folder() as folder:
        client, group = EngineClient(folder.socket), EngineGroup(config("fake"), folder, ENGINE)
        await client.start()
        group.start()
        watching = asyncio.create_task(supervise(group, client))
        try:
            yield folder, client, group, watching
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await group.stop()
            await client.close()


async def collect(client: EngineClient, name: str, first: int, count: int, length: int = 1) -> list[int]:
    return [
        token
        async for message in client.generate(name, [first] * length, SamplingParams(max_tokens=count))
        for token in message.tokens
    ]


async def test_death_of_any_rank_ends_streams_and_the_group_serves_again_then_drains():
    async with started_group() as (folder, client, _, watching):
        ready = await client.wait_ready(READY_SECONDS)
        assert (ready.ranks, ready.restarts) == (2, 0)
        both = await asyncio.gather(collect(client, "a", 10, 5), collect(client, "b", 20, 3))
        assert both == [[11, 12, 13, 14, 15], [21, 22, 23]]
        with pytest.raises(RequestRefused, match="too long"):
            await collect(client, "long", 0, 1, length=1001)
        for restarts, victim in enumerate((1, 0), start=1):
            stream = client.generate(f"c{victim}", [0], SamplingParams(max_tokens=100_000))
            assert (await anext(stream)).tokens == [1]
            old = pids(folder)
            os.kill(old[victim], signal.SIGKILL)
            killed_s = time.monotonic()
            with pytest.raises(EngineFailed, match="restarts by itself"):
                async for _ in stream:
                    pass
            assert time.monotonic() - killed_s < 5
            assert client.ready is None
            with pytest.raises(EngineFailed, match="not ready"):
                await collect(client, "early", 0, 1)
            assert (await client.wait_ready(READY_SECONDS)).restarts == restarts
            assert all(gone(pid) for pid in old.values())
            assert await collect(client, f"d{victim}", 7, 2) == [8, 9]
        running = asyncio.create_task(collect(client, "e", 0, 40))
        await asyncio.sleep(0.1)
        assert await client.drain(10)
        assert await running == list(range(1, 41))
        await asyncio.wait_for(watching, 10)  # the launcher leaves by itself, with code 0
        assert all(gone(pid) for pid in pids(folder).values())


async def test_closing_a_stream_cancels_it_in_the_engine():
    async with started_group() as (folder, client, group, _):
        await client.wait_ready(READY_SECONDS)
        stream = client.generate("a", [0], SamplingParams(max_tokens=100_000))
        await anext(stream)
        await stream.aclose()
        assert await until(lambda: client.stats is not None and client.stats.preemptions == 1, 5)
        assert client.stats is not None
        assert client.stats.running == 0
        ranks = pids(folder)
        await group.stop()
        assert all(gone(pid) for pid in ranks.values())


async def test_a_config_error_of_one_rank_ends_all_at_once_with_its_message():
    with pytest.raises(ConfigError, match=r"^model: this one is wrong for rank 1$"):
        async with asyncio.timeout(READY_SECONDS), running_engine(config("wrong"), ENGINE):
            pytest.fail("an engine with a wrong model got ready")


@pytest.mark.slow
async def test_ranks_that_crash_over_and_over_are_given_up_with_the_cause():
    with pytest.raises(EngineFailed, match=r"crashed 3 times in a row while starting.*a bug in rank 1"):
        async with asyncio.timeout(READY_SECONDS), running_engine(config("broken"), ENGINE):
            pytest.fail("a broken engine got ready")


HOLDER = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from tests.parallel.test_group import started_group

async def main():
    async with started_group() as (folder, client, _, watching):
        await client.wait_ready(60)
        print(folder.path, flush=True)
        await watching

asyncio.run(main())
"""


async def test_no_rank_outlives_an_api_process_that_is_killed():
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(ROOT)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        folder = RunFolder(Path((await asyncio.to_thread(holder.stdout.readline)).strip()))
        ranks = pids(folder)
        assert len(ranks) == 2
    finally:
        holder.kill()
        holder.wait()
    assert await until(lambda: all(gone(pid) for pid in ranks.values()), 5)
