"""The gated delta rule with its norm: one kernel for sequences of one token, a program a head; chunks by the others.

With S the state and d its decay: k S' = d (k S) and q (S' + k delta) = d (q S) + (q k) delta, so that both products
with the state are taken of what was read, side by side. The factors of the l2 norms of q and k go onto sums.
Legend: T tokens, S sequences, G key heads, V value heads, K key width, D value width, R rows of state.
"""
# pyright: reportArgumentType=false, reportCallIssue=false

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from shardwise.kernels import tuning
from shardwise.kernels.cases import CompileCase, signature
from shardwise.kernels.delta import prefill as filling
from shardwise.kernels.delta.decode import NORM_EPS, log_decay
from shardwise.kernels.delta.triton import _packed as packed
from shardwise.kernels.delta.triton import gated_delta
from shardwise.kernels.linear.tiles import target_of
from shardwise.kernels.norm.triton import gated_rms_norm
from shardwise.kernels.overlap import after_previous, launch, let_next_come
from shardwise.kernels.sequences import Sequences

STATE_ELEMENTS = 128 * 128  # of one head, most that a program holds in registers
MOST_WARPS = 2048  # of all heads of all sequences: beyond, the memory is what counts; narrower programs keep it busier


@triton.jit
def _two_sums(a, b, c, d):
    """Sums over threads that wait for one another once, not once each."""
    return a + c, b + d


