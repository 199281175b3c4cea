"""gated_delta: the reference against transformers and its own definition, and Triton against the same.

Legend: T tokens, G key heads, V value heads, K key width (Dk), D value width (Dv), R rows of state.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from shardwise.kernels.delta import prefill, reference
from shardwise.kernels.delta import triton as fast
from tests.kernels.states import ROWS, make_steps, poison_fresh

BOTH = pytest.mark.parametrize("impl", [reference, fast], ids=["reference", "triton"])
LENGTHS = (1, 2, 3, 4, 5, 63, 64, 65, 130)
# Key heads, key width, value width, key head of each value head.
SHAPES = {"even": (2, 32, 32, [0, 0, 1, 1]), "ragged": (2, 48, 24, [0, 1, 1]), "one": (1, 16, 40, [0])}
pytestmark = pytest.mark.usefixtures("poison")


@dataclass(frozen=True)
class Case:
    """The arguments of gated_delta but the state and the sequences."""

    q_TGK: torch.Tensor
    k_TGK: torch.Tensor
    v_TVD: torch.Tensor
    a_TV: torch.Tensor
    b_TV: torch.Tensor
    A_log_V: torch.Tensor
    dt_bias_V: torch.Tensor
    key_map_V: torch.Tensor

    @property
    def shared(self) -> tuple[torch.Tensor, ...]:
        return self.A_log_V, self.dt_bias_V, self.key_map_V

    def run(self, impl, state_RVKD, seqs, part: slice = slice(None)) -> torch.Tensor:
        tokens = (self.q_TGK, self.k_TGK, self.v_TVD, self.a_TV, self.b_TV)
        return impl.gated_delta(*(x[part] for x in tokens), *self.shared, state_RVKD, seqs)

    def prepared(self) -> tuple[torch.Tensor, ...]:
        """q, k, v, g and beta in fp32, as `recurrent` takes them."""
        inputs = (self.q_TGK, self.k_TGK, self.a_TV, self.b_TV, *self.shared)
        q_TVK, k_TVK, g_TV, beta_TV = reference.prepare(*inputs)
        return q_TVK, k_TVK, self.v_TVD.float(), g_TV, beta_TV


def make_case(tokens: int, shape: str, device: torch.device, dtype=torch.float32, strength: float = 1.0) -> Case:
    """Random inputs, slices of wider rows; `strength` spreads the gates: at 30, decays go from 1 down to 0."""
    groups, key_width, value_width, key_map = SHAPES[shape]
    heads, make = len(key_map), torch.Generator().manual_seed(tokens + key_width)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=make)

    sizes = (7, groups * key_width, groups * key_width, heads * value_width, 5)
    _, q, k, v, _ = normal(tokens, sum(sizes)).to(device, dtype).split(sizes, dim=-1)
    ab_TX = (normal(tokens, 2 * heads) * strength).to(device, dtype)
    return Case(
        q.unflatten(-1, (groups, key_width)),
        k.unflatten(-1, (groups, key_width)),
        v.unflatten(-1, (heads, value_width)),
        ab_TX[:, :heads],
        ab_TX[:, heads:],
        (normal(heads) * strength**0.5).to(device),
        normal(heads).to(device),
        torch.tensor(key_map, dtype=torch.int32, device=device),
    )


def make_state(shape: str, device: torch.device) -> torch.Tensor:
    _, key_width, value_width, key_map = SHAPES[shape]
    make = torch.Generator().manual_seed(7)
    return torch.randn(ROWS, len(key_map), key_width, value_width, generator=make).to(device)


def by_definition(case: Case, state_VKD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and state after all tokens of the case, token by token."""
    q, k, v, g, beta = case.prepared()
    state_VKD = state_VKD.clone()
    return reference.recurrent(q, k, v, g, beta, state_VKD), state_VKD


