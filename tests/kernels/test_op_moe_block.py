"""A block of experts: Triton against the composition of single operations, in every format, over odd sizes."""

from typing import Any

import pytest
import torch

from shardwise.kernels.linear import arrange
from shardwise.kernels.linear.tiles import Target, operand
from shardwise.kernels.moe_block import Then, persistent, reference
from shardwise.kernels.moe_block import triton as fast
from shardwise.kernels.moe_block.banks import Banks
from shardwise.kernels.moe_block.combine import Outputs
from shardwise.kernels.moe_block.persistent import Persistent
from shardwise.kernels.norm.reference import add_rms_norm
from shardwise.kernels.peer_sum.reference import weighted
from tests.kernels.weights import make_weight

SMALL, NATIVE = Target(native_fp8=False, shared_kib=64), Target(native_fp8=True, shared_kib=227)
EPS = 1e-6
pytestmark = pytest.mark.usefixtures("poison")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 9, 2), (1, 16, 8), (1, 5, 5), (18, 9, 2), (0, 9, 2)])
@pytest.mark.parametrize("with_added", [True, False])
def test_norm_route(tokens, experts, top_k, with_added, device):
    router = make_weight((experts + 1, 72), "fp32", 1, str(device))
    residual, norm = randn(tokens, 72).to(device), randn(72).to(device)
    added = randn(tokens, 72, seed=1).to(device) if with_added else None
    expected = reference.norm_route(added, residual, norm, EPS, [router], top_k)
    arrivals = torch.zeros(1, dtype=torch.int32, device=device)
    for _ in range(2):
        got = fast.norm_route(added, residual, norm, EPS, [router], top_k, arrivals)
        assert arrivals.tolist() == [0]
        assert torch.equal(got[1], expected[1])
        assert torch.equal(got[3], expected[3])
        for n in (0, 2, 4):
            assert got[n].dtype == expected[n].dtype
            torch.testing.assert_close(got[n], expected[n], rtol=2e-5, atol=2e-5)
        weights, ids, gate = fast.route_linears(expected[0], [router], top_k)
        assert torch.equal(ids, expected[3])
        torch.testing.assert_close((weights, gate), (expected[2], expected[4]), rtol=2e-5, atol=2e-5)


def test_equal_and_broken_logits(device):
    """A router of zeros: all are equal, the lowest ids are chosen. One of NaN: ids stay in range."""
    router = make_weight((9, 16), "fp32", 1, str(device))
    arrivals, residual = torch.zeros(1, dtype=torch.int32, device=device), randn(1, 16).to(device)
    none = torch.zeros(1, 16, device=device)
    for filling, ids in ((0.0, [0, 1, 2]), (-0.0, [0, 1, 2]), (float("nan"), None)):
        router.plain.fill_(filling)
        got = fast.norm_route(none, residual, torch.zeros(16, device=device), EPS, [router], 3, arrivals)[3]
        assert ((got >= 0) & (got < 8)).all()
        assert ids is None or got.tolist() == [ids]


CASES = [("fp32", 1), ("fp8_block_f32", 1), ("nvfp4", 1), ("fp32", 3), ("fp8_block_f32", 2), ("nvfp4", 6), ("fp32", 36)]


@pytest.mark.parametrize(("form", "tokens"), CASES)
def test_moe_shared(form, tokens, device):
    """The shared expert in the experts' format and in another one, wider than they are."""
    up, down = make_weight((5, 32, 32), form, 1, str(device)), make_weight((5, 32, 16), form, 2, str(device))
    x, gate = randn(tokens, 32).to(device), randn(tokens, 3).to(device)[:, 2:]
    ids = torch.tensor([[0, 4, 2], [1, 2, 3], [4, 3, 0]] * 12, dtype=torch.int32, device=device)[:tokens]
    weights = torch.rand(36, 3, generator=torch.Generator().manual_seed(1)).to(device)[:tokens]
    others = [make_weight((56, 32), "fp32", 3, str(device))], [make_weight((32, 28), "fp32", 4, str(device))]
    alike = [make_weight((32, 32), form, 3, str(device))], [make_weight((32, 16), form, 4, str(device))]
    for shared_up, shared_down in (others, alike):
        arguments = (x, up, down, ids, weights, shared_up, shared_down, gate)
        expected = reference.moe_shared(*arguments)
        for target in (SMALL, NATIVE) if tokens == 1 else (NATIVE,):
            got = fast.moe_shared(*arguments, target=target)
            assert got.dtype == torch.float32
            assert relative(got, expected) < 1e-5


