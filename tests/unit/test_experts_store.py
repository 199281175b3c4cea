"""Banks on disk: what was written comes back, and whatever is wrong with a file or its folder, the bank is built."""

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.checkpoint.index import CheckpointIndex
from shardwise.checkpoint.synth import write_checkpoint
from shardwise.experts import store
from shardwise.experts.keys import bank_key
from shardwise.experts.store import Layout, Tensors, open_or_build
from shardwise.shard import ParamSpec, Partition, Segment, Stored

KEY = "model-rank0of2.one"
LAYOUT: Layout = {
    "0.gate_up": ((3, 40, 33), torch.float8_e4m3fn),
    "0.gate_up.scale": ((3, 5, 2), torch.bfloat16),
    "0.down": ((3, 33, 20), torch.uint8),
    "0.nothing": ((3, 0, 4), torch.float32),
    "0.global": ((), torch.float32),
}


class Builder:
    """Fills tensors with bits that depend on a seed, and counts how often."""

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.calls = seed, 0

    def __call__(self, tensors: Tensors) -> None:
        self.calls += 1
        generator = torch.Generator().manual_seed(self.seed)
        for tensor in tensors.values():
            flat = tensor.reshape(-1).view(torch.uint8)
            flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=generator))


def bits(tensors: Tensors) -> dict[str, bytes]:
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def expected(layout: Layout = LAYOUT, seed: int = 0) -> dict[str, bytes]:
    tensors = memory(layout)
    Builder(seed)(tensors)
    return bits(tensors)


def memory(layout: Layout = LAYOUT) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in layout.items()}


class Got(NamedTuple):
    tensors: Tensors
    built: bool


def get(folder: Path, key: str = KEY, seed: int = 0, into: Tensors | None = None, layout: Layout = LAYOUT) -> Got:
    builder = Builder(seed)
    tensors = open_or_build(folder, key, layout, builder, into=into, threads=2)
    assert bits(tensors) == expected(layout, seed)
    assert {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()} == dict(layout)
    return Got(tensors, bool(builder.calls))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PIECE_BYTES", 1000)


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING)

    def taken() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    return taken


def test_it_is_built_once(tmp_path: Path, warned: Callable[[], list[str]]) -> None:
    """The folder is made; the second time the bank is a mapping, or read into memory that is given."""
    folder = tmp_path / "new" / "banks"
    assert get(folder).built
    assert names(folder) == [f"{KEY}.bank"]
    assert not get(folder).built
    into = memory()
    got = get(folder, into=into)
    assert not got.built
    assert all(got.tensors[name] is tensor for name, tensor in into.items())
    assert not warned()


def test_it_is_built_into_given_memory(tmp_path: Path) -> None:
    into = memory()
    got = get(tmp_path, into=into)
    assert got.built
    assert all(got.tensors[name] is tensor for name, tensor in into.items())
    assert not get(tmp_path).built


def test_a_mapping_is_not_written_back(tmp_path: Path) -> None:
    get(tmp_path)
    get(tmp_path).tensors["0.down"].zero_()
    assert not get(tmp_path).built


@pytest.mark.parametrize("wrong", ["shape", "dtype", "strides"])
def test_given_memory_is_checked(tmp_path: Path, wrong: str) -> None:
    into, shape = memory(), LAYOUT["0.down"][0]
    into["0.down"] = {
        "shape": torch.empty(3, 33, 19, dtype=torch.uint8),
        "dtype": torch.empty(shape, dtype=torch.int8),
        "strides": torch.empty(3, 20, 33, dtype=torch.uint8).mT,
    }[wrong]
    with pytest.raises(ValueError, match=r"0\.down"):
        open_or_build(tmp_path, KEY, LAYOUT, Builder(), into=into)


@pytest.mark.parametrize("key", ["no-content", "", ".content", "../up.content"])
def test_a_key_names_a_slot(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="SLOT"):
        open_or_build(tmp_path, key, LAYOUT, Builder())


def test_another_content_replaces_only_its_own_slot(tmp_path: Path) -> None:
    """Ranks, worlds and slots that begin alike keep their files."""
    others = ["model-rank1of2.one", "model-rank0of3.one", "model-rank0of2.more.one", "model.one"]
    for seed, key in enumerate(others, 1):
        get(tmp_path, key, seed)
    assert get(tmp_path).built
    assert get(tmp_path, "model-rank0of2.two", 9).built
    assert names(tmp_path) == sorted(f"{key}.bank" for key in [*others, "model-rank0of2.two"])
    for seed, key in enumerate(others, 1):
        assert not get(tmp_path, key, seed).built


