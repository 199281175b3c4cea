"""Experts on the CPU: the reference's answer for every format, split, size and way of cutting the work."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.checkpoint.weight import Weight
from shardwise.experts import host
from shardwise.kernels.moe import reference
from shardwise.shard import ParamSpec, Partition, Segment, Stored
from tests.kernels.weights import FORMATS, cut_weight, make_weight, sources_of, spec_of
from tests.poison import poisoned


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def choose(tokens: int, experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    weights_Tk, ids_Tk = reference.route(randn(tokens, experts), top_k)
    return ids_Tk, weights_Tk


def check(x_TH: torch.Tensor, gate_up: Weight, down: Weight, ids_Tk: torch.Tensor, weights_Tk: torch.Tensor) -> None:
    expected = reference.moe(x_TH, gate_up, down, ids_Tk, weights_Tk)
    with poisoned():
        got = host.compute(x_TH, gate_up, down, ids_Tk, weights_Tk, 1)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()) if len(x_TH) else 0)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("tokens", [0, 1, 3, 20])
def test_every_format_is_the_reference(form: str, tokens: int) -> None:
    """Ids of experts that are not here are skipped."""
    gate_up, down = make_weight((5, 288, 176), form), make_weight((5, 176, 144), form, 1)
    ids, weights = choose(tokens, 9, 3)
    ids[ids == 7] = -1
    check(randn(tokens, 176) * 5, gate_up, down, ids, weights)


@pytest.mark.parametrize("form", ["bf16", "fp8_block", "fp8_block_f32", "fp8_channel", "nvfp4", "nvfp4_row"])
@pytest.mark.parametrize("block", [300, 4000, 30000])
def test_work_is_cut_anywhere(form: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows one by one, parts of an expert, several experts at once, and all of them: the same sums."""
    monkeypatch.setattr(host, "BLOCK_ELEMENTS", block)
    gate_up, down = make_weight((6, 160, 80), form), make_weight((6, 80, 80), form, 1)
    check(randn(4, 80), gate_up, down, *choose(4, 6, 3))


@pytest.mark.parametrize("form", ["bf16", "fp8_block", "fp8_tensor", "nvfp4", "nvfp4_ct", "nvfp4_row"])
@pytest.mark.parametrize("weights", [(5, 3), (1, 1, 1), (0, 1, 2), (7, 1)])
def test_slices_of_ranks_add_up(form: str, weights: tuple[int, ...]) -> None:
    """Cuts inside blocks leave blocks of 16 and less, and a rank that owns nothing adds nothing."""
    units = 96 // 4
    cut, half = {"expert": Partition.weighted(units, weights)}, Segment("gate", 96)
    specs = [
        spec_of((4, (half, Segment("up", 96)), 64), form, fused=True, group="expert", cut=1),
        spec_of((4, 64, (Segment("in", 96),)), form, group="expert", cut=2),
    ]
    x, (ids, chosen) = randn(2, 64), choose(2, 4, 2)
    total = torch.zeros(2, 64)
    for rank in range(len(weights)):
        gate_up, down = (cut_weight(spec, sources_of(spec, n), cut, rank) for n, spec in enumerate(specs))
        check(x, gate_up, down, ids, chosen)
        total += host.compute(x, gate_up, down, ids, chosen, 1)
    whole = [
        cut_weight(spec, sources_of(spec, n), {"expert": Partition((0, units))}, 0) for n, spec in enumerate(specs)
    ]
    expected = reference.moe(x, *whole, ids, chosen)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@settings(max_examples=25, deadline=None)
@given(
    form=st.sampled_from(sorted(FORMATS)),
    hidden=st.integers(1, 9),
    inner=st.integers(0, 9),
    experts=st.integers(1, 4),
    tokens=st.integers(0, 5),
    block=st.integers(1, 4000),
)
def test_odd_sizes(form: str, hidden: int, inner: int, experts: int, tokens: int, block: int) -> None:
    grain = 16 if form.startswith("nvfp4") else 7
    shapes = (experts, 2 * inner * grain, hidden * grain), (experts, hidden * grain, inner * grain)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "BLOCK_ELEMENTS", block)
        ids, weights = choose(tokens, experts + 1, 1 + experts // 2)
        check(
            randn(tokens, hidden * grain), make_weight(shapes[0], form), make_weight(shapes[1], form, 1), ids, weights
        )


def every_code(stored: Stored, shape: tuple[int, ...]) -> torch.Tensor:
    codes = torch.arange(256, dtype=torch.uint8)
    if stored.dtype == "F8_E4M3":
        codes[[0x7F, 0xFF]] = 0  # no numbers
    return codes.repeat(-(-torch.Size(shape).numel() // 256))[: torch.Size(shape).numel()].view(shape)


@pytest.mark.parametrize("form", ["fp8_tensor", "nvfp4"])
def test_every_code_is_widened_exactly(form: str) -> None:
    """Subnormal codes and every scale are bits of halves that torch must not flush to zero."""
    spec = ParamSpec((1, 16, 512), FORMATS[form], ("w",))
    made = sources_of(spec)
    for stored in spec.format:
        tensor = made["w" + stored.suffix]
        if stored.role == "value":
            made["w" + stored.suffix] = every_code(stored, tuple(tensor.shape)).view(tensor.dtype)
        elif stored.dtype == "F8_E4M3":
            positive = torch.arange(1, 0x7F, dtype=torch.uint8).repeat(8)[: tensor.numel()]
            made["w" + stored.suffix] = positive.view(tensor.shape).view(tensor.dtype)
        elif stored.role == "scale":
            made["w" + stored.suffix] = torch.ones_like(tensor)
    weight = cut_weight(spec, made, {}, 0)
    got = host.product(weight, {0: torch.eye(512)})[0]
    assert torch.equal(got.T, reference.dequantise(weight, expert=0))


def test_an_unknown_format_falls_back() -> None:
    """Two scales of groups: what is not widened here is what the reference makes of it."""
    form = (
        Stored("", "F8_E4M3"),
        Stored("_a", "BF16", (8, 8), role="scale"),
        Stored("_b", "F32", (4, 16), role="inverse_scale"),
    )
    made = [ParamSpec(shape, form, (f"w{n}",)) for n, shape in enumerate([(3, 32, 40), (3, 40, 16)])]
    check(
        randn(3, 40), *(cut_weight(spec, sources_of(spec, n), {}, 0) for n, spec in enumerate(made)), *choose(3, 3, 2)
    )


def test_the_number_of_threads_is_put_back() -> None:
    before = torch.get_num_threads()
    gate_up, down = make_weight((4, 64, 32), "fp8_block"), make_weight((4, 32, 32), "fp8_block", 1)
    ids, weights = choose(2, 4, 2)
    two, one = (host.compute(randn(2, 32), gate_up, down, ids, weights, threads) for threads in (2, 1))
    assert torch.get_num_threads() == before
    torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)


def test_only_chosen_experts_are_read() -> None:
    gate_up, down = make_weight((4, 64, 32), "fp8_tensor"), make_weight((4, 32, 32), "bf16", 1)
    expected = host.compute(randn(1, 32), gate_up, down, torch.tensor([[2, 0]]), torch.ones(1, 2), 1)
    down.tensors[0][[1, 3]] = float("nan")
    gate_up.tensors[0].view(torch.uint8)[[1, 3]] = 0x7F
    got = host.compute(randn(1, 32), gate_up, down, torch.tensor([[2, 0]]), torch.ones(1, 2), 1)
    assert torch.isfinite(got).all()
    assert torch.equal(got, expected)
