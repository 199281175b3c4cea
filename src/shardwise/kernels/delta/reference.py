"""The gated delta rule in plain torch: the definition token by token, one batched step for decodes, chunks for prompts.

For each value head, with state S [Dk, Dv]:  S = exp(g) S;  S = S + k (beta (v - k S));  out = q S.

Legend: T tokens of the step, S sequences, B decode sequences, L tokens of one prompt chunk, N blocks of M tokens of it,
G key heads, V value heads, K key width (Dk), D value width (Dv), R rows of state.
"""

import torch
from torch.nn import functional as F

from shardwise.kernels.sequences import Sequences

BLOCK_TOKENS = 64
NORM_EPS = 1e-6


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
    """out_TVD [T, V, Dv] in v's dtype, computed in fp32; g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b).

    q_TGD, k_TGD [T, G, Dk] are l2-normalised here (q also divided by sqrt(Dk)); key_map_V (int32) is the local key head
    of each value head. state_RVKD [rows, V, Dk, Dv] fp32 is read (zeros where the context is 0) and updated in place.
    """
    out_TVD = torch.empty_like(v_TVD)
    if v_TVD.numel() == 0:
        return out_TVD
    q_TVK, k_TVK, g_TV, beta_TV = prepare(q_TGD, k_TGD, a_TV, b_TV, A_log_V, dt_bias_V, key_map_V)
    if seqs.decodes:
        ahead = slice(0, seqs.decodes)
        rows_B, context_B = seqs.state_rows_S[ahead].long(), seqs.context_S[ahead]
        state_BVKD = state_RVKD.index_select(0, rows_B).masked_fill_((context_B == 0)[:, None, None, None], 0)
        out_TVD[ahead] = step(q_TVK[ahead], k_TVK[ahead], v_TVD[ahead], g_TV[ahead], beta_TV[ahead], state_BVKD)
        state_RVKD.index_copy_(0, rows_B, state_BVKD)
    if seqs.decodes < seqs.count:
        starts, rows = seqs.starts_S1.tolist(), seqs.state_rows_S.tolist()
        context = seqs.context_S.tolist()
        for s in range(seqs.decodes, seqs.count):
            part, state_VKD = slice(starts[s], starts[s + 1]), state_RVKD[rows[s]]
            if context[s] == 0:
                state_VKD.zero_()
            if starts[s] < starts[s + 1]:
                gates = g_TV[part], beta_TV[part]
                out_TVD[part] = chunked(q_TVK[part], k_TVK[part], v_TVD[part], *gates, state_VKD)
    return out_TVD


