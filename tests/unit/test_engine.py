"""The whole loop over a fake model: whatever is served together, each request gets what it would get alone."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.engine.engine import Engine
from shardwise.engine.messages import Failed, Generate, SamplingParams, Tokens
from shardwise.engine.request import Limits
from shardwise.engine.reuse import ReuseOptions
from tests.unit.fake_runner import VOCAB, FakeRunner, model

EOS = 5
WIDE = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, pages=64, page_tokens=4, vocab_size=VOCAB)


class Serving:
    """An engine over a fake runner, all that it said by request, and its books checked after every step."""

    def __init__(
        self,
        limits: Limits = WIDE,
        overlap: bool = False,
        reuse: ReuseOptions | None = None,
        chooses: bool = False,
    ) -> None:
        self.runner = FakeRunner(limits, reuse.snapshot_rows if reuse else 0, chooses)
        self.engine = Engine(limits, self.runner, (EOS,), overlap=overlap, reuse=reuse)
        self.said: dict[str, list[Tokens | Failed]] = {}

    def step(self) -> None:
        for message in self.engine.step():
            self.said.setdefault(message.id, []).append(message)
        self.engine.check()
        size = self.engine.scheduler.limits.page_tokens
        written = [page for r in self.engine.scheduler.running for page in r.pages[r.computed // size :]]
        whole = [page for r in self.engine.scheduler.running for page in r.pages[: r.computed // size]]
        assert len(set(written)) == len(written), "live requests share a page that they write"
        assert not set(written) & set(whole), "a live request writes a page of another"
        assert self.engine.scheduler.reuse.cache.rows or len(set(whole)) == len(whole), "live requests share a page"
        stats = self.engine.stats()
        assert stats.kv_tokens_used <= stats.kv_tokens
        assert stats.state_rows_used == stats.running <= stats.state_rows

    def run(self, *requests: Generate, steps: int = 3000) -> "Serving":
        for request in requests:
            self.engine.add(request)
        while self.engine.busy:
            assert steps > 0, "still not done"
            self.step()
            steps -= 1
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.kv_tokens_used, stats.state_rows_used) == (0, 0, 0, 0)
        return self


@dataclass
class Answer:
    """The messages of one request, put together."""

    tokens: list[int]
    logprobs: list
    prompt_logprobs: list | None
    finish_reason: str | None
    stop_token: int | None


def answer(said: list[Tokens | Failed]) -> Answer:
    messages = [message for message in said if isinstance(message, Tokens)]
    assert len(messages) == len(said), said
    assert [m.finish_reason is not None for m in messages] == [False] * (len(messages) - 1) + [True], (
        "the last one says why"
    )
    assert all(m.prompt_logprobs is None for m in messages[1:])
    return Answer(
        [token for m in messages for token in m.tokens],
        [logprob for m in messages for logprob in m.logprobs],
        messages[0].prompt_logprobs,
        messages[-1].finish_reason,
        messages[-1].stop_token,
    )


def generate(name: str = "r", prompt: int | list[int] = 3, priority: int = 0, **sampling) -> Generate:
    tokens = [(i * i + len(name)) % VOCAB for i in range(prompt)] if isinstance(prompt, int) else prompt
    params = SamplingParams(**{"max_tokens": 6, "temperature": 0.0, **sampling})
    return Generate(name, tokens, params, priority)


def greedy(prompt: list[int], max_tokens: int) -> tuple[list[int], int | None]:
    """What the model says, straight from it: the tokens, and the stop token if it came to one."""
    history = list(prompt)
    for _ in range(max_tokens):
        logits = model(tuple(history))
        token = logits.index(max(logits))
        if token == EOS:
            return history[len(prompt) :], token
        history.append(token)
    return history[len(prompt) :], None


@pytest.mark.parametrize("overlap", [False, True])
def test_more_rows_than_a_runner_chooses_for_come_and_go(overlap: bool):
    """And one whose logits are not numbers, in the middle; the memory of tokens is written again meanwhile."""
    ways = {}, {"temperature": 0.9, "top_k": 3, "seed": 7}, {"temperature": 5.0, "top_k": 4, "top_p": 0.8, "seed": 8}
    limits = replace(WIDE, max_num_seqs=20, max_num_batched_tokens=200, pages=200)
    everything = [
        generate(f"r{i}", [i % VOCAB, 2], max_tokens=3 + 2 * i, ignore_eos=True, **ways[i % 3]) for i in range(20)
    ]
    alone = {request.id: answer(Serving().run(request).said[request.id]) for request in everything}
    serving = Serving(limits, overlap, chooses=True)
    serving.runner.poison.add((19 % VOCAB, 2, *alone["r19"].tokens[:9]))
    serving.run(*everything[4:], *everything[:4])
    *most, last = everything
    assert {r.id: answer(serving.said[r.id]) for r in most} == {r.id: alone[r.id] for r in most}
    *before, failed = serving.said[last.id]
    assert isinstance(failed, Failed)
    assert [token for m in before if isinstance(m, Tokens) for token in m.tokens] == alone[last.id].tokens[:9]
    assert serving.runner.chosen > 10


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [1, 2, 3, 64])
def test_greedy_answers_are_the_models(overlap: bool, budget: int):
    requests = [generate(f"r{i}", [i, i + 1, (i * 5) % VOCAB][: i % 3 + 1], max_tokens=12) for i in range(12)]
    serving = Serving(replace(WIDE, max_num_batched_tokens=budget), overlap).run(*requests)
    ends = set()
    for request in requests:
        tokens, stop = greedy(request.prompt, 12)
        found = answer(serving.said[request.id])
        assert (found.tokens, found.stop_token) == (tokens, stop)
        assert found.finish_reason == ("length" if stop is None else "stop")
        ends.add(found.finish_reason)
    assert ends == {"length", "stop"}
    stats = serving.engine.stats()
    assert stats.prompt_tokens == sum(len(r.prompt) for r in requests)
    assert stats.generated_tokens == sum(len(greedy(r.prompt, 12)[0]) for r in requests)


def test_four_identical_requests_give_equal_answers():
    serving = Serving().run(*(generate(f"r{i}", [1, 2, 3], max_tokens=9) for i in range(4)))
    answers = [answer(serving.said[f"r{i}"]) for i in range(4)]
    assert all(found == answers[0] for found in answers)


def test_refusals_are_told_once_and_leave_nothing():
    serving = Serving().run(
        generate("empty", []),
        generate("long", 60, max_tokens=5),
        generate("alien", [VOCAB]),
        generate("hot", temperature=-1.0),
        generate("fine", [1]),
        generate("fine", [2]),
    )
    for name, param in (("empty", "prompt"), ("long", "max_tokens"), ("alien", "prompt"), ("hot", "temperature")):
        (message,) = serving.said[name]
        assert isinstance(message, Failed)
        assert (message.refused, message.param) == (True, param)
    twice, *rest = serving.said["fine"]
    assert isinstance(twice, Failed)
    assert "running already" in twice.message
    assert answer(rest).tokens == greedy([1], 6)[0]


@pytest.mark.parametrize("overlap", [False, True])
def test_cancel_at_every_moment(overlap: bool):
    whole, stop = greedy([1, 2, 3, 7], 6)
    assert stop is None
    for moment in range(12):
        serving = Serving(replace(WIDE, max_num_batched_tokens=3), overlap)
        serving.engine.cancel("r")  # unknown: nothing happens
        serving.engine.add(generate("r", [1, 2, 3, 7]))
        serving.engine.add(generate("s", [4, 3]))
        for _ in range(moment):
            serving.step()
        serving.engine.cancel("r")
        serving.run()
        found = answer(serving.said["r"])
        assert found.tokens == whole[: len(found.tokens)]
        assert found.finish_reason == ("cancel" if len(found.tokens) < len(whole) else "length")
        assert answer(serving.said["s"]).tokens == greedy([4, 3], 6)[0]


def test_an_id_can_be_used_again():
    serving = Serving(overlap=True)
    serving.engine.add(generate("r", [1]))
    serving.step()
    serving.step()
    serving.engine.cancel("r")
    serving.engine.add(generate("r", [2]))
    serving.run()
    end = next(i for i, m in enumerate(serving.said["r"]) if isinstance(m, Tokens) and m.finish_reason)
    assert answer(serving.said["r"][end + 1 :]).tokens == greedy([2], 6)[0]


@pytest.mark.parametrize("overlap", [False, True])
def test_output_that_is_not_finite_fails_its_request_only(overlap: bool):
    serving = Serving(overlap=overlap)
    tokens = greedy([1, 2], 6)[0]
    serving.runner.poison.add((1, 2, *tokens[:3]))
    serving.run(generate("bad", [1, 2]), generate("good", [2, 1]))
    *before, last = serving.said["bad"]
    assert [token for m in before if isinstance(m, Tokens) for token in m.tokens] == tokens[:3]
    assert isinstance(last, Failed)
    assert not last.refused
    assert "not finite" in last.message
    assert answer(serving.said["good"]).tokens == greedy([2, 1], 6)[0]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [1, 2, 64])
def test_prompt_logprobs_come_once_whatever_the_chunks(overlap: bool, budget: int):
    limits = replace(WIDE, max_num_batched_tokens=budget, prompt_logits_tokens=5)
    prompt = [3, 1, 4, 1, 5, 9, 2]
    serving = Serving(limits, overlap).run(
        generate("r", prompt, prompt_logprobs=2, logprobs=1),
        generate("echo", prompt, prompt_logprobs=0, max_tokens=0),
        generate("one", [4], prompt_logprobs=1),
    )
    expected = Serving().run(generate("r", prompt, prompt_logprobs=2, logprobs=1))
    found, alone = answer(serving.said["r"]), answer(expected.said["r"])
    assert found == alone
    assert [p.token for p in found.prompt_logprobs or []] == prompt[1:]
    echo = answer(serving.said["echo"])
    assert (echo.tokens, echo.finish_reason) == ([], "length")
    assert [p.logprob for p in echo.prompt_logprobs or []] == [p.logprob for p in alone.prompt_logprobs or []]
    assert answer(serving.said["one"]).prompt_logprobs == []


def test_prompt_logprobs_of_a_prompt_preempted_half_way_come_once():
    limits = replace(WIDE, pages=11, page_tokens=1, max_num_batched_tokens=2, max_model_len=11)
    long = generate("long", 8, prompt_logprobs=0, max_tokens=2, ignore_eos=True)
    serving = Serving(limits).run(generate("old", [1], max_tokens=10, ignore_eos=True), long)
    assert serving.engine.stats().preemptions == 1
    restarts = [
        plan.step for plan in serving.runner.plans for chunk in plan.chunks if chunk.row == 2 and not chunk.start
    ]
    assert restarts[0] < 9, "before the prompt was done"
    assert answer(serving.said["long"]) == answer(Serving().run(long).said["long"])


def test_prompts_whose_logits_are_not_finite_fail():
    serving = Serving()
    serving.runner.poison.add((1, 2))
    serving.run(generate("r", [1, 2, 3], prompt_logprobs=0))
    (message,) = serving.said["r"]
    assert isinstance(message, Failed)
    assert "prompt" in message.message


def test_unseeded_requests_differ_and_an_engines_seed_repeats_them():
    def tokens(seed: int) -> list[list[int]]:
        engine = Engine(WIDE, FakeRunner(WIDE), seed=seed)
        for i in range(3):
            engine.add(generate(f"r{i}", [1], temperature=1.0, max_tokens=20))
        said: dict[str, list[int]] = {}
        while engine.busy:
            for message in engine.step():
                assert isinstance(message, Tokens)
                said.setdefault(message.id, []).extend(message.tokens)
        return [said[f"r{i}"] for i in range(3)]

    first = tokens(0)
    assert len({tuple(t) for t in first}) == 3
    assert tokens(0) == first
    assert tokens(1) != first


def test_overlap_keeps_one_step_in_flight():
    serving = Serving(overlap=True)
    serving.engine.add(generate("r", [1], ignore_eos=True))
    serving.step()
    assert (len(serving.runner.plans), serving.said) == (1, {})
    serving.step()
    assert (len(serving.runner.plans), len(serving.said["r"])) == (2, 1)


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_requests_go_on_as_if_nothing_had_been(overlap: bool):
    """Seeds, penalties and logprobs included; and prompt logprobs are not told again."""
    tight = replace(WIDE, pages=9, page_tokens=2, max_model_len=18, max_num_batched_tokens=7)
    asked = [
        generate(
            f"r{i}",
            [i, 2, 3],
            max_tokens=14,
            temperature=i % 2,
            seed=i,
            ignore_eos=True,
            frequency_penalty=0.5,
            logprobs=1,
            prompt_logprobs=1,
        )
        for i in range(6)
    ]
    serving = Serving(tight, overlap).run(*asked)
    assert serving.engine.stats().preemptions >= 5
    for request in asked:
        assert answer(serving.said[request.id]) == answer(Serving().run(request).said[request.id])


samplings = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(0, 9),
        "temperature": st.sampled_from([0.0, 0.0, 1.0]),
        "top_k": st.sampled_from([0, 3]),
        "top_p": st.sampled_from([1.0, 0.8]),
        "seed": st.integers(0, 9),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.4]),
        "ignore_eos": st.booleans(),
        "logprobs": st.sampled_from([None, None, 2]),
        "prompt_logprobs": st.sampled_from([None, None, 1]),
    }
)
requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14),
        samplings,
        st.integers(0, 2),  # priority
        st.integers(0, 12),  # step it comes in
        st.none() | st.none() | st.integers(0, 20),  # steps until it is cancelled
    ),
    min_size=1,
    max_size=8,
)
limits = st.builds(
    Limits,
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 12),
    max_model_len=st.integers(4, 20),
    pages=st.integers(2, 12),
    page_tokens=st.integers(1, 5),
    vocab_size=st.just(VOCAB),
    prompt_logits_tokens=st.integers(1, 6),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests, limits, st.booleans(), st.booleans())
def test_anything_served_together_is_as_alone(specs: list, limits: Limits, overlap: bool, chooses: bool):
    """Any arrivals, lengths, cancels, chunks and page pools: the same answers, nothing leaked, nobody left waiting.
    Alone, no tokens are chosen by a runner."""
    everything = [
        generate(f"r{i}", prompt, priority, **{"min_tokens": min(i % 3, sampling["max_tokens"]), **sampling})
        for i, (prompt, sampling, priority, _, _) in enumerate(specs)
    ]
    serving = Serving(limits, overlap, chooses=chooses)
    for moment in range(34):
        for request, (*_, arrival, cancel) in zip(everything, specs, strict=True):
            if arrival == moment:
                serving.engine.add(request)
            if cancel is not None and arrival + cancel == moment:
                serving.engine.cancel(request.id)
        serving.step()
    serving.run(steps=sum(len(r.prompt) + r.sampling.max_tokens for r in everything) * (len(specs) + 1) + 10)
    for request, (*_, cancel) in zip(everything, specs, strict=True):
        length = len(request.prompt) + request.sampling.max_tokens
        if length > min(limits.max_model_len, limits.kv_tokens):
            (message,) = serving.said[request.id]
            assert isinstance(message, Failed)
            assert message.refused
            continue
        found = answer(serving.said[request.id])
        alone = answer(Serving().run(request).said[request.id])
        if found.finish_reason == "cancel":
            assert cancel is not None
            assert found.tokens == alone.tokens[: len(found.tokens)]
        else:
            assert found == alone


def test_plans_say_how_many_of_the_likeliest_matter():
    """No more than a head makes lists for are asked for, and whole rows where prompts are scored."""
    limits = replace(WIDE, max_num_seqs=20, max_num_batched_tokens=200, pages=200)

    def keeps(count: int, **sampling) -> set[int]:
        serving = Serving(limits)
        params = SamplingParams(**{"max_tokens": 2, "temperature": 0.0, "ignore_eos": True, **sampling})
        serving.run(*(Generate(str(n), [n % VOCAB, 3], params) for n in range(count)))
        return {plan.keep for plan in serving.runner.plans}

    assert keeps(1) == keeps(16) == {1}
    assert keeps(3, temperature=1.0, top_k=4, seed=1) == {4}
    assert keeps(17) == keeps(2, temperature=1.0, seed=1) == {0}
    assert keeps(1, max_tokens=1, prompt_logprobs=1) == {0}
