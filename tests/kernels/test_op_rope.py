"""Rotary embeddings: the table and the rotation against transformers' modules, Triton against the reference."""

import pytest
import torch
from transformers import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeRMSNorm,
    Qwen3_5MoeTextRotaryEmbedding,
    apply_rotary_pos_emb,
)

from shardwise.config import parse_model_config
from shardwise.kernels.rope import cos_sin, reference, rope_table
from shardwise.kernels.rope import triton as fast

BOTH = pytest.mark.parametrize("impl", [reference, fast], ids=["reference", "triton"])
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn_scaled": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.5,
    },
}


def rope_settings(kind: str) -> dict:
    base = {"rope_theta": 1e6, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2], "mrope_interleaved": True}
    return base | ROPES[kind]


def table_of(rope: dict):
    raw = {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "max_position_embeddings": 4096,
        "rope_parameters": rope,
    }  # fmt: skip
    return rope_table(parse_model_config(raw))


def theirs(rope: dict) -> Qwen3_5MoeTextRotaryEmbedding:
    text = Qwen3_5MoeTextConfig(head_dim=64, rope_parameters=dict(rope), max_position_embeddings=4096)
    return Qwen3_5MoeTextRotaryEmbedding(text)


@pytest.mark.parametrize("kind", ROPES)
def test_cosines_and_sines_are_those_of_transformers(kind):
    rope = rope_settings(kind)
    positions_3T = torch.randint(0, 100_000, (3, 40), generator=torch.Generator().manual_seed(0))
    cos, sin = theirs(rope)(torch.zeros(1), positions_3T[:, None])
    cos_TR, sin_TR = cos_sin(positions_3T, table_of(rope))
    torch.testing.assert_close(cos_TR, cos[0, :, :8], atol=0, rtol=0)
    torch.testing.assert_close(sin_TR, sin[0, :, :8], atol=0, rtol=0)


def test_positions_of_text_may_be_given_once():
    positions_T = torch.tensor([0, 5, 70_000])
    table = table_of(rope_settings("yarn"))
    once, thrice = cos_sin(positions_T, table), cos_sin(positions_T.expand(3, -1), table)
    assert all(torch.equal(a, b) for a, b in zip(once, thrice, strict=True))


@BOTH
@pytest.mark.parametrize("heads", [(6, 2), (1, 1), (5, 0), (0, 3), (0, 0)])
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.usefixtures("poison")
def test_norm_and_rotation_are_those_of_transformers(impl, heads, tokens, device):
    """Of queries that are a view of queries and gates, as the projection gives them."""
    rope = rope_settings("yarn")
    make = torch.Generator().manual_seed(tokens)
    q_norm, k_norm = (Qwen3_5MoeRMSNorm(64).requires_grad_(False) for _ in range(2))
    for norm in (q_norm, k_norm):
        norm.weight.normal_(generator=make)
    wide = torch.randn(tokens, heads[0], 128, generator=make).to(device)
    q, k = wide[..., :64], torch.randn(tokens, heads[1], 64, generator=make).to(device)
    positions_3T = torch.randint(0, 4096, (3, tokens), generator=make)
    cos, sin = theirs(rope)(torch.zeros(1), positions_3T[:, None])
    expected = apply_rotary_pos_emb(q_norm(q.cpu())[None], k_norm(k.cpu())[None], cos, sin, 2)
    angles = cos_sin(positions_3T.to(device), table_of(rope).to(device))
    got = impl.qk_norm_rope(q, k, q_norm.weight.to(device), k_norm.weight.to(device), *angles, 1e-6)
    for ours, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), wanted[0])


@pytest.mark.parametrize(("dim", "half"), [(48, 5), (64, 32), (80, 10)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.usefixtures("poison")
def test_triton_equals_the_reference_at_odd_sizes(dim, half, dtype, device):
    make = torch.Generator().manual_seed(dim)
    q, k = (torch.randn(3, n, dim, generator=make).to(device, dtype) for n in (5, 3))
    weights = [torch.randn(dim, generator=make).to(device, dtype) for _ in range(2)]
    angles = [torch.randn(3, half, generator=make).to(device) for _ in range(2)]
    got, expected = (impl.qk_norm_rope(q, k, *weights, *angles, 1e-6) for impl in (fast, reference))
    for ours, wanted in zip(got, expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, wanted, atol=1e-5 if dtype == torch.float32 else 2e-3, rtol=2e-3)