def close(x: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Within `tolerance` of the largest value: elements that cancel cannot be relatively exact."""
    torch.testing.assert_close(x, want, rtol=tolerance, atol=tolerance * (want.abs().max().item() + 1e-6))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_definition_is_that_of_transformers(length, shape, device):
    case, state_VKD = make_case(length, shape, device), make_state(shape, device)[1]
    out_TVD, after_VKD = by_definition(case, state_VKD)
    keys = case.key_map_V
    g_TV = -case.A_log_V.exp() * torch.nn.functional.softplus(case.a_TV + case.dt_bias_V)
    inputs = (case.q_TGK[:, keys], case.k_TGK[:, keys], case.v_TVD, g_TV, case.b_TV.sigmoid())
    for theirs in (torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule):
        want_1TVD, want_1VKD = theirs(
            *(x[None] for x in inputs),
            initial_state=state_VKD[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        close(out_TVD, want_1TVD[0])
        close(after_VKD, want_1VKD[0])


@BOTH
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("shape", "strength"), [("ragged", 1.0), ("even", 30.0)])
@pytest.mark.parametrize("context", [0, 9])
def test_a_prompt_equals_the_definition(impl, length, shape, strength, context, device):
    """At length 1 this is a decode. Strong gates: decays of 0, also in the middle of a block, must not be NaN."""
    case, state_RVKD = make_case(length, shape, device, strength=strength), make_state(shape, device)
    seqs = make_steps([context], [length], device)
    before_VKD = state_RVKD[ROWS - 1] if context else torch.zeros_like(state_RVKD[0])
    want_TVD, want_VKD = by_definition(case, before_VKD)
    close(case.run(impl, poison_fresh(state_RVKD, seqs), seqs), want_TVD)
    close(state_RVKD[ROWS - 1], want_VKD)
    assert not state_RVKD[1:].isnan().any()


@BOTH
@pytest.mark.parametrize("a", [-200.0, 1e4, 3e38])
def test_extreme_gates(impl, a, device):
    """No decay, all at once, and a decay whose logarithm overflows: between tokens that have none."""
    case, state_RVKD = make_case(70, "even", device), make_state("even", device)
    a_TV = case.a_TV.clone()
    a_TV[[3, 40]] = a
    case, seqs = replace(case, a_TV=a_TV, A_log_V=case.A_log_V.abs() + 1), make_steps([2], [70], device)
    want_TVD, want_VKD = by_definition(case, state_RVKD[ROWS - 1])
    assert want_TVD.isfinite().all()
    close(case.run(impl, state_RVKD, seqs), want_TVD)
    close(state_RVKD[ROWS - 1], want_VKD)


@BOTH
@pytest.mark.parametrize("block_tokens", [16, 32, 64])
def test_one_token_over_and_over(impl, block_tokens, device, monkeypatch):
    """All keys alike, nothing forgotten: the powers of the system's matrix explode, its inverse does not."""
    monkeypatch.setattr(prefill, "EXACT", prefill.EXACT._replace(tokens=block_tokens))
    case, state_RVKD = make_case(130, "even", device), make_state("even", device)
    case = replace(
        case,
        k_TGK=case.k_TGK[:1].expand(130, -1, -1),
        a_TV=torch.full_like(case.a_TV, -50.0),
        b_TV=torch.full_like(case.b_TV, 20.0),
    )
    seqs = make_steps([2], [130], device)
    want_TVD, want_VKD = by_definition(case, state_RVKD[ROWS - 1])
    close(case.run(impl, state_RVKD, seqs), want_TVD)
    close(state_RVKD[ROWS - 1], want_VKD)


@BOTH
@pytest.mark.parametrize("length", [5, 66])
def test_every_split_of_a_prompt_agrees(impl, length, device):
    case, state_RVKD = make_case(length, "one", device), make_state("one", device)
    want_TVD, want_VKD = by_definition(case, torch.zeros_like(state_RVKD[0]))
    # Interpreted, only splits near the edges of blocks.
    middles = (1, 31, 32, 33, 64, 65) if impl is fast and length > 64 else range(1, length)
    for middle in middles:
        state_RVKD[:] = float("nan")
        parts = [
            case.run(impl, state_RVKD, make_steps([start], [end - start], device), slice(start, end))
            for start, end in ((0, middle), (middle, length))
        ]
        close(torch.cat(parts), want_TVD)
        close(state_RVKD[ROWS - 1], want_VKD)


@BOTH
@pytest.mark.parametrize(
    ("contexts", "queries"),
    [([4, 0, 9], [1, 1, 1]), ([3, 0, 2, 0, 7, 1], [1, 1, 2, 70, 1, 33])],
    ids=["decodes", "mixed"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequences_of_a_step_do_not_touch_each_other(impl, contexts, queries, dtype, device):
    case, state_RVKD = make_case(sum(queries), "ragged", device, dtype), make_state("ragged", device)
    seqs = make_steps(contexts, queries, device)
    before_RVKD = state_RVKD.clone()
    out_TVD = case.run(impl, poison_fresh(state_RVKD, seqs), seqs)
    assert out_TVD.dtype == dtype
    at, tolerance = 0, 1e-5 if dtype == torch.float32 else 1e-2
    q, k, v, g, beta = case.prepared()
    for context, query, row in zip(contexts, queries, seqs.state_rows_S.tolist(), strict=True):
        part, state_VKD = slice(at, at + query), before_RVKD[row].clone() * (context > 0)
        want_TVD = reference.recurrent(q[part], k[part], v[part], g[part], beta[part], state_VKD)
        close(out_TVD[part].float(), want_TVD, tolerance)
        close(state_RVKD[row], state_VKD, 1e-5 if dtype == torch.float32 else 1e-4)
        at += query
    others = slice(1, ROWS - len(queries))
    torch.testing.assert_close(state_RVKD[others], before_RVKD[others], atol=0, rtol=0)


def test_full_blocks_need_no_masks(device, monkeypatch):
    """As cards with much shared memory are given them: blocks that are full, and one at the end that is not."""
    monkeypatch.setattr(prefill, "config_of", lambda *_: prefill.Config(32, 32, 4, 2, 4))
    case, state_RVKD = make_case(64 + 101, "even", device, torch.bfloat16), make_state("even", device)
    before_RVKD, seqs = state_RVKD.clone(), make_steps([4, 0], [64, 101], device)
    out_TVD = case.run(fast, poison_fresh(state_RVKD, seqs), seqs)
    want_TVD = case.run(reference, before_RVKD, seqs)
    close(out_TVD.float(), want_TVD.float(), 1e-2)
    close(state_RVKD[1:], before_RVKD[1:], 1e-4)


@BOTH
def test_padding_touches_only_row_zero(impl, device):
    case, state_RVKD = make_case(4, "even", device), make_state("even", device)
    seqs = make_steps([5, 0, 0, 0], [1] * 4, device)
    seqs.state_rows_S[1:] = 0
    before_RVKD = poison_fresh(state_RVKD, seqs).clone()
    assert case.run(impl, state_RVKD, seqs).isfinite().all()
    torch.testing.assert_close(state_RVKD[1 : ROWS - 1], before_RVKD[1 : ROWS - 1], atol=0, rtol=0)


@BOTH
@pytest.mark.parametrize(("heads", "queries"), [(0, [1, 5]), (4, [])])
def test_nothing_to_do(impl, heads, queries, device):
    case, state_RVKD = make_case(sum(queries), "even", device), make_state("even", device)[:, :heads].contiguous()
    case = replace(case, v_TVD=case.v_TVD[:, :heads], a_TV=case.a_TV[:, :heads], b_TV=case.b_TV[:, :heads])
    seqs = make_steps([0] * len(queries), queries, device)
    assert case.run(impl, state_RVKD, seqs).shape == (sum(queries), heads, 32)
