"""The sampler against its definition in plain Python, and against itself in other batches."""

from collections import Counter
from itertools import pairwise
from math import exp, inf, log, nan, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.engine.messages import SamplingParams
from shardwise.engine.request import Request
from shardwise.engine.sampler import LISTED, Sampler, enough, largest, score_prompt
from shardwise.kernels.draw.reference import gumbel, split_seed


def make(arrival: int = 0, prompt: list[int] | None = None, seed: int = 1, stop=(), **sampling) -> Request:
    params = SamplingParams(**{"max_tokens": 1000, "temperature": 0.0, **sampling})
    return Request(f"r{arrival}", prompt or [0], params, arrival, seed=seed, stop_ids=frozenset(stop), pending=1)


def draw(sampler: Sampler, logits_LV: torch.Tensor, requests: list[Request]) -> list[int | None]:
    """One step: samples from a copy of the logits, and takes the tokens in."""
    results = sampler.sample(logits_LV.clone(), requests).read()
    for request, (token, _) in zip(requests, results, strict=True):
        if token is not None:
            request.output.append(token)
    return [token for token, _ in results]


def random_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def kept(logits: list[float], s: SamplingParams) -> dict[int, float]:
    """The definition: probabilities of the ids that are left, after temperature, min_p, top_k and top_p."""
    top = max(logits)
    p = {i: exp((x - top) / s.temperature) for i, x in enumerate(logits)}
    order = sorted((i for i in p if p[i] >= s.min_p), key=lambda i: (-logits[i], i))
    order = order[: s.top_k or None]
    total, before, left = sum(p[i] for i in order), 0.0, {}
    for i in order:
        if before >= s.top_p * total and s.top_p < 1:
            break
        left[i] = p[i]
        before += p[i]
    return {i: weight / sum(left.values()) for i, weight in left.items()}


def test_greedy_is_the_lowest_of_the_largest():
    logits = torch.tensor([[1.0, 5.0, 5.0], [5.0, 5.0, 5.0], [-0.0, 0.0, -1.0], [-inf, -inf, -3.0]])
    assert draw(Sampler(), logits, [make(i) for i in range(4)]) == [1, 0, 0, 2]


def test_how_many_of_the_likeliest_suffice():
    """And that they do: the rest of a row may as well be missing."""
    few = [make(), make(1, temperature=0.7, top_k=4), make(2, temperature=1, top_k=LISTED, top_p=0.5, min_p=0.1)]
    assert [enough(few[:n]) for n in (0, 1, 2, 3)] == [1, 1, 4, LISTED]
    whole = [
        make(3, temperature=1), make(4, temperature=1, top_p=0.9), make(5, logprobs=0), make(6, min_tokens=2),
        make(7, temperature=1, top_k=LISTED + 1), make(8, repetition_penalty=1.1), make(9, logit_bias={3: 1.0}),
    ]  # fmt: skip
    assert [enough([*few, request]) for request in whole] == [0] * len(whole)
    logits = random_logits(3, 500)
    cut = logits.where(logits >= logits.topk(LISTED).values[:, -1:], -inf)
    again = [Request(r.id, r.prompt, r.sampling, r.arrival, seed=r.seed, pending=1) for r in few]
    assert draw(Sampler(), logits, few) == draw(Sampler(), cut, again)


def test_all_greedy_is_three_operations_on_the_device():
    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func.overloadpacket))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    logits, requests = random_logits(3, 50), [make(i) for i in range(3)]
    with Record():
        sampled = Sampler().sample(logits, requests)
    assert seen.count("aten.max") == 1
    assert not {"aten._local_scalar_dense", "aten.sort", "aten.topk", "aten._log_softmax"} & set(seen)
    assert len(seen) <= 8, seen  # isfinite is several
    assert [logprob for _, logprob in sampled.read()] == [None] * 3


def test_empty_batch():
    assert Sampler().sample(torch.empty(0, 5), []).read() == []


