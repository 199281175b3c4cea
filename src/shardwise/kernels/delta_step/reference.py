"""The gated delta rule, then the norm of each head's output, gated: a composition, in plain torch.

Legend: T tokens, G key heads, V value heads, K key width, D value width, R rows of state.
"""

import torch

from shardwise.kernels.delta.reference import gated_delta
from shardwise.kernels.norm.reference import gated_rms_norm
from shardwise.kernels.sequences import Sequences


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
) -> torch.Tensor:
    """norm_D * norm(gated_delta(..)) * silu(gate) -> [T, V, D] in v's type; the state moves on."""
    out_TVD = gated_delta(
        q_TGD, k_TGD, v_TVD, a_TV, b_TV, A_log_V, dt_bias_V, key_map_V, state_RVKD, seqs
    )  # fmt: skip
    return gated_rms_norm(out_TVD, gate_TVD, norm_D, eps)
