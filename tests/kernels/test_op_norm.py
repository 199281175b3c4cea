"""Norms: the reference against transformers' modules and a formula, Triton against the reference."""
# pyright: reportCallIssue=false

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from shardwise.kernels.norm import reference
from shardwise.kernels.norm import triton as fast

BOTH = pytest.mark.parametrize("impl", [reference, fast], ids=["reference", "triton"])
SHAPES = [(0, 8), (1, 1), (3, 100), (9, 128), (2, 2000), (0, 4, 16), (3, 0, 16), (2, 5, 48), (17,)]
EPS = 1e-6


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@BOTH
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("poison")
def test_rms_norm_is_that_of_transformers(impl, shape, device):
    module = Qwen3_5RMSNorm(shape[-1], EPS).requires_grad_(False)
    module.weight.copy_(randn(shape[-1]))
    x = randn(*shape)
    got = impl.rms_norm(x.to(device), module.weight.to(device), EPS)
    torch.testing.assert_close(got.cpu(), module(x))


@BOTH
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("poison")
def test_add_rms_norm_norms_the_sum_and_gives_it(impl, shape, device):
    x, residual, weight = randn(*shape).to(device), randn(*shape).flip(0).to(device) * 3, randn(shape[-1]).to(device)
    kept = residual.clone()
    normed, total = impl.add_rms_norm(x, residual, weight, EPS)
    torch.testing.assert_close(total, x + residual, atol=0, rtol=0)
    torch.testing.assert_close(normed, reference.rms_norm(x + residual, weight, EPS))
    assert torch.equal(residual, kept)


@BOTH
@pytest.mark.parametrize("shape", [(1, 3, 100), (4, 2, 128), (2, 0, 8), (3, 2, 5, 48)])
@pytest.mark.usefixtures("poison")
def test_parts_are_added_before_the_residual(impl, shape, device):
    parts, residual, weight = randn(*shape).to(device), randn(*shape[1:]).to(device), randn(shape[-1]).to(device)
    normed, total = impl.add_rms_norm(parts, residual, weight, EPS)
    torch.testing.assert_close(total, parts.sum(0) + residual)
    torch.testing.assert_close(normed, reference.rms_norm(total, weight, EPS))


@BOTH
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if len(shape) > 1])
@pytest.mark.usefixtures("poison")
def test_gated_rms_norm_is_that_of_transformers(impl, shape, device):
    module = Qwen3_5RMSNormGated(shape[-1], EPS).requires_grad_(False)
    module.weight.copy_(randn(shape[-1]))
    x, gate = randn(*shape), randn(*shape).flip(0) * 4
    got = impl.gated_rms_norm(x.to(device), gate.to(device), module.weight.to(device), EPS)
    torch.testing.assert_close(got.cpu(), module(x, gate))


@BOTH
def test_inputs_may_be_views_of_a_wider_tensor(impl, device):
    wide = randn(4, 3, 96).to(device)
    x, gate, weight = wide[..., :32], wide[..., 64:], randn(32).to(device)
    got = impl.gated_rms_norm(x, gate, weight, EPS)
    torch.testing.assert_close(got, reference.gated_rms_norm(x.contiguous(), gate.contiguous(), weight, EPS))
    flat = wide.flatten(1)
    rows = flat[:, 5:105], flat[:, 105:205], randn(100).to(device)
    got = impl.add_rms_norm(*rows, EPS)
    torch.testing.assert_close(got, reference.add_rms_norm(*(x.contiguous() for x in rows), EPS))
    turned = wide.transpose(0, 2)
    torch.testing.assert_close(
        impl.rms_norm(turned, randn(4).to(device), EPS),
        reference.rms_norm(turned.contiguous(), randn(4).to(device), EPS),
    )


@pytest.mark.parametrize("kept", [torch.float16, torch.float32])
@pytest.mark.usefixtures("poison")
def test_half_precision_is_rounded_once(kept, device):
    """All is fp32 inside, and the result has the weight's dtype; a residual may be kept in fp32."""
    x, residual, weight = randn(3, 130).to(device).half(), randn(4, 130)[:3].to(device, kept), randn(130).to(device)
    for impl in (reference, fast):
        normed, total = impl.add_rms_norm(x, residual, weight.half(), EPS)
        torch.testing.assert_close(total, (x.float() + residual.float()).to(kept), atol=0, rtol=0)
        exact = reference.rms_norm(total.float(), weight.half().float(), EPS)
        torch.testing.assert_close(normed, exact.half(), atol=0, rtol=1e-3)
        torch.testing.assert_close(impl.rms_norm(total, weight.half(), EPS), normed, atol=0, rtol=0)
        gated = impl.gated_rms_norm(x[None], x[None], weight, EPS)
        assert gated.dtype == torch.float16
        exact = reference.gated_rms_norm(x[None].float(), x[None].float(), weight, EPS)
        torch.testing.assert_close(gated, exact.half(), atol=1e-7, rtol=1e-3)
