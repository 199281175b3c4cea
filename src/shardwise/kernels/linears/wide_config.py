"""Which FP8 weights of 17 to 128 tokens go by warp groups on Hopper (wide.py), and in what configuration."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton

from shardwise.kernels import tuning
from shardwise.kernels.hopper import SHARED_KIB
from shardwise.kernels.linear.fragments import fits as fragment_fits
from shardwise.kernels.linear.tiles import (
    COARSE,
    COLUMNS,
    FINE,
    FINE_COLUMNS,
    FINE_O,
    FP8,
    INVERSE,
    PLAIN,
    ROWS,
    Operand,
)
from shardwise.kernels.linear.warpgroups import STEP_BYTES, fits

GROUP_ROWS = 64  # of a warp group
FEW_ROWS = 512  # most rows of a plain weight beside the others
LEAST_TOKENS, MOST_TOKENS = 17, 128
# Steps of a program, each of which is written out: 40 of 128 tokens would take half a minute to compile, of 64 five
# seconds.
FEWEST_STEPS, MOST_STEPS, MOST_STEPS_OF_MANY, MANY_TOKENS = 3, 48, 16, 64
FEWEST_PROGRAMS, MANY_PROGRAMS, MOST_PARTS = 64, 120, 8


class Wide(NamedTuple):
    """A configuration: rows of a program, parts of the columns, and steps that are held at a time."""

    BM: int
    parts: int
    slots: int


def wide_config(operands: Sequence[Operand], x_TH: torch.Tensor, gpu: str, parts: bool) -> Wide | None:
    """How these weights are to be multiplied with x, if they are to be by this kernel. parts: whether it may be parts
    of the sum."""
    tokens = x_TH.shape[0]
    if not LEAST_TOKENS <= tokens <= MOST_TOKENS or not count_large(operands):
        return None
    config = wide_choice(operands, tokens, gpu, parts)
    return config if config is not None and possible(operands, x_TH, config) else None


def wide_choice(operands: Sequence[Operand], tokens: int, gpu: str, parts: bool) -> Wide | None:
    """A configuration for so many tokens, as measured on `gpu` or by rule."""
    found = tuning.choice(gpu, "wide", [of.layout for of in operands], tokens)
    config = Wide(*found) if found else wide_rule(operands, tokens, parts)
    return None if config is None or (config.parts > 1 and not parts) else config


def wide_rule(operands: Sequence[Operand], tokens: int, parts: bool) -> Wide | None:
    """Programs for all processors of an H200: fewer rows of each where tokens are few, parts of the columns where rows
    are. None where even then there are few programs."""
    rows = sum(of.layout[ROWS.value] for of in operands[: count_large(operands)])
    steps = operands[0].layout[COLUMNS.value] // STEP_BYTES.value
    BM = 128 if tokens > 32 and rows // 128 >= FEWEST_PROGRAMS else 64
    most, n = MOST_PARTS if parts else 1, 1
    while n < most and rows // BM * n < MANY_PROGRAMS and steps % (2 * n) == 0 and steps // (2 * n) >= FEWEST_STEPS:
        n *= 2
    if rows // BM * n < FEWEST_PROGRAMS or steps // n > (MOST_STEPS if tokens <= MANY_TOKENS else MOST_STEPS_OF_MANY):
        return None
    return Wide(BM, n, 4 if BM + 2 * room(tokens) > 256 else 6)


def count_large(operands: Sequence[Operand]) -> int:
    """How many are in FP8, which are to come first."""
    return sum(of.kind == FP8.value for of in operands)


def room(tokens: int) -> int:
    """Tokens that a program has room for, and that the rows of e4m3 are to have room for, whatever is in them."""
    return max(32, triton.next_power_of_2(tokens))


def warps_of(config: Wide) -> int:
    """Warps of a program."""
    return 4 * (config.BM // GROUP_ROWS)


def held_steps(of: Operand, config: Wide) -> int:
    """Steps that a program holds at a time."""
    return min(config.slots, of.layout[COLUMNS.value] // config.parts // STEP_BYTES.value)


def shared_bytes(of: Operand, tokens: int, config: Wide) -> int:
    """Shared memory of a program."""
    steps = of.layout[COLUMNS.value] // config.parts // STEP_BYTES.value
    held = held_steps(of, config) * STEP_BYTES.value * (config.BM + 2 * room(tokens))
    return held + 4 * (room(tokens) + triton.next_power_of_2(steps)) + 1024


def possible(operands: Sequence[Operand], x_TH: torch.Tensor, config: Wide) -> bool:
    """Whether this kernel can multiply such weights with such an input, on this device: one or two in FP8, alike but
    for their rows, and perhaps a plain one of few rows."""
    large = count_large(operands)
    few, first = operands[large:], operands[0]
    if not 0 < x_TH.shape[0] <= MOST_TOKENS or not 0 < large <= 2 or len(few) > 1 or (few and config.parts > 1):
        return False
    if any(of.kind != FP8.value for of in operands[:large]):  # of a checkpoint that mixes formats
        return False
    same = COLUMNS.value, FINE.value, FINE_O.value, FINE_COLUMNS.value, COARSE.value, INVERSE.value
    alike = all(of.layout[n] == first.layout[n] for of in operands[:large] for n in same)
    alike = alike and len({(of.fine.dtype, of.coarse.dtype) for of in operands[:large]}) == 1
    if not alike or not all(fits(of, x_TH.dtype, config.BM) for of in operands[:large]):
        return False
    if first.layout[FINE.value] and first.layout[FINE_O.value] % config.BM:
        return False
    if few and (few[0].kind != PLAIN.value or few[0].layout[ROWS.value] > FEW_ROWS):
        return False
    whole = (
        first.layout[COLUMNS.value] % (config.parts * STEP_BYTES.value) == 0
        and held_steps(first, config) >= FEWEST_STEPS
    )
    small = all(fragment_fits(of, x_TH.dtype) for of in few)
    return whole and small and shared_bytes(first, x_TH.shape[0], config) <= SHARED_KIB * 1024
