"""Routed experts on the CPU, from the slices of a bank, in every format: the reference's answer, many times faster.

A CPU without narrow floats widens codes by arithmetic on their bits, some megabytes at a time, so that what is widened
stays in the cache until it was multiplied. Torch looks tables up, and converts e4m3, one element at a time: that is 5
to 7 times slower for a token (benchmarks/host_experts.py). Sums are in fp32; scales of rows go to the products.

Legend: T tokens, k experts a token, H hidden, I in, O out, M tokens of one expert, P planes: of each word of packed
codes the first, the second, ...; C columns of a plane; N rows of several experts; B blocks of rows, G groups of columns
under one scale.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import silu

from shardwise.checkpoint.weight import Weight
from shardwise.kernels.linear.reference import dequantise
from shardwise.shard import Local

BLOCK_ELEMENTS = 1 << 19  # widened at once for each thread and one more: of fewer, starting operations takes the time
MOST_ELEMENTS = 6 << 20  # of more, the C library gives memory back each time, and page faults take the time
FEW = 8  # rows of a block of scales for each token, from which on it is x that is scaled, and not the rows
CODES_A_WORD = 4  # e2m1 in 16 bits
# Codes are placed as the bits of a half, exponents as they are: each then stands for this part of its value.
E4M3_PART, E2M1_PART = 2.0**-8, 2.0**-14
E4M3_BITS, E2M1_BITS = 0xBF80 - (1 << 16), 0x8E00 - (1 << 16)  # which remain, as int16


class _Factor(NamedTuple):
    """A scale: [E or 1, rows, groups] and what an element of it stands for, 0 for all of an axis."""

    tensor: torch.Tensor
    block: tuple[int, ...]
    inverse: bool

    def of(self, expert: int) -> torch.Tensor:
        return self.tensor[expert // self.block[0] if self.block[0] else 0]


class _Piece(NamedTuple):
    """Rows first .. first + rows of an expert's matrix, which are rows `at` and on of what is widened together."""

    expert: int
    first: int
    rows: int
    at: int

    @property
    def places(self) -> slice:
        return slice(self.at, self.at + self.rows)

    @property
    def source(self) -> slice:
        return slice(self.first, self.first + self.rows)


def compute(
    x_TH: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    threads: int,
) -> torch.Tensor:
    """The weighted sum of the chosen experts' outputs -> [T, H] fp32, by `threads` threads; all tensors on the CPU.

    gate_up [E, 2I, H] holds gate rows first, down [E, H, I]. Ids outside 0 .. E, such as -1, add nothing. Codes of
    e4m3 that are no numbers are not told from numbers.
    """
    out_TH = torch.zeros(x_TH.shape, dtype=torch.float32)
    hit: dict[int, list[int]] = {}
    for pair, expert in enumerate(ids_Tk.flatten().tolist()):
        if 0 <= expert < gate_up.shape[0]:
            hit.setdefault(expert, []).append(pair)
    if not hit or not down.shape[-1]:
        return out_TH
    wide_TH, pair_weights = x_TH.float(), weights_Tk.float().flatten()
    pairs = {expert: torch.tensor(hit[expert]) for expert in sorted(hit)}
    tokens = {expert: pairs_M // ids_Tk.shape[1] for expert, pairs_M in pairs.items()}
    with _threads(threads):
        inner = product(gate_up, {expert: wide_TH[tokens_M] for expert, tokens_M in tokens.items()}, threads)
        for expert, both_M2I in inner.items():
            gate_MI, up_MI = both_M2I.chunk(2, -1)
            inner[expert] = silu(gate_MI) * up_MI * pair_weights[pairs[expert], None]
        for expert, y_MH in product(down, inner, threads).items():
            out_TH.index_add_(0, tokens[expert], y_MH)
    return out_TH


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Within, torch's operations of this thread use `count` threads."""
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)


