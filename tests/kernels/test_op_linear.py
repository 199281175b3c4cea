"""Linears of every format: the reference against plain loops, cuts against the whole, Triton against the reference."""
# pyright: reportArgumentType=false

from itertools import product

import pytest
import torch

from shardwise.kernels.linear import dequantise, reference, w8a8
from shardwise.kernels.linear import triton as fast
from shardwise.kernels.linear.tiles import Target, operand
from shardwise.shard import Partition, Segment
from tests.kernels.weights import FORMATS, cut_weight, make_weight, sources_of, spec_of

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
QUANTISED = [form for form in FORMATS if form not in ("fp32", "fp16", "bf16")]
SMALL, NATIVE = Target(native_fp8=False, shared_kib=64), Target(native_fp8=True, shared_kib=227)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def naive_element(weight, index: tuple[int, ...]) -> float:
    """What the format says of one element, in Python floats."""
    number = 1.0
    for held, tensor in zip(weight.held, weight.tensors, strict=True):
        if held.stored.role == "input_scale":
            continue
        stored = float(tensor[tuple(i // b if b else 0 for i, b in zip(index, held.block, strict=True))])
        if held.stored.packed:
            stored = E2M1[int(stored) >> 4 if index[-1] % 2 else int(stored) & 15]
        number = number / stored if held.stored.role == "inverse_scale" else number * stored
    return number


@pytest.mark.parametrize("form", FORMATS)
def test_dequantise_is_values_times_scales(form):
    weight = make_weight((3, 5, 48), form)
    got = reference.dequantise(weight, torch.float64)
    expected = [naive_element(weight, index) for index in product(*map(range, weight.shape))]
    torch.testing.assert_close(got.flatten(), torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(reference.dequantise(weight, torch.float64, expert=1), got[1])


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("form", QUANTISED)
@pytest.mark.parametrize("shape", [(40, 144), (33, 48)])
def test_a_weight_made_plain(form, shape, device):
    weight = make_weight(shape, form, 1, str(device))
    for target in (SMALL, NATIVE):
        got = dequantise.dequantised(operand(weight, target.native_fp8), torch.float32)
        torch.testing.assert_close(got, reference.dequantise(weight), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize("bounds", [(0, 1, 2, 3), (0, 2, 5), (0, 5, 8), (0, 0, 1)])
def test_a_cut_weight_is_a_slice_of_the_whole(form, cut, bounds):
    """Also inside a block of 128, where ranks hold the scale at a finer grain."""
    segments = (Segment("a", 16 * bounds[-1]), Segment("b", 32 * bounds[-1]))
    axes = (segments, 96) if cut == 0 else (40, (Segment("in", 48 * bounds[-1]),))
    for fused in (True, False):
        spec = spec_of(axes, form, fused, "group", cut)
        sources = sources_of(spec)
        whole = reference.dequantise(cut_weight(spec, sources, {"group": Partition((0, bounds[-1]))}, 0))
        partitions = {"group": Partition(bounds)}
        for rank in range(len(bounds) - 1):
            got = reference.dequantise(cut_weight(spec, sources, partitions, rank))
            at, parts = 0, []
            for segment in spec.segments(cut):
                start, stop = segment.span(partitions["group"], rank)
                parts.append(whole.narrow(cut, at + start, stop - start))
                at += segment.size
            assert torch.equal(got, torch.cat(parts, cut))


@pytest.mark.parametrize("form", FORMATS)
def test_reference_is_a_product_in_fp32(form):
    weight, x = make_weight((24, 48), form), randn(2, 3, 48).bfloat16()
    exact = x.double() @ reference.dequantise(weight, torch.float64).T
    torch.testing.assert_close(reference.linear(x, weight, torch.float32).double(), exact, rtol=1e-4, atol=1e-4)
    got = reference.linear(x, weight)
    assert got.dtype == torch.bfloat16
    assert (got.double() - exact).norm() / exact.norm() < 4e-3


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("tokens", "shape"), [(1, (11, 208)), (3, (9, 80)), (6, (40, 208)), (19, (70, 144))])
@pytest.mark.usefixtures("poison")
def test_triton_is_the_reference(form, tokens, shape, device):
    weight, x = make_weight(shape, form, device=device), randn(tokens, shape[1]).to(device)
    for target in (SMALL, NATIVE):
        got = fast.linear(x, weight, target=target)
        assert relative(got, reference.linear(x, weight)) < 1e-6


@pytest.mark.parametrize("form", QUANTISED)
@pytest.mark.parametrize("tokens", [2, 7])
def test_triton_takes_fp16(form, tokens, device):
    weight, x = make_weight((12, 176), form, device=device), randn(tokens, 176).half().to(device)
    got = fast.linear(x, weight, out_dtype=torch.float32, target=SMALL)
    assert got.dtype == torch.float32
    assert relative(got, reference.linear(x, weight, torch.float32)) < 1e-3


@pytest.mark.parametrize("form", ["fp16", "fp8_block", "fp8_channel", "nvfp4", "nvfp4_ct"])
@pytest.mark.parametrize("columns", [2, 50, 78])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.usefixtures("poison")
def test_odd_sizes(form, columns, tokens, device):
    weight, x = make_weight((7, columns), form, device=device), randn(tokens, columns).to(device)
    assert relative(fast.linear(x, weight, target=SMALL), reference.linear(x, weight)) < 1e-6


@pytest.mark.parametrize("form", QUANTISED)
@pytest.mark.parametrize(("unit", "cut"), [(16, 1), (64, 1), (4, 0)])
@pytest.mark.usefixtures("poison")
def test_triton_serves_cuts_inside_a_block(form, unit, cut, device):
    """Grains of 16 and 64 instead of 128, and rows that are joined from two sources with scales of their own."""
    size = 3 * unit
    axes = ((Segment("a", 12), Segment("b", 12)), 64) if cut == 0 else (9, (Segment("in", size),))
    spec, partitions = spec_of(axes, form, False, "group", cut), {"group": Partition((0, 1, 3))}
    sources = sources_of(spec, device=device)
    for rank, tokens in product(range(2), (1, 5)):
        weight = cut_weight(spec, sources, partitions, rank, device)
        x = randn(tokens, weight.shape[1]).to(device)
        assert relative(fast.linear(x, weight, target=SMALL), reference.linear(x, weight)) < 1e-6


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("impl", [reference, fast], ids=["reference", "triton"])
@pytest.mark.usefixtures("poison")
def test_empty(form, impl, device):
    for tokens, rows, columns in ((0, 16, 32), (3, 0, 32), (3, 16, 0)):
        got = impl.linear(randn(tokens, columns).to(device), make_weight((rows, columns), form, device=device))
        assert torch.equal(got, torch.zeros(tokens, rows, device=device))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("tokens", [1, 6])
def test_neighbours_that_are_nan_do_not_leak(form, tokens, device):
    """Weights, scales and activations lie between NaNs, and no size is a multiple of a tile."""
    weight = make_weight((13, 80), form, device=device)
    for i, tensor in enumerate(weight.tensors):
        raw = tensor.flatten().view(torch.uint8)
        around = torch.full((raw.numel() + 2 * 4096,), 0xFF, dtype=torch.uint8, device=device)
        around[4096:-4096] = raw
        inner = around[4096:-4096].view(tensor.dtype).view(tensor.shape)
        weight = type(weight)(
            weight.spec, weight.shape, weight.held, (*weight.tensors[:i], inner, *weight.tensors[i + 1 :])
        )
    wide = torch.full((tokens + 2, 112), float("nan"), device=device)
    wide[1:-1, 16:96] = randn(tokens, 80).to(device)
    x = wide[1:-1, 16:96]
    got = fast.linear(x, weight, target=NATIVE)
    assert not got.isnan().any()
    assert relative(got, reference.linear(x.contiguous(), weight)) < 1e-6


def test_more_axes_and_other_strides(device):
    weight, x = make_weight((12, 32), "fp8_block", device=device), randn(2, 3, 32).to(device)
    expected = reference.linear(x, weight)
    torch.testing.assert_close(fast.linear(x, weight), expected)
    torch.testing.assert_close(fast.linear(x.transpose(0, 1), weight), expected.transpose(0, 1))


def test_formats_without_kernels_are_named():
    weight = make_weight((8, 32), "nvfp4")
    twice = type(weight)(
        weight.spec, weight.shape, (*weight.held, weight.held[1]), (*weight.tensors, weight.tensors[1])
    )
    with pytest.raises(TypeError, match="w: kernels take one such scale"):
        operand(twice, True)


@pytest.mark.parametrize("form", [form for form in QUANTISED if form.startswith("fp8")])
@pytest.mark.parametrize(("tokens", "shape"), [(7, (40, 208)), (70, (67, 96)), (3, (5, 64))])
@pytest.mark.usefixtures("poison")
def test_fp8_activations(form, tokens, shape, device):
    """Exactly the reference's rounding, which is close to no rounding; a token of zeros stays one."""
    weight, x = make_weight(shape, form, device=device), randn(tokens, shape[1]).to(device)
    x[2] = 0
    assert w8a8.fits(weight)
    expected = reference.linear_w8a8(x, weight)
    assert 1e-3 < relative(expected, reference.linear(x, weight)) < 5e-2
    for target in (SMALL, NATIVE):
        got = w8a8.linear(x, weight, target=target)
        assert relative(got, expected) < 1e-6
        assert not got[2].any()


def test_codes_of_activations_are_rounded_as_torch_does(device):
    x = torch.cat((randn(6, 256) ** 5, torch.arange(1024.0).view(4, 256) / 37, randn(2, 256) * 1e-3)).to(device)
    codes, scales = reference.quantise_tokens(x, 64)
    got, got_scales = torch.empty(12, 256, dtype=torch.uint8, device=device), torch.empty(12, 4, device=device)
    w8a8.quantise_kernel[(12, 4)](x, 256, got, got_scales, 256, 64, 448.0)
    assert torch.equal(got_scales, scales)
    assert torch.equal(got.view(torch.float8_e4m3fn).float(), codes.float())


def test_fp8_activations_of_nothing(device):
    for tokens, rows, columns in ((0, 16, 32), (3, 0, 32), (3, 16, 0)):
        weight = make_weight((rows, columns), "fp8_block", device=device)
        assert w8a8.linear(randn(tokens, columns).to(device), weight).shape == (tokens, rows)
