"""Routed experts of every format: the reference against plain loops, Triton against the reference."""

from itertools import product

import pytest
import torch

from shardwise.kernels.linear.reference import dequantise
from shardwise.kernels.linear.tiles import Target
from shardwise.kernels.moe import grouped, reference, sort
from shardwise.kernels.moe import triton as fast
from shardwise.shard import Partition, Segment
from tests.kernels.weights import FORMATS, cut_weight, make_weight, sources_of, spec_of

BOTH = pytest.mark.parametrize("impl", [reference, fast], ids=["reference", "triton"])
SMALL, NATIVE = Target(native_fp8=False, shared_kib=64), Target(native_fp8=True, shared_kib=227)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@BOTH
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (256, 8), (5, 5), (77, 3), (1, 1)])
@pytest.mark.usefixtures("poison")
def test_route_is_softmax_then_top_k(impl, experts, top_k, device):
    logits = randn(9, experts).to(device)
    weights, ids = impl.route(logits, top_k)
    shares, chosen = logits.double().softmax(-1).topk(top_k)
    assert ids.dtype == torch.int32
    assert torch.equal(ids.long(), chosen)
    torch.testing.assert_close(weights.double(), shares / shares.sum(-1, keepdim=True), rtol=1e-5, atol=1e-6)


@BOTH
def test_route_takes_the_lower_id_among_equals(impl, device):
    logits = torch.tensor([[1.0, 3, 3, 0, 3, 3], [2, 2, 2, 2, 2, 2], [-9, -9, 0, -9, 5, -9]], device=device)
    for dtype in (torch.float32, torch.float16):
        weights, ids = impl.route(logits.to(dtype), 3)
        assert ids.tolist() == [[1, 2, 4], [0, 1, 2], [4, 2, 0]]
        torch.testing.assert_close(weights[:2].cpu(), torch.full((2, 3), 1 / 3))


@BOTH
@pytest.mark.usefixtures("poison")
def test_route_of_nothing(impl, device):
    weights, ids = impl.route(torch.empty(0, 16, device=device), 4)
    assert weights.shape == ids.shape == (0, 4)


def test_route_stays_in_range_whatever_the_logits(device):
    logits = torch.full((2, 6), float("nan"), device=device)
    logits[1, 2] = 1.0
    _, ids = fast.route(logits, 3)
    assert ((ids >= 0) & (ids < 6)).all()


@BOTH
@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (3, 154), (2, 3, 20), (3, 0)])
@pytest.mark.usefixtures("poison")
def test_silu_mul(impl, shape, device):
    x = randn(*shape).to(device)
    gate, up = x.double().chunk(2, -1)
    torch.testing.assert_close(impl.silu_mul(x).double(), gate / (1 + (-gate).exp()) * up, rtol=1e-5, atol=1e-6)


def naive_moe(x, gate_up, down, ids, weights, first_expert):
    """Token by token and slot by slot, in float64."""
    w_up, w_down = dequantise(gate_up, torch.float64), dequantise(down, torch.float64)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for t, slot in product(range(ids.shape[0]), range(ids.shape[1])):
        e = int(ids[t, slot]) - first_expert
        if 0 <= e < gate_up.shape[0]:
            gate, up = (w_up[e] @ x[t].double()).chunk(2)
            out[t] += weights[t, slot].double() * (w_down[e] @ (gate / (1 + (-gate).exp()) * up))
    return out


