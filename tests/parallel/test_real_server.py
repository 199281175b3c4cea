"""The miniature over two ranks behind HTTP, one server for all: a small soak, a rank that dies mid-stream, the end."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.soak import soak

ROOT = Path(__file__).parents[2]
READY_SECONDS = 120
LONG = {"prompt": [5, 6, 7], "max_tokens": 4000, "stream": True, "ignore_eos": True, "temperature": 0}


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def ranks(self) -> dict[int, int]:
        """Process numbers of the ranks, by rank."""
        found: dict[int, int] = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            if "shardwise.engine.worker" in process.cmdline():
                found[int(process.environ()["RANK"])] = process.pid
        return found

    def wait_healthy(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        pytest.fail(f"not healthy: {self.log.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = ["-m", "shardwise", "serve", "--tp", "2", "--device", "cpu", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, *command], env=environment, stdout=output, stderr=output)
    one = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        one.wait_healthy()
        yield one
    finally:
        process.kill()
        process.wait()


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if data and data != "[DONE]":
            yield json.loads(data)


def test_every_request_is_answered_right_or_refused_and_nothing_is_kept(server: Server) -> None:
    report = asyncio.run(soak(server.url, 60, seed=1))
    assert report.wrong == []
    assert set(report.gauges.values()) == {0.0}
    assert report.answered_tokens > 100
    ended = " ".join(report.outcomes)
    assert all(kind in ended for kind in ("whole: right", "stream: right", ": left", ": refused")), report.outcomes


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_a_rank_that_dies_ends_streams_with_an_error_and_the_group_serves_again(server: Server, victim: int) -> None:
    before = server.ranks()
    assert sorted(before) == [0, 1]
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=30) as response:
        got = events(response)
        assert next(got)["choices"]
        os.kill(before[victim], signal.SIGKILL)
        killed_s = time.monotonic()
        last = list(got)[-1]
    assert time.monotonic() - killed_s < 5
    assert "restarts by itself" in last["error"]["message"]
    server.wait_healthy()
    assert not set(server.ranks().values()) & set(before.values())
    assert asyncio.run(soak(server.url, 5, seed=2)).passed


@pytest.mark.slow
def test_sigterm_lets_a_stream_end_and_leaves_nothing_behind(server: Server) -> None:
    """The last: it ends the server."""
    ranks = server.ranks()
    body = {**LONG, "max_tokens": 60}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        got = events(response)
        next(got)
        server.process.send_signal(signal.SIGTERM)
        last = list(got)[-1]
    assert last["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(timeout=40) == 0
    assert not any(psutil.pid_exists(pid) for pid in ranks.values())
    log = server.log.read_text()
    assert "draining" in log
    assert "waiting for it to restart" not in log.partition("draining")[2]
    assert "GET /health" not in log
