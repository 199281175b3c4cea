"""Which tokens can be among the likeliest: bounds of logits from a copy of the head in 8 bits.

A row w of the head is kept beside it as whole numbers q and one scale s. By Cauchy and Schwarz, w x lies within
|w - s q| |x| of s q x, so that a token whose upper bound is below the `keep`-th largest lower bound is not among the
`keep` likeliest; the others' logits are computed from the head itself. Nothing is approximated.

Legend: L rows with logits, H hidden, V rows of the head.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import linear

CODE_MAX = 127
CHUNK_ROWS = 8192
MARGIN = 1.01  # bounds are wider by this, and by ROUNDING of |w| |x|: more than fp32 rounds
ROUNDING = 1e-5
LOOSEST = 0.03  # mean error of rows by their norm; normally distributed weights have 0.008, and lists of some 30 ids


class Shortlist(NamedTuple):
    """A copy of a head. codes_VH: int8; sizes_V3: fp32, of a row the scale, the bound of |w - s q|, and |s q|."""

    codes_VH: torch.Tensor
    sizes_V3: torch.Tensor

    @property
    def sharp(self) -> bool:
        """Whether bounds are narrow enough for short lists; not with a few weights much larger than all others."""
        _, error_V, norm_V = self.sizes_V3.unbind(-1)
        return bool((error_V / norm_V.clamp(min=1e-30)).clamp(max=1).nan_to_num(1).mean() <= LOOSEST)


def shortlist_bytes(rows: int, hidden: int) -> int:
    """What the copy of a head takes."""
    return rows * (hidden + 3 * 4)


@torch.inference_mode()
def make_shortlist(weight_VH: torch.Tensor) -> Shortlist:
    """The copy of `weight_VH`, a float tensor, on its device. Rows that are not finite get bounds that are not."""
    rows, hidden = weight_VH.shape
    codes_VH = torch.empty((rows, hidden), dtype=torch.int8, device=weight_VH.device)
    sizes_V3 = torch.empty((rows, 3), dtype=torch.float32, device=weight_VH.device)
    for first in range(0, rows, CHUNK_ROWS):
        part = slice(first, first + CHUNK_ROWS)
        w_CH = weight_VH[part].float()
        scale_C1 = w_CH.abs().amax(-1, keepdim=True) / CODE_MAX
        unit_CH = w_CH / scale_C1.where(scale_C1 > 0, 1.0)
        q_CH = unit_CH.round().clamp(-CODE_MAX, CODE_MAX)
        codes_VH[part] = q_CH.nan_to_num().to(torch.int8)
        # In units of the scale, whose squares are fp32 whatever size the weights have.
        copy_C, error_C = q_CH.norm(dim=-1), (unit_CH - q_CH).norm(dim=-1)
        sizes_C3 = torch.stack((torch.ones_like(copy_C), error_C * MARGIN + copy_C * ROUNDING, copy_C * MARGIN), -1)
        sizes_V3[part] = sizes_C3 * scale_C1
    return Shortlist(codes_VH, sizes_V3)


def shortlist_logits(x_LH: torch.Tensor, weight_VH: torch.Tensor, shortlist: Shortlist, keep: int) -> torch.Tensor:
    """Logits [L, V] in fp32: those of each row that can be among its `keep` largest, minus infinity for the others.

    keep: 1 or more. A row with an input that is not finite, or under a weight that is not, has NaN for its logits, or
    for those of that weight.
    """
    x_LH, (scale_V, error_V, _) = x_LH.float(), shortlist.sizes_V3.unbind(-1)
    about_LV = linear(x_LH, shortlist.codes_VH.float()) * scale_V
    off_LV = x_LH.norm(dim=-1, keepdim=True) * error_V
    lower_LV, upper_LV = (about_LV - off_LV).nan_to_num(nan=-torch.inf), about_LV + off_LV
    least_L1 = lower_LV.topk(min(keep, lower_LV.shape[1]), -1).values[:, -1:]
    logits_LV = linear(x_LH, weight_VH.float()).where(upper_LV >= least_L1, -torch.inf)
    return logits_LV.where(upper_LV.isfinite(), torch.nan)
