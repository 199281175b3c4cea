"""causal_conv: the reference against torch's convolution, and Triton against the reference."""

import pytest
import torch
from torch.nn import functional as F

from shardwise.kernels.conv import reference
from shardwise.kernels.conv import triton as fast
from tests.kernels.states import ROWS, make_steps, poison_fresh

BOTH = pytest.mark.parametrize("impl", [reference, fast], ids=["reference", "triton"])
LENGTHS = (1, 2, 3, 4, 5, 63, 64, 65, 130)
pytestmark = pytest.mark.usefixtures("poison")


def inputs(tokens: int, channels: int, taps: int, device: torch.device, dtype: torch.dtype = torch.float32):
    make = torch.Generator().manual_seed(tokens + channels)
    x_TC = torch.randn(tokens, channels, generator=make).to(device, dtype)
    weight_CW = torch.randn(channels, taps, generator=make).to(device, dtype)
    state_RCW1 = torch.randn(ROWS, channels, taps - 1, generator=make).to(device, dtype)
    return x_TC, weight_CW, state_RCW1


def convolve(x_LC: torch.Tensor, weight_CW: torch.Tensor) -> torch.Tensor:
    taps = weight_CW.shape[1]
    padded_CL = F.pad(x_LC.T, (taps - 1, 0))
    return F.silu(F.conv1d(padded_CL[None], weight_CW[:, None], groups=weight_CW.shape[0])[0]).T


@BOTH
@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_equals_a_convolution_and_leaves_its_last_inputs(impl, length, device):
    x_TC, weight_CW, state_RCW1 = inputs(length + 2, 70, 4, device)
    seqs = make_steps([0, 0], [length + 1, 1], device)  # the last is a chunk of one token
    poison_fresh(state_RCW1, seqs)
    y_TC = impl.causal_conv(x_TC, weight_CW, state_RCW1, seqs)
    torch.testing.assert_close(y_TC[:-1], convolve(x_TC[:-1], weight_CW), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(y_TC[-1:], convolve(x_TC[-1:], weight_CW), atol=1e-5, rtol=1e-5)
    kept_CL = F.pad(x_TC[:-1].T, (3, 0))[:, -3:]
    torch.testing.assert_close(state_RCW1[ROWS - 1], kept_CL, atol=0, rtol=0)
    assert not state_RCW1[1:].isnan().any()


@BOTH
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_every_split_of_a_prompt_agrees(impl, taps, device):
    x_TC, weight_CW, state_RCW1 = inputs(9, 33, taps, device)
    whole_TC = convolve(x_TC, weight_CW)
    for first in range(1, 9):
        for second in range(first, 9):
            state_RCW1[:] = float("nan")
            parts, at = [], 0
            for end in sorted({first, second, 9}):
                # A part of one token runs as a decode.
                seqs = make_steps([at], [end - at], device)
                parts.append(impl.causal_conv(x_TC[at:end], weight_CW, state_RCW1, seqs))
                at = end
            torch.testing.assert_close(torch.cat(parts), whole_TC, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(state_RCW1[ROWS - 1], x_TC[10 - taps :].T, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("contexts", "queries"), [([4, 0, 9], [1, 1, 1]), ([3, 0, 2, 0, 7, 1], [1, 1, 2, 40, 1, 33])])
def test_triton_equals_the_reference_on_slices_of_wider_rows(contexts, queries, dtype, device):
    wide_TX, weight_CW, state_RCW1 = inputs(sum(queries), 150, 4, device, dtype)
    x_TC, weight_CW, state_RCW1 = wide_TX[:, 10:139], weight_CW[:129], state_RCW1[:, :129].contiguous()
    seqs = make_steps(contexts, queries, device)
    poison_fresh(state_RCW1, seqs)
    other_RCW1 = state_RCW1.clone()
    want_TC = reference.causal_conv(x_TC, weight_CW, state_RCW1, seqs)
    y_TC = fast.causal_conv(x_TC, weight_CW, other_RCW1, seqs)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(y_TC, want_TC, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(other_RCW1, state_RCW1, atol=0, rtol=0, equal_nan=True)


@BOTH
def test_padding_touches_only_row_zero(impl, device):
    x_TC, weight_CW, state_RCW1 = inputs(4, 16, 4, device)
    seqs = make_steps([5, 0, 0, 0], [1] * 4, device)
    seqs.state_rows_S[1:] = 0
    before_RCW1 = poison_fresh(state_RCW1, seqs).clone()
    y_TC = impl.causal_conv(x_TC, weight_CW, state_RCW1, seqs)
    assert y_TC.isfinite().all()
    torch.testing.assert_close(state_RCW1[1 : ROWS - 1], before_RCW1[1 : ROWS - 1], atol=0, rtol=0)


@BOTH
@pytest.mark.parametrize(("channels", "queries"), [(0, [1, 5]), (8, [])])
def test_nothing_to_do(impl, channels, queries, device):
    x_TC, weight_CW, state_RCW1 = inputs(sum(queries), channels, 4, device)
    seqs = make_steps([0] * len(queries), queries, device)
    assert impl.causal_conv(x_TC, weight_CW, state_RCW1, seqs).shape == (sum(queries), channels)
