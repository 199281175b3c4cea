"""Norm, rotation and storing in one: Triton against the composition of single operations."""

import pytest
import torch

from shardwise.kernels.turn_store import reference
from shardwise.kernels.turn_store import triton as fast

PAGE_TOKENS = 16
pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize(("dim", "half"), [(48, 5), (64, 32)])
@pytest.mark.parametrize(("tokens", "heads"), [(1, (9, 1)), (4, (3, 3)), (0, (2, 1)), (2, (2, 0)), (2, (0, 1))])
@pytest.mark.parametrize("kind", ["fp32", "fp16", "fp8"])
@pytest.mark.parametrize("many", [1, 256])
def test_queries_and_pages(kind, tokens, heads, dim, half, many, device, monkeypatch):
    """Queries and gates take turns, as the projection gives them; slots of two pages, out of order."""
    monkeypatch.setattr(fast, "MANY_TOKENS", many)
    make = torch.Generator().manual_seed(dim + tokens)
    dtype = torch.float16 if kind == "fp16" else torch.float32
    pool = {"fp32": torch.float32, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}[kind]
    wide = torch.randn(tokens, heads[0], 2 * dim, generator=make).to(device, dtype)
    k, v = torch.randn(tokens, 2, heads[1], dim, generator=make).to(device, dtype).unbind(1)
    weights = [torch.randn(dim, generator=make).to(device, dtype) for _ in range(2)]
    angles = [torch.randn(tokens, half, generator=make).to(device) for _ in range(2)]
    slots = torch.tensor([37, 3, 17, 40], device=device)[:tokens]
    scales = (0.25, 2.0) if kind == "fp8" else (1.0, 1.0)
    found = list[tuple[torch.Tensor, ...]]()
    for impl in (reference, fast):
        pages = [torch.full((3, heads[1], PAGE_TOKENS, dim), 0.5, device=device).to(pool) for _ in range(2)]
        q = impl.turn_store(wide[..., :dim], k, v, *weights, *angles, 1e-6, *pages, slots, *scales)
        found.append((q, *(each.float() for each in pages)))
    for expected, got in zip(*found, strict=True):
        assert got.dtype == expected.dtype
        coarse = 2e-3 if kind == "fp16" else 1e-5
        # Keys that lie between two codes of e4m3 may go to either.
        torch.testing.assert_close(
            got, expected, atol=coarse, rtol=0.13 if kind == "fp8" and got.dim() == 4 else coarse
        )
