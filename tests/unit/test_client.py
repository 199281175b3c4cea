"""The client of the engine against a scripted first rank on the other end of the socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from shardwise.config import ConfigError
from shardwise.engine.client import EngineClient, EngineFailed, RequestRefused
from shardwise.engine.folder import Broke, RunFolder, Serving, Started, config_fault, crash_loop
from shardwise.engine.group import run_folder
from shardwise.engine.messages import (
    Cancel,
    Drain,
    Drained,
    Failed,
    Generate,
    Ready,
    SamplingParams,
    Stats,
    ToEngine,
    Tokens,
)
from shardwise.engine.wire import pack

READY = Ready(max_model_len=100, kv_tokens=400, max_num_seqs=4, ranks=2)
GREEDY = SamplingParams(max_tokens=3, temperature=0.0)


class FirstRank:
    """The other end: says what a test tells it to, and hears."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, folder: RunFolder) -> "FirstRank":
        return cls(*await asyncio.open_unix_connection(folder.socket))

    def say(self, *messages) -> None:
        self.writer.write(pack(messages))

    async def hear(self) -> list[ToEngine]:
        header = await asyncio.wait_for(self._reader.readexactly(4), 5)
        body = await self._reader.readexactly(int.from_bytes(header, "big"))
        return msgspec.msgpack.decode(body, type=list[ToEngine])


@pytest.fixture
async def folder() -> AsyncIterator[RunFolder]:
    with run_folder() as made:
        yield made


@pytest.fixture
async def client(folder: RunFolder) -> AsyncIterator[EngineClient]:
    made = EngineClient(folder.socket)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
async def engine(client: EngineClient, folder: RunFolder) -> AsyncIterator[FirstRank]:
    made = await FirstRank.connect(folder)
    made.say(READY)
    await client.wait_ready(5)
    yield made
    made.writer.close()


async def collect(client: EngineClient, name: str) -> list[Tokens]:
    return [message async for message in client.generate(name, [1, 2], GREEDY)]


async def test_nothing_is_taken_before_the_engine_is_ready(client: EngineClient, folder: RunFolder):
    with pytest.raises(TimeoutError):
        await client.wait_ready(0.05)
    engine = await FirstRank.connect(folder)
    with pytest.raises(EngineFailed, match="not ready"):
        await collect(client, "a")
    engine.say(READY)
    assert await client.wait_ready(5) == READY == client.ready
    engine.writer.close()


async def test_tokens_of_one_frame_reach_their_requests(client: EngineClient, engine: FirstRank):
    tasks = [asyncio.create_task(collect(client, name)) for name in "ab"]
    heard = await engine.hear() + await engine.hear()
    assert heard == [Generate(id=name, prompt=[1, 2], sampling=GREEDY) for name in "ab"]
    a, b = Tokens(id="a", tokens=[5]), Tokens(id="b", tokens=[6], finish_reason="stop", stop_token=9)
    end, unknown = Tokens(id="a", tokens=[], finish_reason="length"), Tokens(id="gone", tokens=[1])
    stats = Stats(1, 0, 8, 400, 1, 4, 0, 2, 2, 1)
    engine.say(a, b, unknown)
    engine.say(end, stats)
    assert await asyncio.gather(*tasks) == [[a, end], [b]]
    assert client.stats == stats


async def test_refused_and_failed_requests_raise_and_are_not_cancelled(client: EngineClient, engine: FirstRank):
    for name, failed in (("a", True), ("b", False)):
        task = asyncio.create_task(collect(client, name))
        await engine.hear()
        engine.say(Failed(id=name, message="no room", refused=failed, param="prompt"))
        with pytest.raises(RequestRefused if failed else EngineFailed, match="no room") as raised:
            await task
        assert getattr(raised.value, "param", None) == ("prompt" if failed else None)
    task = asyncio.create_task(collect(client, "c"))
    assert isinstance((await engine.hear())[0], Generate)  # and no Cancel before it
    engine.say(Tokens(id="c", tokens=[1], finish_reason="length"))
    await task


async def test_closing_or_cancelling_a_stream_cancels_the_request(client: EngineClient, engine: FirstRank):
    engine.say(Tokens(id="none", tokens=[]))
    stream = client.generate("a", [1], GREEDY)
    first = asyncio.create_task(anext(stream))
    await engine.hear()
    engine.say(Tokens(id="a", tokens=[5]))
    async with aclosing(stream):
        await first
    assert await engine.hear() == [Cancel(id="a")]
    task = asyncio.create_task(collect(client, "b"))
    await engine.hear()
    task.cancel()
    assert await engine.hear() == [Cancel(id="b")]
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_id_in_use_is_refused_without_harm_to_its_owner(client: EngineClient, engine: FirstRank):
    task = asyncio.create_task(collect(client, "a"))
    await engine.hear()
    with pytest.raises(RequestRefused, match="in use"):
        await collect(client, "a")
    engine.say(Tokens(id="a", tokens=[1], finish_reason="length"))
    assert len(await task) == 1


