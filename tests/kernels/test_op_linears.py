"""Several linears of one normed input: Triton against the reference, in every format, with the convolution behind."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.checkpoint.load import load
from shardwise.checkpoint.synth import DummySource
from shardwise.checkpoint.weight import Weight
from shardwise.kernels import tuning
from shardwise.kernels.linear.geometry import case
from shardwise.kernels.linear.tiles import Target, operand
from shardwise.kernels.linears import neighbours, reference, resident
from shardwise.kernels.linears import triton as fast
from shardwise.kernels.linears.reference import Conv
from shardwise.kernels.ops import select
from shardwise.kernels.overlap import launch
from shardwise.layers.delta import DeltaState, GatedDeltaNet, declare, declare_cache
from shardwise.layers.linear import Norm
from shardwise.parallel.comm import Alone
from shardwise.parallel.context import RankContext
from shardwise.shard import Partition, Stored, local_shape
from tests.kernels.states import ROWS, make_steps, poison_fresh
from tests.kernels.weights import make_weight

SMALL, NATIVE = Target(native_fp8=False, shared_kib=64), Target(native_fp8=True, shared_kib=227)
EPS = 1e-6


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def conv_of(tokens: int, channels: int, queries: list[int], device: torch.device) -> Conv:
    """Contexts 0, 3, 6 ..: the state of a sequence without context is NaN, and must not be read."""
    seqs = make_steps([3 * s for s in range(len(queries))], queries, device)
    state = poison_fresh(randn(ROWS, channels, 3).to(device), seqs)
    return Conv(randn(channels, 4, seed=1).to(device), state, seqs)


@pytest.mark.parametrize("form", ["bf16", "fp8_block_f32", "nvfp4_row"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.usefixtures("poison")
def test_formats(form, tokens, device):
    first, second = make_weight((21, 128), form, 1, str(device)), make_weight((6, 128), "fp32", 2, str(device))
    added, residual, norm = randn(tokens, 128).to(device), randn(tokens, 128, seed=1).to(device), randn(128).to(device)
    arguments = (added, residual, norm * 0.1, EPS, [first, second, first], [None, torch.float32, None])
    expected, total = reference.norm_linears(*arguments)
    for target in (SMALL, NATIVE) if tokens == 1 else (NATIVE,):
        got, got_total = fast.norm_linears(*arguments, target=target)
        assert torch.equal(got_total, total)
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert relative(a, b) < 1e-5


@pytest.mark.parametrize("tokens", [0, 1, 3, 11])
@pytest.mark.parametrize(("columns", "with_added"), [(24, True), (200, False)])
@pytest.mark.usefixtures("poison")
def test_tokens_and_odd_sizes_with_convolution(tokens, columns, with_added, device):
    weights = [make_weight((rows, columns), "fp32", rows, str(device)) for rows in (29, 8, 1)]
    residual, norm = randn(tokens, columns).to(device), randn(columns).to(device)
    added = randn(tokens, columns, seed=1).to(device) if with_added else None
    convs = [conv_of(tokens, 29, [1] * tokens, device) for _ in range(2)]
    arguments = (added, residual, norm, EPS, weights, [None, None, torch.float32])
    expected, total = reference.norm_linears(*arguments, convs[0])
    got, got_total = fast.norm_linears(*arguments, convs[1])
    assert torch.equal(got_total, total)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(convs[1].state_RCW1, convs[0].state_RCW1, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.usefixtures("poison")
def test_prompts_go_through_the_convolution_too(device):
    weights = [make_weight((29, 64), "fp32", 1, str(device))]
    residual, norm = randn(4, 64).to(device), randn(64).to(device)
    convs = [conv_of(4, 29, [1, 3], device) for _ in range(2)]
    (expected,), _ = reference.norm_linears(None, residual, norm, EPS, weights, [None], convs[0])
    (got,), _ = fast.norm_linears(None, residual, norm, EPS, weights, [None], convs[1])
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(convs[1].state_RCW1, convs[0].state_RCW1, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.usefixtures("poison")
def test_no_rows_and_many_weights(device):
    weights = [make_weight((rows, 64), "fp32", rows + 1, str(device)) for rows in (0, 5, 7, 9)]
    x = randn(2, 64).to(device)
    for chosen in (weights, weights[1:], weights[:2]):
        dtypes = [None] * len(chosen)
        expected, got = reference.linears(x, chosen, dtypes), fast.linears(x, chosen, dtypes)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("form", "shape", "tokens", "parts"),
    [("fp8_block_f32", (1030, 256), 17, 4), ("nvfp4_row", (21, 128), 2, 1), ("bf16", (21, 128), 3, 1),
     ("fp8_block_f32", (70, 512), 0, 1), ("bf16", (9, 0), 2, 1)],
)  # fmt: skip
@pytest.mark.usefixtures("poison")
def test_parts_of_a_sum(form, shape, tokens, parts, device):
    weight, x = make_weight(shape, form, 1, str(device)), randn(tokens, shape[1]).to(device)
    got, expected = fast.linear_parts(x, weight), reference.linear_parts(x, weight)
    assert got.shape == (parts, tokens, shape[0])
    assert got.dtype == expected.dtype == torch.float32
    assert torch.equal(got, expected) or relative(got.sum(0), expected.sum(0)) < 1e-2


@pytest.mark.usefixtures("poison")
def test_types_of_activations(device):
    """Residuals in fp32, activations in bf16: results in bf16 or fp32 as asked for."""
    weights = [make_weight((40, 96), form, 1, str(device)) for form in ("bf16", "fp32")]
    norm = (randn(96) * 0.1).bfloat16().to(device)
    for tokens in (1, 9):
        added, residual = randn(tokens, 96).to(device), randn(tokens, 96, seed=1).to(device)
        expected, _ = reference.norm_linears(added, residual, norm, EPS, weights, [None, torch.float32])
        got, _ = fast.norm_linears(added, residual, norm, EPS, weights, [None, torch.float32])
        assert [a.dtype for a in got] == [torch.bfloat16, torch.float32]
        assert all(relative(a, b) < 1e-2 for a, b in zip(got, expected, strict=True))


@pytest.mark.usefixtures("poison")
def test_few_rows_for_many_tokens(device):
    """More tokens than one program takes."""
    weights, x = [make_weight((19, 64), "fp32", 1, str(device))], randn(37, 64).to(device)
    (expected,), (got,) = reference.linears(x, weights, [None]), fast.linears(x, weights, [None])
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


def products_of(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Rows of the outputs of each product of neighbours that is made from now on."""
    made = list[list[int]]()

    def product(*given: Any) -> list[torch.Tensor]:
        found = neighbours.product(*given)
        made.append([y.shape[1] for y in found])
        return found

    monkeypatch.setattr(fast, "product", product)
    return made


