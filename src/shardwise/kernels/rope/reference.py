"""Rotary embeddings in plain torch: the definition.

Legend: T tokens, N query heads, K kv heads, D head dim, R half of the rotary dims.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch.nn import functional
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shardwise.config import ModelConfig


@dataclass(frozen=True)
class RopeTable:
    """What a model's rotary embedding is made from: a frequency, and the position it follows, for each of R pairs."""

    inverse_R: torch.Tensor  # fp32, radians per position
    axis_R: torch.Tensor  # int64: 0 time, 1 height, 2 width
    scaling: float  # of cosines and sines; not 1 in yarn

    def to(self, device: torch.device) -> "RopeTable":
        return RopeTable(self.inverse_R.to(device), self.axis_R.to(device), self.scaling)


def rope_table(config: ModelConfig) -> RopeTable:
    """The table of `config`, on the CPU. Interleaved mrope: heights take pairs 1, 4, 7 .., widths 2, 5, 8 .."""
    if config.rope["rope_type"] == "default":
        exponents_R = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
        inverse_R, scaling = 1.0 / config.rope["rope_theta"] ** exponents_R, 1.0
    else:
        settings = dict(config.rope)
        settings.setdefault("original_max_position_embeddings", config.max_position_embeddings)
        shim = SimpleNamespace(
            rope_parameters=settings,
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            num_attention_heads=config.query_heads,
            max_position_embeddings=config.max_position_embeddings,
            standardize_rope_params=lambda: None,
        )
        inverse_R, scaling = ROPE_INIT_FUNCTIONS[settings["rope_type"]](shim, torch.device("cpu"))
    axis_R = torch.zeros(config.rotary_dim // 2, dtype=torch.int64)
    for axis in (1, 2):
        axis_R[axis : config.mrope_section[axis] * 3 : 3] = axis
    return RopeTable(inverse_R.float(), axis_R, float(scaling))


def cos_sin(positions_3T: torch.Tensor, table: RopeTable) -> tuple[torch.Tensor, torch.Tensor]:
    """cos_TR and sin_TR in fp32, scaled. Text alone may give its positions once, as [T]."""
    positions_TR = positions_3T[:, None] if positions_3T.dim() == 1 else positions_3T[table.axis_R].T
    angles_TR = positions_TR.float() * table.inverse_R
    cos_TR, sin_TR = angles_TR.cos(), angles_TR.sin()
    return (cos_TR, sin_TR) if table.scaling == 1.0 else (cos_TR * table.scaling, sin_TR * table.scaling)


def qk_norm_rope(
    q_TND: torch.Tensor,
    k_TKD: torch.Tensor,
    q_weight_D: torch.Tensor,
    k_weight_D: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero-centred norm of each head, then the rotation of dims i and R + i for i < R; in the dtypes of q and k."""
    normed = (
        functional.rms_norm(x.float(), weight_D.shape, weight_D.float() + 1, eps)
        for x, weight_D in ((q_TND, q_weight_D), (k_TKD, k_weight_D))
    )
    heads_TAD = torch.cat((*normed,), 1)  # A: both kinds of heads, so that they are rotated in one go
    half = cos_TR.shape[-1]
    first_TAR, second_TAR, rest = heads_TAD.split((half, half, heads_TAD.shape[-1] - 2 * half), -1)
    cos_T1R, sin_T1R = cos_TR[:, None], sin_TR[:, None]
    turned_TAD = torch.cat(
        (first_TAR * cos_T1R - second_TAR * sin_T1R, second_TAR * cos_T1R + first_TAR * sin_T1R, rest), -1
    )
    queries = q_TND.shape[1]
    return turned_TAD[:, :queries].to(q_TND.dtype), turned_TAD[:, queries:].to(k_TKD.dtype)