def test_sort_keys_order_all_floats():
    logits = torch.tensor([[-0.0, 0.0, inf, -inf, 1e-40, -1e-40, 3.4e38, -3.4e38, 1.5, 1.5]])
    assert largest(logits, 10).tolist() == [[2, 6, 8, 9, 4, 0, 1, 5, 7, 3]]


def test_largest_takes_the_lower_id_among_equals_at_every_width():
    logits = torch.randint(0, 4, (5, 300), generator=torch.Generator().manual_seed(1)).float()
    expected = [sorted(range(300), key=lambda i: (-row[i], i)) for row in logits.tolist()]
    for count in (0, 1, 7, 150, 300):
        assert largest(logits, count).tolist() == [ids[:count] for ids in expected]


CUTS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 3},
    {"top_k": 1000},
    {"top_p": 0.8},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 5, "top_p": 0.7, "min_p": 0.02, "temperature": 1.5},
]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("ties", [False, True])
def test_draws_follow_the_definition(cut: dict, ties: bool):
    request = make(seed=5, **{"temperature": 1.0, **cut})
    logits = torch.randint(0, 3, (1, 12), generator=torch.Generator().manual_seed(3)).float() if ties else None
    logits = random_logits(1, 12, 7) / 2 if logits is None else logits
    expected = kept(logits[0].tolist(), request.sampling)
    # Many requests at once, alike but for their seeds.
    many = [make(i, seed=i * 7919, **{"temperature": 1.0, **cut}) for i in range(4000)]
    seen = Counter(draw(Sampler(), logits.expand(4000, -1), many))
    assert set(seen) <= set(expected)
    for token, p in expected.items():
        assert abs(seen[token] / 4000 - p) < 5 * sqrt(p * (1 - p) / 4000) + 1e-9, (token, p)


def test_successive_tokens_of_a_request_are_independent_draws():
    sampler, requests = Sampler(), [make(i, temperature=1.0, seed=i) for i in range(200)]
    steps = [draw(sampler, torch.zeros(200, 4), requests) for _ in range(41)]
    pairs = Counter(pair for a, b in pairwise(steps) for pair in zip(a, b, strict=True))
    assert all(abs(pairs[a, b] - 500) < 5 * sqrt(500) for a in range(4) for b in range(4)), pairs


def test_noise_is_gumbel_over_a_wide_vocabulary():
    low, high = split_seed(-3)
    low, high, index = (torch.tensor([[x]]) for x in (low, high, 17))
    noise = gumbel(low, high, index, torch.arange(250_000).unsqueeze(0))[0]
    assert noise.isfinite().all()
    assert abs(noise.mean().item() - 0.5772) < 0.02
    assert abs(noise.var().item() - 1.6449) < 0.03
    for quantile in (0.01, 0.25, 0.75, 0.999):
        assert abs((noise < -log(-log(quantile))).float().mean().item() - quantile) < 0.004
    assert noise.max() > 10  # the far tail is there
    assert len(noise.unique()) > 230_000


def test_the_winners_noise_is_fine_grained():
    zero = torch.tensor([[0]])
    noise = gumbel(zero, zero, zero, torch.arange(2_000_000).unsqueeze(0))[0]
    assert len(noise.topk(100).values.unique()) == 100