@pytest.mark.usefixtures("poison")
def test_neighbours_are_one_product(device, monkeypatch):
    """Outputs are slices of wider rows, one of which goes through the convolution; others are left where they are."""
    shapes = (40, 24), (21, 24), (6, 24)
    weights = [make_weight(shape, "fp32", n, str(device)) for n, shape in enumerate(shapes)]
    conv, again = conv_of(36, 40, [17, 19], device), conv_of(36, 40, [17, 19], device)
    x, dtypes = randn(36, 24).to(device), [None, None, torch.bfloat16]
    expected, made = reference.linears(x, weights, dtypes, conv), products_of(monkeypatch)
    fast.adjoin([make_weight((8, 128), "fp8_block", 1, str(device)), weights[0]])
    fast.adjoin(weights[:2])
    got = fast.linears(x, weights, dtypes, again)
    assert made == [[40, 21]]
    assert got[1].stride(0) == 61
    for mine, right in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, right)
    torch.testing.assert_close(again.state_RCW1, conv.state_RCW1, equal_nan=True)
    assert neighbours.product(x, weights[1:], [x.dtype] * 2) == []


@pytest.mark.parametrize(("tokens", "joined"), [(0, 0), (2, 0), (16, 0), (17, 1), (512, 1), (513, 0)])
@pytest.mark.usefixtures("poison")
def test_neighbours_are_one_product_for_as_many_tokens_as_were_measured(tokens, joined, device, monkeypatch):
    weights, x = [make_weight((n, 16), "fp32", n, str(device)) for n in (9, 5)], randn(tokens, 16).to(device)
    fast.adjoin(weights)
    expected, made = reference.linears(x, weights, [None, None]), products_of(monkeypatch)
    for mine, right in zip(fast.linears(x, weights, [None, None]), expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=2e-5, atol=2e-5)
    assert made == [[9, 5]] * joined


