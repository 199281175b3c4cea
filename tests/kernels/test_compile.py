"""The compile matrix: every configuration of every Triton kernel, for the cards, within their shared memory."""

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

import pytest

import shardwise.kernels
from tests.kernels.conftest import RUNNING
from tests.kernels.hardware import page, racing, registers

ROOT = Path(__file__).parents[2]
MODULES = [
    found.name
    for found in pkgutil.walk_packages(shardwise.kernels.__path__, "shardwise.kernels.")
    if found.name.endswith(".triton")
]
NEED_FP8 = {"quantise_kernel", "w8a8_kernel"}  # in hardware, which sm_86 lacks
IN_GLUON = "fragment_"  # begins the names of kernels that are for NVIDIA's instructions
FOR_HOPPER = {
    "halve_kernel", "held_linear_kernel", "hopper_down_kernel", "hopper_gate_up_kernel", "hopper_linears_kernel",
    "hopper_prefill_kernel", "persistent_gate_up_kernel", "resident_linears_kernel", "warpgroup_down_kernel",
    "warpgroup_gate_up_kernel", "wide_linears_kernel",
}  # fmt: skip
CARDS = {"sm_86", "sm_89", "sm_90", "sm_120", "gfx1201"}


@pytest.fixture(scope="module")
def compiled(pytestconfig: pytest.Config) -> list[dict[str, Any]]:
    """All that is compiled, for which see Compiling."""
    running = pytestconfig.stash[RUNNING]
    assert running.wait() == 0, running.log.read_text()[-4000:]
    return json.loads(running.found.read_text())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("module", MODULES)
def test_kernels_compile_for_every_card(module: str, compiled: list[dict[str, Any]]) -> None:
    ours = [each for each in compiled if each["module"] == module]
    cards: dict[str, set[str]] = {}
    for each in ours:
        cards.setdefault(each["case"].split("(")[0], set()).add(each["card"])
    lacking = {name: {"sm_86"} for name in NEED_FP8} | {name: CARDS - {"sm_90"} for name in FOR_HOPPER}
    lacking |= {name: {"gfx1201"} for name in cards if name.startswith(IN_GLUON)}
    assert cards == {name: CARDS - lacking.get(name, set()) for name in cards}
    faults = [each for each in ours if each["error"] or each["shared_bytes"] > each["limit_bytes"]]
    assert not faults, json.dumps(faults, indent=1)


def test_the_page_of_hardware_names_every_kernel_and_card() -> None:
    """Figures are not compiled again for it."""
    text = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")
    kernels = {
        f"{module.split('.')[-2]}.{case[0].__name__}"
        for module in MODULES
        for case in importlib.import_module(module).compile_cases()
    }
    listed = {line.split("`")[1] for line in text.partition("## Kernels")[2].splitlines() if line.startswith("| `")}
    assert kernels - listed == set(), "run `FULL_COMPILE=1 python -m tests.kernels.targets --table docs/hardware.md`"
    assert all(f"| {card} |" in text for card in CARDS)


def test_the_page_tells_the_most_of_each_kernel_and_what_spills() -> None:
    first = {"module": "a.moe.triton", "case": "k(A=1) warps=4", "card": "sm_86", "shared_bytes": 2048, "registers": 40,
             "spilled_bytes": 0}  # fmt: skip
    found = [
        first,
        {**first, "case": "k(A=2) warps=4", "registers": 255, "spilled_bytes": 64},
        {**first, "card": "sm_89"},
    ]
    text = page(found, {"sm_86": 4096, "sm_89": 2048}, "3.9")
    assert "| `moe.k` | 2 | 2.0; 255; spills 64 | 2.0; 40 |" in text
    assert "| `moe.k` | sm_86 | 1 | 64 | 255 | `A=2; warps=4` |" in text
    assert "1, up to 64 B |" in text


def test_registers_are_read_from_the_tools_of_either_vendor() -> None:
    assert registers("Function k:\n  REG:255 STACK:12 SHARED:1024 LOCAL:0 CONSTANT[0]:672") == (255, 12)
    assert registers("  .vgpr_count:     96\n  .vgpr_spill_count: 3\n") == (96, 12)
    with pytest.raises(ValueError, match="no registers are told"):
        registers("nothing of note")


@pytest.mark.parametrize(
    ("left", "pendings", "races"),
    [("dot_op<{opIdx = 0}>", 3, True), ("dot_op<{opIdx = 0}>", 0, False), ("shared", 1, False)],
)
def test_products_that_outlive_a_turn_of_their_loop_are_found(left: str, pendings: int, races: bool) -> None:
    """As Triton 3.6 writes a loop down: the last wait of the turn says how many may go on."""
    loop = f"""
      %0:2 = scf.for %i = %a to %b step %c iter_args(%acc = %zero) -> (tensor<128x128xf32, #mma>) : i32 {{
        %1 = ttng.warp_group_dot %w, %x, %acc {{isAsync = true}} : tensor<128x16xbf16, #ttg.{left}> -> tensor<#mma>
        %2:2 = ttng.warp_group_dot_wait %1, %x {{pendings = {pendings} : i32}} : tensor<128x128xf32, #mma>
        scf.yield %2#0 : tensor<128x128xf32, #mma>
      }}
      %3:2 = ttng.warp_group_dot_wait %0#0 {{pendings = 0 : i32}} : tensor<128x128xf32, #mma>
"""
    assert racing(loop) is races
