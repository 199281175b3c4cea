"""The HF model, made fit for training on packed rows.

Five functions of transformers' qwen3_5_moe are replaced by equivalent ones which know where a document of a packed row
begins, or which do with a few large GPU operations what the originals do in Python loops. The weights and the results
are the same (test_fast_model.py compares them); inference later uses the unchanged HF model.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as hf

FORGET = -60.0  # log of the decay that wipes the recurrent state at the start of a document


def causal_conv(
    hidden_states: Tensor, weight: Tensor, bias: None = None, *, position_in_doc: Tensor, **_: Any
) -> Tensor:
    """Depthwise causal convolution over (batch, channels, time) that does not look into the document before."""
    x, weight, width = hidden_states.transpose(1, 2), weight.to(hidden_states.dtype), weight.shape[-1]
    out = x * weight[:, -1]
    for back in range(1, width):
        shifted = F.pad(x, (0, 0, back, 0))[:, :-back]
        same_document = (position_in_doc >= back)[..., None]
        out = out + shifted * same_document * weight[:, width - 1 - back]
    return F.silu(out).transpose(1, 2)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    position_in_doc: Tensor,
    chunk_size: int = 64,
    **_: Any,
) -> tuple[Tensor, None]:
    """The chunked gated delta rule (as in HF, whose comments explain it), in fp32, starting anew with each document."""
    with torch.autocast(query.device.type, enabled=False):
        return _gated_delta_rule(query, key, value, g, beta, position_in_doc, chunk_size).to(query.dtype), None


def _gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, position_in_doc: Tensor, chunk: int
) -> Tensor:
    batch, length, heads, size = value.shape
    repeat = heads // key.shape[2]
    g = g.float() + FORGET * (position_in_doc == 0)[..., None]

    def chunked(x: Tensor) -> Tensor:  # (batch, time, heads, ...) -> (batch, heads, chunks, chunk, ...)
        x = F.pad(x.float().transpose(1, 2).contiguous(), (0, 0) * (x.ndim - 3) + (0, -length % chunk))
        return x.unflatten(2, (-1, chunk))

    query, key = (chunked(hf.l2norm(x.float()).repeat_interleave(repeat, dim=2)) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    value, beta, decay = chunked(value), chunked(beta)[..., None], chunked(g).cumsum(-1)
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=query.device).triu(1)
    pairwise = (decay[..., :, None] - decay[..., None, :]).masked_fill(future, float("-inf")).exp()
    start, rest = decay.exp()[..., None], (decay[..., -1:] - decay).exp()[..., None]

    system = (beta * key) @ key.transpose(-1, -2) * pairwise
    right = torch.cat([value * beta, key * beta * start], dim=-1)
    new_value, decayed_key = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [size, key.shape[-1]], dim=-1
    )
    attention = query @ key.transpose(-1, -2) * pairwise

    state, out = query.new_zeros(batch, heads, key.shape[-1], size), []
    parts = (new_value, decayed_key, query * start, attention, (key * rest).mT, decay[..., -1:, None].exp())
    for v, k, q, a, kr, d in zip(*(x.unbind(2) for x in parts), strict=True):
        v = v - k @ state
        out.append(q @ state + a @ v)
        state = state * d + kr @ v
    return torch.stack(out, 2).flatten(2, 3)[:, :, :length].transpose(1, 2)


def experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """All experts on all tokens, weighted with zero where not chosen: two large products instead of a loop."""
    n = len(hidden_states)
    weight = torch.zeros(n, self.num_experts, dtype=top_k_weights.dtype, device=hidden_states.device)
    weight = weight.scatter(1, top_k_index, top_k_weights)
    gate, up = F.linear(hidden_states, self.gate_up_proj.flatten(0, 1)).view(n, self.num_experts, -1).chunk(2, dim=-1)
    inner = self.act_fn(gate) * up * weight[..., None]
    return inner.flatten(1) @ self.down_proj.transpose(1, 2).flatten(0, 1).to(inner.dtype)


def vision_attention(
    self: Any,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    image: Tensor,
    slot: Tensor,
    layout: tuple[int, int],
    **_: Any,
) -> Tensor:
    """Attention within each picture, all pictures padded to the largest; `layout` is their number and that size."""
    n = len(hidden_states)
    images, slots = layout
    q, k, v = self.qkv(hidden_states).view(n, 3, self.num_heads, -1).unbind(1)
    q, k = hf.apply_rotary_pos_emb_vision(q, k, *position_embeddings)
    q, k, v = (x.new_zeros(images, slots, *x.shape[1:]).index_put((image, slot), x).transpose(1, 2) for x in (q, k, v))
    filled = torch.zeros(images, 1, 1, slots, dtype=torch.bool, device=q.device)
    filled[image, 0, 0, slot] = True
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=filled, scale=self.scaling)
    return self.proj(out.transpose(1, 2)[image, slot].flatten(1))


def patch_embed(self: Any, pixels: Tensor) -> Tensor:
    """The patches do not overlap, so that the 3-d convolution is one matrix product."""
    return F.linear(pixels.flatten(1), self.proj.weight.flatten(1), self.proj.bias)


@contextmanager
def installed() -> Iterator[None]:
    """Within, HF's model computes with the functions above."""
    replaced = (
        (hf, "causal_conv1d_fn", causal_conv),
        (hf, "torch_chunk_gated_delta_rule", gated_delta_rule),
        (hf.Qwen3_5MoeExperts, "forward", experts),
        (hf.Qwen3_5MoeVisionAttention, "forward", vision_attention),
        (hf.Qwen3_5MoeVisionPatchEmbed, "forward", patch_embed),
    )
    with ExitStack() as stack:
        for owner, name, function in replaced:
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