def test_programs_that_take_tiles_are_asked_first_and_only_with_something_to_count_by(device, monkeypatch):
    up, down = make_weight((5, 32, 32), "fp32", 1, str(device)), make_weight((5, 32, 16), "fp32", 2, str(device))
    x, ids = randn(2, 32).to(device), torch.tensor([[0, 4], [1, 2]], dtype=torch.int32, device=device)
    shared = [make_weight((32, 32), "fp32", 3, str(device))], [make_weight((32, 16), "fp32", 4, str(device))]
    arguments = (x, up, down, ids, torch.ones(2, 2, device=device), *shared, randn(2, 1).to(device))
    arrivals, asked, config = torch.zeros(1, dtype=torch.int32, device=device), [], Persistent(4, 64, 4, 1, 128, 2)

    def launch(x_TH, banks_of, ids_Tk, counter, config, pdl):
        asked.append((counter is arrivals, config))
        return Outputs(torch.zeros(4, 32, device=device), torch.zeros(2, 32, device=device))

    monkeypatch.setattr(persistent, "persistent_config", lambda banks_of, dtype, chosen, gpu: config)
    monkeypatch.setattr(persistent, "moe", launch)
    expected = reference.moe_shared(*arguments)
    assert relative(fast.moe_shared(*arguments, target=NATIVE), expected) < 1e-5
    assert not asked
    assert not fast.moe_shared(*arguments, None, arrivals, target=NATIVE).any()
    assert asked == [(True, config)]


@pytest.mark.parametrize(("form", "tokens", "experts", "top_k"), [("fp32", 33, 41, 1), ("fp8_block_f32", 50, 3, 2)])
def test_sorted_pairs_and_the_shared_expert_in_the_same_launches(form, tokens, experts, top_k, device):
    """Experts without a token, and with more tokens than a tile has; no width is a multiple of a tile's."""
    widths = (experts, 2 * 24, 48), (experts, 48, 24)
    up, down = (make_weight(shape, form, n, str(device)) for n, shape in enumerate(widths))
    shared = [make_weight((80, 48), form, 3, str(device))], [make_weight((48, 40), form, 4, str(device))]
    likings = randn(tokens, experts)
    likings[:, 1] += 2
    weights, ids = reference.route(likings.to(device), top_k)
    of = Banks(*(operand(weight, True) for weight in (up, down, *shared[0], *shared[1])))
    assert fast.way_of(of, torch.float32, tokens) == fast.SORTED
    arguments = (randn(tokens, 48).to(device), up, down, ids, weights, *shared, randn(tokens, 1).to(device))
    target = NATIVE if form == "fp32" else SMALL
    assert relative(fast.moe_shared(*arguments, target=target), reference.moe_shared(*arguments)) < 1e-5


@pytest.mark.parametrize(("form", "tokens"), [("fp32", 3), ("fp32", 36), ("nvfp4", 2)])
def test_moe_shared_with_the_norm_that_follows(form, tokens, device):
    """Joined to the weighted sum, or as a launch of its own where experts are added otherwise."""
    up, down = make_weight((5, 32, 40), form, 1, str(device)), make_weight((5, 40, 16), form, 2, str(device))
    shared = [make_weight((32, 40), form, 3, str(device))], [make_weight((40, 16), form, 4, str(device))]
    ids = torch.tensor([[0, 4, 2], [1, 2, 3], [3, 3, 0]] * 12, dtype=torch.int32, device=device)[:tokens]
    weights = torch.rand(tokens, 3, generator=torch.Generator().manual_seed(1)).to(device)
    then = Then(randn(tokens, 40, seed=2).to(device), randn(40).to(device), EPS)
    arguments = (randn(tokens, 40).to(device), up, down, ids, weights, *shared, randn(tokens, 1).to(device), then)
    for got, expected in zip(fast.moe_shared(*arguments), reference.moe_shared(*arguments), strict=True):
        assert got.dtype == expected.dtype
        assert relative(got, expected) < 1e-5