def choose(tokens: int, experts: int, top_k: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = reference.route(randn(tokens, experts), top_k)
    return ids.to(device), weights.to(device)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.usefixtures("poison")
def test_reference_is_the_weighted_sum(form, tokens, device):
    banks = make_weight((5, 64, 80), form, device=device), make_weight((5, 80, 32), form, 1, device)
    ids, weights = choose(tokens, 9, 3, device)
    x = randn(tokens, 80).to(device) * 5
    got = reference.moe(x, *banks, ids, weights, 2)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), naive_moe(x, *banks, ids, weights, 2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("tokens", [2, 20])
@pytest.mark.usefixtures("poison")
def test_triton_is_the_reference(form, tokens, device):
    """Streamed and grouped; some experts are other ranks', some have no token; no size is a multiple of a tile."""
    if form == "bf16" and device.type == "cpu" and tokens > 16:
        pytest.skip("dots of bf16 are wrong in Triton's interpreter")
    banks = make_weight((5, 96, 80), form, device=device), make_weight((5, 80, 48), form, 1, device)
    ids, weights = choose(tokens, 9, 3, device)
    x = randn(tokens, 80).to(device) * 5
    expected = reference.moe(x, *banks, ids, weights, 2)
    for target in (SMALL, NATIVE) if form in ("fp32", "fp8_block", "nvfp4") else (NATIVE,):
        assert relative(fast.moe(x, *banks, ids, weights, 2, target), expected) < 1e-6


@pytest.mark.parametrize("form", ["fp16", "fp8_block", "fp8_tensor", "nvfp4"])
@pytest.mark.parametrize("tokens", [1, 17])
def test_triton_takes_fp16(form, tokens, device):
    banks = make_weight((4, 64, 64), form, device=device), make_weight((4, 64, 32), form, 1, device)
    ids, weights = choose(tokens, 4, 2, device)
    x = randn(tokens, 64).half().to(device)
    expected = reference.moe(x, *banks, ids, weights)
    assert relative(fast.moe(x, *banks, ids, weights, target=SMALL), expected) < 3e-3


@pytest.mark.parametrize("form", ["fp8_block", "fp8_channel", "nvfp4"])
@pytest.mark.usefixtures("poison")
def test_banks_made_plain_for_many_pairs(form, device, monkeypatch):
    """As tiles that convert, whatever the scales; some experts are other ranks', some have no token."""
    made, dequantised = [], grouped.dequantise.dequantised
    monkeypatch.setattr(
        grouped.dequantise, "dequantised", lambda *args, **kw: made.append(1) or dequantised(*args, **kw)
    )
    monkeypatch.setattr(grouped, "PLAIN_PAIRS", 0)
    monkeypatch.setattr(grouped, "ROOMY_KIB", 0)
    banks = make_weight((5, 96, 80), form, device=device), make_weight((5, 80, 48), form, 1, device)
    ids, weights = choose(20, 9, 3, device)
    x = randn(20, 80).half().to(device)
    expected = reference.moe(x, *banks, ids, weights, 2)
    assert relative(fast.moe(x, *banks, ids, weights, 2, SMALL), expected) < 3e-3
    assert len(made) == 2


@pytest.mark.parametrize("tile", [16, 192])
@pytest.mark.usefixtures("poison")
def test_tiles_of_sorted_pairs_are_one_expert_s(tile, device):
    """Each pair is in one tile, but those of other ranks; tiles are as full as can be; counters begin at 0."""
    counts = [0, 1, 15, 16, 17, 0, 193, 400, 0]
    starts_E1 = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    own = sum(counts)
    (total, *counters, _), *tiles = sort.tiles_of(starts_E1, own + 30, tile).tolist()
    assert counters == [0, 0]
    assert total == sum(-(-count // tile) for count in counts) <= len(tiles)
    places = list[int]()
    for expert, first, pairs, _ in tiles[:total]:
        assert 0 < pairs <= tile
        assert starts_E1[expert] <= first < first + pairs <= starts_E1[expert + 1]
        places += range(first, first + pairs)
    assert sorted(places) == list(range(own))


CUT = ["fp8_block", "fp8_tensor", "fp8_channel", "nvfp4", "nvfp4_ct"]


@pytest.mark.parametrize(("form", "unit", "tokens"), [*product(CUT, [16], [1, 18]), ("fp8_block", 64, 2)])
@pytest.mark.usefixtures("poison")
def test_triton_serves_cuts_inside_a_block(form, unit, tokens, device):
    """The ranks' sums add up to the whole; gate and up have scales of their own."""
    halves = (Segment("gate", 3 * unit), Segment("up", 3 * unit))
    up = spec_of((3, halves, 48), form, False, "ffn", 1)
    down = spec_of((3, 48, (Segment("in", 3 * unit),)), form, True, "ffn", 2)
    up_sources, down_sources = sources_of(up, device=device), sources_of(down, 1, device)
    ids, weights = choose(tokens, 3, 2, device)
    x = randn(tokens, 48).to(device) * 5
    total = torch.zeros(tokens, 48, device=device)
    for rank, bounds in product(range(2), [(0, 1, 3)]):
        partitions = {"ffn": Partition(bounds)}
        banks = (
            cut_weight(up, up_sources, partitions, rank, device),
            cut_weight(down, down_sources, partitions, rank, device),
        )
        total += fast.moe(x, *banks, ids, weights, target=SMALL)
    alone = {"ffn": Partition((0, 3))}
    banks = cut_weight(up, up_sources, alone, 0, device), cut_weight(down, down_sources, alone, 0, device)
    assert relative(total, reference.moe(x, *banks, ids, weights)) < 1e-6


@BOTH
@pytest.mark.parametrize("form", ["fp32", "fp8_block", "nvfp4"])
@pytest.mark.usefixtures("poison")
def test_empty(impl, form, device):
    for tokens, experts, width in ((0, 4, 32), (3, 0, 32), (3, 4, 0)):
        banks = (
            make_weight((experts, 2 * width, 32), form, device=device),
            make_weight((experts, 32, width), form, device=device),
        )
        ids, weights = choose(tokens, 8, 2, device)
        got = impl.moe(randn(tokens, 32).to(device), *banks, ids, weights)
        assert torch.equal(got, torch.zeros(tokens, 32, device=device))


@BOTH
@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.usefixtures("poison")
def test_experts_of_other_ranks_add_nothing(impl, tokens, device):
    banks = make_weight((4, 32, 32), "fp32", device=device), make_weight((4, 32, 16), "fp32", device=device)
    ids, weights = choose(tokens, 4, 2, device)
    x = randn(tokens, 32).to(device)
    for first in (-4, 4, 100):
        assert torch.equal(impl.moe(x, *banks, ids, weights, first), torch.zeros(tokens, 32, device=device))


@pytest.mark.parametrize("form", ["fp32", "fp8_block", "nvfp4"])
@pytest.mark.parametrize("tokens", [1, 17])
def test_neighbours_that_are_nan_do_not_leak(form, tokens, device):
    """Experts without a token, and those before and after the bank, are NaN."""
    ids, weights = choose(tokens, 3, 2, device)
    banks = make_weight((5, 96, 48), form, device=device), make_weight((5, 48, 48), form, 1, device)
    for bank in banks:
        for tensor in bank.tensors:
            if tensor.shape[0] == 5:
                raw = tensor.view(torch.uint8)
                raw[0], raw[4] = 0xFF, 0xFF
    wide = torch.full((tokens + 2, 80), float("nan"), device=device)
    wide[1:-1, 16:64] = randn(tokens, 48).to(device)
    x, shifted = wide[1:-1, 16:64], ids + 1
    got = fast.moe(x, *banks, shifted, weights, target=NATIVE)
    assert not got.isnan().any()
    assert relative(got, reference.moe(x.contiguous(), *banks, shifted, weights)) < 1e-6


@pytest.mark.parametrize(("tokens", "experts", "first"), [(1, 4, 0), (40, 7, 0), (40, 3, 2), (300, 8, 1)])
def test_pairs_are_sorted_by_expert(tokens, experts, first, device, monkeypatch):
    ids, _ = choose(tokens, 8, 3, device)
    local = (ids.flatten() - first).long()
    local[(local < 0) | (local >= experts)] = experts
    expected = local.sort(stable=True)
    starts = torch.tensor([int((local < e).sum()) for e in range(experts + 1)])
    for most in (10**6, 0):  # compared with one another, and counted
        monkeypatch.setattr(sort, "RANKED_PAIRS", most)
        order, found = sort.sort_pairs(ids, first, experts)
        assert torch.equal(order.long(), expected.indices)
        assert torch.equal(found.long().cpu(), starts)


def test_results_do_not_depend_on_the_batch(device):
    """A token's sum is the same, bit for bit, whichever tokens share its streamed step."""
    banks = make_weight((4, 64, 32), "fp8_block", device=device), make_weight((4, 32, 32), "fp8_block", device=device)
    ids, weights = choose(5, 4, 2, device)
    x = randn(5, 32).to(device)
    together = fast.moe(x, *banks, ids, weights, target=SMALL)
    for t in range(5):
        alone = fast.moe(x[t : t + 1], *banks, ids[t : t + 1], weights[t : t + 1], target=SMALL)
        assert torch.equal(alone[0], together[t])
