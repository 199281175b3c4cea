"""What cannot be served is told in one line with exit code 2, within seconds, before a rank starts or reads weights."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.checkpoint.hub import miniature
from shardwise.checkpoint.index import CheckpointIndex
from shardwise.cli import main
from shardwise.engine.group import EngineGroup

CPU_SECONDS = 15.0  # imports and all
SECOND_FILE = "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The miniature in a folder of its own, by links: what a test changes it has to write anew."""
    for path in miniature().iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that starts, or a weight that is read, fails the test."""

    def never(*_: object) -> None:
        raise AssertionError("it went too far")

    monkeypatch.setattr(EngineGroup, "start", never)
    monkeypatch.setattr(CheckpointIndex, "read", never)


def rewrite(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def cut_short(folder: Path) -> None:
    path = folder / SECOND_FILE
    rewrite(path, path.read_bytes()[:-1000])


def cut_in_the_header(folder: Path) -> None:
    path = folder / SECOND_FILE
    rewrite(path, path.read_bytes()[:100])


def without_a_file(folder: Path) -> None:
    (folder / SECOND_FILE).unlink()


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def another_config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        rewrite(path, json.dumps(json.loads(path.read_bytes()) | changes).encode())

    return change


def untouched(folder: Path) -> None:
    pass


FAULTS = {
    "truncated": (cut_short, [], [SECOND_FILE, "truncated", "download it again"]),
    "truncated header": (cut_in_the_header, [], [SECOND_FILE, "truncated", "download it again"]),
    "missing file": (without_a_file, [], [SECOND_FILE, "no such file"]),
    "missing config": (without_config, [], ["config.json", "no such file"]),
    "unknown architecture": (
        another_config(architectures=["LlamaForCausalLM"]), [], ["'LlamaForCausalLM' is not served", "known: Qwen3_5"],
    ),
    "too many ranks": (untouched, ["--tp", "17"], ["17 ranks are too many", "at most 16 heads", "--tp 16"]),
    "wrong ratio": (untouched, ["--ratio", "nothing=1,1"], ["--ratio nothing=", "no such group", "attention"]),
    "no GPU": (untouched, ["--device", "cuda"], ["--device cuda", "--device cpu"]),
}  # fmt: skip


@pytest.mark.parametrize("command", ["serve", "bench", "plan", "verify"])
@pytest.mark.parametrize("fault", FAULTS)
def test_one_line_and_exit_code_2(
    fault: str, command: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, options, words = FAULTS[fault]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    spoil(folder)
    port = ["--port", "0"] if command == "serve" else []
    ranks = [] if options[:1] in (["--tp"], ["--ratio"]) else ["--tp", "2"]
    begin_s = time.process_time()
    assert main([command, str(folder), *port, *ranks, *options]) == 2
    assert time.process_time() - begin_s < CPU_SECONDS
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("shardwise: error: ")]
    assert (out, len(lines), err.count("\n")) == ("", 1, 1)
    assert all(word in lines[0] for word in words), lines[0]
