"""Headers are read and nothing else; every broken checkpoint is refused in one line that names the file."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardwise.checkpoint.index import INDEX_FILE, CheckpointIndex
from shardwise.checkpoint.synth import write_checkpoint
from shardwise.config import ConfigError

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.arange(10).to(torch.bfloat16).reshape(5, 2),
    "c.codes": torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn),
    "d.scalar": torch.tensor(2.5),
    "e.empty": torch.empty(0, 3),
}


@pytest.mark.parametrize("files", [1, 3])
def test_names_shapes_and_slices(tmp_path: Path, files: int) -> None:
    index = CheckpointIndex.open(write_checkpoint(tmp_path, TENSORS, {}, files))
    assert set(index) == set(TENSORS)
    assert len(index) == 5
    assert "a.weight" in index
    assert "a" not in index
    info = index.info("c.codes")
    assert (info.dtype, info.shape, info.nbytes) == ("F8_E4M3", (8,), 8)
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in tmp_path.glob("*.safetensors"))
    assert index.bytes_read == index.header_bytes == headers
    assert index.read("a.weight", (slice(1, 3), slice(2, 3))).tolist() == [[6.0], [10.0]]
    assert index.bytes_read == headers + 8
    assert index.read("d.scalar", ()).item() == 2.5
    assert index.read("c.codes", (slice(2, 5),)).view(torch.uint8).tolist() == [2, 3, 4]
    assert index.read("b.weight", (slice(4, 5), slice(0, 2))).tolist() == [[8.0, 9.0]]
    assert index.read("e.empty", (slice(0, 0), slice(0, 3))).shape == (0, 3)
    assert index.bytes_read == headers + 8 + 4 + 3 + 4


def test_several_files_need_no_index_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TENSORS, {}, 2)
    (tmp_path / INDEX_FILE).unlink()
    assert set(CheckpointIndex.open(tmp_path)) == set(TENSORS)


def test_only_files_of_the_index_file_are_opened(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TENSORS, {}, 2)
    (tmp_path / "consolidated.safetensors").write_bytes(b"another layout of the same weights")
    assert set(CheckpointIndex.open(tmp_path)) == set(TENSORS)


def test_pickles_as_headers_and_opens_files_when_read(tmp_path: Path) -> None:
    index = CheckpointIndex.open(write_checkpoint(tmp_path, TENSORS, {}))
    index.read("a.weight", (slice(0, 3), slice(0, 4)))
    again = pickle.loads(pickle.dumps(index))
    assert again.bytes_read == index.header_bytes
    assert torch.equal(again.read("a.weight", (slice(0, 3), slice(0, 4))), TENSORS["a.weight"])


def test_slices_stay_right_when_pages_are_handed_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.checkpoint.index.RESIDENT_BYTES", 100)
    index = CheckpointIndex.open(write_checkpoint(tmp_path, TENSORS, {}))
    for _ in range(20):
        assert torch.equal(index.read("a.weight", (slice(0, 3), slice(0, 4))), TENSORS["a.weight"])


def test_an_unaligned_header_is_read(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * ((1 - len(header)) % 4)
    data = torch.tensor([1.5, -2.0]).numpy().tobytes()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    assert len(header) % 4 == 1
    assert CheckpointIndex.open(tmp_path).read("w", (slice(0, 2),)).tolist() == [1.5, -2.0]


def broken(tmp_path: Path, spoil: str) -> None:
    write_checkpoint(tmp_path, TENSORS, {}, 2)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    content = first.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    if spoil == "truncated":
        first.write_bytes(content[:-1])
    elif spoil == "truncated header":
        first.write_bytes(content[: size - 5])
    elif spoil == "too long":
        first.write_bytes(content + b"\0")
    elif spoil == "empty":
        first.write_bytes(b"")
    elif spoil == "not safetensors":
        first.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    elif spoil == "garbage header":
        first.write_bytes(content[:8] + b"\xff" * (size - 8) + content[size:])
    elif spoil == "header of a list":
        first.write_bytes((2).to_bytes(8, "little") + b"[]")
    elif spoil == "wrong size":
        first.write_bytes(content.replace(b'"shape":[3,4]', b'"shape":[4,4]'))
    elif spoil == "missing file":
        second.unlink()
    elif spoil == "missing tensor":
        index["weight_map"]["z.weight"] = first.name
    elif spoil == "tensor in another file":
        index["weight_map"]["a.weight"] = second.name
    elif spoil == "tensor in two files":
        save_file({"a.weight": TENSORS["a.weight"]} | {"q": torch.zeros(1)}, second)
        index["weight_map"] = {"a.weight": first.name, "q": second.name}
    elif spoil == "no weight_map":
        index = {}
    elif spoil == "another folder":
        index["weight_map"]["a.weight"] = "../model.safetensors"
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("truncated", r"model-00001-of-00002\.safetensors: truncated, \d+ bytes where its header says \d+; download"),
        ("truncated header", r"00001.*: truncated, \d+ bytes of a header of \d+; download"),
        ("too long", r"00001.*: too long, \d+ bytes where"),
        ("empty", r"00001.*: no safetensors file \(header of 0 bytes in 0\); download"),
        ("not safetensors", r"00001.*: no safetensors file \(header of \d+ bytes in 56\)"),
        ("garbage header", r"00001.*: its header is garbage"),
        ("header of a list", r"00001.*: its header is garbage"),
        ("wrong size", r"00001.*: tensor 'a\.weight' is 48 bytes at \d+, expected 64"),
        (
            "missing file",
            r"model-00002-of-00002\.safetensors: no such file, expected by model\.safetensors\.index\.json",
        ),
        ("missing tensor", r"index\.json: tensor 'z\.weight' is in no file, expected in model-00001"),
        ("tensor in another file", r"index\.json: tensor 'a\.weight' is in model-00001.*, expected in model-00002"),
        ("tensor in two files", r"model-00002.*: tensor 'a\.weight' is in model-00001.* too; expected in one file"),
        ("no weight_map", r"index\.json: weight_map is missing or empty"),
        ("another folder", r"index\.json: names file '\.\./model\.safetensors'"),
    ],
)
def test_a_broken_checkpoint_is_refused_in_one_line(tmp_path: Path, spoil: str, message: str) -> None:
    broken(tmp_path, spoil)
    with pytest.raises(ConfigError, match=message) as caught:
        CheckpointIndex.open(tmp_path)
    assert "\n" not in str(caught.value)


def test_no_folder_no_files_no_tensor(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        CheckpointIndex.open(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors file in it"):
        CheckpointIndex.open(tmp_path)
    save_file({"w": torch.zeros(1)}, tmp_path / "m.safetensors")
    with pytest.raises(ConfigError, match="tensor 'v' is missing"):
        CheckpointIndex.open(tmp_path).read("v", ())


def test_a_file_that_goes_away_is_named(tmp_path: Path) -> None:
    index = CheckpointIndex.open(write_checkpoint(tmp_path, TENSORS, {}))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors: cannot be read"):
        index.read("d.scalar", ())
