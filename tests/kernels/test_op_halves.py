"""Tokens as rows of e4m3, and which FP8 weights are multiplied with these."""

from unittest import mock

import pytest
import torch

from shardwise.kernels.linear.geometry import case
from shardwise.kernels.linear.halves import halve_rows
from shardwise.kernels.linear.tiles import Target
from shardwise.kernels.linears import reference, wide, wide_config
from shardwise.kernels.linears import triton as fast
from shardwise.kernels.linears.wide_config import Wide, wide_choice
from tests.kernels.weights import make_weight


@pytest.mark.usefixtures("poison")
def test_two_rows_of_e4m3_are_the_token(device):
    """Exactly where values are within 2 ** 10 of a token's largest, whatever its size; what is not finite makes all of
    its token's sums so, and no other's."""
    generator = torch.Generator().manual_seed(3)
    x_TH = torch.randn(7, 96, generator=generator)
    x_TH = x_TH.sign() * (x_TH.abs() + 0.01) * torch.tensor([1.0, 1e-30, 1e30, 3e-5, 448.0, 1.0, 1.0])[:, None]
    x_TH = x_TH.bfloat16().to(device)
    x_TH[5, 3], x_TH[6, 4] = float("nan"), float("-inf")
    found = halve_rows(x_TH, 9)
    assert found.halves_T2H.shape == (9, 2, 96)
    high_TH, low_TH = found.halves_T2H[:7].float().unbind(1)
    back_TH = (high_TH + low_TH / 16) * found.back_T[:7, None]
    assert torch.equal(back_TH[:5], x_TH[:5].float())
    assert back_TH[6].isnan().all()
    if device.type != "cpu":  # the interpreter makes a number of a NaN in e4m3; see tests.gpu.check_hopper, too
        assert back_TH[5].isnan().any()


RULE = [
    ((8192, 4096, 64), 2048, 128, Wide(128, 1, 4)),
    ((8192, 4096, 64), 2048, 64, Wide(128, 1, 6)),
    ((9216,), 2048, 20, Wide(64, 1, 6)),
    ((2048,), 4096, 128, Wide(64, 4, 4)),  # parts, for there are few rows
    ((2048,), 2048, 17, Wide(64, 4, 6)),
    ((512,), 2048, 64, None),  # few programs, even so
    ((17408, 17408), 5120, 128, None),  # too much to compile
]


@pytest.mark.parametrize(("rows", "columns", "tokens", "config"), RULE)
def test_programs_are_for_all_processors(rows, columns, tokens, config):
    weights = [case(n, columns, "bf16" if n < 512 else "fp8_block", True).of for n in rows]
    assert wide_choice(weights, tokens, "", len(rows) == 1) == config


def test_a_sum_in_parts_is_not_for_all(monkeypatch):
    weight = [case(2048, 4096, "fp8_block", True).of]
    assert wide_choice(weight, 64, "", True) == Wide(64, 4, 6)
    assert wide_choice(weight, 64, "", False) is None
    monkeypatch.setattr(wide_config.tuning, "choice", lambda *_: [64, 2, 8])
    assert wide_choice(weight, 64, "a GPU", True) == Wide(64, 2, 8)
    assert wide_choice(weight, 64, "a GPU", False) is None


def test_plain_weights_in_front_are_not_taken_for_codes(monkeypatch):
    monkeypatch.setattr(wide_config, "fits", lambda *_: True)
    monkeypatch.setattr(wide_config, "fragment_fits", lambda *_: True)
    plain, codes, few = (
        case(n, 2048, kind, True).of for n, kind in ((4096, "bf16"), (4096, "fp8_tensor"), (64, "bf16"))
    )
    x_TH, config = torch.zeros(33, 2048).bfloat16(), Wide(64, 1, 4)
    for taken in ([codes], [codes, codes], [codes, codes, few], [codes, few]):
        assert wide_config.possible(taken, x_TH, config)
    for others in (
        [plain],
        [plain, codes],
        [plain, codes, few],
        [codes, plain],
        [codes, few, few],
        [few, codes, codes],
    ):
        assert not wide_config.possible(others, x_TH, config)


@pytest.mark.parametrize("tokens", [16, 17, 128, 129])
def test_such_weights_are_done_so_for_17_to_128_tokens(tokens, monkeypatch, device):
    """The kernel is for Hopper: what it is given is looked at."""
    weights = [make_weight((256, 256), "fp8_block", n, str(device)) for n in range(2)]
    x_TH = torch.randn(tokens, 256).half().to(device)
    given = []

    def launch(halved, operands, dtypes, config, pdl):
        given.append(halved)
        return reference.linears(x_TH, weights, dtypes)

    monkeypatch.setattr(wide_config, "possible", lambda *_: True)
    monkeypatch.setattr(wide_config, "FEWEST_PROGRAMS", 1)
    monkeypatch.setattr(wide_config, "FEWEST_STEPS", 1)
    target = Target(native_fp8=True, shared_kib=227, name="")
    with mock.patch.object(wide, "wide_linears", launch):
        got = fast.linears(x_TH, weights, [torch.float32] * 2, target=target)
    for one, want in zip(got, reference.linears(x_TH, weights, [torch.float32] * 2), strict=True):
        torch.testing.assert_close(one, want, rtol=3e-3, atol=3e-3)
    assert len(given) == (17 <= tokens <= 128)
    if given:
        assert given[0].x_TH.shape == (tokens, 256)
        assert given[0].halves_T2H.shape == (32 if tokens == 17 else 128, 2, 256)
