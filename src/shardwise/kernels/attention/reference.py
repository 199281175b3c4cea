"""Paged attention in plain torch, in fp32: the definition, and what a CPU runs.

Legend: T tokens of the step, S sequences, N query heads, K kv heads, D head dim, P pages of a sequence, L positions.
Pages are [pages, K, page_tokens, D], in a float type; what they hold times k_scale (v_scale) are the keys (values).
"""

import torch
from torch.nn import functional

from shardwise.kernels.sequences import Sequences

FP8_MAX = 448.0  # of e4m3


def store_kv(
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    kv_slots_T: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Puts the step's keys and values into their slots; FP8 pages get them divided by their scale and clamped."""
    page_tokens = k_pages.shape[2]
    at = (kv_slots_T // page_tokens, slice(None), kv_slots_T % page_tokens)
    for x_TKD, pages, scale in ((k_TKD, k_pages, k_scale), (v_TKD, v_pages, v_scale)):
        if scale != 1.0:
            x_TKD = x_TKD.float() / scale
        if pages.dtype == torch.float8_e4m3fn:  # which torch can copy, but not scatter
            fp8_TKD = x_TKD.float().clamp(-FP8_MAX, FP8_MAX).to(pages.dtype)
            pages.view(torch.uint8)[at] = fp8_TKD.view(torch.uint8)
        else:
            pages[at] = x_TKD.to(pages.dtype)


def paged_attention(
    q_TND: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    seqs: Sequences,
    head_map_N: torch.Tensor,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """out_TND in q's dtype; query t of a sequence sees the first context + t + 1 positions, its own the last of them.

    head_map_N (int32): the kv head that each query head reads. The pages of this step's tokens are stored already.
    """
    out_TND = torch.empty_like(q_TND, memory_format=torch.contiguous_format)
    if not out_TND.numel():
        return out_TND
    heads_N = head_map_N.long()
    batched = seqs.decodes if seqs.decodes > 1 else 0
    if batched:
        out_TND[:batched] = _decodes(q_TND[:batched], k_pages, v_pages, seqs, heads_N, scale * k_scale, v_scale)
    if batched == seqs.count:
        return out_TND
    page_tokens = k_pages.shape[2]
    starts, contexts = seqs.starts_S1.tolist(), seqs.context_S.tolist()
    for s in range(batched, seqs.count):
        start, stop, context = starts[s], starts[s + 1], contexts[s]
        length = context + stop - start
        pages_P = seqs.pages_SP[s, : -(-length // page_tokens)]
        k_NLD, v_NLD = (_gather(pages, pages_P, heads_N)[:, :length] for pages in (k_pages, v_pages))
        q_NTD = q_TND[start:stop].float().transpose(0, 1)
        # SDPA's own causal mask starts at the first key, so that it serves only where there is no context.
        mask_TL = None
        if context and stop - start > 1:
            seen_T = torch.arange(context, length, device=q_TND.device)
            mask_TL = torch.arange(length, device=q_TND.device) <= seen_T[:, None]
        y_NTD = functional.scaled_dot_product_attention(
            q_NTD[None], k_NLD[None], v_NLD[None], mask_TL, is_causal=not context, scale=scale * k_scale
        )[0]
        out_TND[start:stop] = (y_NTD if v_scale == 1.0 else y_NTD * v_scale).transpose(0, 1)
    return out_TND


def _gather(pages: torch.Tensor, pages_P: torch.Tensor, heads_N: torch.Tensor) -> torch.Tensor:
    """The [N, P * page_tokens, D] of one sequence, in fp32, with a head for every query head."""
    if pages.dtype == torch.float8_e4m3fn:
        found_PNtD = pages.view(torch.uint8)[pages_P[:, None], heads_N].view(pages.dtype)
    else:
        found_PNtD = pages[pages_P[:, None], heads_N]
    return found_PNtD.float().transpose(0, 1).flatten(1, 2)


def _decodes(
    q_SND: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    seqs: Sequences,
    heads_N: torch.Tensor,
    scale: float,
    v_scale: float,
) -> torch.Tensor:
    """One query of each of S sequences, in one call: all are padded to the longest."""
    count, page_tokens = q_SND.shape[0], k_pages.shape[2]
    lengths_S1 = seqs.context_S[:count, None] + 1
    longest = seqs.max_length if count == seqs.count else int(lengths_S1.max())
    pages = -(-longest // page_tokens)
    seen_SL = torch.arange(pages * page_tokens, device=q_SND.device) < lengths_S1
    # Past a sequence's end lie page numbers, and in its last page values, that can be anything, NaN too.
    pages_SP = seqs.pages_SP[:count, :pages].masked_fill(~seen_SL[:, ::page_tokens], 0).flatten()
    k_SNLD, v_SNLD = (
        _gather(x, pages_SP, heads_N).unflatten(1, (count, -1)).transpose(0, 1) for x in (k_pages, v_pages)
    )
    hidden_S1L1 = ~seen_SL[:, None, :, None]
    y_SN1D = functional.scaled_dot_product_attention(
        q_SND.float()[:, :, None],
        k_SNLD.masked_fill(hidden_S1L1, 0),
        v_SNLD.masked_fill(hidden_S1L1, 0),
        seen_SL[:, None, None],
        scale=scale,
    )
    return y_SN1D[:, :, 0] * v_scale
