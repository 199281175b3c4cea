"""The private folder that the processes of one server share: config, socket, and a journal of how the ranks fare.

A rank that fails cannot always say so over the socket (it may not be the first rank, or not be connected yet), so it
writes a line in the journal; the group reads there why ranks end, and when starting them again is pointless.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shardwise.config import ServeConfig

MAX_CRASHES = 3  # of whole groups in a row, none of which got ready


class Started(msgspec.Struct, frozen=True, tag=True):
    """A rank has begun. `restarts`: how often its group had been started before."""

    rank: int
    restarts: int
    pid: int


class Serving(msgspec.Struct, frozen=True, tag=True):
    """The group is ready."""

    restarts: int


class Broke(msgspec.Struct, frozen=True, tag=True):
    """A rank has failed. `config_error`: by what the user asked for, so it would fail again."""

    rank: int
    restarts: int
    message: str
    config_error: bool = False


Entry = Started | Serving | Broke


@dataclass(frozen=True)
class RunFolder:
    """Names within the folder, and its journal: JSON lines, appended in single writes by any rank."""

    path: Path

    @property
    def socket(self) -> Path:
        return self.path / "engine.sock"

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def launcher_log(self) -> Path:
        return self.path / "launcher.log"

    def write_config(self, config: ServeConfig) -> None:
        self.config_file.write_bytes(msgspec.json.encode(config))

    def config(self) -> ServeConfig:
        return msgspec.json.decode(self.config_file.read_bytes(), type=ServeConfig)

    def record(self, entry: Entry) -> None:
        file = os.open(self.journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, msgspec.json.encode(entry) + b"\n")
        finally:
            os.close(file)

    def entries(self) -> list[Entry]:
        """All of the journal so far, but for a last line that is still being written."""
        if not self.journal.exists():
            return []
        lines = self.journal.read_bytes().split(b"\n")[:-1]
        return [msgspec.json.decode(line, type=Entry) for line in lines if line]


def config_fault(entries: Sequence[Entry]) -> str | None:
    """What the user has to change, if a rank said so.

    Only the first to fail in a group knows why: the others may take its silence for a fault of the network. And what
    has served before was no fault of the config's.
    """
    first: dict[int, Broke] = {}
    for entry in entries:
        if isinstance(entry, Serving):
            return None
        if isinstance(entry, Broke):
            first.setdefault(entry.restarts, entry)
    return next((entry.message for entry in first.values() if entry.config_error), None)


def crash_loop(entries: Sequence[Entry], limit: int = MAX_CRASHES) -> str | None:
    """Why the ranks crash, if `limit` groups in a row did without one getting ready in between; None otherwise.

    A group that was killed leaves no word; it shows when the next one starts.
    """
    served = max((entry.restarts for entry in entries if isinstance(entry, Serving)), default=-1)
    latest = max((entry.restarts for entry in entries if isinstance(entry, Started)), default=-1)
    broken: dict[int, Broke] = {}  # the first of each group: the others follow from it
    for entry in entries:
        if isinstance(entry, Broke) and entry.restarts > served:
            broken.setdefault(entry.restarts, entry)
    if max(len(broken), latest - served - 1) < limit:
        return None
    last = broken[max(broken)] if broken else None
    cause = f"rank {last.rank}: {last.message}" if last else "they were killed; is memory short?"
    return f"the ranks crashed {limit} times in a row while starting; the last cause: {cause}"
