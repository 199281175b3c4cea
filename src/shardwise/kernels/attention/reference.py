"""Paged attention in plain torch, in fp32: the definition, and what a CPU runs.

Legend: T tokens of the step, S sequences, N query heads, K kv heads, D head dim, P pages of a sequence, L positions.
Pages are [pages, K, page_tokens, D], contiguous, of any float type; keys (values) are what they hold times k_scale
(v_scale).
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
    gate_TND: torch.Tensor | None = None,
) -> torch.Tensor:
    """out_TND in q's dtype; query t of a sequence sees the first context + t + 1 positions, its own the last of them.

    head_map_N (int32): the kv head that each query head reads. The pages of this step's tokens are stored already.
    gate_TND: the output is multiplied by its sigmoid, if there is one.
    """
    out_TND = _attention(q_TND, k_pages, v_pages, seqs, head_map_N, scale, k_scale, v_scale)
    return out_TND if gate_TND is None else out_TND * gate_TND.sigmoid()


def _attention(
    q_TND: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    seqs: Sequences,
    head_map_N: torch.Tensor,
    scale: float,
    k_scale: float,
    v_scale: float,
) -> torch.Tensor:
    """Without a gate."""
    out_TND = torch.empty_like(q_TND, memory_format=torch.contiguous_format)
    if not out_TND.numel():
        return out_TND
    heads_N = head_map_N.long()
    batched = seqs.decodes if seqs.decodes > 1 else 0
    if batched:
        out_TND[:batched] = _decodes(q_TND[:batched], k_pages, v_pages, seqs, heads_N, scale * k_scale, v_scale)
    if batched == seqs.count:
        return out_TND
    kv_heads, page_tokens = k_pages.shape[1:3]
    starts, contexts = seqs.starts_S1.tolist(), seqs.context_S.tolist()
    for s in range(batched, seqs.count):
        start, stop, context = starts[s], starts[s + 1], contexts[s]
        length = context + stop - start
        pages_1P = seqs.pages_SP[s : s + 1, : -(-length // page_tokens)].long()
        rows_1NP = pages_1P[:, None] * kv_heads + heads_N[:, None]
        k_1NLD, v_1NLD = (_rows(pages, rows_1NP, 2)[:, :, :length] for pages in (k_pages, v_pages))
        q_1NTD = q_TND[None, start:stop].float().transpose(1, 2)
        # SDPA's own causal mask starts at the first key, so that it serves only where there is no context.
        mask_TL = None
        if context and stop - start > 1:
            seen_T = torch.arange(context, length, device=q_TND.device)
            mask_TL = torch.arange(length, device=q_TND.device) <= seen_T[:, None]
        y_1NTD = functional.scaled_dot_product_attention(
            q_1NTD, k_1NLD, v_1NLD, mask_TL, is_causal=not context, scale=scale * k_scale
        )
        out_TND[start:stop] = (y_1NTD if v_scale == 1.0 else y_1NTD * v_scale)[0].transpose(0, 1)
    return out_TND


def _rows(pages: torch.Tensor, rows: torch.Tensor, dims: int) -> torch.Tensor:
    """Of pages as a table whose rows are their last `dims` axes: [*rows' shape, positions, D], in fp32; a copy."""
    table = pages.view(torch.uint8) if pages.dtype == torch.float8_e4m3fn else pages  # FP8 can be copied, not indexed
    # index_select copies whole rows; indexing would go element by element.
    found = table.view(-1, pages.shape[2:][-dims:].numel()).index_select(0, rows.flatten())
    return found.view(pages.dtype).view(*rows.shape[:2], -1, pages.shape[3]).float()


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
    (count, _, _), (_, kv_heads, page_tokens, _) = q_SND.shape, k_pages.shape
    lengths_S1 = seqs.context_S[:count, None] + 1
    longest = seqs.max_length if count == seqs.count else int(lengths_S1.max())
    positions_L = torch.arange(longest, device=q_SND.device)
    seen_SL = positions_L < lengths_S1
    # Past a sequence's end lie page numbers and values that can be anything, NaN too: its first position stands in.
    positions_SL = positions_L * seen_SL
    pages_SL = seqs.pages_SP[:count].gather(1, positions_SL // page_tokens).long()
    rows_SL = pages_SL * (kv_heads * page_tokens) + positions_SL % page_tokens
    rows_SNL = rows_SL[:, None] + (heads_N * page_tokens)[:, None]
    y_SN1D = functional.scaled_dot_product_attention(
        q_SND.float()[:, :, None],
        _rows(k_pages, rows_SNL, 1),
        _rows(v_pages, rows_SNL, 1),
        seen_SL[:, None, None],
        scale=scale,
    )
    return y_SN1D[:, :, 0] * v_scale
