"""Banks kept on disk or tmpfs, so that a server that starts again reads its experts as they are used, in one go.

A rank has one file, named by what it belongs to (checkpoint, split, rank) and by what made it (content, format, page of
layout). It is whole or it is not there: written under another name, synced, then renamed; and each piece has a checksum
that is verified when it is read. Whatever is wrong with a file or its folder, the bank is built anew and the server
runs; nothing here raises an error of the folder.

File: a header of fixed size, the table (JSON: key and tensors), a crc32 for each piece of each tensor, then the
tensors, each from a page on, in pieces of PIECE_BYTES.
"""

import contextlib
import fcntl
import logging
import mmap
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from struct import Struct
from typing import BinaryIO, NamedTuple

import msgspec
import torch

logger = logging.getLogger(__name__)

MAGIC, VERSION = b"shardbnk", 1
HEADER = Struct("<8sIIQQII")  # magic, version, bytes of the table, pieces, bytes of the file, crc of the rest, own crc
PAGE_BYTES = 4096
PIECE_BYTES = 8 << 20
MOST_THREADS = 16
SUFFIX, UNFINISHED = ".bank", ".part"
LEFT_FREE_BYTES = 64 << 20  # of a disk or tmpfs

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype by name
Tensors = Mapping[str, torch.Tensor]


class Broken(Exception):
    """A file that is no whole bank of the key: what is wrong with it."""


