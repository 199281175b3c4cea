"""What a checkpoint's safetensors files hold, from their headers alone, and reading of exact slices of it.

Files are mapped, not read: a slice is a view of the file, so that nothing larger than what a rank keeps is ever built.
Mapped pages that were used are handed back to the kernel every `RESIDENT_BYTES`, or the whole file would stay in the
process's resident memory.
"""

import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
import torch

from shardwise.config import ConfigError, read_json

INDEX_FILE = "model.safetensors.index.json"
HEADER_LIMIT_BYTES = 100_000_000  # as in the safetensors library
RESIDENT_BYTES = 64 << 20
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)


class TensorInfo(msgspec.Struct, frozen=True, gc=False):
    """A tensor of a checkpoint: its file, its dtype by safetensors' name, its shape, its bytes and where they begin."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset_bytes: int = 0


class _Raw(msgspec.Struct, gc=False):
    """An entry of a header. There may be 100,000, hence no garbage collection of them."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


class Source(Protocol):
    """Where weights come from, and the device on which `read` has them: a checkpoint or made-up values."""

    device: torch.device

    def info(self, name: str) -> TensorInfo: ...

    def read(self, name: str, src: tuple[slice, ...]) -> torch.Tensor:
        """The slice `src`, one per axis, in the source's dtype; not to be written to, and not to be kept."""
        ...

    def __contains__(self, name: object) -> bool: ...


