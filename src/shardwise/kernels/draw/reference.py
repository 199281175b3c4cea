"""Tokens drawn by random numbers that are a function of (seed, index of the token, vocabulary id) and of nothing else.

So a seeded request draws the same tokens whatever shares its batch, wherever it is cut off and resumed, and on
whatever device; and noise is needed only for those ids that are still in the running.

Legend: N rows, K ids of each row, L rows of logits, V vocabulary. Of keep_tokens: B tokens, R rows, K turns.
"""

import torch

_LOW = 0xFFFFFFFF
# Two odd multipliers of a 32-bit mixer. As signed numbers: a product with 32 bits then stays within an int64.
_FIRST, _SECOND = 0x21F0AAAD, 0xD35A2D97 - (1 << 32)
_GOLDEN = 0x9E3779B9


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Scramble int64 values of 32 bits, one to one: each input bit flips each output bit about half the time."""
    x = ((x ^ (x >> 16)) * _FIRST) & _LOW
    x = ((x ^ (x >> 15)) * _SECOND) & _LOW
    return x ^ (x >> 15)


def split_seed(seed: int) -> tuple[int, int]:
    """The low and high 32 bits of `seed`, any whole number, modulo 2 ** 64."""
    return seed & _LOW, (seed >> 32) & _LOW


def gumbel(low_N1: torch.Tensor, high_N1: torch.Tensor, index_N1: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise [N, K] in fp32: argmax(log p + noise) draws from p.

    low, high: halves of each row's seed; index: how many tokens it has generated before; ids: vocabulary ids, [N, K]
    or [1, K]. All int64.
    """
    index_N1 = _mix(index_N1 & _LOW)
    first_N1 = _mix(high_N1 ^ _mix(low_N1 ^ index_N1))
    second_N1 = _mix(low_N1 ^ _mix(high_N1 ^ ((index_N1 + _GOLDEN) & _LOW)))
    bits_NK = _mix((_mix(ids_NK ^ first_N1) + second_N1) & _LOW)
    # The winners have small exponentials: log1p keeps 32 bits of resolution there. The clamp keeps the others finite.
    uniform_NK = ((bits_NK.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform_NK.neg_().log1p_().neg_().log_().neg_()


def sort_keys(logits_LV: torch.Tensor) -> torch.Tensor:
    """int64 [L, V], all different in a row: larger for the larger logit, and among equals for the lower id.

    So that the k largest are the same ones on every device and in every batch. The id is V - 1 - (key & 0xffffffff).
    """
    bits_LV = (logits_LV + 0.0).view(torch.int32)  # + 0.0: no negative zero
    ordered_LV = bits_LV ^ ((bits_LV >> 31) & 0x7FFFFFFF)
    reversed_ids_V = torch.arange(logits_LV.shape[-1] - 1, -1, -1, device=logits_LV.device)
    return (ordered_LV.to(torch.int64) << 32) + reversed_ids_V


def largest(logits_LV: torch.Tensor, count: int) -> torch.Tensor:
    """Ids [L, count] of the largest logits, in falling order, the lower id first among equals."""
    keys_LK = sort_keys(logits_LV).topk(count, dim=-1).values
    return logits_LV.shape[-1] - 1 - (keys_LK & 0xFFFFFFFF)


def likeliest(logits_LV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's largest logit, fp32 [L] (NaN if any is), and its id, int64 [L]: of equals the lowest.

    The id is -1 where the largest is not finite.
    """
    values_L, ids_L = logits_LV.max(dim=-1)
    return values_L, torch.where(values_L.isfinite(), ids_L, -1)


def keep_tokens(
    tokens_B: torch.Tensor,
    rows_B: torch.Tensor,
    last_tokens_R: torch.Tensor,
    told_KB: torch.Tensor,
    turn_1: torch.Tensor,
) -> None:
    """Store tokens (int64) as the last of their rows (int32), and as the row of `told` that `turn` (int32) says.

    Of several tokens for one row, any stays. told: int64, perhaps of the host, pinned where the others are a GPU's.
    """
    last_tokens_R[rows_B.long()] = tokens_B
    told_KB[int(turn_1)] = tokens_B


def draw(
    logits_LV: torch.Tensor,
    rows_N: torch.Tensor,
    largest_L: torch.Tensor,
    temperature_N: torch.Tensor,
    seeds_N3: torch.Tensor,
) -> torch.Tensor:
    """int64 [N]: a token from each of `rows_N` (int64) of fp32 logits, by softmax(logits / temperature).

    largest_L: each row's largest logit. seeds: low and high half, and index, as for `gumbel`. Of equals the lowest.
    """
    low_N1, high_N1, index_N1 = seeds_N3.split(1, dim=1)
    logits_NV = logits_LV if len(rows_N) == len(logits_LV) else logits_LV[rows_N]  # rows are in order
    ids_1V = torch.arange(logits_NV.shape[-1], device=logits_NV.device).unsqueeze(0)
    scaled_NV = (logits_NV - largest_L[rows_N].unsqueeze(1)) / temperature_N.unsqueeze(1)
    return (scaled_NV + gumbel(low_N1, high_N1, index_N1, ids_1V)).argmax(dim=-1)


def draw_among(
    logits_LV: torch.Tensor, rows_N: torch.Tensor, candidates: int, floats_N3: torch.Tensor, ints_N4: torch.Tensor
) -> torch.Tensor:
    """int64 [N]: as `draw`, from those of each row's `candidates` likeliest that its parameters keep.

    floats: temperature, top_p, logarithm of min_p. ints: top_k (0: any), low and high half of the seed, index.
    """
    logits_NV = logits_LV if len(rows_N) == len(logits_LV) else logits_LV[rows_N]  # rows are in order
    temperature_N1, top_p_N1, log_min_p_N1 = floats_N3.split(1, dim=1)
    top_k_N1, low_N1, high_N1, index_N1 = ints_N4.split(1, dim=1)
    ids_NK = largest(logits_NV, candidates)
    values_NK = logits_NV.gather(1, ids_NK)
    values_NK = (values_NK - values_NK[:, :1]) / temperature_N1
    keep_NK = _keep(values_NK, top_k_N1, top_p_N1, log_min_p_N1)
    score_NK = (values_NK + gumbel(low_N1, high_N1, index_N1, ids_NK)).masked_fill(~keep_NK, float("-inf"))
    return ids_NK.gather(1, score_NK.argmax(dim=-1, keepdim=True)).squeeze(1)


def _keep(values_NK: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, log_min_p: torch.Tensor) -> torch.Tensor:
    """Which candidates, likeliest first, are left. The first always is.

    In fp64, so that a different width of the batch (another order of additions) does not move the cut of top_p.
    """
    rank_K = torch.arange(values_NK.shape[1], device=values_NK.device)
    keep_NK = (values_NK >= log_min_p) & ((top_k == 0) | (rank_K < top_k))
    p_NK = values_NK.double().exp().masked_fill(~keep_NK, 0)
    before_NK = p_NK.cumsum(dim=1) - p_NK
    return keep_NK & ((before_NK < top_p * p_NK.sum(dim=1, keepdim=True)) | (top_p >= 1))