def test_a_file_of_another_key_is_not_believed(tmp_path: Path, warned: Callable[[], list[str]]) -> None:
    get(tmp_path, "model-rank1of2.one", 5)
    shutil.copy(tmp_path / "model-rank1of2.one.bank", tmp_path / f"{KEY}.bank")
    assert get(tmp_path).built
    assert ["another bank" in text and KEY in text for text in warned()] == [True]
    assert not get(tmp_path).built


def test_another_layout_of_the_same_key(tmp_path: Path) -> None:
    get(tmp_path)
    assert get(tmp_path, layout={**LAYOUT, "0.down": ((3, 20, 33), torch.uint8)}).built
    assert get(tmp_path, layout={"0.down": LAYOUT["0.down"]}).built
    assert get(tmp_path, layout={}).built
    assert not get(tmp_path, layout={}).built


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_damage_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A bit, a page of zeros, an end that is missing or too long: the bank is built again, and is whole after it."""
    folder = tmp_path_factory.mktemp("damage")
    get(folder)
    path = folder / f"{KEY}.bank"
    whole = path.read_bytes()
    used = [at for at in range(len(whole)) if whole[at]]  # changes of padding do no harm
    kind = data.draw(st.sampled_from(["bit", "zeros", "short", "long", "empty"]))
    at = data.draw(st.sampled_from(used))
    if kind == "bit":
        damaged = whole[:at] + bytes([whole[at] ^ (1 << data.draw(st.integers(0, 7)))]) + whole[at + 1 :]
    elif kind == "zeros":
        start = at // 512 * 512
        damaged = whole[:start] + bytes(512) + whole[start + 512 :]
    else:
        damaged = {"short": whole[:at], "long": whole + b"\0", "empty": b""}[kind]
    path.write_bytes(damaged)
    into = memory() if data.draw(st.booleans()) else None
    assert get(folder, into=into).built
    assert path.read_bytes() == whole
    shutil.rmtree(folder)


@settings(max_examples=20, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3), max_size=5),
    dtypes=st.lists(st.sampled_from([torch.float8_e4m3fn, torch.bfloat16, torch.float32]), min_size=5, max_size=5),
    piece=st.integers(1, 200),
    threads=st.integers(0, 3),
)
def test_any_layout_comes_back(tmp_path_factory, shapes, dtypes, piece: int, threads: int) -> None:
    folder = tmp_path_factory.mktemp("layout")
    layout = {f"t{n}": (tuple(shape), dtype) for n, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "PIECE_BYTES", piece)
        builders = [Builder(), Builder()]
        for builder in builders:
            assert bits(open_or_build(folder, KEY, layout, builder, threads=threads)) == expected(layout)
    assert [builder.calls for builder in builders] == [1, 0]
    shutil.rmtree(folder)


def test_a_write_that_was_cut_off(tmp_path: Path) -> None:
    """What a killed process left is removed by the next of its slot, but not what is being written, or other slots'."""
    stale, busy = (tmp_path / f"model-rank0of2.{name}.part" for name in ("stale", "busy"))
    other = tmp_path / "model-rank1of2.stale.part"
    for path in (stale, busy, other):
        path.write_bytes(b"half a bank")
    with busy.open("rb") as held:
        fcntl.flock(held.fileno(), fcntl.LOCK_EX)
        assert get(tmp_path).built
    assert names(tmp_path) == sorted([busy.name, other.name, f"{KEY}.bank"])


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_an_error_while_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]], fault: BaseException, call: str
) -> None:
    """The disk fills up on the way: served from memory, one warning, nothing is left behind."""
    calls = 0
    real = getattr(os, call)

    def failing(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls > 2 or call == "fsync":
            raise fault
        return real(*arguments)

    monkeypatch.setattr(os, call, failing)
    if isinstance(fault, OSError):
        assert get(tmp_path).built
        assert [str(tmp_path) in text and "No space left" in text for text in warned()] == [True]
    else:
        with pytest.raises(KeyboardInterrupt):
            get(tmp_path)
    assert names(tmp_path) == []


def test_space_is_looked_at_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]
) -> None:
    """An older bank of the slot makes room first; one warning with the missing bytes if that is not enough."""
    get(tmp_path, "model-rank0of2.old", 4)
    get(tmp_path, "model-rank1of2.old", 5)
    needed = (tmp_path / "model-rank0of2.old.bank").stat().st_size
    before = len(names(tmp_path))

    def usage(free_with_both: int) -> Callable[[Path], SimpleNamespace]:
        return lambda path: SimpleNamespace(free=free_with_both + needed * (before - len(names(tmp_path))))

    monkeypatch.setattr(shutil, "disk_usage", usage(store.LEFT_FREE_BYTES))
    assert get(tmp_path).built
    assert not warned()
    assert names(tmp_path) == [f"{KEY}.bank", "model-rank1of2.old.bank"]
    monkeypatch.setattr(shutil, "disk_usage", usage(store.LEFT_FREE_BYTES - needed - 7))
    assert get(tmp_path, "model-rank0of2.two", 6).built
    assert [text.startswith(f"--bank-cache {tmp_path}: {needed + 7} bytes more") for text in warned()] == [True]
    assert names(tmp_path) == ["model-rank1of2.old.bank"]