def test_only_what_is_alike_and_in_one_piece_of_memory_is_adjoined(device):
    def given(*shapes: tuple[int, int]) -> list[Weight]:
        return [make_weight(shape, "fp32", n, str(device)) for n, shape in enumerate(shapes)]

    x = randn(40, 24).to(device)
    for weights in (given((8, 24)), given((8, 24), (0, 24)), given((8, 24), (4, 16)),
                    [*given((8, 24)), make_weight((8, 24), "fp16", 1, str(device))]):  # fmt: skip
        before = [weight.plain.data_ptr() for weight in weights]
        fast.adjoin(weights)
        assert [weight.plain.data_ptr() for weight in weights] == before
        assert neighbours.product(x, weights, [x.dtype] * len(weights)) == []
    assert neighbours.product(x, given((0, 24), (0, 24)), [x.dtype] * 2) == []
    assert neighbours.product(x, [], []) == []
    first, last, other = given((8, 24), (4, 24), (2, 24))
    fast.adjoin([first, last])
    rows = [y.shape[1] for y in neighbours.product(x, [first, last, other], [x.dtype] * 3)]
    assert rows == [8, 4]  # whatever is behind them
    for weights, dtypes in (([last, first], [x.dtype] * 2), ([first, last], [x.dtype, torch.bfloat16])):
        assert neighbours.product(x, weights, dtypes) == []
    assert neighbours.product(x.double(), [first, last], [torch.float64] * 2) == []


def test_kernels_find_weights_that_were_moved(device):
    """What they made of a weight before is of the place where it was."""
    weights, x = [make_weight((n, 32), "fp32", n, str(device)) for n in (9, 5)], randn(3, 32).to(device)
    expected = fast.linears(x, weights, [None, None])
    before = [weight.plain.clone() for weight in weights]
    fast.adjoin(weights)
    for n, weight in enumerate(weights):
        assert torch.equal(weight.plain, before[n])
        assert operand(weight, False).value.data_ptr() == weight.plain.data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(fast.linears(x, weights, [None, None]), expected, strict=True))


@pytest.mark.parametrize(("bounds", "rank"), [((0, 2), 0), ((0, 1, 2), 1), ((0, 2, 2), 0), ((0, 2, 2), 1)])
@pytest.mark.usefixtures("poison")
def test_a_layer_whose_inputs_are_one_product(bounds, rank, device, monkeypatch):
    """Convolution, delta rule and gated norm read slices of wider rows; a rank may have no heads."""
    config: Any = SimpleNamespace(
        hidden_size=32, delta_key_heads=2, delta_value_heads=2, delta_key_dim=16, delta_value_dim=16, conv_width=4,
        rms_norm_eps=EPS,
    )  # fmt: skip
    specs = declare(config, "layer", "source", lambda _: (Stored("", "F32"),), "F32")
    cuts, made, found = {"delta": Partition(bounds)}, products_of(monkeypatch), []
    queries, contexts = [1, 21, 15], [5, 0, 3]
    seqs, x = make_steps(contexts, queries, device), randn(37, 32).to(device)
    for name in ("reference", "triton"):
        weights = load(specs, cuts, rank, DummySource(specs.values(), std=0.2), device)
        ops = select(name, device)
        layer = GatedDeltaNet(config, weights, "layer", RankContext(rank, 1, cuts, Alone(), ops, device, torch.float32))
        shapes = [(ROWS, *local_shape(spec, cuts, rank)) for spec in declare_cache(config, "layer", "F32").values()]
        state = DeltaState(*[poison_fresh(randn(*shape).to(device), seqs) for shape in shapes])
        out_TH, total_TH = layer(None, x, Norm(torch.zeros(32, device=device), EPS), seqs, state)
        found.append((out_TH.sum(0), total_TH, state.conv, state.delta))
    assert made == [
        [96, 32] if bounds[-1] == bounds[rank + 1] - bounds[rank] else [48, 16] if bounds == (0, 1, 2) else []
    ]
    for mine, right in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.usefixtures("poison")
