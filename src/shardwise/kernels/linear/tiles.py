"""How kernels see a weight of any format: its tensors with a layout of plain integers, and tiles of it, dequantised.

A kernel gets the codes, a fine scale that varies along `in` (it goes into the sum) and a coarse one that does not (it
goes onto the result). One set of helpers serves all formats; what differs is compile-time data, the layout W.

Legend: B batch of rows, R rows, C chunks of V consecutive elements of `in`, O out, K in, T tokens, E experts.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false

from dataclasses import dataclass
from functools import cache
from math import gcd

import torch
import triton
import triton.language as tl

from shardwise.checkpoint.weight import Weight
from shardwise.kernels.overlap import ask_for
from shardwise.kernels.products import settled
from shardwise.shard import Local

PLAIN = tl.constexpr(0)
FP8 = tl.constexpr(1)
FP4 = tl.constexpr(2)  # bytes of two codes
FP4_WORDS = tl.constexpr(3)  # words of eight, where rows and scales allow it
FP4_MOVED = tl.constexpr(4)  # words in the order of arrange.py

# Indices into W, the layout that kernels are compiled for.
KIND = tl.constexpr(0)
NATIVE = tl.constexpr(1)  # whether the device converts e4m3 itself
ROWS = tl.constexpr(2)  # O
COLUMNS = tl.constexpr(3)  # K
FINE = tl.constexpr(4)  # elements of `in` under one fine scale; 0: there is none
FINE_O = tl.constexpr(5)  # rows under one fine scale; 0: all
FINE_ROWS = tl.constexpr(6)  # rows of the fine scale an expert; 0: all experts share them
FINE_COLUMNS = tl.constexpr(7)
FINE_CODE = tl.constexpr(8)  # whether it is e4m3
COARSE = tl.constexpr(9)  # rows under one coarse scale; 0: all; -1: there is none
COARSE_ROWS = tl.constexpr(10)
INVERSE = tl.constexpr(11)  # 1: divide by the fine scale; 2: by the coarse one; 3: by both

Layout = tuple[int, ...]


@dataclass(frozen=True)
class Target:
    """What the choice of a kernel's configuration goes by.

    native_fp8: whether the device has e4m3 in hardware (compute capability 8.9 and up); shared_kib: the most shared
    memory that one program can have; name: of the GPU, for what was measured on its kind (see tuning.py).
    """

    native_fp8: bool
    shared_kib: int
    name: str = ""


@cache
def target_of(device: torch.device) -> Target:
    """The Target of `device`; a CPU, which interprets, counts as a small card."""
    if device.type != "cuda":
        return Target(native_fp8=False, shared_kib=64)
    found = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Target(native_fp8=found.gcnArchName.startswith("gfx12"), shared_kib=64)
    shared_bytes = getattr(found, "shared_memory_per_block_optin", 99 * 1024)
    return Target((found.major, found.minor) >= (8, 9), shared_bytes // 1024, found.name)


@dataclass(frozen=True)
class Operand:
    """What a kernel is given of a weight. A scale that is lacking is the value tensor, and is never read."""

    value: torch.Tensor
    fine: torch.Tensor
    coarse: torch.Tensor
    layout: Layout

    @property
    def kind(self) -> int:
        return self.layout[0]

    @property
    def chunk(self) -> int:
        """Consecutive elements of `in` that a thread takes at a time: 16 bytes at most, under one fine scale."""
        most = 16 if self.kind else 16 // self.value.element_size()
        return gcd(most, self.layout[3], self.layout[4])

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.value, self.fine, self.coarse


def _bytes_view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def operand(weight: Weight, native_fp8: bool) -> Operand:
    """`weight` ([O, K], or [E, O, K]) as kernels see it. Raises TypeError for a format that they do not have."""
    if native_fp8 not in weight.views:
        weight.views[native_fp8] = _operand(weight, native_fp8)
    return weight.views[native_fp8]


def _operand(weight: Weight, native_fp8: bool) -> Operand:
    value, fine, coarse = None, None, None
    for held, tensor in zip(weight.held, weight.tensors, strict=True):
        part = (held, tensor)
        if held.stored.role == "value":
            value = part
        elif held.stored.role != "input_scale" and held.block[-1]:
            fine = _single(weight, fine, part)
        elif held.stored.role != "input_scale":
            coarse = _single(weight, coarse, part)
    if value is None or not all(tensor.is_contiguous() for tensor in weight.tensors):
        raise TypeError(f"{weight.spec.sources[0]}: kernels need one tensor of values, and contiguous tensors")
    kind = {"U8": 2, "F8_E4M3": 1}.get(value[0].stored.dtype, 0)
    if kind == 2 and value[0].block[-1] != 2:
        raise TypeError(f"{weight.spec.sources[0]}: codes packed in blocks of {value[0].block}; kernels unpack (1, 2)")
    if kind == 2 and gcd(weight.shape[-1], fine[0].block[-1] if fine else 0) % 8 == 0:
        kind = 4 if weight.moved else 3
    inverse = sum(bit for bit, part in ((1, fine), (2, coarse)) if part and part[0].stored.role == "inverse_scale")
    layout = (
        kind,
        int(native_fp8),
        *weight.shape[-2:],
        fine[0].block[-1] if fine else 0,
        fine[0].block[-2] if fine else 0,
        _expert_rows(weight, fine[0]) if fine else 0,
        fine[0].shape[-1] if fine else 0,
        int(bool(fine) and fine[0].stored.dtype == "F8_E4M3"),
        coarse[0].block[-2] if coarse else -1,
        _expert_rows(weight, coarse[0]) if coarse else 0,
        inverse,
    )
    spare = value[1].view(torch.int32) if kind >= 3 else _bytes_view(value[1])
    return Operand(spare, _bytes_view(fine[1]) if fine else spare, coarse[1] if coarse else spare, layout)


Part = tuple[Local, torch.Tensor]


def _single(weight: Weight, found: Part | None, part: Part) -> Part:
    if found:
        names = (found[0].stored.suffix, part[0].stored.suffix)
        raise TypeError(f"{weight.spec.sources[0]}: kernels take one such scale, not {names}; use the reference ops")
    return part


def _expert_rows(weight: Weight, held: Local) -> int:
    """Rows of a scale from one expert to the next."""
    if len(weight.shape) == 3 and held.block[0] not in (0, 1):
        raise TypeError(f"{weight.spec.sources[0]}{held.stored.suffix}: one scale for {held.block[0]} experts")
    return held.shape[-2] if len(weight.shape) == 3 and held.block[0] == 1 else 0


@triton.jit
def ask_for_rows(value, e, o_O, ok_O, W: tl.constexpr, PDL: tl.constexpr):
    """Have the beginnings of rows o of expert e on their way before the kernel waits; nothing without PDL."""
    PER: tl.constexpr = 8 if W[KIND] >= FP4_WORDS else 2 if W[KIND] == FP4 else 1
    WIDTH: tl.constexpr = W[COLUMNS] // PER * (value.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = 8 if WIDTH >= 1024 else 4 if WIDTH >= 512 else 0
    if PDL and LINES > 0:
        row_O = e.to(tl.int64) * W[ROWS] + tl.where(ok_O, o_O, 0)
        ask_for(value.to(tl.int64) + (row_O * WIDTH)[:, None] + (tl.arange(0, LINES) * 128)[None, :])


@triton.jit
def e4m3(code, NATIVE_FP8: tl.constexpr):
    """The e4m3 values of bytes, in fp16, which holds them exactly; without native conversion NaN codes become 480."""
    if NATIVE_FP8:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    wide = code.to(tl.uint16)
    return (((wide & 128) << 8) | ((wide & 127) << 7)).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def e2m1_of_bytes(code):
    """The two e2m1 values of each byte, low nibble first: [.., N] -> [.., N, 2] in fp16, divided by 2 ** 14.

    Sign, exponent and fraction are moved to their places; the smaller exponent bias of e2m1 is made good by the caller.
    """
    wide = code.to(tl.uint16)
    low = (((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.float16, bitcast=True)
    high = (((wide & 128) << 8) | ((wide & 112) << 5)).to(tl.float16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _pair(word, SIGN: tl.constexpr, REST: tl.constexpr):
    """Two nibbles, four apart, as the halves of a word in fp16 -> the lower, the upper."""
    rest = word << REST if REST >= 0 else word >> -REST
    both = ((word << SIGN) & 0x80008000) | (rest & 0x0E000E00)
    lower = (both & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return lower, (both >> 16).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def e2m1_of_words(code, MOVED: tl.constexpr):
    """The eight e2m1 values of each word, lowest nibble first: [.., N] -> [.., N, 2, 2, 2], as e2m1_of_bytes.

    Half the instructions: two codes are moved at a time. MOVED: the word is in the order of arrange.py.
    """
    word = code.to(tl.uint32, bitcast=True)
    v0, v4 = _pair(word, 0 if MOVED else 12, 3 if MOVED else 9)
    v1, v5 = _pair(word, 3 if MOVED else 8, 6 if MOVED else 5)
    v2, v6 = _pair(word, 1 if MOVED else 4, 9 if MOVED else 1)
    v3, v7 = _pair(word, 2 if MOVED else 0, 0 if MOVED else -3)
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    return tl.join(even, tl.join(tl.join(v1, v5), tl.join(v3, v7)))


@triton.jit
def scale_at(pointers, mask, CODE: tl.constexpr, INVERT: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Scales in fp32 as factors; 0 where masked."""
    raw = tl.load(pointers, mask=mask, other=0)
    scale = e4m3(raw, NATIVE_FP8).to(tl.float32) if CODE else raw.to(tl.float32)
    if INVERT:
        scale = tl.where(mask, 1.0 / tl.where(mask, scale, 1.0), 0.0)
    return scale


