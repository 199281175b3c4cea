"""`shardwise serve` as its users start it: alone and under torchrun, with an engine that has no model."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from shardwise.commands.serve import group_folder
from shardwise.config import STORE_PER_GROUP
from shardwise.engine.folder import Started

pytest.importorskip("shardwise.server.app")

ROOT = Path(__file__).parents[2]
ENGINE = "tests.parallel.fake_engine:build"
READY_SECONDS = 60
SERVE = ["-m", "shardwise", "serve", "--device", "cpu", "--engine", ENGINE]
LONG = {"prompt": [5], "max_tokens": 900, "stream": True, "ignore_eos": True}

Start = Callable[[list[str]], subprocess.Popen[str]]


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts Python with arguments; whatever still runs at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []
    environment = {
        **os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", STORE_PER_GROUP: "1",
    }  # fmt: skip

    def begin(arguments: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments], env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def wait_healthy(port: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    process.kill()
    pytest.fail(f"not healthy: {process.communicate()}")


def events(response: httpx.Response) -> Iterator[dict]:
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if data and data != "[DONE]":
            yield json.loads(data)


def stream(port: int, body: dict, then: Callable[[], None]) -> list[dict]:
    """All events of a completion; `then` is called after the first."""
    with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30) as response:
        assert response.status_code == 200
        got = events(response)
        first = next(got)
        then()
        return [first, *got]


def test_sigterm_lets_streams_end_and_exits_with_0(start: Start, port: int):
    server = start([*SERVE, "--tp", "2", "--port", str(port)])
    wait_healthy(port, server)
    got = stream(port, {**LONG, "max_tokens": 100}, lambda: server.send_signal(signal.SIGTERM))
    assert got[-1]["choices"][0]["finish_reason"] == "length"
    assert server.wait(timeout=20) == 0


def test_what_one_rank_finds_wrong_is_one_line_and_exit_code_2(start: Start, port: int):
    wrong = ["--tp", "2", "--port", str(port), "--served-model-name", "wrong", "--log-level", "error"]
    server = start([*SERVE, *wrong])
    out, err = server.communicate(timeout=READY_SECONDS)
    assert (out, err) == ("", "shardwise: error: model: this one is wrong for rank 1\n")
    assert server.returncode == 2


@pytest.mark.slow
def test_two_launchers_serve_restart_and_drain_together(start: Start, port: int):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = probe.getsockname()[1]
    torchrun = [
        *("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "10"),
        *("--monitor-interval", "0.25", "--rdzv-backend", "c10d", "--rdzv-id", "test", "--local-addr", "127.0.0.1"),
        *("--rdzv-endpoint", f"localhost:{meeting}"),
    ]
    launchers = [start([*torchrun, *SERVE, "--port", str(port)]) for _ in range(2)]
    wait_healthy(port, launchers[0])
    folders = {pid.pid: group_folder(pid.pid) for pid in launchers}
    ranks = {
        entry.rank: entry.pid for folder in folders.values() for entry in folder.entries() if isinstance(entry, Started)
    }
    assert sorted(ranks) == [0, 1]
    begin_s = time.monotonic()
    got = stream(port, LONG, lambda: os.kill(ranks[1], signal.SIGKILL))
    assert time.monotonic() - begin_s < 5
    assert "restarts by itself" in got[-1]["error"]["message"]
    wait_healthy(port, launchers[0])
    body = {"prompt": [5], "max_tokens": 3, "return_token_ids": True}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30).json()
    assert answer["usage"]["completion_tokens"] == 3
    os.kill(api_process(port), signal.SIGTERM)
    assert [launcher.wait(timeout=30) for launcher in launchers] == [0, 0]
    assert not any(folder.path.exists() for folder in folders.values())


def api_process(port: int) -> int:
    """The process that listens on `port`."""
    found = (c for c in psutil.net_connections() if c.laddr and c.laddr.port == port and c.status == "LISTEN")
    return next(c.pid for c in found if c.pid is not None)