def test_without_a_norm(tokens, device, monkeypatch):
    """What overlapping launches take for one token too."""
    monkeypatch.setattr(fast, "launch", lambda *_: {"PDL": False})
    weights, x = [make_weight((19, 72), "fp32", n, str(device)) for n in (1, 2)], randn(tokens, 72).to(device)
    expected = reference.linears(x, weights, [None, None])
    for a, b in zip(fast.linears(x, weights, [None, None], pdl=True), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("queries", [[9, 11], [20]])
@pytest.mark.usefixtures("poison")
def test_many_tokens_are_joined_if_measured_with_the_convolution_behind(queries, device, monkeypatch):
    """Whatever the sequences are: the convolution is a launch of its own."""
    weights = [make_weight((n, 208), "fp8_block" if n > 6 else "fp16", n, str(device)) for n in (46, 21, 6)]
    monkeypatch.setattr(
        fast.tuning, "choice", lambda _, what, *__: [1, 32, 32, 128, 4, 2] if what == "linears" else None
    )
    joined, tile = [], fast._tile
    monkeypatch.setattr(fast, "_tile", lambda *given: joined.append(given[3]) or tile(*given))
    x, dtypes = randn(20, 208).half().to(device), [torch.float16, torch.float16, torch.float32]
    convs = [conv_of(20, 46, queries, device) for _ in range(2)]
    convs = [Conv(conv.weight_CW.half(), conv.state_RCW1.half(), conv.seqs) for conv in convs]
    got, expected = fast.linears(x, weights, dtypes, convs[0]), reference.linears(x, weights, dtypes, convs[1])
    assert joined == [None]
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(convs[0].state_RCW1, convs[1].state_RCW1, rtol=2e-3, atol=2e-3, equal_nan=True)


def test_what_is_asked_for_early(device, monkeypatch):
    """Plain weights in whole tiles, neighbours if they are two, with few rows behind them at most, and no more tokens
    than were measured."""
    monkeypatch.setattr(resident, "fits", lambda of, dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(resident, "is_hopper", lambda _: True)
    config = resident.Resident(32, 16, 8, 3, 6, 0)

    def possible(shapes, forms=("bf16",) * 3, apart=False, tokens=16, kinds=(torch.bfloat16,) * 2 + (torch.float32,)):
        weights = [
            make_weight(shape, form, n, str(device))
            for n, (shape, form) in enumerate(zip(shapes, forms[: len(shapes)], strict=True))
        ]
        if not apart:
            fast.adjoin(weights[:2])
        x, of = torch.zeros(tokens, shapes[0][1], dtype=torch.bfloat16), [operand(weight, True) for weight in weights]
        return resident.possible(of, len(neighbours.together(weights, x.dtype)), x, list(kinds), config)

    inputs = (1024, 512), (544, 512), (24, 512)
    assert possible(inputs)
    assert possible([(96, 1024)])
    assert not possible(inputs, apart=True)
    assert not possible(inputs, forms=("bf16", "fp8_block", "bf16"))
    assert not possible(inputs, forms=("bf16", "bf16", "fp8_block"))
    assert not possible(inputs, kinds=(torch.bfloat16, torch.float32, torch.float32))
    assert not possible([(1024, 512), (1024, 512), (1024, 512)])
    assert not possible([(1024 + 16, 512), (544, 512)])  # no whole tiles
    assert not possible([(96, 576)])  # no whole steps
    assert not possible(inputs, tokens=17)
    assert not possible(inputs, tokens=1)  # streamed past its norm
    monkeypatch.setattr(resident, "is_hopper", lambda _: False)
    assert not possible(inputs)


def test_registers_are_limited_where_that_was_chosen(monkeypatch):
    """A limit reaches the launch as chosen for the first weight; without one ROCm's compiler, which knows no such
    option, is given none."""
    monkeypatch.setattr(tuning, "choice", lambda gpu, *_: (8, 128, 4, 80) if gpu == "A GPU" else None)
    operands = [case(rows, 2048, "fp8_tensor", True).of for rows in (8192, 4096)]
    _, chosen = fast.stream_constants(operands, True, 4, "A GPU")
    assert (chosen.warps, chosen.registers) == (4, 80)
    assert launch(False, chosen.registers)["maxnreg"] == 80
    _, ruled = fast.stream_constants(operands, True, 4)
    assert "maxnreg" not in launch(False, ruled.registers) | launch(True)
