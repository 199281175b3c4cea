"""gated_delta_norm: Triton against the composition of delta rule and gated norm."""

import pytest
import torch

from shardwise.kernels.delta_step import reference
from shardwise.kernels.delta_step import triton as fast
from tests.kernels.states import make_steps, poison_fresh
from tests.kernels.test_op_delta import SHAPES, make_case, make_state

pytestmark = pytest.mark.usefixtures("poison")
EPS = 1e-6


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("queries", [[1], [1, 1, 1, 1, 1], [1, 1, 6]], ids=str)
def test_steps_and_chunks(shape, queries, device):
    _, _, value_width, key_map = SHAPES[shape]
    tokens = sum(queries)
    case, seqs = make_case(tokens, shape, device), make_steps([7 * s for s in range(len(queries))], queries, device)
    make = torch.Generator().manual_seed(3)
    wide = torch.randn(tokens, 3 + len(key_map) * value_width, generator=make).to(device)
    gate = wide[:, 3:].unflatten(-1, (len(key_map), value_width))
    norm = torch.randn(value_width, generator=make).to(device)
    states = [poison_fresh(make_state(shape, device), seqs) for _ in range(2)]
    inputs = (case.q_TGK, case.k_TGK, case.v_TVD, case.a_TV, case.b_TV, *case.shared)
    expected = reference.gated_delta_norm(*inputs, states[0], seqs, gate, norm, EPS)
    got = fast.gated_delta_norm(*inputs, states[1], seqs, gate, norm, EPS)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=1e-5, equal_nan=True)


def test_no_heads_and_no_tokens(device):
    seqs = make_steps([], [], device)
    case = make_case(0, "even", device)
    inputs = (case.q_TGK, case.k_TGK, case.v_TVD, case.a_TV, case.b_TV, *case.shared)
    got = fast.gated_delta_norm(
        *inputs, make_state("even", device), seqs, case.v_TVD, torch.ones(32, device=device), EPS
    )
    assert got.shape == (0, 4, 32)


@pytest.mark.parametrize("strength", [1.0, 30.0])
def test_bf16_and_strong_gates(strength, device):
    case, seqs = make_case(3, "even", device, torch.bfloat16, strength), make_steps([5, 0, 9], [1, 1, 1], device)
    norm = torch.ones(32, dtype=torch.bfloat16, device=device)
    states = [poison_fresh(make_state("even", device), seqs) for _ in range(2)]
    inputs = (case.q_TGK, case.k_TGK, case.v_TVD, case.a_TV, case.b_TV, *case.shared)
    expected = reference.gated_delta_norm(*inputs, states[0], seqs, case.v_TVD, norm, EPS)
    got = fast.gated_delta_norm(*inputs, states[1], seqs, case.v_TVD, norm, EPS)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, rtol=3e-2, atol=1e-2)
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=1e-5, equal_nan=True)