@triton.jit
def fine_row(e, o, W: tl.constexpr):
    """Offset of the row of fine scales for row `o` of expert `e`."""
    row = e.to(tl.int64) * W[FINE_ROWS] + o * 0
    if W[FINE_O] > 0:
        row += o // W[FINE_O]
    return row * W[FINE_COLUMNS]


@triton.jit
def coarse_scale(coarse, e, o, mask, W: tl.constexpr):
    """The coarse scale of row `o` of expert `e`, in fp32; 1 for formats without one."""
    if W[COARSE] < 0:
        return tl.where(mask, 1.0, 0.0)
    row = e.to(tl.int64) * W[COARSE_ROWS] + o * 0
    if W[COARSE] > 0:
        row += o // W[COARSE]
    return scale_at(coarse + row, mask, False, W[INVERSE] >= 2, W[NATIVE])


@triton.jit
def fine_step(fine, e, o_O, ok_O, k0, BK: tl.constexpr, W: tl.constexpr):
    """Fine scales, as stored, of BK columns from k0: [BO] if one of each row covers them, else [BO, G]; 0 past K."""
    row = fine + fine_row(e, o_O, W)
    if W[FINE] % BK == 0:
        scales = tl.load(row + k0 // W[FINE], mask=ok_O & (o_O * 0 + k0 < W[COLUMNS]), other=0)
    else:
        UNDER: tl.constexpr = W[FINE] if BK % W[FINE] == 0 else 1
        g_G = k0 + tl.arange(0, BK // UNDER) * UNDER
        at = row[:, None] + (g_G // W[FINE])[None, :]
        scales = tl.load(at, mask=ok_O[:, None] & (g_G < W[COLUMNS])[None, :], other=0)
    return scales


@triton.jit
def factors(raw, W: tl.constexpr):
    """Fine scales as stored -> what values are multiplied by, in fp32."""
    scale = e4m3(raw, W[NATIVE]).to(tl.float32) if W[FINE_CODE] else raw.to(tl.float32)
    if W[INVERSE] % 2 == 1:
        scale = tl.where(scale == 0, 0.0, 1.0 / tl.where(scale == 0, 1.0, scale))
    return scale


@triton.jit
def e2m1_bf16_of_words(code, MOVED: tl.constexpr):
    """As e2m1_of_words, but in bf16, divided by 2 ** 126."""
    word = code.to(tl.uint32, bitcast=True)
    v0, v4 = _pair_bf16(word, 0 if MOVED else 12, 0 if MOVED else 6)
    v1, v5 = _pair_bf16(word, 3 if MOVED else 8, 3 if MOVED else 2)
    v2, v6 = _pair_bf16(word, 1 if MOVED else 4, 6 if MOVED else -2)
    v3, v7 = _pair_bf16(word, 2 if MOVED else 0, -3 if MOVED else -6)
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    return tl.join(even, tl.join(tl.join(v1, v5), tl.join(v3, v7)))


@triton.jit
def _pair_bf16(word, SIGN: tl.constexpr, REST: tl.constexpr):
    rest = word << REST if REST >= 0 else word >> -REST
    both = ((word << SIGN) & 0x80008000) | (rest & 0x01C001C0)
    lower = (both & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return lower, (both >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def bf16_factors(raw):
    """Bytes of positive e4m3 scales in bf16, times 2 ** 119: with e2m1_bf16_of_words, products divided by 128."""
    small = (raw.to(tl.uint16) << 4).to(tl.bfloat16, bitcast=True)  # divided by 2 ** 120
    return (small * (2.0**120)).to(tl.bfloat16) * (2.0**119)


@triton.jit
def weight_tile(value, scales, e, o_O, ok_O, k0, BK: tl.constexpr, SCALED: tl.constexpr, dtype, W: tl.constexpr):
    """Rows o of expert e, columns k0 .. k0 + BK -> [BO, BK] in `dtype`, times `scales` (see fine_step) if SCALED.

    0 where masked. Values of e2m1 come divided by 128: times e4m3 scales, bf16 and fp16 then hold them exactly.
    """
    K: tl.constexpr = W[COLUMNS]
    PER: tl.constexpr = 8 if W[KIND] >= FP4_WORDS else 2 if W[KIND] == FP4 else 1
    UNDER: tl.constexpr = W[FINE] if SCALED and BK % W[FINE] == 0 else 1
    SHORT: tl.constexpr = SCALED and PER > 1 and W[FINE_CODE] and W[INVERSE] % 2 == 0  # scales of 4 bits
    row_O = e.to(tl.int64) * W[ROWS] + o_O
    k_K = k0 // PER + tl.arange(0, BK // PER)
    mask = ok_O[:, None] if K % BK == 0 else ok_O[:, None] & (k_K < K // PER)[None, :]
    raw = tl.load(value + (row_O * (K // PER))[:, None] + k_K[None, :], mask=mask, other=0)
    if SHORT and PER == 8 and dtype == tl.bfloat16:
        s_OG = bf16_factors(scales)
        w = tl.reshape(e2m1_bf16_of_words(raw, W[KIND] == FP4_MOVED), (raw.shape[0], BK))
    elif PER > 1:
        w = tl.reshape(e2m1_of_words(raw, W[KIND] == FP4_MOVED) if PER == 8 else e2m1_of_bytes(raw), (raw.shape[0], BK))
        if SCALED:
            s_OG = factors(scales, W) * 128.0
            if SHORT:
                s_OG = s_OG.to(tl.float16)
            else:
                w = w.to(tl.float32)
        else:
            w = w * 128.0
    else:
        w = e4m3(raw, W[NATIVE]).to(tl.float32) if W[KIND] == FP8 else raw
        if SCALED:
            s_OG = factors(scales, W)
            w = w.to(tl.float32)
    if SCALED:
        if UNDER > 1:
            w = tl.reshape(tl.reshape(w, (w.shape[0], BK // UNDER, UNDER)) * s_OG[:, :, None], (w.shape[0], BK))
        else:
            w = w * s_OG
    return w.to(dtype)


@triton.jit
def tile_product(x, x_row_T, x_ok_T, value, fine, e, o_O, ok_O, k_start, k_stop, BK: tl.constexpr, W: tl.constexpr):
    """weight[e, o, k_start:k_stop] @ x[rows, k_start:k_stop].T -> [BO, BT] fp32, without the coarse scale.

    The weight is the left operand, so that what is dequantised in registers can stay there. Where a whole step of BK is
    under one fine scale per row, the scale goes onto the step's product: fp8 codes then enter exactly. Scales are read
    a step ahead: they are too small to be copied to shared memory in the background, as the weights are.
    """
    K: tl.constexpr = W[COLUMNS]
    PER_STEP: tl.constexpr = W[FINE] > 0 and W[FINE] % BK == 0
    acc = tl.zeros((o_O.shape[0], x_row_T.shape[0]), tl.float32)
    scales = fine_step(fine, e, o_O, ok_O, k_start, BK, W) if W[FINE] > 0 else 0
    for k0 in range(k_start, k_stop, BK):
        k_K = k0 + tl.arange(0, BK)
        mask = x_ok_T[None, :] if K % BK == 0 else x_ok_T[None, :] & (k_K < K)[:, None]
        x_KT = tl.load(x + x_row_T[None, :] + k_K[:, None], mask=mask, other=0)
        w_OK = weight_tile(value, scales, e, o_O, ok_O, k0, BK, W[FINE] > 0 and not PER_STEP, x_KT.dtype, W)
        if PER_STEP:
            acc += tl.dot(w_OK, x_KT, input_precision="ieee") * factors(scales, W)[:, None]
        else:
            acc = tl.dot(w_OK, x_KT, acc, input_precision="ieee")
            if W[KIND] != PLAIN:
                acc = settled(acc, k0 < k_stop)
        if W[FINE] > 0:
            scales = fine_step(fine, e, o_O, ok_O, k0 + BK, BK, W)
    return acc * 128.0 if W[KIND] >= FP4 else acc
