"""The gated delta rule in Triton: decode.py has the kernel for single tokens, prefill.py those for chunks of prompts.

Legend: T tokens of the step, S sequences, G key heads, V value heads, K key width (Dk), D value width (Dv), R rows of
state.
"""

from collections.abc import Iterator

import torch

from shardwise.kernels.cases import CompileCase
from shardwise.kernels.delta import decode as decoding
from shardwise.kernels.delta import prefill as filling
from shardwise.kernels.sequences import Sequences


def gated_delta(
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
) -> torch.Tensor:
    """As reference.gated_delta. Each token's q, k, v, a and b may be slices of a wider row; state is contiguous."""
    out_TVD = torch.empty(v_TVD.shape, dtype=v_TVD.dtype, device=v_TVD.device)
    if out_TVD.numel() == 0:
        return out_TVD
    inputs = [packed for x in (q_TGD, k_TGD, v_TVD, a_TV, b_TV) for packed in _packed(x)]
    gating = (A_log_V, dt_bias_V, key_map_V)
    if seqs.decodes:
        decoding.decode(inputs, gating, state_RVKD, seqs, out_TVD)
    if seqs.decodes < seqs.count:
        filling.prefill(inputs, gating, state_RVKD, seqs, out_TVD)
    return out_TVD


def _packed(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """x, or a copy where a token's part of it is not contiguous, and its stride from token to token, in elements."""
    dense, stride = True, 1
    for axis in range(x.dim() - 1, 0, -1):
        dense &= x.shape[axis] == 1 or x.stride(axis) == stride
        stride *= x.shape[axis]
    x = x if dense else x.contiguous()
    return x, x.stride(0)


def compile_cases() -> Iterator[CompileCase]:
    """All kernels of this op, for the heads of the family."""
    yield from decoding.compile_cases()
    yield from filling.compile_cases()
