"""Experts in host memory: each layer's answer is that of experts on the device, and loading takes the banks' room."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint.weight import Weight
from shardwise.experts import memory
from shardwise.experts.bank import LayerBank
from shardwise.experts.hybrid import TRY_EVERY, Hybrid, divide
from shardwise.experts.offload import Offload
from shardwise.experts.sizes import expert_sizes
from shardwise.kernels.expert_slots import reference
from shardwise.kernels.expert_slots.table import SlotTable
from shardwise.kernels.moe.reference import route
from shardwise.kernels.ops import Ops, select
from tests.kernels.weights import FORMATS, make_weight

CPU = torch.device("cpu")
HIDDEN, WIDTH, EXPERTS, TOP_K = 64, 32, 9, 2


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def bank(form: str, seed: int) -> LayerBank:
    shapes = (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    return LayerBank(*(make_weight(shape, form, seed + n) for n, shape in enumerate(shapes)))


def shared_parts(tokens: int) -> tuple[Sequence[Weight], Sequence[Weight], torch.Tensor]:
    return [make_weight((2 * WIDTH, HIDDEN), "fp32")], [make_weight((HIDDEN, WIDTH), "fp32")], randn(tokens, 1)


def steps(count: int) -> list[int]:
    """Tokens of some steps: alone, a few, more than any slots hold, and back."""
    return [1, 1, 3, 12, 2, 1, 4, 1][:count]


def differences(ops: Ops, form: str, slots: int, count: int, **options: Any) -> list[float]:
    """Between each layer's answer and that of resident experts, relative, over some steps of two layers."""
    banks = {3: bank(form, 1), 5: bank(form, 7)}
    offload = Offload(banks, TOP_K, ops, CPU, **options)
    offload.resize(slots)
    found = list[float]()
    for n, tokens in enumerate(steps(count)):
        for layer, one in banks.items():
            weights_Tk, ids_Tk = route(randn(tokens, EXPERTS, seed=10 * n + layer), TOP_K)
            x_TH, shared = randn(tokens, HIDDEN, seed=n), shared_parts(tokens)
            expected = ops.moe_shared(x_TH, one.gate_up, one.down, ids_Tk, weights_Tk, *shared)
            got = offload.layers[layer](x_TH, ids_Tk, weights_Tk, *shared)
            found.append(float((got - expected).norm() / expected.norm()))
    return found


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.usefixtures("poison")
def test_offloaded_layers_answer_as_resident_ones_do(form: str) -> None:
    for slots in (0, 2, 5, EXPERTS):
        assert max(differences(select("reference", CPU), form, slots, 8)) < 1e-6


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.usefixtures("poison")
def test_hosts_answer_alike(form: str) -> None:
    """All misses fetched by the host; none of them, but what must be tried; and half of them."""
    ops, some = select("reference", CPU), (2, 5)
    for slots in (*some, EXPERTS):
        assert max(differences(ops, form, slots, 8, pinned=False)) < 1e-6
    for split in (lambda _: 0, lambda misses: misses // 2):
        for slots in some:
            assert max(differences(ops, form, slots, 8, hybrid=Hybrid(1, split))) < 1e-5


@pytest.mark.parametrize("slots", [3, 6, EXPERTS])
def test_hosts_and_devices_decide_alike(slots: int) -> None:
    ours, theirs = (SlotTable.empty(EXPERTS, slots, CPU) for _ in range(2))
    for n in range(20):
        _, ids_Tk = route(randn(1, EXPERTS, seed=n), 3)
        found, (slot_ids_Tk, fetches_2F, count_1) = divide(ids_Tk, ours, int), reference.plan_slots(ids_Tk, theirs)
        assert torch.equal(found.slot_ids_Tk, slot_ids_Tk)
        assert found.fetches == [tuple(each) for each in fetches_2F[:, : int(count_1)].T.tolist()]
        for mine, other in zip(vars(ours).values(), vars(theirs).values(), strict=True):
            assert torch.equal(mine, other)
        assert not (found.computed_Tk >= 0).any()


def test_slots_fill_and_turn_over_even_where_computing_is_faster() -> None:
    table, fetched = SlotTable.empty(EXPERTS, 2, CPU), list[int]()
    for n in range(2 * TRY_EVERY):
        found = divide(torch.tensor([[n % 7, (n + 3) % 7]], dtype=torch.int32), table, lambda _: 0)
        assert torch.equal(found.computed_Tk >= 0, found.slot_ids_Tk < 0)
        fetched += [n] * len(found.fetches)
    assert fetched[:2] == [0, 1]
    assert len(fetched) == 4


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.usefixtures("poison")
def test_kernels_fill_slots_alike(form: str) -> None:
    """Decisions and copies are Triton's; the products, which take the interpreter long, the reference's."""
    fast, ops = select("triton", CPU), select("reference", CPU)
    ops = replace(ops, plan_slots=fast.plan_slots, plan_wanted=fast.plan_wanted, fetch_experts=fast.fetch_experts)
    assert max(differences(ops, form, 4, 5)) < 1e-6


def test_what_was_found_and_copied_is_counted() -> None:
    banks = {0: bank("fp32", 1)}
    offload = Offload(banks, TOP_K, select("reference", CPU), CPU)
    offload.resize(4)
    weights_Tk = torch.ones(1, 2)
    for pair in ([1, 2], [2, 3], [5, 6], [3, 1]):  # 3 is still there, 1 is not
        ids_Tk = torch.tensor([pair], dtype=torch.int32)
        offload.layers[0](randn(1, HIDDEN), ids_Tk, weights_Tk, *shared_parts(1))
    expert_bytes = 3 * WIDTH * HIDDEN * 4
    assert tuple(vars(offload.counts()).values()) == (2, 6, 6 * expert_bytes)
    offload.resize(EXPERTS)
    assert tuple(vars(offload.counts()).values()) == (2, 6, 6 * expert_bytes)
    assert offload.slot_bytes == expert_bytes


@pytest.mark.parametrize("form", FORMATS)
def test_sizes_follow_from_specs_alone(form: str) -> None:
    banks = {n: bank(form, n) for n in range(2)}
    offload = Offload(banks, TOP_K, select("reference", CPU), CPU)
    pairs = {n: (f"{n} up", f"{n} down") for n in banks}
    specs = {
        name: w.spec for n, one in banks.items() for name, w in zip(pairs[n], (one.gate_up, one.down), strict=True)
    }
    found = expert_sizes(specs, pairs, {}, 0)
    assert found.bank_bytes == sum(one.nbytes for one in banks.values())
    assert found.slot_bytes == offload.slot_bytes
    assert found.staging_bytes == sum(arena.nbytes for arena in offload.staging.arenas)
    assert found.experts == EXPERTS


def test_windows_is_known_by_its_kernel(tmp_path: Path) -> None:
    version = tmp_path / "version"
    assert not memory.on_wsl(version)
    version.write_text("Linux version 5.15.153.1-microsoft-standard-WSL2")
    assert memory.on_wsl(version)


MEASURE = """
import re, sys, threading, time
from pathlib import Path
import torch
from shardwise.checkpoint.index import CheckpointIndex
from shardwise.experts.bank import load_banks
from shardwise.shard import ParamSpec, Partition, Segment, Stored

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

bf16 = (Stored("", "BF16"),)
halves = (Segment("gate", 1280), Segment("up", 1280))
specs, pairs = {}, {}
for n in range(2):
    specs[f"{n}.up"] = ParamSpec((8, halves, 5120), bf16, (f"{n}.up",), "expert", 1)
    specs[f"{n}.down"] = ParamSpec((8, 5120, (Segment("in", 1280),)), bf16, (f"{n}.down",), "expert", 2)
    pairs[n] = f"{n}.up", f"{n}.down"
index = CheckpointIndex.open(Path(sys.argv[1]))
torch.empty(8).copy_(torch.ones(8))
before, peak, done = resident(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, resident())
        time.sleep(0.002)
watcher = threading.Thread(target=watch)
watcher.start()
banks, pinned = load_banks(specs, pairs, {"expert": Partition.even(80, 1)}, 0, index, torch.device("cpu"))
peak, done = max(peak, resident()), True
watcher.join()
print(sum(bank.nbytes for bank in banks.values()), peak - before)
"""


@pytest.mark.slow
def test_loading_takes_the_banks_and_512_mib(tmp_path: Path) -> None:
    """All resident memory counts, mapped files too. The banks are so large that a second copy would be seen."""
    shapes = {
        f"{n}.{part}": shape for n in range(2) for part, shape in (("up", (8, 2560, 5120)), ("down", (8, 5120, 1280)))
    }
    header, at = dict[str, object](), 0
    for name, shape in shapes.items():
        stop = at + 2 * prod(shape)
        header[name], at = {"dtype": "BF16", "shape": shape, "data_offsets": (at, stop)}, stop
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    held_bytes, peak_bytes = map(int, result.stdout.split())
    assert held_bytes == at > 512 << 20
    assert peak_bytes <= held_bytes + (512 << 20)
