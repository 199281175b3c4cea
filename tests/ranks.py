"""Rank processes for tests: a pool of Gloo ranks on this machine, started once and used by many tests.

A test hands over a module-level function by reference; it runs as fn(rank, world, group, **kwargs) on the first
`world` ranks, and what it returns comes back. `python -m tests.ranks` is the program of one rank.
"""

import argparse
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

MAX_RANKS = 4
START_SECONDS = 120.0
GRACE_SECONDS = 1.0  # for the other ranks to report, once one has failed
# Memory stays with a rank's allocator: to give back what the next step asks for again was a fifth of its time.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 29)}
ROOT = Path(__file__).parent.parent


class RankError(RuntimeError):
    """A rank that died, hung, or raised something that cannot be sent to another process."""


def reference(fn: Callable[..., Any] | str) -> str:
    """`fn` as "module:function", which a rank can import. Raises ValueError for a lambda or a nested function."""
    if isinstance(fn, str):
        return fn
    if "<" in fn.__qualname__:
        raise ValueError(f"{fn.__qualname__}: ranks import their function; give one at the top level of a module")
    return f"{fn.__module__}:{fn.__qualname__}"


class Ranks:
    """The pool. It starts at the first `run`, and anew after a failure, since collectives may be left halfway."""

    def __init__(self, ranks: int = MAX_RANKS) -> None:
        self.ranks = ranks
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._logs: list[Path] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, world: int, fn: Callable[..., Any] | str, *, timeout_s: float = 120.0, **kwargs: Any) -> list[Any]:
        """fn(rank, world, group, **kwargs) on ranks 0 .. world; the results in order of rank.

        Raises what the first rank to fail raised, with the traceback there as a note; RankError for a rank that died,
        and for one without an answer after `timeout_s`.
        """
        if not 1 <= world <= self.ranks:
            raise ValueError(f"{world} ranks: the pool has {self.ranks}; ask for 1 .. {self.ranks}")
        name = reference(fn)
        if any(process.poll() is not None for process in self._processes):
            self.close()  # something outside ended one between two calls
        if not self._processes:
            self._start()
        message = pickle.dumps((list(sys.path), name, world, kwargs))
        for connection in self._connections[:world]:
            connection.send_bytes(message)
        answers, failures, silent = self._collect(world, timeout_s)
        if failures or silent:
            self.close()
            raise _failure(name, world, timeout_s, failures, silent)
        return [answers[rank] for rank in range(world)]

    def close(self) -> None:
        """End the rank processes, at once."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for connection in self._connections:
            connection.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._connections, self._logs, self._folder = [], [], [], None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        folder = Path(self._folder.name)
        self._logs = [folder / f"rank{rank}.log" for rank in range(self.ranks)]
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment |= KEEP_MEMORY
        with Listener(str(folder / "socket"), backlog=self.ranks) as listener:
            for rank, log in enumerate(self._logs):
                arguments = ["--rank", str(rank), "--ranks", str(self.ranks), "--folder", str(folder)]
                with log.open("wb") as output:
                    self._processes.append(
                        subprocess.Popen(
                            [sys.executable, "-m", "tests.ranks", *arguments],
                            env=environment,
                            cwd=ROOT,
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                        )
                    )
            self._connections = self._accept(listener)

    def _accept(self, listener: Listener) -> list[Connection]:
        """The connections of all ranks, in order; a rank connects once its groups are there."""
        by_rank: dict[int, Connection] = {}
        end = time.monotonic() + START_SECONDS
        socket = listener._listener._socket  # pyright: ignore[reportAttributeAccessIssue]
        while len(by_rank) < self.ranks:
            if wait([socket], timeout=0.2):
                connection = listener.accept()
                by_rank[connection.recv()] = connection
            dead = [rank for rank, process in enumerate(self._processes) if process.poll() is not None]
            if dead or time.monotonic() > end:
                missing = dead or sorted(set(range(self.ranks)) - set(by_rank))
                logs = "\n".join(self._log(rank) for rank in missing)
                self.close()
                raise RankError(f"ranks {missing} did not start within {START_SECONDS:.0f} s\n{logs}")
        return [by_rank[rank] for rank in range(self.ranks)]

    def _collect(self, world: int, timeout_s: float) -> tuple[dict[int, Any], list["_Failure"], list[int]]:
        """Answers by rank, failures in order of arrival, and the ranks from which nothing came."""
        answers: dict[int, Any] = {}
        failures: list[_Failure] = []
        waiting = {self._connections[rank]: rank for rank in range(world)}
        end = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answer = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    code = self._processes[rank].wait()
                    answer = _Failure(None, f"the process ended with code {code}\n{self._log(rank)}")
                if isinstance(answer, _Failure):
                    failures.append(answer.of(rank))
                    end = min(end, time.monotonic() + GRACE_SECONDS)
                else:
                    answers[rank] = answer[0]
        return answers, failures, sorted(waiting.values())

    def _log(self, rank: int) -> str:
        text = self._logs[rank].read_text(errors="replace") if self._logs[rank].exists() else ""
        return "\n".join(["", f"-- output of rank {rank} --", *text.splitlines()[-40:]])


class _Failure:
    """What a rank sends instead of a result."""

    def __init__(self, error: BaseException | None, text: str, rank: int = -1) -> None:
        self.error, self.text, self.rank = error, text, rank

    def of(self, rank: int) -> "_Failure":
        return _Failure(self.error, self.text, rank)


def _failure(name: str, world: int, timeout_s: float, failures: list[_Failure], silent: list[int]) -> BaseException:
    """The exception to raise: the first failure's own, where it could be sent."""
    notes = [f"-- {name} on rank {failure.rank} of {world} --\n{failure.text}" for failure in failures]
    if not failures:
        return RankError(f"{name}: no answer from ranks {silent} of {world} after {timeout_s:.0f} s")
    if failures[0].error is None:
        return RankError("\n".join(notes))
    for note in notes:
        failures[0].error.add_note(note)
    return failures[0].error


def _answer(message: bytes, rank: int, groups: dict[int, Any]) -> bytes:
    """Run one call; its result, in a tuple, or its failure."""
    from tests.poison import poisoned

    try:
        path, name, world, kwargs = pickle.loads(message)
        sys.path += [entry for entry in path if entry not in sys.path]
        module, _, function = name.partition(":")
        fn = getattr(importlib.import_module(module), function)
        with poisoned():
            result = fn(rank, world, groups[world], **kwargs)
        return pickle.dumps((result,))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            sent = pickle.dumps(_Failure(error, text))
            pickle.loads(sent)  # some exceptions can be written but not read
        except Exception:
            sent = pickle.dumps(_Failure(None, text))
        return sent


def main() -> None:
    """One rank: join the groups, then answer calls until the pool closes the connection."""
    import torch
    import torch.distributed as dist

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    store = dist.FileStore(  # pyright: ignore[reportPrivateImportUsage]
        str(args.folder / "store"), args.ranks
    )
    limit = timedelta(seconds=600)
    dist.init_process_group("gloo", store=store, rank=args.rank, world_size=args.ranks, timeout=limit)
    groups = {world: dist.new_group(list(range(world)), backend="gloo") for world in range(1, args.ranks + 1)}
    with Client(str(args.folder / "socket")) as connection:
        connection.send(args.rank)
        while True:
            try:
                message = connection.recv_bytes()
            except (EOFError, OSError):
                break
            connection.send_bytes(_answer(message, args.rank, groups))
    os._exit(0)  # no farewell among ranks: others may be gone already


if __name__ == "__main__":
    # So that what is pickled here is known by the same module name on the other side.
    importlib.import_module("tests.ranks").main()
