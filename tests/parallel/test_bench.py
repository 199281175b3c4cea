"""`shardwise bench --load` on a real engine: made-up weights of a small geometry, from config.json alone."""

import importlib.resources
import json
from pathlib import Path

import pytest

from shardwise.cli import main

MINIATURE = Path(str(importlib.resources.files("shardwise") / "miniature"))


def test_a_load_on_made_up_weights_is_answered_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_bytes((MINIATURE / "config.json").read_bytes())
    flags = "--load-format dummy --device cpu --vision off --load --rate 20 --requests 4 --mix 12,6 --log-level error"
    assert main(["bench", str(tmp_path), *flags.split(), "--json", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    (load,) = found["load"]
    assert (load["answered"], load["requests"], load["failures"]) == (4, 4, {})
    assert 0 < load["first_token_s"]["50"] <= load["first_token_s"]["99"] < load["whole_s"]["99"]
    assert load["between_tokens_s"]["50"] > 0
    assert load["share_of_limit"] > 0
    assert "4 of 4" in capsys.readouterr().out