def product(weight: Weight, inputs: Mapping[int, torch.Tensor], threads: int = 1) -> dict[int, torch.Tensor]:
    """x_MI @ expert's matrix_OI.T -> y_MO fp32 for each expert of `inputs`, whose x is fp32; weight is [E, O, I]."""
    held, values = next(
        (part, tensor) for part, tensor in zip(weight.held, weight.tensors, strict=True) if part.stored.role == "value"
    )
    factors = [
        _Factor(tensor, part.block, part.stored.role == "inverse_scale")
        for part, tensor in zip(weight.held, weight.tensors, strict=True)
        if part.stored.role in ("scale", "inverse_scale")
    ]
    grouped = [factor for factor in factors if factor.tensor.shape[-1] > 1]
    if values.dtype == torch.float32 or not _known(held, values, grouped):
        return {expert: torch_linear(x_MI, dequantise(weight, expert=expert)) for expert, x_MI in inputs.items()}
    blocks = _Blocks(held, values, grouped, threads)
    found = {expert: torch.empty((len(x_MI), weight.shape[1]), dtype=torch.float32) for expert, x_MI in inputs.items()}
    parted = {expert: blocks.parted(x_MI) for expert, x_MI in inputs.items()}
    for pieces in _batches(list(inputs), weight.shape[1], blocks.rows):
        wide_PNC = blocks.widen(pieces)
        for piece in pieces:
            found[piece.expert][:, piece.source] = blocks.multiply(
                parted[piece.expert], wide_PNC[:, piece.places], piece
            )
    for expert, y_MO in found.items():
        _scale_rows(y_MO, expert, [factor for factor in factors if factor.tensor.shape[-1] <= 1], blocks.part)
    return found


def _known(held: Local, values: torch.Tensor, grouped: Sequence[_Factor]) -> bool:
    """Whether bits of this format are widened here, and not by the reference."""
    if len(grouped) > 1 or any(factor.inverse for factor in grouped):
        return False
    if not held.stored.packed:
        return values.dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
    words = held.block[-1] == 2 and values.shape[-1] % 2 == 0
    return words and all(factor.block[1] == 1 and factor.block[2] % CODES_A_WORD == 0 for factor in grouped)


def _batches(experts: Sequence[int], rows: int, limit: int) -> Iterator[list[_Piece]]:
    """All `rows` rows of the matrices of `experts`, at most `limit` rows at a time."""
    batch, at = list[_Piece](), 0
    for expert in experts:
        for first in range(0, rows, limit):
            count = min(limit, rows - first)
            if at + count > limit and batch:
                yield batch
                batch, at = [], 0
            batch.append(_Piece(expert, first, count, at))
            at += count
    if batch:
        yield batch


def _scale_rows(y_MO: torch.Tensor, expert: int, factors: Sequence[_Factor], part: float) -> None:
    """Multiply y by scales that all columns share, and by what bits of codes lack."""
    if part != 1:
        y_MO.mul_(1 / part)
    for factor in factors:
        scale, grain = factor.of(expert).float().flatten(), factor.block[1]
        if len(scale) > 1 and grain > 1:
            scale = scale.repeat_interleave(grain)[: y_MO.shape[1]]
        if factor.inverse:
            y_MO.div_(scale)
        else:
            y_MO.mul_(scale)


