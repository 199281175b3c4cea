"""Quantised forms of plain weights, rounded to nearest: block, channel and tensor FP8, and NVFP4 in both dialects.

An encoder takes rows of a weight at a time, so that no weight has to be in memory whole; what the rows share (the
largest magnitude) is found before. Scales are rounded to what the file holds before anything is divided by them.
Legend: O rows (out), I columns (in).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

E4M3_MAX = 448.0
E4M3_LEAST = 2.0**-9  # the smallest scale that is not zero
E2M1_MAX = 6.0
BLOCK = 128  # rows and columns under one FP8 scale
GROUP = 16  # columns under one NVFP4 scale
# Of e2m1's values, where a magnitude between two neighbours goes to the upper one; exactly half way to the even code.
MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))

Kind = Literal["fp8_block", "fp8_channel", "fp8_tensor", "nvfp4", "nvfp4_ct"]


class Planned(NamedTuple):
    """A tensor of the new checkpoint: its name, its dtype by safetensors' name, its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Encoded:
    """Some rows of a weight: its values [O, I] (packed: [O, I / 2]) and the scales of these rows."""

    values: torch.Tensor
    scales: torch.Tensor | None = None


def planned(module: str, kind: Kind, rows: int, columns: int) -> tuple[Planned, ...]:
    """The tensors of `module`, a weight [rows, columns]: values, scales of blocks or rows, then what is one for all.

    Raises ValueError where groups of NVFP4 do not fill the columns.
    """
    weight = f"{module}.weight"
    if kind == "fp8_block":
        blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
        return Planned(weight, "F8_E4M3", (rows, columns)), Planned(f"{weight}_scale_inv", "BF16", blocks)
    if kind == "fp8_channel":
        return Planned(weight, "F8_E4M3", (rows, columns)), Planned(f"{weight}_scale", "BF16", (rows, 1))
    if kind == "fp8_tensor":
        return Planned(weight, "F8_E4M3", (rows, columns)), Planned(f"{weight}_scale", "F32", ())
    if columns % GROUP:
        raise ValueError(f"{module}: {columns} columns are not whole groups of {GROUP}, which NVFP4 needs")
    scales = Planned(f"{weight}_scale", "F8_E4M3", (rows, columns // GROUP))
    if kind == "nvfp4":
        return Planned(weight, "U8", (rows, columns // 2)), scales, Planned(f"{weight}_scale_2", "F32", ())
    packed = Planned(f"{weight}_packed", "U8", (rows, columns // 2))
    return packed, scales, Planned(f"{weight}_global_scale", "F32", (1,))


def shared_scale(kind: Kind, largest: float) -> torch.Tensor | None:
    """What all rows share, as the file holds it, given the largest magnitude in the weight; None if nothing."""
    largest = largest or 1.0  # of nothing but zeros: any scale serves
    if kind == "fp8_tensor":
        return torch.tensor(largest / E4M3_MAX)
    if kind == "nvfp4":
        return torch.tensor(largest / (E4M3_MAX * E2M1_MAX))
    return torch.tensor([E4M3_MAX * E2M1_MAX / largest]) if kind == "nvfp4_ct" else None


def encode(rows_OI: torch.Tensor, kind: Kind, shared: torch.Tensor | None) -> Encoded:
    """Some rows of a weight (for "fp8_block" from a multiple of BLOCK on), in fp32, with what all rows share."""
    if kind == "fp8_block":
        return _fp8_block(rows_OI)
    if kind == "fp8_channel":
        scales_O1 = _scale(rows_OI.abs().amax(1, keepdim=True) / E4M3_MAX)
        return Encoded(_e4m3(rows_OI / scales_O1.float()), scales_O1)
    assert shared is not None
    shared = shared.to(rows_OI.device)
    if kind == "fp8_tensor":
        return Encoded(_e4m3(rows_OI / shared))
    groups = rows_OI.unflatten(1, (-1, GROUP))
    whole = 1 / shared if kind == "nvfp4_ct" else shared
    ideal = groups.abs().amax(2) / (E2M1_MAX * whole)
    scales = ideal.clamp(E4M3_LEAST, E4M3_MAX).to(torch.float8_e4m3fn)
    return Encoded(_e2m1((groups / (scales.float() * whole)[:, :, None]).flatten(1)), scales)


def _scale(ideal: torch.Tensor) -> torch.Tensor:
    """Scales in bf16; where all values are zero any will do."""
    return torch.where(ideal > 0, ideal, torch.ones_like(ideal)).to(torch.bfloat16)


def _e4m3(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _fp8_block(rows_OI: torch.Tensor) -> Encoded:
    """The last blocks may be partial."""
    rows, columns = rows_OI.shape
    padded = torch.nn.functional.pad(rows_OI, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = _scale(blocks.abs().amax((1, 3)) / E4M3_MAX)
    values = (blocks / scales.float()[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return Encoded(_e4m3(values), scales)


def _e2m1(values_OI: torch.Tensor) -> torch.Tensor:
    """Pairs of codes, low nibble first: U8 [O, I / 2]."""
    size, codes = values_OI.abs(), torch.zeros(values_OI.shape, dtype=torch.uint8, device=values_OI.device)
    for middle, upwards in MIDPOINTS:
        codes += (size >= middle) if upwards else (size > middle)
    codes |= (values_OI < 0).to(torch.uint8) << 3
    return codes[:, 0::2] | codes[:, 1::2] << 4


def row_steps(rows: int, columns: int, step_elements: int) -> Iterator[slice]:
    """Rows in steps of some `step_elements` elements, whole FP8 blocks each."""
    step = max(BLOCK, step_elements // max(columns, 1) // BLOCK * BLOCK)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
