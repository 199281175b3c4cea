"""The norms and rotation of query and key heads, then keys and values to their slots: a composition, in plain torch.

Legend: T tokens, N query heads, K kv heads, D head dim, R half of the rotary dims.
"""

import torch

from shardwise.kernels.attention.reference import store_kv
from shardwise.kernels.rope.reference import qk_norm_rope


def turn_store(
    q_TND: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    q_weight_D: torch.Tensor,
    k_weight_D: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    eps: float,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    kv_slots_T: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Queries as qk_norm_rope returns them [T, N, D]; keys as it returns them, and values, go where store_kv says."""
    q_TND, k_TKD = qk_norm_rope(q_TND, k_TKD, q_weight_D, k_weight_D, cos_TR, sin_TR, eps)
    store_kv(k_TKD, v_TKD, k_pages, v_pages, kv_slots_T, k_scale, v_scale)
    return q_TND