class Entry(msgspec.Struct, frozen=True):
    """A tensor of a file; offset_bytes counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset_bytes: int
    nbytes: int


class Table(msgspec.Struct, frozen=True):
    key: str
    piece_bytes: int
    tensors: tuple[Entry, ...]


class _Piece(NamedTuple):
    """Part of a tensor: where in the file, and where in memory."""

    offset_bytes: int
    memory: memoryview


def open_or_build(
    folder: Path,
    key: str,
    layout: Layout,
    build: Callable[[Tensors], None],
    *,
    into: Tensors | None = None,
    threads: int = 0,
) -> Tensors:
    """The bank `key` (see keys.bank_key): from `folder` if it is there whole; else filled by `build`, and kept there.

    into: contiguous tensors of `layout` to have it in, such as pinned ones. Without, what is read is a mapping of the
    file, which on tmpfs takes no memory of its own, and what is built is in fresh memory. Not to be written to
    afterwards. threads: that read or write; 0: by the number of cores.

    The key is SLOT.CONTENT: banks of the same slot and other content are replaced; others are let be.
    """
    store = _Store(Path(folder), key, layout, threads or min(MOST_THREADS, os.cpu_count() or 1))
    if into is not None:
        _check_memory(into, layout)
    found = store.read(into)
    if found is not None:
        return found
    tensors = into or {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in layout.items()}
    build(tensors)
    store.write(tensors)
    return tensors


def _check_memory(into: Tensors, layout: Layout) -> None:
    for name, (shape, dtype) in layout.items():
        tensor = into[name]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name}: memory is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class _Store:
    """One rank's file in a folder: its place, and what it has to hold."""

    def __init__(self, folder: Path, key: str, layout: Layout, threads: int) -> None:
        self._folder, self._path, self._threads = folder, folder / f"{key}{SUFFIX}", threads
        self._slot, self._layout = key.rpartition(".")[0], layout
        if not self._slot or Path(key).name != key:
            raise ValueError(f"key {key!r}: expected SLOT.CONTENT, fit for the name of a file")
        sizes = {name: prod(shape) * dtype.itemsize for name, (shape, dtype) in layout.items()}
        self._pieces = sum(-(-size // PIECE_BYTES) for size in sizes.values())
        # The table's length depends on the offsets in it: take it with the largest ones.
        self._data_bytes = HEADER.size + len(self._encoded(key, sizes, 1 << 62)) + 4 * self._pieces
        self._table = self._encoded(key, sizes, _pages(self._data_bytes))
        self._entries = msgspec.json.decode(self._table, type=Table).tensors
        ends = [_pages(entry.offset_bytes + entry.nbytes) for entry in self._entries]
        self._nbytes = max([_pages(self._data_bytes), *ends])

    def _encoded(self, key: str, sizes: Mapping[str, int], start_bytes: int) -> bytes:
        entries, at = list[Entry](), start_bytes
        for name, (shape, dtype) in self._layout.items():
            entries.append(Entry(name, shape, str(dtype), at, sizes[name]))
            at += _pages(sizes[name])
        return msgspec.json.encode(Table(key, PIECE_BYTES, tuple(entries)))

    # Reading

    def read(self, into: Tensors | None) -> Tensors | None:
        """The tensors, or None if there is no whole file of this very key; what is broken is removed, and said."""
        try:
            with self._path.open("rb") as file:
                checks = self._checks(file.fileno())
                return self._read_into(file.fileno(), into, checks) if into is not None else self._mapped(file, checks)
        except FileNotFoundError:
            return None
        except Broken as broken:
            logger.warning("%s: %s; the experts' bank is built again", self._path, broken)
            with contextlib.suppress(OSError):
                self._path.unlink()
        except OSError as error:
            logger.warning("%s: cannot be read (%s); the experts' bank is built again", self._path, error.strerror)
        return None

    def _checks(self, descriptor: int) -> list[int]:
        """The checksums of all pieces, once the file is known to be of this key and length."""
        found_bytes = os.fstat(descriptor).st_size
        if found_bytes != self._nbytes:
            raise Broken(f"{found_bytes} bytes, expected {self._nbytes}")
        head = os.pread(descriptor, HEADER.size + len(self._table) + 4 * self._pieces, 0)
        magic, version, table_bytes, pieces, nbytes, rest_check, own_check = HEADER.unpack_from(head)
        if magic != MAGIC or version != VERSION or zlib.crc32(head[: HEADER.size - 4]) != own_check:
            raise Broken("its header is not that of a bank, or of another version")
        table, rest = head[HEADER.size : HEADER.size + table_bytes], head[HEADER.size :]
        if (table_bytes, pieces, nbytes) != (len(self._table), self._pieces, self._nbytes) or table != self._table:
            raise Broken("it holds another bank than its name says")
        if zlib.crc32(rest) != rest_check:
            raise Broken("wrong checksum of its table")
        return list(Struct(f"<{pieces}I").unpack(rest[table_bytes:]))

    def _read_into(self, descriptor: int, into: Tensors, checks: list[int]) -> Tensors:
        def fill(piece: _Piece) -> int:
            done = 0
            while done < len(piece.memory):
                count = os.preadv(descriptor, [piece.memory[done:]], piece.offset_bytes + done)
                if not count:
                    raise Broken(f"truncated at {piece.offset_bytes + done} bytes")
                done += count
            return zlib.crc32(piece.memory)

        self._verify(fill, into, checks)
        return {name: into[name] for name in self._layout}

    def _mapped(self, file: BinaryIO, checks: list[int]) -> Tensors:
        # A private map: torch takes only writable memory without a warning, and the file stays as it is.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        mapped.madvise(mmap.MADV_WILLNEED)
        tensors: dict[str, torch.Tensor] = {}
        for entry in self._entries:
            shape, dtype = self._layout[entry.name]
            if entry.nbytes:
                flat = torch.frombuffer(mapped, dtype=dtype, count=prod(shape), offset=entry.offset_bytes)
            else:
                flat = torch.empty(0, dtype=dtype)
            tensors[entry.name] = flat.view(shape)
        self._verify(lambda piece: zlib.crc32(piece.memory), tensors, checks)
        return tensors

    def _parts(self, tensors: Tensors) -> Iterator[_Piece]:
        for entry in self._entries:
            memory = _bytes_of(tensors[entry.name])
            for at in range(0, entry.nbytes, PIECE_BYTES):
                yield _Piece(entry.offset_bytes + at, memory[at : at + PIECE_BYTES])

    def _verify(self, check: Callable[[_Piece], int], tensors: Tensors, checks: list[int]) -> None:
        pieces = list(self._parts(tensors))
        with ThreadPoolExecutor(self._threads, "bank") as pool:
            try:
                for piece, found, expected in zip(pieces, pool.map(check, pieces), checks, strict=True):
                    if found != expected:
                        raise Broken(f"wrong checksum of the {len(piece.memory)} bytes at {piece.offset_bytes}")
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    # Writing

    def write(self, tensors: Tensors) -> None:
        """Keep `tensors`, in place of older banks of this slot; what prevents it is said in one warning."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._remove_unfinished()
            if self._short_bytes() > 0:
                self._remove_older()
            if (short_bytes := self._short_bytes()) > 0:
                logger.warning(
                    "--bank-cache %s: %d bytes more are needed there to keep this rank's experts; the next start reads "
                    "the checkpoint again", self._folder, short_bytes,
                )  # fmt: skip
                return
            self._write(tensors)
            self._remove_older()
        except OSError as error:
            logger.warning(
                "--bank-cache %s: this rank's experts cannot be kept there (%s); the next start reads the checkpoint "
                "again", self._folder, error.strerror or error,
            )  # fmt: skip

    def _short_bytes(self) -> int:
        return self._nbytes + LEFT_FREE_BYTES - shutil.disk_usage(self._folder).free

    def _write(self, tensors: Tensors) -> None:
        descriptor, name = tempfile.mkstemp(UNFINISHED, f"{self._slot}.", self._folder)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is being written: see _remove_unfinished
                os.ftruncate(descriptor, self._nbytes)
                self._write_all(descriptor, tensors)
                os.fsync(descriptor)
                Path(name).replace(self._path)
            finally:
                os.close(descriptor)
            folder = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _write_all(self, descriptor: int, tensors: Tensors) -> None:
        def put(piece: _Piece) -> int:
            _write_at(descriptor, piece.memory, piece.offset_bytes)
            return zlib.crc32(piece.memory)

        with ThreadPoolExecutor(self._threads, "bank") as pool:
            try:
                checks = list(pool.map(put, self._parts(tensors)))
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        rest = self._table + b"".join(check.to_bytes(4, "little") for check in checks)
        fields = (MAGIC, VERSION, len(self._table), self._pieces, self._nbytes, zlib.crc32(rest))
        own_check = zlib.crc32(HEADER.pack(*fields, 0)[: HEADER.size - 4])
        _write_at(descriptor, memoryview(HEADER.pack(*fields, own_check) + rest), 0)

    def _remove_older(self) -> None:
        for path in self._of_slot(SUFFIX):
            if path != self._path:
                path.unlink(missing_ok=True)

    def _of_slot(self, suffix: str) -> list[Path]:
        """Files of this very slot, SLOT.ANYTHING and the suffix, and of no other whose name goes on."""
        found = self._folder.glob(f"*{suffix}")
        return [path for path in found if path.name.removesuffix(suffix).rpartition(".")[0] == self._slot]

    def _remove_unfinished(self) -> None:
        """Files of this slot that a process which is gone did not finish: nobody holds their lock."""
        for path in self._of_slot(UNFINISHED):
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)


def _write_at(descriptor: int, memory: memoryview, offset_bytes: int) -> None:
    done = 0
    while done < len(memory):
        done += os.pwrite(descriptor, memory[done:], offset_bytes + done)
