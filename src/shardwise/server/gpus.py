"""How busy the GPUs are, by NVIDIA's management library where it is installed (`pip install nvidia-ml-py`)."""

import importlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

KEPT_S = 0.8


@dataclass(frozen=True)
class GpuReading:
    """utilisation: share of the last moments in which a kernel ran. memory_used_bytes: by all processes."""

    utilisation: float
    memory_used_bytes: int


def _import_library() -> Any:
    """The library, started; None if it is not installed or finds no driver."""
    try:
        library = importlib.import_module("pynvml")
        library.nvmlInit()
    except Exception:  # each version and driver fails in its own way, and the page does without
        return None
    return library


class Gpus:
    """Reads GPUs of this host. Readings are kept for a moment, so that many viewers cost what one does."""

    def __init__(self, library: Callable[[], Any] = _import_library) -> None:
        self._start = library
        self._library: Any = None
        self._started = False
        self._lock = threading.Lock()
        self._kept: tuple[float, tuple[str, ...], list[GpuReading | None]] = (0.0, (), [])

    def read(self, ids: Sequence[str]) -> list[GpuReading | None]:
        """Of each GPU by its id; None where nothing is to be had. May take milliseconds: call it in a thread."""
        if not any(ids):
            return [None] * len(ids)
        with self._lock:
            read_s, kept_ids, readings = self._kept
            if kept_ids == tuple(ids) and time.monotonic() - read_s < KEPT_S:
                return readings
            if not self._started:
                self._library, self._started = self._start(), True
            readings = [self._read(each) if each and self._library is not None else None for each in ids]
            self._kept = (time.monotonic(), tuple(ids), readings)
            return readings

    def _read(self, device_id: str) -> GpuReading | None:
        library = self._library
        name = device_id if device_id.startswith("GPU-") else f"GPU-{device_id}"
        try:
            handle = library.nvmlDeviceGetHandleByUUID(name)
            used = library.nvmlDeviceGetMemoryInfo(handle).used
            return GpuReading(library.nvmlDeviceGetUtilizationRates(handle).gpu / 100, int(used))
        except Exception:  # of the library's own class, which is not there without it
            return None
