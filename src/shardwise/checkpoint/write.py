"""Safetensors files written piece by piece: all headers first, from shapes alone, then any part of any tensor."""

import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch

from shardwise.checkpoint.encode import Planned
from shardwise.checkpoint.index import DTYPES, INDEX_FILE
from shardwise.shard import BITS

FILE_BYTES = 5 * 10**9  # as large as published files are at most


class TensorWriter:
    """Files in `folder` for tensors that are known by name, dtype and shape; each is then written from its start on.

    Until they are written they are holes that read as zeros. A file is begun when the last one holds `file_bytes`.
    """

    def __init__(self, folder: Path, tensors: Iterable[Planned], file_bytes: int = FILE_BYTES) -> None:
        groups: list[list[Planned]] = [[]]
        held_bytes = self.total_bytes = 0
        for tensor in tensors:
            size = nbytes(tensor)
            if groups[-1] and held_bytes + size > file_bytes:
                groups.append([])
                held_bytes = 0
            groups[-1].append(tensor)
            held_bytes += size
            self.total_bytes += size
        self._files: list[BinaryIO] = []
        self._spans: dict[str, tuple[BinaryIO, int, int]] = {}  # where the next bytes go, and where they end
        weight_map: dict[str, str] = {}
        for n, group in enumerate(groups, start=1):
            name = "model.safetensors" if len(groups) == 1 else f"model-{n:05}-of-{len(groups):05}.safetensors"
            self._open(folder / name, group)
            weight_map |= {tensor.name: name for tensor in group}
        if len(groups) > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")

    def _open(self, path: Path, tensors: Iterable[Planned]) -> None:
        """A file with its header and its full length."""
        file = path.open("xb")
        self._files.append(file)
        entries: dict[str, Mapping] = {"__metadata__": {"format": "pt"}}
        at = 0
        spans = list[tuple[str, int, int]]()
        for tensor in tensors:
            stop = at + nbytes(tensor)
            entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (at, stop)}
            spans.append((tensor.name, at, stop))
            at = stop
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        file.write(len(header).to_bytes(8, "little") + header)
        base = 8 + len(header)
        file.truncate(base + at)
        self._spans |= {name: (file, base + start, base + stop) for name, start, stop in spans}

    def write(self, name: str, values: torch.Tensor) -> None:
        """The next part of tensor `name`. Raises ValueError if it is longer than the tensor."""
        file, at, stop = self._spans[name]
        if values.nbytes > stop - at:
            raise ValueError(f"{name}: {values.nbytes} bytes for the {stop - at} that are left")
        file.seek(at)
        if values.nbytes:
            file.write(values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType, reportCallIssue]
        self._spans[name] = file, at + values.nbytes, stop

    def close(self) -> None:
        """Raises ValueError if a tensor was not written to its end."""
        for file in self._files:
            file.close()
        short = [name for name, (_, at, stop) in self._spans.items() if at != stop]
        if short:
            raise ValueError(f"{short[0]}: not written to its end, like {len(short) - 1} others")


def nbytes(tensor: Planned) -> int:
    """Bytes of `tensor` in a file."""
    width = BITS[tensor.dtype] // 8 if tensor.dtype in BITS else DTYPES[tensor.dtype].itemsize
    return prod(tensor.shape) * width