@pytest.mark.parametrize("bits", [0, 0xFFFFFFFF])
def test_noise_is_finite_at_the_ends(bits: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shardwise.kernels.draw.reference._mix", lambda x: torch.full_like(x, bits))
    zero = torch.tensor([[0]])
    assert gumbel(zero, zero, zero, zero).isfinite().all()


def test_seeds_differ_in_every_bit():
    ids, base = torch.arange(64).unsqueeze(0), 0x0123456789ABCDEF
    rows = [split_seed(base ^ (1 << bit)) for bit in range(64)] + [split_seed(base)]
    low, high = (torch.tensor(half).unsqueeze(1) for half in zip(*rows, strict=True))
    noise = gumbel(low, high, torch.zeros_like(low), ids)
    assert len({tuple(row) for row in noise.tolist()}) == 65
    assert noise.T.corrcoef().abs().fill_diagonal_(0).max() < 0.7


params = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-6, 0.3, 1.0, 5.0]),
        "top_k": st.sampled_from([0, 1, 4, 31, 300]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3]),
        "min_p": st.sampled_from([0.0, 0.2]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.0]),
        "frequency_penalty": st.sampled_from([0.0, -0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
        "logit_bias": st.sampled_from([{}, {3: 4.0, 5: -100.0}]),
        "min_tokens": st.integers(0, 3),
        "logprobs": st.sampled_from([None, None, 0, 3]),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(params, st.integers(0, 2**64)), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_row_is_what_it_would_be_alone(specs: list[tuple[dict, int]], choose):
    """Over several steps, in which a changing choice of the requests takes part."""
    vocab = 320
    alone = [make(i, [1, 2, i], seed, stop=(7,), **spec) for i, (spec, seed) in enumerate(specs)]
    together = [make(i, [1, 2, i], seed, stop=(7,), **spec) for i, (spec, seed) in enumerate(specs)]
    samplers, shared = [Sampler() for _ in specs], Sampler()
    for step in range(6):
        some = [i for i in range(len(specs)) if choose.random() < 0.8]
        logits = (random_logits(len(specs), vocab, step) * 4).round() / 4
        found = shared.sample(logits[some], [together[i] for i in some]).read()
        for i, result in zip(some, found, strict=True):
            assert samplers[i].sample(logits[i : i + 1].clone(), [alone[i]]).read() == [result]
            assert result[0] is not None
            alone[i].output.append(result[0])
            together[i].output.append(result[0])
        for i, request in enumerate(together):
            assert request.sampling.min_tokens <= request.index or 7 not in request.output, i


def penalised(logits: list[float], prompt: list[int], output: list[int], s: SamplingParams) -> list[float]:
    result = []
    for i, x in enumerate(logits):
        x += s.logit_bias.get(i, 0.0)
        if i in prompt or i in output:
            x = x / s.repetition_penalty if x > 0 else x * s.repetition_penalty
        x -= s.frequency_penalty * output.count(i) + s.presence_penalty * (i in output)
        result.append(x)
    return result


def test_penalties_and_bias_follow_the_definition():
    sampling = {
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.3,
        "logit_bias": {2: 1.5, 9: -2.0},
        "logprobs": 12,
    }
    sampler, other = Sampler(), make(1, logprobs=0)
    request = make(0, [3, 3, 4, 11], **sampling)
    for step in range(30):
        logits = random_logits(2, 12, step) / 3
        expected = torch.tensor(penalised(logits[1].tolist(), request.prompt, request.output, request.sampling))
        (plain, _), (token, logprob) = sampler.sample(logits.clone(), [other, request]).read()
        assert plain == logits[0].argmax()
        assert token == expected.argmax()
        assert logprob is not None
        values = dict(logprob.top)
        torch.testing.assert_close(torch.tensor([values[i] for i in range(12)]), expected.log_softmax(0))
        request.output.append(token or 0)
        other.output.append(plain or 0)
    assert max(Counter(request.output).values()) > 1


def test_counts_outlive_a_pause_and_end_with_forget():
    sampler, logits = Sampler(), torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0]])
    requests = [make(i, [4], presence_penalty=1.5) for i in range(9)]  # more than the first slots
    assert draw(sampler, logits.expand(9, -1), requests) == [0] * 9
    assert draw(sampler, logits, requests[3:4]) == [1]
    assert draw(sampler, logits.expand(2, -1), [requests[8], requests[3]]) == [1, 0]
    assert sampler.remembered == 9
    for request in requests:
        sampler.forget(request)
        sampler.forget(request)
    assert sampler.remembered == 0
    late = make(10, [4], presence_penalty=1.5)  # a used slot starts clean
    assert draw(sampler, logits, [late]) == [0]


def test_a_draw_depends_on_the_index_and_not_on_how_often_it_is_made():
    sampler, request, logits = Sampler(), make(temperature=1.0), torch.zeros(1, 300)
    first, again = (sampler.sample(logits.clone(), [request]).read() for _ in range(2))
    request.output.append(first[0][0] or 0)
    assert first == again != sampler.sample(logits.clone(), [request]).read()