class CheckpointIndex:
    """The tensors of a checkpoint by name; `bytes_read` counts the headers and every slice that was read.

    Pickles as the headers alone; files are mapped when first read.
    """

    def __init__(self, folder: Path, entries: Mapping[str, TensorInfo], header_bytes: int) -> None:
        self.folder = folder
        self.device = torch.device("cpu")
        self.bytes_read = header_bytes
        self.header_bytes = header_bytes
        self._entries = dict(entries)
        self._open_maps()

    def _open_maps(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}
        self._touched_bytes = 0
        self._lock = threading.Lock()

    @classmethod
    def open(cls, folder: Path) -> "CheckpointIndex":
        """Read the headers of all files in `folder`, and check them against file sizes and the index file, if any.

        Raises ConfigError.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder; name a folder with config.json and *.safetensors files")
        listed = _listed(folder)
        files = sorted(set(listed.values())) or sorted(path.name for path in folder.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{folder}: no *.safetensors file in it; download the weights or use --load-format dummy")
        entries: dict[str, TensorInfo] = {}
        header_bytes = 0
        for file in files:
            found, size = read_header(folder / file)
            header_bytes += size
            for name in found.keys() & entries.keys():
                raise ConfigError(
                    f"{folder / file}: tensor {name!r} is in {entries[name].file} too; expected in one file, "
                    "so remove the stray file"
                )
            entries |= found
        for name, file in listed.items():
            if name not in entries or entries[name].file != file:
                where = f"is in {entries[name].file}" if name in entries else "is in no file"
                raise ConfigError(
                    f"{folder / INDEX_FILE}: tensor {name!r} {where}, expected in {file}; download that file again"
                )
        return cls(folder, entries, header_bytes)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "entries": self._entries, "header_bytes": self.header_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def info(self, name: str) -> TensorInfo:
        """Raises ConfigError if the checkpoint lacks `name`."""
        info = self._entries.get(name)
        if info is None:
            raise ConfigError(f"{self.folder}: tensor {name!r} is missing; is the download complete?")
        return info

    def read(self, name: str, src: tuple[slice, ...]) -> torch.Tensor:
        """A view of the file, one slice per axis (none for a scalar), in the file's dtype, on the CPU.

        Copy it before anything else: changes to it may be lost. Raises ConfigError for a missing tensor.
        """
        info = self.info(name)
        if info.dtype not in DTYPES:
            raise ConfigError(f"{self.folder / info.file}: tensor {name!r} is {info.dtype}, which cannot be read")
        if not info.nbytes:
            return torch.empty(info.shape, dtype=DTYPES[info.dtype])[src]
        count, offset = prod(info.shape), info.offset_bytes
        with self._lock:
            mapped = self._map(info.file)
        whole = torch.frombuffer(mapped, dtype=DTYPES[info.dtype], count=count, offset=offset)
        part = whole.view(info.shape)[src]
        span = sum((size - 1) * step for size, step in zip(part.shape, part.stride(), strict=True)) + 1
        with self._lock:
            self.bytes_read += part.nbytes
            self._touched_bytes += span * part.element_size()
            if self._touched_bytes > RESIDENT_BYTES:
                self._touched_bytes = 0
                for used in self._maps.values():
                    used.madvise(mmap.MADV_DONTNEED)
        return part

    def _map(self, file: str) -> mmap.mmap:
        if file not in self._maps:
            try:
                with (self.folder / file).open("rb") as opened:
                    # A private map: torch takes only writable memory without a warning, and the file stays as it is.
                    self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise ConfigError(f"{self.folder / file}: cannot be read ({error})") from None
        return self._maps[file]


def _listed(folder: Path) -> dict[str, str]:
    """The file of each tensor by the index file; empty without one."""
    path = folder / INDEX_FILE
    if not path.exists():
        return {}
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise ConfigError(f"{path}: weight_map is missing or empty; expected the file of every tensor")
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise ConfigError(f"{path}: names file {file!r}; expected a file of the same folder")
        if not (folder / file).exists():
            raise ConfigError(f"{folder / file}: no such file, expected by {INDEX_FILE}; download it again")
    return weight_map


def read_header(path: Path) -> tuple[dict[str, TensorInfo], int]:
    """The tensors of one safetensors file, and the bytes of its header. Raises ConfigError if it is not whole."""
    try:
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            size = int.from_bytes(file.read(8), "little") if total >= 8 else 0
            if not 2 <= size <= HEADER_LIMIT_BYTES:
                raise ConfigError(f"{path}: no safetensors file (header of {size} bytes in {total}); download it again")
            if 8 + size > total:
                raise ConfigError(f"{path}: truncated, {total} bytes of a header of {8 + size}; download it again")
            text = file.read(size)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        header = msgspec.json.decode(text, type=dict[str, _Raw])
        header.pop("__metadata__", None)
        entries = {name: _info(path.name, raw, 8 + size) for name, raw in header.items()}
    except (msgspec.MsgspecError, ValueError):
        raise ConfigError(f"{path}: its header is garbage, not safetensors' JSON; download it again") from None
    _check_extent(path, entries.items(), 8 + size, total)
    return entries, 8 + size


def _info(file: str, raw: _Raw, base: int) -> TensorInfo:
    start, stop = raw.data_offsets
    if not raw.dtype or start < 0 or any(size < 0 for size in raw.shape):
        raise ValueError(raw)
    return TensorInfo(file, raw.dtype, raw.shape, stop - start, base + start)


def _check_extent(path: Path, entries: Iterable[tuple[str, TensorInfo]], base: int, total: int) -> None:
    """Tensors must follow one another without a gap, be as long as their shapes say, and end with the file."""
    at = base
    for name, info in sorted(entries, key=lambda item: (item[1].offset_bytes, item[1].nbytes)):
        expected = prod(info.shape) * DTYPES[info.dtype].itemsize if info.dtype in DTYPES else info.nbytes
        if info.offset_bytes != at or info.nbytes != expected:
            raise ConfigError(
                f"{path}: tensor {name!r} is {info.nbytes} bytes at {info.offset_bytes}, expected {expected} at {at} "
                f"for {info.dtype} {list(info.shape)}; download it again"
            )
        at += info.nbytes
    if at != total:
        state = "truncated" if at > total else "too long"
        raise ConfigError(f"{path}: {state}, {total} bytes where its header says {at}; download it again")