@pytest.mark.parametrize("garbage", [b"", b"\x00\x00", b"\x00\x00\x00\x01\xc1"])
async def test_losing_the_engine_fails_what_runs_and_a_new_one_is_taken(
    client: EngineClient, engine: FirstRank, folder: RunFolder, garbage: bytes
):
    tasks = [asyncio.create_task(collect(client, name)) for name in "ab"]
    await engine.hear()
    await engine.hear()
    engine.writer.write(garbage)
    engine.writer.close()
    for task in tasks:
        with pytest.raises(EngineFailed, match="restarts by itself"):
            await asyncio.wait_for(task, 1)
    assert client.ready is None
    again = await FirstRank.connect(folder)
    again.say(msgspec.structs.replace(READY, restarts=1))
    assert (await client.wait_ready(5)).restarts == 1
    again.writer.close()


async def test_a_new_group_replaces_one_whose_end_was_not_seen(
    client: EngineClient, engine: FirstRank, folder: RunFolder
):
    task = asyncio.create_task(collect(client, "a"))
    await engine.hear()
    again = await FirstRank.connect(folder)
    with pytest.raises(EngineFailed, match="restarts by itself"):
        await asyncio.wait_for(task, 1)
    again.say(READY)
    await client.wait_ready(5)
    engine.writer.close()
    task = asyncio.create_task(collect(client, "b"))
    assert isinstance((await again.hear())[0], Generate)
    again.say(Tokens(id="b", tokens=[1], finish_reason="length"))
    assert len(await task) == 1
    again.writer.close()


async def test_draining_takes_nothing_new_and_lets_the_rest_end(client: EngineClient, engine: FirstRank):
    running = asyncio.create_task(collect(client, "a"))
    await engine.hear()
    draining = asyncio.create_task(client.drain(5))
    assert await engine.hear() == [Drain()]
    with pytest.raises(EngineFailed, match="shutting down"):
        await collect(client, "b")
    engine.say(Tokens(id="a", tokens=[1], finish_reason="length"), Drained())
    assert await draining
    assert len(await running) == 1


async def test_draining_gives_up_after_its_time(client: EngineClient, engine: FirstRank):
    assert not await client.drain(0.05)


async def test_a_stop_for_good_fails_all_with_its_cause(client: EngineClient, engine: FirstRank):
    task = asyncio.create_task(collect(client, "a"))
    await engine.hear()
    client.stop("out of luck")
    for attempt in (task, collect(client, "b"), client.wait_ready(1)):
        with pytest.raises(EngineFailed, match="out of luck"):
            await attempt


async def test_a_socket_path_that_is_too_long_is_named():
    with pytest.raises(ConfigError, match="TMPDIR"):
        await EngineClient(Path("/tmp") / ("x" * 120)).start()


def starts(*restarts: int) -> list[Started]:
    return [Started(rank=0, restarts=number, pid=1) for number in restarts]


def test_the_journal_tells_faults_of_the_user_from_crashes():
    wrong, crash = Broke(0, 0, "wrong", config_error=True), Broke(1, 0, "bug")
    assert config_fault([*starts(0), wrong]) == "wrong"
    assert config_fault([*starts(0), crash, wrong]) is None  # rank 0 failed because rank 1 did
    assert config_fault([*starts(0), Serving(0), wrong]) is None
    assert crash_loop([*starts(0, 1, 2)]) is None
    assert "killed" in str(crash_loop([*starts(0, 1, 2, 3)]))
    assert crash_loop([*starts(0, 1, 2, 3), Serving(1)]) is None
    broken = [Broke(1, number, f"bug {number}") for number in range(3)]
    assert crash_loop([*starts(0, 1, 2), *broken[:2]]) is None
    assert "rank 1: bug 2" in str(crash_loop([*starts(0, 1, 2), *broken]))


def test_the_journal_is_read_without_a_line_that_is_being_written(tmp_path: Path):
    folder = RunFolder(tmp_path)
    assert folder.entries() == []
    folder.record(Serving(restarts=2))
    with folder.journal.open("ab") as file:
        file.write(b'{"type":"Serv')
    assert folder.entries() == [Serving(restarts=2)]
