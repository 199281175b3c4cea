"""Causal depthwise convolution in Triton: one kernel for decodes; for prompts one for the outputs, one for the state.

Legend: T tokens of the step, S sequences, C channels, W taps, R rows of state.
"""
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.sequences import Sequences

DECODE_CHANNELS = 128
PREFILL_CHANNELS = 128
PREFILL_TOKENS = 16
METADATA = ("starts_ptr", "context_ptr", "rows_ptr")  # behind those of decodes, so aligned by chance


@triton.jit
def decode_kernel(
    x_ptr,
    x_stride,
    weight_ptr,
    state_ptr,
    y_ptr,
    starts_ptr,
    context_ptr,
    rows_ptr,
    C: tl.constexpr,
    W: tl.constexpr,
    WINDOW: tl.constexpr,
    BC: tl.constexpr,
):
    """The output and the next state of BC channels of one sequence of one token."""
    sequence = tl.program_id(0)
    channels = tl.program_id(1) * BC + tl.arange(0, BC)
    taps = tl.arange(0, WINDOW)
    inside = channels < C
    token = tl.load(starts_ptr + sequence).to(tl.int64)
    carried = tl.where(tl.load(context_ptr + sequence) > 0, W - 1, 0)  # inputs that are read, not zeros
    state_ptr += tl.load(rows_ptr + sequence).to(tl.int64) * (C * (W - 1))

    x = tl.load(x_ptr + token * x_stride + channels, mask=inside, other=0.0).to(tl.float32)
    at = channels[:, None] * (W - 1) + taps[None, :]
    old_mask = inside[:, None] & (taps < carried)[None, :]
    window = tl.load(state_ptr + at, mask=old_mask, other=0.0).to(tl.float32)
    window = tl.where((taps == W - 1)[None, :], x[:, None], window)
    weight_mask = inside[:, None] & (taps < W)[None, :]
    weight = tl.load(weight_ptr + channels[:, None] * W + taps[None, :], mask=weight_mask, other=0.0).to(tl.float32)
    y = tl.sum(window * weight, axis=1)
    y = y * tl.sigmoid(y)
    tl.store(y_ptr + token * C + channels, y.to(y_ptr.dtype.element_ty), mask=inside)
    # The values move one place down, perhaps between threads: all are read before any is written.
    tl.debug_barrier()
    new_mask = weight_mask & (taps > 0)[None, :]
    tl.store(state_ptr + at - 1, window.to(state_ptr.dtype.element_ty), mask=new_mask)


