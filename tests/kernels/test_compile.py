"""The compile matrix: every configuration of every Triton kernel, for the cards, within their shared memory."""

import json
import os
import pkgutil
import subprocess
import sys
from typing import Any

import pytest

import shardwise.kernels

MODULES = [
    found.name
    for found in pkgutil.walk_packages(shardwise.kernels.__path__, "shardwise.kernels.")
    if found.name.endswith(".triton")
]
NEED_FP8 = {"quantise_kernel", "w8a8_kernel"}  # in hardware, which sm_86 lacks
CARDS = {"sm_86", "sm_89", "sm_90", "sm_120", "gfx1201"}


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """All that is compiled, in a process of its own: this one may interpret kernels, which cannot be undone."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "tests.kernels.targets", *MODULES]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("module", MODULES)
def test_kernels_compile_for_every_card(module: str, compiled: list[dict[str, Any]]) -> None:
    ours = [each for each in compiled if each["module"] == module]
    cards: dict[str, set[str]] = {}
    for each in ours:
        cards.setdefault(each["case"].split("(")[0], set()).add(each["card"])
    expected = {name: CARDS - {"sm_86"} if name in NEED_FP8 else CARDS for name in cards}
    assert cards == expected
    faults = [each for each in ours if each["error"] or each["shared_bytes"] > each["limit_bytes"]]
    assert not faults, json.dumps(faults, indent=1)
