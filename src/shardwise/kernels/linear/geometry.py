"""Weights of real models as kernels see them, without their bytes: what the compile matrix goes through."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from shardwise.kernels.linear.tiles import Operand

EMPTY_VALUES = {0: torch.bfloat16, 1: torch.uint8, 3: torch.int32}
EMPTY_SCALES = {"bf16": torch.bfloat16, "fp32": torch.float32, "u8": torch.uint8}


class Case(NamedTuple):
    """An operand whose tensors are empty (their types count), and the names of these types for a signature."""

    of: Operand
    types: dict[str, str]


def case(rows: int, columns: int, kind: str, native_fp8: bool, grain: int = 128, halves: int = 1) -> Case:
    """kind: "bf16", "fp8_block" in blocks of `grain`, "fp8_tensor" or "nvfp4" (per tensor; `halves` are fused)."""
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
        code, layout, coarse, fine = 3, (16, 1, rows, columns // 16, 1, share, halves, 0), "fp32", "u8"
    value = torch.empty(0, dtype=EMPTY_VALUES[code])
    scales = (torch.empty(0, dtype=EMPTY_SCALES[fine]), torch.empty(0, dtype=EMPTY_SCALES[coarse]))
    of = Operand(value, *scales, (code, native, rows, columns, *layout))
    return Case(of, {"value": {0: "*bf16", 1: "*u8", 3: "*i32"}[code], "fine": f"*{fine}", "coarse": f"*{coarse}"})


def linears(native_fp8: bool) -> Iterator[Case]:
    """Linears of 35B-A3B and of the dense 27B, whole and cut, plain, FP8 and NVFP4; few, for each is compiled."""
    shapes = ((12288, 2048), (2048, 4096), (2048, 512), (5120, 17408))
    for rows, columns in shapes:
        for kind in ("bf16", "fp8_block", "fp8_tensor", "nvfp4"):
            yield case(rows, columns, kind, native_fp8)
    yield case(2048, 64, "fp8_block", native_fp8, 64)
    yield case(1024, 80, "fp8_block", native_fp8, 16)
    yield case(32, 2048, "bf16", native_fp8)


def banks(native_fp8: bool) -> Iterator[tuple[Case, Case]]:
    """gate|up and down of 35B-A3B's experts at 1, 2 and 8 ranks."""
    for width, grain in ((512, 128), (256, 128), (64, 64), (176, 16)):
        for kind in ("bf16", "fp8_block", "fp8_tensor", "nvfp4"):
            yield (
                case(2 * width, 2048, kind, native_fp8, grain, 2),
                case(2048, width, kind, native_fp8, grain),
            )