@pytest.mark.parametrize(
    ("form", "tokens", "inner", "whole"),
    [("fp32", 3, 16, False), ("fp32", 36, 16, False), ("nvfp4", 2, 16, True), ("fp32", 3, 0, True)],
)
def test_moe_shared_with_what_sums_over_ranks(form, tokens, inner, whole, device):
    """That is given what is to be added, or the sum; a rank may have no columns of experts."""
    up, down = make_weight((5, 2 * inner, 40), form, 1, str(device)), make_weight((5, 40, inner), form, 2, str(device))
    shared = [make_weight((32, 40), form, 3, str(device))], [make_weight((40, 16), form, 4, str(device))]
    ids = torch.tensor([[0, 4, 2], [1, 2, 3], [3, 1, 0]] * 12, dtype=torch.int32, device=device)[:tokens]
    weights = torch.rand(tokens, 3, generator=torch.Generator().manual_seed(1)).to(device)
    arguments = (randn(tokens, 40).to(device), up, down, ids, weights, *shared, randn(tokens, 7)[:, 6:].to(device))
    rest, given = (randn(tokens, 40, seed=2).to(device), randn(40).to(device), EPS), []

    def over_ranks(found: Any, choice: Any, *behind: Any) -> Any:
        given.append(isinstance(found, torch.Tensor))
        assert choice[0].is_contiguous()
        assert choice[1].is_contiguous()
        assert behind == rest
        return add_rms_norm(found if given[-1] else weighted(*found, choice), *behind)

    then, expected = Then(*rest, over_ranks), reference.moe_shared(*arguments, Then(*rest))
    for module in (reference, fast):
        for got, right in zip(module.moe_shared(*arguments, then), expected, strict=True):
            assert relative(got, right) < 1e-5
    assert given == [True, whole]


@pytest.mark.parametrize("tokens", [1, 6])
def test_codes_in_the_order_that_is_cheap_to_unpack_are_the_same_numbers(tokens, device):
    banks = make_weight((5, 32, 32), "nvfp4", 1, str(device)), make_weight((5, 32, 16), "nvfp4", 2, str(device))
    x, gate = randn(tokens, 32).to(device), randn(tokens, 1).to(device)
    ids = torch.tensor([[0, 4, 2], [1, 2, 3]] * 3, dtype=torch.int32, device=device)[:tokens]
    weights = torch.rand(6, 3, generator=torch.Generator().manual_seed(1)).to(device)[:tokens]
    shared = [make_weight((32, 32), "nvfp4", 3, str(device))], [make_weight((32, 16), "nvfp4", 4, str(device))]
    expected = reference.moe_shared(x, *banks, ids, weights, *shared, gate)
    moved = [arrange.arranged(bank) for bank in banks]
    assert torch.equal(reference.moe_shared(x, *moved, ids, weights, *shared, gate), expected)
    assert relative(fast.moe_shared(x, *moved, ids, weights, *shared, gate, target=NATIVE), expected) < 1e-5


def test_gate_and_up_in_two_weights_and_nothing(device):
    up, down = make_weight((5, 96, 64), "fp32", 1, str(device)), make_weight((5, 64, 48), "fp32", 2, str(device))
    halves = [make_weight((40, 64), "fp32", n, str(device)) for n in (3, 4)]
    shared_down = [make_weight((64, 40), "fp32", 5, str(device))]
    for tokens in (2, 0):
        x, ids = randn(tokens, 64).to(device), torch.ones(tokens, 2, dtype=torch.int32, device=device)
        arguments = (x, up, down, ids, torch.ones(tokens, 2, device=device), halves, shared_down)
        got = fast.moe_shared(*arguments, torch.ones(tokens, 1, device=device))
        assert got.shape == (tokens, 64)
        if tokens:
            expected = reference.moe_shared(*arguments, torch.ones(tokens, 1, device=device))
            assert relative(got, expected) < 1e-5
