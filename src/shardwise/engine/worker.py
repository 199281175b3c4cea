"""A rank's process: `python -m shardwise.engine.worker FOLDER --parent PID`, as the elastic launcher starts it.

The first rank talks to the API process and decides; the others follow its step plans. SIGTERM and SIGINT keep their
default action, which is to end at once: a rank that waits in a collective for a dead one must not wait for Python.
"""

import argparse
import importlib
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from shardwise.config import ConfigError, RankEnvironment, ServeConfig, rank_environment
from shardwise.engine.folder import Broke, RunFolder, Serving, Started
from shardwise.engine.messages import (
    CacheResized,
    Cancel,
    Drain,
    Drained,
    Failed,
    Generate,
    Picture,
    Ready,
    ResizeCache,
    Stats,
    ToEngine,
    Tokens,
)
from shardwise.engine.processes import die_with_parent
from shardwise.engine.wire import EngineConnection, FrameError, connect

logger = logging.getLogger(__name__)

DEFAULT_ENGINE = "shardwise.engine.build:build"
CONNECT_SECONDS = 60.0
SIGN_OF_LIFE_SECONDS = 5.0
STATS_SECONDS = 1.0
DRAINING = "the server is shutting down and takes no new requests"


class Leader(Protocol):
    """The engine as the first rank drives it. A real step has run on every rank when it is built."""

    def has_work(self) -> bool:
        """Whether `step` has something to do or to say."""
        ...

    def ready(self) -> Ready: ...

    def add(self, generate: Generate) -> None:
        """Take a request in; if it is refused, the next `step` says so."""
        ...

    def add_picture(self, picture: Picture) -> None:
        """Keep a picture for the request that comes next."""
        ...

    def cancel(self, request_id: str) -> None: ...

    def resize(self, asked: ResizeCache) -> CacheResized:
        """Move memory between KV cache and slots of experts, if that can be."""
        ...

    def step(self) -> list[Tokens | Failed]:
        """One step on all ranks, and what came of it."""
        ...

    def idle(self) -> None:
        """Send the followers an empty plan, so that none times out while it waits."""
        ...

    def stats(self) -> Stats: ...

    def stop(self) -> None:
        """Send the plan that ends the followers."""
        ...


class Follower(Protocol):
    """Any other rank."""

    def run_forever(self) -> None:
        """Follow plans until one says stop."""
        ...


Build = Callable[[ServeConfig, RankEnvironment], Leader | Follower]


class FirstRank:
    """The loop of the first rank: requests in from a reading thread, steps, tokens out."""

    def __init__(self, engine: Leader, connection: EngineConnection, restarts: int) -> None:
        self._engine = engine
        self._connection = connection
        self._restarts = restarts
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._draining = threading.Event()
        self._stats_due_s = 0.0
        self._stats_told = True

    def run(self) -> None:
        """Serve until drained. Ends the process at once, whatever it waits for, when the API process hangs up."""
        ready = self._ready()
        threading.Thread(target=self._read, name="inbox", daemon=True).start()
        self._connection.send([ready, self._stats()])
        while self._engine.has_work() or not self._draining.is_set():
            self._take_messages()
            if self._engine.has_work():
                self._step()
        self._connection.send([self._stats(), Drained()])
        self._engine.stop()

    def _step(self) -> None:
        out: list[Tokens | Failed | Stats] = [*self._engine.step()]
        self._stats_told = False
        if time.monotonic() >= self._stats_due_s:
            out.append(self._stats())
        if out:
            self._connection.send(out)

    def _ready(self) -> Ready:
        return msgspec.structs.replace(self._engine.ready(), restarts=self._restarts)

    def _stats(self) -> Stats:
        self._stats_due_s = time.monotonic() + STATS_SECONDS
        self._stats_told = True
        return self._engine.stats()

    def _take_messages(self) -> None:
        """Take in all that has come; with nothing to do, wait for more, giving signs of life to the other ranks."""
        while True:
            wait = not (self._engine.has_work() or self._draining.is_set())
            if wait and not self._stats_told:
                self._connection.send([self._stats()])
            try:
                self._take(self._inbox.get(block=wait, timeout=SIGN_OF_LIFE_SECONDS))
            except queue.Empty:
                if not wait:
                    return
                self._engine.idle()

    def _take(self, message: ToEngine) -> None:
        self._stats_told = False
        match message:
            case Picture():
                self._engine.add_picture(message)
            case Generate() if self._draining.is_set():
                self._connection.send([Failed(id=message.id, message=DRAINING)])
            case Generate():
                self._engine.add(message)
            case Cancel():
                self._engine.cancel(message.id)
            case ResizeCache():
                answer = self._engine.resize(message)
                self._connection.send([self._ready(), self._stats(), answer])
            case Drain():
                self._draining.set()

    def _read(self) -> None:
        try:
            while (messages := self._connection.receive()) is not None:
                for message in messages:
                    self._inbox.put(message)
        except (FrameError, OSError) as error:
            logger.error("connection to the API process: %s", error)
        if not self._draining.is_set():
            leave(1)


def leave(code: int) -> None:
    """End the process without waiting for threads or for libraries that would wait for other ranks."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def load_build(engine: str) -> Build:
    """The function `engine` names, as "module:function"; it builds this rank's part."""
    module, _, name = engine.partition(":")
    return getattr(importlib.import_module(module), name)


def run_rank(folder: RunFolder, config: ServeConfig, environment: RankEnvironment, engine: str) -> None:
    """Be one rank until the server is drained. Raises what goes wrong, after noting it in the journal of `folder`."""
    rank, restarts = environment.rank, environment.restarts
    folder.record(Started(rank=rank, restarts=restarts, pid=os.getpid()))
    try:
        # The first rank connects before it loads, so that the API process sees it go at any time.
        connection = connect(folder.socket, CONNECT_SECONDS) if rank == 0 else None
        part = load_build(engine)(config, environment)
        if connection is None:
            part.run_forever()  # pyright: ignore[reportAttributeAccessIssue]
        else:
            folder.record(Serving(restarts=restarts))
            FirstRank(part, connection, restarts).run()  # pyright: ignore[reportArgumentType]
    except BaseException as error:
        fault = isinstance(error, ConfigError)
        message = str(error) if fault else f"{type(error).__name__}: {error}"
        folder.record(Broke(rank=rank, restarts=restarts, message=message, config_error=fault))
        raise


def set_up_process(config: ServeConfig, rank: int) -> None:
    """Signals and logging of a rank."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    logging.basicConfig(
        level=config.log_level.upper(), format=f"%(asctime)s %(levelname)s rank {rank}: %(message)s", datefmt="%H:%M:%S"
    )


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0 drained, 1 failed (the launcher starts the group again), 2 the user asked for what cannot be."""
    parser = argparse.ArgumentParser(prog="shardwise.engine.worker")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--engine", default=DEFAULT_ENGINE, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    die_with_parent(options.parent)
    environment = rank_environment()
    if environment is None:
        parser.error("not started by torch's elastic launcher")
    folder = RunFolder(options.folder)
    config = folder.config()
    set_up_process(config, environment.rank)
    try:
        run_rank(folder, config, environment, options.engine)
    except ConfigError:
        return 2  # told in the journal; the process that started the group tells the user
    except Exception:
        logger.exception("stopped")
        return 1
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