def document_mask(position: Tensor) -> Tensor:
    """(batch, 1, time, time): may attend to earlier tokens of the same document."""
    document = (position == 0).cumsum(1)
    same = document[:, :, None] == document[:, None, :]
    return (same & torch.ones_like(same[0]).tril())[:, None]


def hidden_states(model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The final hidden states (after the last norm) and the token embeddings of a batch from packing.py."""
    embeds = model.model.language_model.embed_tokens(batch["ids"])
    pixels = (batch["pixels"].float() / 127.5 - 1)[:, :, None].expand(-1, -1, 2, -1, -1)
    features = model.model.visual(
        pixels,
        grid_thw=None,
        position_ids=batch["coordinates"],
        cu_seqlens=batch["image"],
        interp_indices=batch["interpolation_index"],
        interp_weights=batch["interpolation_weight"],
        image=batch["image"],
        slot=batch["slot"],
        layout=batch["layout"],
    ).pooler_output
    is_image = (batch["ids"] == model.config.image_token_id)[..., None]
    embeds = embeds.masked_scatter(is_image, features.to(embeds.dtype))
    masks = {"full_attention": document_mask(batch["position"]), "linear_attention": None}
    hidden = model.model.language_model(
        inputs_embeds=embeds,
        position_ids=batch["rope"],
        attention_mask=masks,
        position_in_doc=batch["position"],
        use_cache=False,
    ).last_hidden_state
    return hidden, embeds


class MTP(nn.Module):
    """The extra layer that guesses the token after the next one; its names are those of the checkpoint under `mtp.`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        text = model.config.text_config
        size, last = text.hidden_size, text.num_hidden_layers - 1  # the last layer is one of full attention
        self.pre_fc_norm_embedding = hf.Qwen3_5MoeRMSNorm(size, text.rms_norm_eps)
        self.pre_fc_norm_hidden = hf.Qwen3_5MoeRMSNorm(size, text.rms_norm_eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([hf.Qwen3_5MoeDecoderLayer(text, last)])
        self.norm = hf.Qwen3_5MoeRMSNorm(size, text.rms_norm_eps)

    def start_from(self, model: Any) -> None:
        """A good start is the last layer of the model itself, fed with the sum of its two inputs."""
        one = torch.eye(self.fc.out_features, device=self.fc.weight.device)
        self.fc.weight.data.copy_(torch.cat([one, one], dim=1))
        self.layers[0].load_state_dict(model.model.language_model.layers[-1].state_dict())
        self.norm.load_state_dict(model.model.language_model.norm.state_dict())

    def forward(self, next_embeds: Tensor, hidden: Tensor, cos_sin: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Hidden states of the guesses, from the embedding of the next token and the hidden state of this one."""
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(next_embeds), self.pre_fc_norm_hidden(hidden)], dim=-1))
        return self.norm(self.layers[0](x, position_embeddings=cos_sin, attention_mask=mask))