@triton.jit
def _three_sums(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def delta_norm_kernel(
    q_ptr, q_stride, k_ptr, k_stride, v_ptr, v_stride, a_ptr, a_stride, b_ptr, b_stride, A_log_ptr, dt_bias_ptr,
    key_map_ptr, state_ptr, starts_ptr, context_ptr, rows_ptr, out_ptr, gate_ptr, gate_stride, norm_ptr, eps,
    V: tl.constexpr, K: tl.constexpr, D: tl.constexpr, KP: tl.constexpr, DP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One token of one sequence, one head: its state is read and written once, its output normed and gated."""
    let_next_come(PDL)
    sequence, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(starts_ptr + sequence).to(tl.int64)
    row = tl.load(rows_ptr + sequence).to(tl.int64)
    carried = tl.where(tl.load(context_ptr + sequence) > 0, K, 0)  # rows of the state that are read, not zeros
    key_head = tl.load(key_map_ptr + head)
    wide, columns = tl.arange(0, KP), tl.arange(0, DP)
    state_ptr += (row * V + head) * (K * D)
    at = wide[:, None] * D + columns[None, :]
    mask = (wide < K)[:, None] & (columns < D)[None, :]
    # Written steps ago, so it need not wait for the kernel before; this processor's own cache may be older.
    state = tl.load(state_ptr + at, mask=mask & (wide < carried)[:, None], other=0.0, cache_modifier=".cg")
    factor = tl.load(norm_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
    A_log, dt_bias = tl.load(A_log_ptr + head), tl.load(dt_bias_ptr + head)
    after_previous(PDL)

    q = tl.load(q_ptr + token * q_stride + key_head * K + wide, mask=wide < K, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + token * k_stride + key_head * K + wide, mask=wide < K, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + token * v_stride + head * D + columns, mask=columns < D, other=0.0).to(tl.float32)
    z = tl.load(gate_ptr + token * gate_stride + head * D + columns, mask=columns < D, other=0.0).to(tl.float32)
    a, b = tl.load(a_ptr + token * a_stride + head), tl.load(b_ptr + token * b_stride + head).to(tl.float32)
    seen, asked = tl.reduce((state * k[:, None], state * q[:, None]), 0, _two_sums)
    kk, qq, both = tl.reduce((k * k, q * q, q * k), 0, _three_sums)
    k_scale, q_scale = tl.rsqrt(kk + NORM_EPS), tl.rsqrt(qq + NORM_EPS) * (K**-0.5)
    both *= q_scale * k_scale

    decay = tl.exp(log_decay(a, A_log, dt_bias))
    delta = (v - decay * k_scale * seen) * tl.sigmoid(b)
    tl.store(state_ptr + at, state * decay + k[:, None] * (k_scale * delta)[None, :], mask=mask)
    out = decay * q_scale * asked + both * delta
    out *= tl.rsqrt(tl.sum(out * out, axis=0) / D + eps) * factor * z * tl.sigmoid(z)
    tl.store(out_ptr + (token * V + head) * D + columns, out.to(out_ptr.dtype.element_ty), mask=columns < D)


def _config(key_width: int, value_width: int, gpu: str = "") -> tuple[dict[str, Any], int]:
    """Constants and warps; a thread holds 64 elements of the state at most. gpu: for a choice that was measured."""
    wide, columns = (triton.next_power_of_2(width) for width in (key_width, value_width))
    constants = {"K": key_width, "D": value_width, "KP": wide, "DP": columns}
    found = tuning.choice(gpu, f"delta_step {key_width}x{value_width}", [], 1)
    return constants, found[0] if found else max(1, min(8, wide * columns // 2048))


def gated_delta_norm(
    q_TGD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TVD: torch.Tensor,
    a_TV: torch.Tensor,
    b_TV: torch.Tensor,
    A_log_V: torch.Tensor,
    dt_bias_V: torch.Tensor,
    key_map_V: torch.Tensor,
    state_RVKD: torch.Tensor,
    seqs: Sequences,
    gate_TVD: torch.Tensor,
    norm_D: torch.Tensor,
    eps: float,
    pdl: bool = False,
) -> torch.Tensor:
    """As the reference; for single tokens the output is not rounded before its norm. pdl: see overlap.py."""
    _, heads, key_width, value_width = state_RVKD.shape
    constants, warps = _config(key_width, value_width, target_of(v_TVD.device).name)
    fits = constants["KP"] * constants["DP"] <= STATE_ELEMENTS and 0 < seqs.decodes * heads * warps <= MOST_WARPS
    if not v_TVD.numel() or not fits:
        out_TVD = gated_delta(
            q_TGD, k_TGD, v_TVD, a_TV, b_TV, A_log_V, dt_bias_V, key_map_V, state_RVKD, seqs
        )  # fmt: skip
        return gated_rms_norm(out_TVD, gate_TVD, norm_D, eps, pdl)
    out_TVD = torch.empty(v_TVD.shape, dtype=v_TVD.dtype, device=v_TVD.device)
    inputs = [part for x in (q_TGD, k_TGD, v_TVD, a_TV, b_TV) for part in packed(x)]
    gating = (A_log_V, dt_bias_V, key_map_V)
    if seqs.decodes:
        delta_norm_kernel[(seqs.decodes, heads)](
            *inputs, *gating, state_RVKD, seqs.starts_S1, seqs.context_S, seqs.state_rows_S, out_TVD,
            *packed(gate_TVD), norm_D, eps, V=heads, **constants, num_warps=warps, **launch(pdl),
        )  # fmt: skip
    if seqs.decodes < seqs.count:
        filling.prefill(inputs, gating, state_RVKD, seqs, out_TVD)
        rest = slice(seqs.decodes, None)
        out_TVD[rest] = gated_rms_norm(out_TVD[rest], gate_TVD[rest], norm_D, eps)
    return out_TVD


def compile_cases() -> Iterator[CompileCase]:
    """The family's heads, in bf16 and, for exact comparisons, fp32."""
    ints = dict.fromkeys(("starts_ptr", "context_ptr", "rows_ptr", "key_map_ptr"), "*i32")
    floats = dict.fromkeys(("A_log_ptr", "dt_bias_ptr", "state_ptr", "a_ptr", "b_ptr"), "*fp32") | {"eps": "fp32"}
    for kind in ("*bf16", "*fp32"):
        constants, warps = _config(128, 128)
        names = ("q_ptr", "k_ptr", "v_ptr", "out_ptr", "gate_ptr", "norm_ptr")
        types = dict.fromkeys(names, kind) | ints | floats
        constants |= {"V": 32, "PDL": False}
        yield CompileCase(delta_norm_kernel, signature(delta_norm_kernel, constants, types), constants, warps, 1)
