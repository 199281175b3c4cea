"""What tests of kernels share."""

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

NICE = 19  # of a process that takes idle cores only
COMPILED = "compiled"  # the fixture of tests that want the compile matrix


@pytest.fixture
def device() -> torch.device:
    """A GPU if there is one; else the CPU, where Triton's kernels are interpreted."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Compiling:
    """The compile matrix in a process of its own: this one may interpret kernels, which cannot be undone.

    It is started before the first test and wanted by the last ones, and takes what cores the tests between leave idle.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="shardwise-compile-")
        self.found, self.log = (Path(self._folder.name) / name for name in ("found.json", "log"))
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-m", "tests.kernels.targets", "--behind", str(os.getpid())]
        with self.found.open("wb") as out, self.log.open("wb") as err:
            self._process = subprocess.Popen(command, env=environment, stdout=out, stderr=err, start_new_session=True)
        self._stand_back(NICE)

    def wait(self) -> int:
        """Its exit code. From here on the tests wait for it, so it stands back no more, where that is allowed."""
        self._stand_back(0)
        return self._process.wait()

    def _stand_back(self, nice: int) -> None:
        """The kernel weighs sessions first (autogroup), then what is in them."""
        pid = self._process.pid
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PGRP, pid, nice)
            Path(f"/proc/{pid}/autogroup").write_text(str(nice))

    def close(self) -> None:
        """Its workers end with it."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


RUNNING = pytest.StashKey[Compiling]()


def wants_matrix(item: Any) -> bool:
    return COMPILED in getattr(item, "fixturenames", ())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=wants_matrix)


def pytest_collection_finish(session: pytest.Session) -> None:
    if any(map(wants_matrix, session.items)) and not session.config.option.collectonly:
        session.config.stash[RUNNING] = Compiling()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (running := session.config.stash.get(RUNNING, None)) is not None:
        running.close()
