"""Weights of real models as kernels see them, without their bytes: what the compile matrix goes through."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch

from shardwise.kernels import tuning
from shardwise.kernels.linear.tiles import Operand, Target

EMPTY_VALUES = {0: torch.bfloat16, 1: torch.uint8, 3: torch.int32, 4: torch.int32}
EMPTY_SCALES = {"bf16": torch.bfloat16, "fp32": torch.float32, "u8": torch.uint8}
HEADS = 248320, 124160  # rows of the family's head, and of half of it
SHARED_KIB = (64, 99, 227)  # of the cards that are served
Config = TypeVar("Config")


class Case(NamedTuple):
    """An operand whose tensors are empty (their types count), and the names of these types for a signature."""

    of: Operand
    types: dict[str, str]


def case(rows: int, columns: int, kind: str, native_fp8: bool, grain: int = 128, halves: int = 1) -> Case:
    """kind: "bf16", "fp8_block" in blocks of `grain`, "fp8_tensor", "nvfp4" or "nvfp4_moved" (per tensor;
    `halves` are fused; moved: see arrange.py)."""
    native, share = int(native_fp8), rows // halves if halves > 1 else 0
    fine, coarse = "bf16", "bf16"
    if kind == "bf16":
        code, layout = 0, (0, 0, 0, 0, 0, -1, 0, 0)
    elif kind == "fp8_block":
        blocks_O, blocks_I = -(-rows // grain), -(-columns // grain)
        code, layout = 1, (grain, grain, blocks_O, blocks_I, 0, -1, 0, 0)
    elif kind == "fp8_tensor":
        code, layout, coarse = 1, (0, 0, 0, 0, 0, share, halves, 0), "fp32"
    else:
        code, coarse, fine = 4 if kind == "nvfp4_moved" else 3, "fp32", "u8"
        layout = (16, 1, rows, columns // 16, 1, share, halves, 0)
    value = torch.empty(0, dtype=EMPTY_VALUES[code])
    scales = (torch.empty(0, dtype=EMPTY_SCALES[fine]), torch.empty(0, dtype=EMPTY_SCALES[coarse]))
    of = Operand(value, *scales, (code, native, rows, columns, *layout))
    return Case(
        of, {"value": {0: "*bf16", 1: "*u8", 3: "*i32", 4: "*i32"}[code], "fine": f"*{fine}", "coarse": f"*{coarse}"}
    )


def linears(native_fp8: bool) -> Iterator[Case]:
    """Linears of 35B-A3B and of the dense 27B, whole and cut, plain, FP8 and NVFP4; few, for each is compiled."""
    for kind in ("bf16", "fp8_block", "fp8_tensor", "nvfp4"):
        yield case(12288, 2048, kind, native_fp8)
        yield case(2048, 512, kind, native_fp8)
    for kind in ("bf16", "fp8_block", "nvfp4"):
        yield case(5120, 17408, kind, native_fp8)
    yield case(2048, 64, "fp8_block", native_fp8, 64)
    yield case(1024, 80, "fp8_block", native_fp8, 16)
    yield case(32, 2048, "bf16", native_fp8)


def banks(native_fp8: bool) -> Iterator[tuple[Case, Case]]:
    """gate|up and down of 35B-A3B's experts, whole, and cut over 8 and 3 ranks inside a block."""
    pairs = [(512, 128, kind) for kind in ("bf16", "fp8_block", "fp8_tensor", "nvfp4_moved")]
    for width, grain, kind in (*pairs, (64, 64, "fp8_block"), (64, 64, "nvfp4"), (176, 16, "fp8_block")):
        yield case(2 * width, 2048, kind, native_fp8, grain, 2), case(2048, width, kind, native_fp8, grain)


def per_card(choose: Callable[[Target], Iterable[Config]], native_fp8: bool) -> Iterator[tuple[Config, int]]:
    """Every configuration, measured ones, too, with the shared memory, in bytes, of cards given it; 0 if all are."""
    chosen = {kib: set(choose(Target(native_fp8, kib))) for kib in SHARED_KIB}
    common = set.intersection(*chosen.values())
    for name, kib in tuning.measured(native_fp8):
        chosen[kib] = chosen[kib] | set(choose(Target(native_fp8, kib, name)))
    yield from ((config, 0) for config in common)
    for kib, configs in chosen.items():
        yield from ((config, kib * 1024) for config in configs - common)