class _Blocks:
    """Widens rows of experts' matrices to fp32, in memory that the next rows are widened in.

    rows: at most at once, a multiple of step, the rows under one scale. part: what a widened value is of the true one,
    scales of rows aside.
    """

    def __init__(self, held: Local, values: torch.Tensor, grouped: Sequence[_Factor], threads: int) -> None:
        packed, codes = held.stored.packed, values.dtype.itemsize == 1
        self._values = values.view(torch.int16) if packed else values.view(torch.int8) if codes else values
        self._planes = CODES_A_WORD if packed else 1
        self._columns = values.shape[-1] // 2 if packed else values.shape[-1]  # of a plane
        self._codes, self._factor = codes, grouped[0] if grouped else None
        self.step = self._factor.block[1] or values.shape[1] if self._factor else 1
        self._grain = (self._factor.block[2] // self._planes if self._factor else 0) or self._columns
        elements = self._planes * self._columns
        limit = min(BLOCK_ELEMENTS * (threads + 1), MOST_ELEMENTS)
        self.rows = max(1, limit // elements // self.step) * self.step
        self.part = E2M1_PART if packed else E4M3_PART if codes else 1.0
        if self._factor and self._factor.tensor.dtype == torch.float8_e4m3fn:
            self.part *= E4M3_PART
        self._wide = torch.empty(self.rows * elements, dtype=torch.float32)
        self._bits = torch.empty(self.rows * elements if codes else 0, dtype=torch.int16)

    def parted(self, x_MI: torch.Tensor) -> torch.Tensor:
        """x with its columns in the order of planes -> [P, M, C]."""
        return x_MI.unflatten(1, (self._columns, self._planes)).permute(2, 0, 1).contiguous()

    def widen(self, pieces: Sequence[_Piece]) -> torch.Tensor:
        """The rows of `pieces` -> [P, N, C] fp32, multiplied by the scales that groups of columns of a row have."""
        rows = pieces[-1].places.stop
        shape, size = (self._planes, rows, self._columns), self._planes * rows * self._columns
        wide_PNC, bits_PNC = self._wide[:size].view(shape), self._bits[: size * self._codes]
        if self._planes > 1:
            _unpack(self._gathered(self._values, pieces), bits_PNC.view(shape))
        elif self._codes:
            for piece in pieces:
                bits_PNC.view(shape)[0, piece.places] = self._values[piece.expert, piece.source]
            _place_e4m3(bits_PNC)
        else:
            for piece in pieces:
                wide_PNC[0, piece.places] = self._values[piece.expert, piece.source]
        if self._codes:
            wide_PNC.copy_(bits_PNC.view(torch.float16).view(shape))
        if self._factor and self.step == 1:
            scales = [self._factor.of(piece.expert)[piece.source] for piece in pieces]
            wide_PNC.mul_(_spread(scales[0] if len(scales) == 1 else _joined(scales), self._grain, self._columns))
        return wide_PNC

    def _gathered(self, values: torch.Tensor, pieces: Sequence[_Piece]) -> torch.Tensor:
        """The rows of `pieces` -> [N, ..], without a copy if they are one."""
        parts = [values[piece.expert, piece.source] for piece in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def multiply(self, x_PMC: torch.Tensor, wide_PNC: torch.Tensor, piece: _Piece) -> torch.Tensor:
        """x times the rows of `piece`, which `wide` holds, and times scales of blocks of several rows -> [M, N]."""
        if self._factor and self.step > 1:
            blocks = slice(piece.first // self.step, -(-(piece.first + piece.rows) // self.step))
            spread_BC = _spread(self._factor.of(piece.expert)[blocks], self._grain, self._columns)
            if len(x_PMC[0]) * FEW <= self.step and piece.rows % self.step == 0:
                x_BMC, wide_BNC = x_PMC * spread_BC[:, None], wide_PNC[0].unflatten(0, (-1, self.step))
                return torch.bmm(x_BMC, wide_BNC.mT).transpose(0, 1).flatten(1)
            whole = piece.rows // self.step
            wide_PNC[:, : whole * self.step].unflatten(1, (whole, self.step)).mul_(spread_BC[:whole, None])
            if piece.rows % self.step:
                wide_PNC[:, whole * self.step :].mul_(spread_BC[whole])
        if self._planes == 1:
            return torch_linear(x_PMC[0], wide_PNC[0])
        return torch.bmm(x_PMC, wide_PNC.mT).sum(0)


def _place_e4m3(bits: torch.Tensor) -> None:
    """From e4m3 codes, widened as signed bytes, to the bits of halves of E4M3_PART of their values, in place."""
    bits.bitwise_left_shift_(7).bitwise_and_(E4M3_BITS)


def _unpack(words_NC: torch.Tensor, bits_PNC: torch.Tensor) -> None:
    """The four e2m1 codes of each word, lowest first, as the bits of halves of E2M1_PART of their values.

    A shift to the right carries the sign along, which stays where a half has its own.
    """
    for plane, shift in enumerate((12, 8, 4)):
        torch.bitwise_left_shift(words_NC, shift, out=bits_PNC[plane])
    bits_PNC[:3].bitwise_right_shift_(3)
    torch.bitwise_right_shift(words_NC, 3, out=bits_PNC[3])
    bits_PNC.bitwise_and_(E2M1_BITS)


def _joined(scales: Sequence[torch.Tensor]) -> torch.Tensor:
    """One after another; as bytes, since not every torch joins e4m3."""
    return torch.cat([each.view(torch.uint8) for each in scales]).view(scales[0].dtype)


def _spread(scales_NG: torch.Tensor, grain: int, columns: int) -> torch.Tensor:
    """Scales in fp32 (E4M3_PART of those in e4m3), each repeated for `grain` columns -> [N, columns]."""
    if scales_NG.dtype != torch.float8_e4m3fn:
        wide_NG = scales_NG.float()
    elif grain == 4 and scales_NG.shape[1] * grain == columns:
        # Scales are positive: one multiplication writes the half four times, where repeating takes four times as long.
        four_NG = scales_NG.view(torch.int8).to(torch.int64)
        return four_NG.bitwise_left_shift_(7).mul_(0x0001_0001_0001_0001).view(torch.float16).float()
    else:
        bits_NG = scales_NG.view(torch.int8).to(torch.int16)
        _place_e4m3(bits_NG)
        wide_NG = bits_NG.view(torch.float16).float()
    if grain == 1:
        return wide_NG[:, :columns]
    return wide_NG.unsqueeze(-1).expand(-1, -1, grain).flatten(1)[:, :columns]