@triton.jit(do_not_specialize_on_alignment=METADATA)
def prefill_kernel(
    x_ptr,
    x_stride,
    weight_ptr,
    state_ptr,
    y_ptr,
    starts_ptr,
    context_ptr,
    rows_ptr,
    C: tl.constexpr,
    W: tl.constexpr,
    WINDOW: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """The outputs of BT tokens of one chunk, BC channels; the state is only read."""
    sequence = tl.program_id(2)
    start = tl.load(starts_ptr + sequence).to(tl.int64)
    length = (tl.load(starts_ptr + sequence + 1) - start).to(tl.int32)
    if tl.program_id(0) * BT >= length:
        return
    tokens = tl.program_id(0) * BT + tl.arange(0, BT)
    channels = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = channels < C
    carried_end = tl.where(tl.load(context_ptr + sequence) > 0, 0, -W)  # places before it come from the state
    state_ptr += tl.load(rows_ptr + sequence).to(tl.int64) * (C * (W - 1))

    here = start + tl.program_id(0) * BT  # what is added per element stays in 32 bits
    x_ptr += here * x_stride
    y = tl.zeros((BT, BC), dtype=tl.float32)
    for tap in tl.static_range(W):
        source = tokens - (W - 1) + tap
        new_mask = ((source >= 0) & (source < length))[:, None] & inside[None, :]
        x_at = (tl.arange(0, BT) - (W - 1) + tap)[:, None] * x_stride + channels[None, :]
        value = tl.load(x_ptr + x_at, mask=new_mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + channels * W + tap, mask=inside, other=0.0).to(tl.float32)
        y += value * weight[None, :]
    y_ptr += here * C
    if tl.program_id(0) == 0:  # values of the state are loaded one by one: a way of its own
        for tap in tl.static_range(W):
            source = tokens - (W - 1) + tap
            old_mask = (source < carried_end)[:, None] & inside[None, :]
            old_at = channels[None, :] * (W - 1) + source[:, None] + (W - 1)
            weight = tl.load(weight_ptr + channels * W + tap, mask=inside, other=0.0).to(tl.float32)
            y += tl.load(state_ptr + old_at, mask=old_mask, other=0.0).to(tl.float32) * weight[None, :]
        _store_silu(y, y_ptr, channels, inside, length - tl.program_id(0) * BT, C, BT)
    else:
        _store_silu(y, y_ptr, channels, inside, length - tl.program_id(0) * BT, C, BT)


@triton.jit
def _store_silu(y, y_ptr, channels, inside, length, C: tl.constexpr, BT: tl.constexpr):
    """Stores SiLU of y [BT, BC] in the rows of a block of `length` tokens."""
    i = tl.arange(0, BT)
    y = y / (1 + tl.exp(-y))
    mask = (i < length)[:, None] & inside[None, :]
    tl.store(y_ptr + i[:, None] * C + channels[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=METADATA)
def state_kernel(
    x_ptr,
    x_stride,
    state_ptr,
    starts_ptr,
    context_ptr,
    rows_ptr,
    C: tl.constexpr,
    W: tl.constexpr,
    WINDOW: tl.constexpr,
    BC: tl.constexpr,
):
    """The state after a chunk: its last inputs, and before them, where it is shorter than the window, old ones."""
    sequence = tl.program_id(1)
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    taps = tl.arange(0, WINDOW)
    start = tl.load(starts_ptr + sequence).to(tl.int64)
    length = (tl.load(starts_ptr + sequence + 1) - start).to(tl.int32)
    carried_end = tl.where(tl.load(context_ptr + sequence) > 0, 0, -W)  # places before it come from the state
    state_ptr += tl.load(rows_ptr + sequence).to(tl.int64) * (C * (W - 1))

    mask = (channels < C)[:, None] & (taps < W - 1)[None, :]
    source = length - (W - 1) + taps
    at = channels[:, None] * (W - 1)
    x_at = (start + source[None, :]) * x_stride + channels[:, None]
    x = tl.load(x_ptr + x_at, mask=mask & (source >= 0)[None, :], other=0.0).to(tl.float32)
    old_mask = mask & (source < carried_end)[None, :]
    old = tl.load(state_ptr + at + source[None, :] + (W - 1), mask=old_mask, other=0.0).to(tl.float32)
    # The old values move down, perhaps between threads: all are read before any is written.
    tl.debug_barrier()
    tl.store(state_ptr + at + taps[None, :], (x + old).to(state_ptr.dtype.element_ty), mask=mask)


def causal_conv(x_TC: torch.Tensor, weight_CW: torch.Tensor, state_RCW1: torch.Tensor, seqs: Sequences) -> torch.Tensor:
    """As reference.causal_conv. The rows of x may be slices of wider ones; weight and state are contiguous."""
    tokens, channels = x_TC.shape
    y_TC = torch.empty((tokens, channels), dtype=x_TC.dtype, device=x_TC.device)
    if y_TC.numel() == 0:
        return y_TC
    if x_TC.stride(1) != 1:
        x_TC = x_TC.contiguous()
    taps, later = weight_CW.shape[1], seqs.count - seqs.decodes
    sizes = {"C": channels, "W": taps, "WINDOW": triton.next_power_of_2(taps)}
    if seqs.decodes:
        grid = (seqs.decodes, triton.cdiv(channels, DECODE_CHANNELS))
        tables = (seqs.starts_S1, seqs.context_S, seqs.state_rows_S)
        decode_kernel[grid](x_TC, x_TC.stride(0), weight_CW, state_RCW1, y_TC, *tables, **sizes, BC=DECODE_CHANNELS)
    if later:
        tables = (seqs.starts_S1[seqs.decodes :], seqs.context_S[seqs.decodes :], seqs.state_rows_S[seqs.decodes :])
        blocks = triton.cdiv(channels, PREFILL_CHANNELS)
        grid = (triton.cdiv(seqs.max_query, PREFILL_TOKENS), blocks, later)
        prefill_kernel[grid](
            x_TC, x_TC.stride(0), weight_CW, state_RCW1, y_TC, *tables, **sizes, BT=PREFILL_TOKENS, BC=PREFILL_CHANNELS
        )
        # Only now: the first block of a chunk reads what this overwrites.
        grid = (blocks, later)
        state_kernel[grid](x_TC, x_TC.stride(0), state_RCW1, *tables, **sizes, BC=PREFILL_CHANNELS)
    return y_TC


def compile_cases() -> Iterator[CompileCase]:
    """The family's channels and taps, in bf16 and, for exact comparisons, fp32."""
    ints = dict.fromkeys(("starts_ptr", "context_ptr", "rows_ptr"), "*i32")
    decode = {"BC": DECODE_CHANNELS}
    prefill = {"BC": PREFILL_CHANNELS, "BT": PREFILL_TOKENS}
    state = {"BC": PREFILL_CHANNELS}
    for kind in ("*bf16", "*fp32"):
        types = dict.fromkeys(("x_ptr", "weight_ptr", "state_ptr", "y_ptr"), kind) | ints
        for kernel, blocks in ((decode_kernel, decode), (prefill_kernel, prefill), (state_kernel, state)):
            constants = {"C": 8192, "W": 4, "WINDOW": 4, **blocks}
            yield CompileCase(kernel, signature(kernel, constants, types), constants, 4, 3)
