"""The gated delta rule in Triton for sequences of one token: each program holds a part of one state."""
# pyright: reportArgumentType=false, reportCallIssue=false

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.delta import reference
from shardwise.kernels.sequences import Sequences

FEW_HEADS = 64  # of all sequences: below it, narrower slices, so that a single stream has enough programs
SOME_HEADS = 512  # beyond it, wider ones, whose rows are longer in memory
NORM_EPS: tl.constexpr = tl.constexpr(reference.NORM_EPS)


@triton.jit
def log_decay(a, A_log, dt_bias):
    """-exp(A_log) softplus(a + dt_bias); log(1 + e) as the series of 2 atanh(e / (2 + e)), exact for small e too."""
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    e = tl.exp(-tl.abs(x))
    z = e / (2.0 + e)
    zz = z * z
    series = 1.0 + zz * (1 / 3 + zz * (1 / 5 + zz * (1 / 7 + zz * (1 / 9 + zz * (1 / 11 + zz * (1 / 13 + zz / 15))))))
    return -tl.exp(A_log.to(tl.float32)) * (tl.maximum(x, 0.0) + 2.0 * z * series)


@triton.jit
def decode_kernel(
    q_ptr,
    q_stride,
    k_ptr,
    k_stride,
    v_ptr,
    v_stride,
    a_ptr,
    a_stride,
    b_ptr,
    b_stride,
    A_log_ptr,
    dt_bias_ptr,
    key_map_ptr,
    state_ptr,
    starts_ptr,
    context_ptr,
    rows_ptr,
    out_ptr,
    V: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    KP: tl.constexpr,
    BD: tl.constexpr,
):
    """One token of one sequence, BD value columns of one head: its part of the state is read and written once.

    Programs of one head follow each other, so that its rows are read whole at about the same time.
    """
    sequence, head = tl.program_id(2), tl.program_id(1)
    token = tl.load(starts_ptr + sequence).to(tl.int64)
    row = tl.load(rows_ptr + sequence).to(tl.int64)
    carried = tl.where(tl.load(context_ptr + sequence) > 0, K, 0)  # rows of the state that are read, not zeros
    key_head = tl.load(key_map_ptr + head)
    wide, columns = tl.arange(0, KP), tl.program_id(0) * BD + tl.arange(0, BD)
    state_ptr += (row * V + head) * (K * D)
    at = wide[:, None] * D + columns[None, :]
    mask = (wide < K)[:, None] & (columns < D)[None, :]
    state = tl.load(state_ptr + at, mask=mask & (wide < carried)[:, None], other=0.0)

    q = tl.load(q_ptr + token * q_stride + key_head * K + wide, mask=wide < K, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + token * k_stride + key_head * K + wide, mask=wide < K, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + token * v_stride + head * D + columns, mask=columns < D, other=0.0).to(tl.float32)
    a, b = tl.load(a_ptr + token * a_stride + head), tl.load(b_ptr + token * b_stride + head).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, axis=0) + NORM_EPS) * (K**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + NORM_EPS)

    state *= tl.exp(log_decay(a, tl.load(A_log_ptr + head), tl.load(dt_bias_ptr + head)))
    delta = (v - tl.sum(state * k[:, None], axis=0)) * tl.sigmoid(b)
    state += k[:, None] * delta[None, :]
    out = tl.sum(state * q[:, None], axis=0)
    tl.store(out_ptr + (token * V + head) * D + columns, out.to(out_ptr.dtype.element_ty), mask=columns < D)
    tl.store(state_ptr + at, state, mask=mask)


def _config(heads: int, key_width: int, value_width: int) -> tuple[dict[str, Any], int]:
    """Constants and warps for `heads` value heads over all sequences."""
    most = 16 if heads < FEW_HEADS else 32 if heads <= SOME_HEADS else 64
    columns = min(most, max(triton.next_power_of_2(value_width), 8))
    return {"K": key_width, "D": value_width, "KP": triton.next_power_of_2(key_width), "BD": columns}, 4


def decode(
    inputs: list[Any],
    gating: tuple[torch.Tensor, ...],
    state_RVKD: torch.Tensor,
    seqs: Sequences,
    out_TVD: torch.Tensor,
) -> None:
    """Fills the rows of out_TVD of the first `decodes` sequences, and updates their states.

    inputs: q, k, v, a, b, each followed by its stride from token to token; gating: A_log, dt_bias, key_map.
    """
    _, heads, key_width, value_width = state_RVKD.shape
    constants, warps = _config(seqs.decodes * heads, key_width, value_width)
    grid = (triton.cdiv(value_width, constants["BD"]), heads, seqs.decodes)
    tables = (seqs.starts_S1, seqs.context_S, seqs.state_rows_S)
    decode_kernel[grid](*inputs, *gating, state_RVKD, *tables, out_TVD, V=heads, **constants, num_warps=warps)


def compile_cases() -> Iterator[CompileCase]:
    """The family's heads, one stream and many, in bf16 and, for exact comparisons, fp32."""
    ints = dict.fromkeys(("starts_ptr", "context_ptr", "rows_ptr", "key_map_ptr"), "*i32")
    floats = dict.fromkeys(("A_log_ptr", "dt_bias_ptr", "state_ptr"), "*fp32")
    for kind in ("*bf16", "*fp32"):
        for heads in (32, SOME_HEADS, 4 * SOME_HEADS):
            constants, warps = _config(heads, 128, 128)
            types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "a_ptr", "b_ptr", "out_ptr"), kind) | ints | floats
            constants["V"] = 32
            yield CompileCase(decode_kernel, signature(decode_kernel, constants, types), constants, warps, 3)
