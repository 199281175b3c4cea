"""The compile matrix: every configuration of every Triton kernel, for every card, within its shared memory."""

import json
import os
import pkgutil
import subprocess
import sys

import pytest

import shardwise.kernels

MODULES = [
    found.name
    for found in pkgutil.walk_packages(shardwise.kernels.__path__, "shardwise.kernels.")
    if found.name.endswith(".triton")
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("module", MODULES)
def test_kernels_compile_for_every_card(module):
    """In a process of its own: this one may interpret kernels, which cannot be undone."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "tests.kernels.targets", module]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    compiled = json.loads(result.stdout)
    assert {each["card"] for each in compiled} == {"sm_86", "sm_89", "sm_90", "sm_120", "gfx1201"}
    faults = [each for each in compiled if each["error"] or each["shared_bytes"] > each["limit_bytes"]]
    assert not faults, json.dumps(faults, indent=1)