def test_slots_are_used_again():
    sampler = Sampler()
    for i in range(50):
        request = make(i, presence_penalty=1.0)
        draw(sampler, torch.zeros(1, 3), [request])
        sampler.forget(request)
    assert sampler._counts._tables is not None
    assert len(sampler._counts._tables[0]) == 4


def test_a_slot_keeps_nothing_of_its_last_request():
    sampler, logits = Sampler(), torch.tensor([[4.0, 3.0, 1.0]])
    first, second = make(0, [0], repetition_penalty=3.0), make(1, [2], repetition_penalty=3.0)
    assert draw(sampler, logits, [first]) == [1]
    sampler.forget(first)
    assert draw(sampler, logits, [second]) == [0]


def test_state_lost_and_found():
    """A sampler that meets a request with tokens already generated counts them."""
    request = make(0, [4], frequency_penalty=1.0)
    request.output += [0, 0, 0, 1]
    assert draw(Sampler(), torch.tensor([[4.0, 3.5, 2.0, 1.0, 0.0]]), [request]) == [1]


def test_no_stop_token_before_min_tokens():
    sampler, logits = Sampler(), torch.tensor([[9.0, 8.0, 7.0]])
    first, second = make(0, stop=(0, 1, 77), min_tokens=2), make(1)
    assert [draw(sampler, logits.expand(2, -1), [first, second]) for _ in range(3)] == [[2, 0], [2, 0], [0, 0]]


def test_logprobs_are_those_of_the_distribution_before_temperature():
    logits = random_logits(4, 30)
    requests = [
        make(0),
        make(1, logprobs=0, temperature=3.0),
        make(2, logprobs=5, top_k=2),
        make(3, logprobs=2, temperature=0.8, top_p=0.5),
    ]
    results = Sampler().sample(logits.clone(), requests).read()
    assert results[0][1] is None
    for row in (1, 2, 3):
        token, logprob = results[row]
        expected = logits[row].log_softmax(0)
        assert logprob is not None
        assert logprob.token == token
        assert logprob.logprob == pytest.approx(expected[token].item(), abs=1e-5)
        count = requests[row].sampling.logprobs or 0
        assert [i for i, _ in logprob.top] == expected.argsort(descending=True)[:count].tolist()
        assert [x for _, x in logprob.top] == pytest.approx([expected[i].item() for i, _ in logprob.top], abs=1e-5)


def test_ruled_out_ids_are_not_among_the_likeliest():
    (result,) = Sampler().sample(torch.tensor([[1.0, 2.0, 3.0]]), [make(stop=(2,), min_tokens=1, logprobs=3)]).read()
    assert result[1] is not None
    assert [i for i, _ in result[1].top] == [1, 0]


@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}, {"logprobs": 2}])
def test_logits_that_are_not_numbers_fail_their_row_only(bad: float, sampling: dict):
    logits = random_logits(3, 20)
    poisoned = logits.clone()
    poisoned[1, :] = bad if bad == -inf else poisoned[1, :]
    poisoned[1, 13] = bad
    requests = [make(i, presence_penalty=0.1 * i, **sampling) for i in range(3)]
    clean = [make(i, presence_penalty=0.1 * i, **sampling) for i in range(3)]
    results = Sampler().sample(poisoned, requests).read()
    assert results[1] == (None, None)
    expected = Sampler().sample(logits, clean).read()
    assert [results[0], results[2]] == [expected[0], expected[2]]


def test_prompt_scores():
    logits = random_logits(5, 17)
    tokens = [3, 16, 0, 2, 2]
    found = score_prompt(logits, tokens, 2).read()
    assert found is not None
    expected = logits.log_softmax(1)
    assert [f.token for f in found] == tokens
    assert [f.logprob for f in found] == pytest.approx([expected[i, t].item() for i, t in enumerate(tokens)], abs=1e-5)
    assert [[i for i, _ in f.top] for f in found] == expected.topk(2).indices.tolist()
    logits[2, 4] = nan
    assert score_prompt(logits, tokens, 0).read() is None
