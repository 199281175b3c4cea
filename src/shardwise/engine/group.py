"""The ranks as one child: torch's elastic launcher, watched through its journal and ended without leaving orphans.

The API process starts it here. Across hosts it is the other way round: the user starts `torchrun -m shardwise serve`
on each host, and the first rank starts the API process (see commands/serve.py and docs/multi-node.md).
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from shardwise.config import ConfigError, ServeConfig, launcher_environment
from shardwise.engine.client import EngineClient, EngineFailed
from shardwise.engine.folder import RunFolder, config_fault, crash_loop
from shardwise.engine.worker import DEFAULT_ENGINE

logger = logging.getLogger(__name__)

MAX_RESTARTS = 100_000  # by the launcher; crash loops are ended here, by cause
MONITOR_SECONDS = 0.25  # the launcher looks for dead ranks this often
WATCH_SECONDS = 0.1
GRACE_SECONDS = 5.0


@contextlib.contextmanager
def run_folder() -> Iterator[RunFolder]:
    """A private folder for one server's processes, removed at the end."""
    path = Path(tempfile.mkdtemp(prefix="shardwise-"))
    try:
        yield RunFolder(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


class EngineGroup:
    """All ranks of this host. Start it from the main thread: it dies with the thread that started it."""

    def __init__(self, config: ServeConfig, folder: RunFolder, engine: str = DEFAULT_ENGINE) -> None:
        self._config = config
        self._folder = folder
        self._engine = engine
        self._launcher: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the launcher. The socket in the folder must be listened on already."""
        self._folder.write_config(self._config)
        ranks = self._config.ranks
        launcher = [
            *("--nnodes", "1", "--nproc-per-node", str(ranks), "--max-restarts", str(MAX_RESTARTS)),
            *("--monitor-interval", str(MONITOR_SECONDS), "--shutdown-timeout", str(int(GRACE_SECONDS))),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", uuid.uuid4().hex),
            *("--local-addr", "127.0.0.1"),
        ]
        ours = [str(self._folder.path), str(os.getpid()), self._engine]
        self._launcher = subprocess.Popen(
            [sys.executable, "-m", "shardwise.engine.launch", *ours, *launcher],
            env=launcher_environment(ranks),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt from the terminal is the API process's to handle
        )

    async def watch(self) -> None:
        """Return when all ranks have left as they should.

        Raises ConfigError at once if a rank says that the user's wishes cannot be met, and EngineFailed if they crash
        over and over or the launcher itself fails; the ranks are then ended by `stop`.
        """
        assert self._launcher is not None, "watch() before start()"
        size = -1
        while True:
            code = self._launcher.poll()
            journal_bytes = self._folder.journal.stat().st_size if self._folder.journal.exists() else 0
            if journal_bytes != size or code is not None:
                size = journal_bytes
                entries = self._folder.entries()
                if fault := config_fault(entries):
                    raise ConfigError(fault)
                if cause := crash_loop(entries):
                    raise EngineFailed(cause)
            if code == 0:
                return
            if code is not None:
                raise EngineFailed(f"the launcher of the ranks ended with code {code}: {self._last_log_line()}")
            await asyncio.sleep(WATCH_SECONDS)

    async def stop(self, wait_s: float = 0.0) -> None:
        """End all ranks: give them `wait_s` to leave by themselves, then SIGTERM, then SIGKILL.

        SIGKILL for the launcher is SIGKILL for its ranks: they die with it.
        """
        if self._launcher is None:
            return
        if await self._ended(wait_s):
            return
        self._launcher.send_signal(signal.SIGTERM)
        if await self._ended(GRACE_SECONDS + 1):
            return
        self._launcher.kill()
        await self._ended(GRACE_SECONDS)

    async def _ended(self, wait_s: float) -> bool:
        assert self._launcher is not None
        deadline = time.monotonic() + wait_s
        while self._launcher.poll() is None:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    def _last_log_line(self) -> str:
        log = self._folder.launcher_log
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return lines[-1] if lines else "it left no word"


async def supervise(group: EngineGroup, client: EngineClient) -> None:
    """Watch `group` until it ends, telling `client` when it will not come back. Raises as `EngineGroup.watch`."""
    try:
        await group.watch()
        client.stop("the engine has shut down")
    except (ConfigError, EngineFailed) as error:
        client.stop(f"the engine has stopped for good: {error}")
        raise


@contextlib.asynccontextmanager
async def running_engine(config: ServeConfig, engine: str = DEFAULT_ENGINE) -> AsyncIterator[EngineClient]:
    """An engine that is ready, for a command that needs one for a while.

    Raises ConfigError or EngineFailed if it does not get ready.
    """
    with run_folder() as folder:
        client, group = EngineClient(folder.socket), EngineGroup(config, folder, engine)
        await client.start()
        group.start()
        watching = asyncio.create_task(supervise(group, client))
        try:
            waiting = asyncio.create_task(client.wait_ready())
            await asyncio.wait({watching, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                waiting.cancel()
                watching.result()
                raise EngineFailed("the engine left before it was ready")
            yield client
            await client.drain(GRACE_SECONDS)
            await group.stop(wait_s=GRACE_SECONDS)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await group.stop()
            await client.close()