def prepare(
    q_TGD: torch.Tensor,
    k_TGD: torch.Tensor,
    a_TV: torch.Tensor,
    b_TV: torch.Tensor,
    A_log_V: torch.Tensor,
    dt_bias_V: torch.Tensor,
    key_map_V: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q_TVK, k_TVK (normalised, q scaled, spread over value heads), g_TV (log of the decay) and beta_TV, in fp32."""
    both_2TGD = torch.stack([q_TGD, k_TGD]).float()
    both_2TGD *= torch.rsqrt(both_2TGD.square().sum(-1, keepdim=True) + NORM_EPS)
    q_TVK, k_TVK = both_2TGD.index_select(2, key_map_V).unbind(0)
    g_TV = -A_log_V.float().exp() * F.softplus(a_TV.float() + dt_bias_V.float())
    return q_TVK * q_TGD.shape[-1] ** -0.5, k_TVK, g_TV, b_TV.float().sigmoid()


def step(
    q_BVK: torch.Tensor,
    k_BVK: torch.Tensor,
    v_BVD: torch.Tensor,
    g_BV: torch.Tensor,
    beta_BV: torch.Tensor,
    state_BVKD: torch.Tensor,
) -> torch.Tensor:
    """One token of each of B sequences: out_BVD in fp32; the state is updated in place."""
    state_BVKD *= g_BV.exp()[..., None, None]
    seen_BV1D = k_BVK[:, :, None] @ state_BVKD
    delta_BV1D = (v_BVD.float()[:, :, None] - seen_BV1D) * beta_BV[..., None, None]
    state_BVKD.addcmul_(k_BVK[..., None], delta_BV1D)
    return (q_BVK[:, :, None] @ state_BVKD)[:, :, 0]


def recurrent(
    q_LVK: torch.Tensor,
    k_LVK: torch.Tensor,
    v_LVD: torch.Tensor,
    g_LV: torch.Tensor,
    beta_LV: torch.Tensor,
    state_VKD: torch.Tensor,
) -> torch.Tensor:
    """The rule token by token, as `chunked` must have it: out_LVD in fp32; the state is updated in place."""
    out_LVD = torch.empty_like(v_LVD, dtype=torch.float32)
    for t in range(v_LVD.shape[0]):
        one = slice(t, t + 1)
        out_LVD[one] = step(q_LVK[one], k_LVK[one], v_LVD[one], g_LV[one], beta_LV[one], state_VKD[None])
    return out_LVD


def chunked(
    q_LVK: torch.Tensor,
    k_LVK: torch.Tensor,
    v_LVD: torch.Tensor,
    g_LV: torch.Tensor,
    beta_LV: torch.Tensor,
    state_VKD: torch.Tensor,
) -> torch.Tensor:
    """The same by blocks of up to 64 tokens, each a few matrix products: out_LVD in fp32; state updated in place.

    Inside a block, with decay D[i, j] = exp(g[j + 1] + ... + g[i]) for i >= j, the updates delta of its tokens solve
    (1 + tril(beta k k^T D, -1)) delta = beta (v - D0 k S), where D0 is the decay since the block's start: a unit lower
    triangular system whose right sides (the WY form's u and w) do not depend on the carried state S.
    """
    length = v_LVD.shape[0]
    blocks = -(-length // BLOCK_TOKENS)
    tokens = -(-length // blocks)

    def split(x: torch.Tensor) -> torch.Tensor:
        x = F.pad(x.float(), (0, 0) * (x.dim() - 1) + (0, blocks * tokens - length))
        return x.unflatten(0, (blocks, tokens)).movedim(2, 1)

    q_NVMK, k_NVMK, v_NVMD, g_NVM, beta_NVM = map(split, (q_LVK, k_LVK, v_LVD, g_LV, beta_LV))
    decay_NVMM = _decays(g_NVM)
    since_NVM1 = g_NVM.cumsum(-1).exp()[..., None]
    until_NVM1 = decay_NVMM[..., -1, :, None]

    scaled_NVMK = k_NVMK * beta_NVM[..., None]
    lower_NVMM = (scaled_NVMK @ k_NVMK.mT) * decay_NVMM
    sides_NVMX = torch.cat([v_NVMD * beta_NVM[..., None], scaled_NVMK * since_NVM1], dim=-1)
    # Entries on and above the diagonal are not read.
    solved_NVMX = torch.linalg.solve_triangular(lower_NVMM, sides_NVMX, upper=False, unitriangular=True)
    u_NVMD, w_NVMK = solved_NVMX.split([v_NVMD.shape[-1], k_NVMK.shape[-1]], dim=-1)

    scores_NVMM = (q_NVMK @ k_NVMK.mT) * decay_NVMM
    queries_NVMK, keys_NVMK = q_NVMK * since_NVM1, k_NVMK * until_NVM1
    out_NVMD = torch.empty_like(v_NVMD)
    for n in range(blocks):
        delta_VMD = torch.baddbmm(u_NVMD[n], w_NVMK[n], state_VKD, alpha=-1)
        out_NVMD[n] = torch.baddbmm(scores_NVMM[n] @ delta_VMD, queries_NVMK[n], state_VKD)
        state_VKD *= since_NVM1[n, :, -1:]
        state_VKD.baddbmm_(keys_NVMK[n].mT, delta_VMD)
    return out_NVMD.movedim(1, 2).flatten(0, 1)[:length]


def _decays(g_NVM: torch.Tensor) -> torch.Tensor:
    """exp(g[j + 1] + ... + g[i]) at [i, j] for i >= j, else 0.

    Summed anew for every j: differences of one running sum would lose all digits behind a strong decay, and be NaN
    where it underflows to -inf.
    """
    tokens = g_NVM.shape[-1]
    lower_MM = torch.ones(tokens, tokens, dtype=torch.bool, device=g_NVM.device).tril(-1)
    terms_NVMM = g_NVM[..., None].expand(*g_NVM.shape, tokens).masked_fill(~lower_MM, 0)
    return terms_NVMM.cumsum(-2).exp().tril()
