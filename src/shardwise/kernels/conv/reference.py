"""Causal depthwise convolution in plain torch: the definition.

Legend: T tokens of the step, S sequences, B decode sequences, L tokens of one prompt chunk, C channels, W taps,
R rows of state.
"""

import torch
from torch.nn import functional as F

from shardwise.kernels.sequences import Sequences


def causal_conv(x_TC: torch.Tensor, weight_CW: torch.Tensor, state_RCW1: torch.Tensor, seqs: Sequences) -> torch.Tensor:
    """y_TC = silu(sum over j of weight[:, j] * the input W - 1 - j tokens ago), in x's dtype, summed in fp32.

    state_RCW1 [rows, C, W - 1] holds the last W - 1 inputs of each request, oldest first. It is read (as zeros where
    the context is 0) and updated in place; to make any chunking of a prompt agree, its dtype must hold x exactly.
    """
    y_TC = torch.empty_like(x_TC)
    if x_TC.numel() == 0:
        return y_TC
    if seqs.decodes:
        _decode(x_TC, weight_CW, state_RCW1, seqs, y_TC)
    if seqs.decodes < seqs.count:
        _prefill(x_TC, weight_CW, state_RCW1, seqs, y_TC)
    return y_TC


def _decode(x_TC: torch.Tensor, weight_CW: torch.Tensor, state_RCW1: torch.Tensor, seqs: Sequences, y_TC: torch.Tensor):
    """One token for each of the first `decodes` sequences, all at once."""
    rows_B, context_B = seqs.state_rows_S[: seqs.decodes].long(), seqs.context_S[: seqs.decodes]
    old_BCW1 = state_RCW1.index_select(0, rows_B).masked_fill_((context_B == 0)[:, None, None], 0)
    window_BCW = torch.cat([old_BCW1.float(), x_TC[: seqs.decodes, :, None].float()], dim=-1)
    y_TC[: seqs.decodes] = F.silu((window_BCW * weight_CW.float()).sum(-1))
    state_RCW1.index_copy_(0, rows_B, window_BCW[:, :, 1:].to(state_RCW1.dtype))


def _prefill(
    x_TC: torch.Tensor, weight_CW: torch.Tensor, state_RCW1: torch.Tensor, seqs: Sequences, y_TC: torch.Tensor
):
    """Prompt chunks one after another; a chunk may be shorter than the window: then old inputs stay in the state."""
    taps = weight_CW.shape[1]
    starts = seqs.starts_S1.tolist()
    rows, context = seqs.state_rows_S.tolist(), seqs.context_S.tolist()
    weight_WC = weight_CW.float().t()
    for s in range(seqs.decodes, seqs.count):
        start, end, state_CW1 = starts[s], starts[s + 1], state_RCW1[rows[s]]
        old_CW1 = torch.zeros_like(state_CW1) if context[s] == 0 else state_CW1
        inputs_LC = torch.cat([old_CW1.t().float(), x_TC[start:end].float()])
        y_LC = inputs_LC[: end - start] * weight_WC[0]
        for j in range(1, taps):
            y_LC.addcmul_(inputs_LC[j : j + end - start], weight_WC[j])
        y_TC[start:end] = F.silu(y_LC)
        state_CW1.copy_(inputs_LC[inputs_LC.shape[0] - (taps - 1) :].t())