@pytest.mark.parametrize("what", ["folder is a file", "mkdir", "open"])
def test_a_folder_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]], what: str
) -> None:
    """One warning that names the folder; root may do everything, hence the errors are made."""
    folder = tmp_path / "banks"

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    if what == "folder is a file":
        folder.write_text("here")
    elif what == "mkdir":
        monkeypatch.setattr(Path, "mkdir", refuse)
    else:
        folder.mkdir()
        monkeypatch.setattr(store.tempfile, "mkstemp", refuse)
    assert get(folder).built
    texts = warned()
    assert len(texts) == (2 if what == "folder is a file" else 1)
    assert all(str(folder) in text for text in texts)


# Keys


def specs(sources: str = "x", dtype: str = "BF16") -> dict[str, ParamSpec]:
    halves = (Segment("gate", 8), Segment("up", 8))
    return {"gate_up": ParamSpec((3, halves, 4), (Stored("", dtype),), (f"{sources}.gate_up",), "expert", 1)}


def cut(*weights: int) -> dict[str, Partition]:
    return {"expert": Partition.weighted(4, weights), "vocab": Partition.weighted(7, weights)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> CheckpointIndex:
    tensors = {"x.gate_up": torch.ones(3, 16, 4, dtype=torch.bfloat16), "y": torch.ones(40_000)}
    return CheckpointIndex.open(write_checkpoint(tmp_path / "Qwen 3.5", tensors, {"a": 1}, files=2))


def test_the_key_says_whose_bank_it_is(checkpoint: CheckpointIndex) -> None:
    def key(rank: int, *weights: int) -> str:
        return bank_key(checkpoint.folder, specs(), cut(*weights), rank, checkpoint)

    keys = [key(0, 1), key(0, 1, 1), key(1, 1, 1), key(0, 3, 1), key(0, 3, 1)]
    slots = [each.rpartition(".")[0] for each in keys]
    assert len(set(slots)) == 4
    assert keys[3] == keys[4]
    assert keys[1].startswith("Qwen-3-5-")
    assert "-rank0of2." in keys[1]
    assert "-rank1of2." in keys[2]


@pytest.mark.parametrize("change", ["config", "index", "time", "value", "size", "header", "format", "sources", "seed"])
def test_the_key_follows_the_content(checkpoint: CheckpointIndex, change: str) -> None:
    """Of the same slot; a value that changed is noticed even if the time of the file did not."""
    folder, made = checkpoint.folder, specs()
    first = bank_key(folder, made, cut(1, 1), 0, None if change == "seed" else checkpoint)
    file = folder / "model-00002-of-00002.safetensors"
    facts = file.stat()
    if change in ("config", "index"):
        path = folder / ("config.json" if change == "config" else "model.safetensors.index.json")
        path.write_text(path.read_text() + " ")
    elif change == "time":
        os.utime(file, ns=(0, facts.st_mtime_ns + 1))
    elif change in ("value", "size", "header"):
        whole = bytearray(file.read_bytes())
        if change == "value":
            whole[-1] ^= 1
        elif change == "header":
            whole[20] ^= 1
        file.write_bytes(bytes(whole) + bytes(4 * (change == "size")))
        os.utime(file, ns=(0, facts.st_mtime_ns))
    elif change in ("format", "sources"):
        made = specs(dtype="F16") if change == "format" else specs("z")
    source = None if change == "seed" else checkpoint
    second = bank_key(folder, made, cut(1, 1), 0, source, seed=int(change == "seed"))
    assert second != first
    assert second.rpartition(".")[0] == first.rpartition(".")[0]


def test_the_version_of_the_layout_is_in_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = bank_key(tmp_path, specs(), cut(1), 0, None)
    assert first == bank_key(tmp_path, specs(), cut(1), 0, None)
    monkeypatch.setattr("shardwise.experts.keys.LAYOUT_VERSION", 99)
    assert bank_key(tmp_path, specs(), cut(1), 0, None) != first
