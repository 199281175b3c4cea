"""The engine with a prefix cache over a fake model, which finds any state, page or position that is not right: a hit
answers as a miss, and what is reported as cached was not computed.
"""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.cache.prefix import TOKEN_BYTES, encode
from shardwise.engine.messages import Failed, Generate, SamplingParams, Tokens
from shardwise.engine.pictures import Pictures
from shardwise.engine.positions import Place
from shardwise.engine.request import Limits, Request
from shardwise.engine.reuse import ReuseOptions
from shardwise.engine.scheduler import Step
from tests.unit.fake_runner import VOCAB
from tests.unit.test_engine import EOS, WIDE, Answer, Serving, answer, generate, greedy, limits, samplings

KEEP_ALL = ReuseOptions(snapshot_rows=40, every_tokens=1 << 30, least_gap_tokens=1)
LONG = replace(WIDE, max_model_len=800, pages=400, max_num_batched_tokens=4096, page_tokens=64)


class Caching(Serving):
    """Counts the prompt tokens that each request really computed, and what it was said to have found."""

    def __init__(self, limits: Limits = LONG, overlap: bool = False, reuse: ReuseOptions = KEEP_ALL) -> None:
        super().__init__(limits, overlap, reuse)
        self.computed: Counter[str] = Counter()
        self.cached: dict[str, int] = {}
        self.preempted: set[str] = set()
        plan = self.engine.scheduler.plan

        def counting() -> Step:
            step = plan()
            for request, chunk in zip(step.requests, step.plan.chunks, strict=True):
                self._count(request, max(0, min(chunk.start + chunk.count, len(request.prompt)) - chunk.start))
            return step

        self.engine.scheduler.plan = counting

    def _count(self, request: Request, tokens: int) -> None:
        self.computed[request.id] += tokens
        if request.preemptions:
            self.preempted.add(request.id)

    def step(self) -> None:
        super().step()
        for name, messages in self.said.items():
            for message in messages:
                if isinstance(message, Tokens) and message.finish_reason != "cancel":
                    self.cached[name] = message.cached_tokens

    def ask(self, *requests: Generate) -> list[int]:
        """Serve `requests` together; what each found."""
        self.run(*requests)
        for request in requests:
            if request.id not in self.preempted:
                assert self.cached[request.id] == len(request.prompt) - self.computed[request.id], request.id
        return [self.cached[request.id] for request in requests]


def alone(request: Generate) -> Answer:
    return answer(Serving(LONG).run(request).said[request.id])


def text(length: int, seed: int = 0) -> list[int]:
    """Tokens that do not repeat themselves soon; none ends a turn."""
    return [token + (token >= EOS) for token in ((i * i * 7 + i // 3 + seed * 5) % (VOCAB - 1) for i in range(length))]


@pytest.mark.parametrize("overlap", [False, True])
def test_every_length_of_a_hit_and_every_remainder(overlap: bool):
    """Prompts of 1 to 200 tokens, each going on from the one before, and again with other endings."""
    words = text(300)
    for length in range(1, 201):
        if length % 10 == 1:
            serving = Caching(LONG, overlap, replace(KEEP_ALL, snapshot_rows=200))
        first = generate(f"p{length}", words[:length], max_tokens=1)
        endings = {
            rest: generate(f"p{length}+{rest}", words[:length] + [12] * rest, max_tokens=2)
            for rest in (1, 2, 3, 1 + length * 7 % 64)
        }
        assert serving.ask(first) == [length - 1 if length % 10 != 1 else 0]
        found = serving.ask(*endings.values())
        assert all(hit >= length for hit in found), (length, found)
        for request in (first, *endings.values()):
            tokens, stop = greedy(request.prompt, request.sampling.max_tokens)
            said = answer(serving.said[request.id])
            assert (said.tokens, said.stop_token) == (tokens, stop), request.id


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("end", ["length", "stop", "cancel"])
def test_the_next_turn_goes_on_where_the_answer_ended(overlap: bool, end: str):
    prompt = next(
        words for seed in range(99) for words in [text(50, seed)]
        if (greedy(words, 12)[1] is None) == (end != "stop") and len(greedy(words, 12)[0]) > 4
    )  # fmt: skip
    serving = Caching(overlap=overlap)
    serving.engine.add(generate("first", prompt, max_tokens=12))
    for _ in range(5):
        serving.step()
    if end == "cancel":
        serving.engine.cancel("first")
    serving.run()
    said = answer(serving.said["first"])
    assert said.finish_reason == end
    stop = [said.stop_token] if said.stop_token is not None else []
    second = generate("second", [*prompt, *said.tokens, *stop, 1, 2, 3])
    (found,) = serving.ask(second)
    assert found >= len(prompt) + len(said.tokens) - 1
    assert found == len(second.prompt) - 3 or not (overlap and end == "stop"), "the stop token was computed as well"
    assert answer(serving.said["second"]) == alone(second)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("keeps_thinking", [False, True])
def test_a_conversation_computes_its_past_once(overlap: bool, keeps_thinking: bool):
    """With the options of a server: turns end with EOS, and a template that drops thinking changes what follows it."""
    serving = Caching(overlap=overlap, reuse=ReuseOptions(snapshot_rows=16, boundaries=frozenset({EOS})))
    past, opening, thinking = text(60, 1), [1, 2], [3, 4]
    before: list[int] = []
    for turn in range(5):
        past = [*past, *text(60, turn + 2), EOS]
        prompt = [*past, *opening, *thinking]
        (found,) = serving.ask(generate(f"t{turn}", prompt, max_tokens=30, ignore_eos=True))
        said = answer(serving.said[f"t{turn}"]).tokens
        assert said == alone(generate("again", prompt, max_tokens=30, ignore_eos=True)).tokens
        common = next((i for i, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b), len(before))
        assert found >= 0.95 * common
        before = [*prompt, *said[:-1]]
        past = [*past, *opening, *(thinking if keeps_thinking else []), *said]
        serving.ask(generate(f"title{turn}", text(40, 50 + turn), max_tokens=5))
    assert 0 < serving.engine.stats().snapshots <= 16


def test_a_shared_beginning_is_kept_from_its_second_use_on():
    serving = Caching(reuse=replace(KEEP_ALL, least_gap_tokens=32))
    system = text(100)
    found = [serving.ask(generate(f"u{i}", [*system, i, 12, 12, i, 3]))[0] for i in range(4)]
    assert found == [0, 0, 100, 100]
    assert serving.ask(generate("same", [*system, 2, 12, 12, 2, 3])) == [100]


def test_identical_prompts_hit_from_the_third_on():
    serving = Caching(reuse=replace(KEEP_ALL, least_gap_tokens=32))
    found = [serving.ask(generate(f"same{i}", text(70)))[0] for i in range(3)]
    assert found == [0, 0, 69]


def test_long_prompts_are_kept_every_so_often():
    serving = Caching(reuse=ReuseOptions(snapshot_rows=16, every_tokens=50))
    serving.ask(generate("long", text(230)))
    assert serving.ask(generate("part", [*text(130), 12, 12])) == [100]


def test_prompt_logprobs_are_computed_in_full():
    serving = Caching()
    serving.ask(generate("first", text(90)))
    request = generate("scored", [*text(90), 1, 2], prompt_logprobs=1, max_tokens=3)
    assert serving.ask(request) == [0]
    assert answer(serving.said["scored"]) == alone(request)


def test_what_failed_is_not_reused():
    for overlap in (False, True):
        for cut in (30, 70, 90, 93):
            options = replace(KEEP_ALL, every_tokens=25)
            serving = Caching(replace(LONG, max_num_batched_tokens=20), overlap, options)
            words = [*text(90), *greedy(text(90), 9)[0]]
            serving.runner.poison.add(tuple(words[:cut]))
            serving.run(generate("bad", words[:90], max_tokens=9, ignore_eos=True))
            assert isinstance(serving.said["bad"][-1], Failed)
            assert serving.engine.stats().snapshots == 0
            assert serving.engine.stats().kv_tokens_cached == 0
            serving.runner.poison.clear()
            assert serving.ask(generate("good", words[:90], max_tokens=9)) == [0]
            assert answer(serving.said["good"]).tokens == greedy(words[:90], 9)[0]


def test_what_is_not_known_to_be_sound_is_not_reused():
    """With steps in flight: of a prompt whose logits have not come yet, and of a stop token that was computed too."""
    serving = Caching(overlap=True)
    serving.runner.poison.add(tuple(text(80)))
    serving.engine.add(generate("bad", text(80)))
    serving.step()
    assert serving.engine.stats().snapshots == 1
    serving.runner.poison.clear()
    assert serving.ask(generate("good", text(90))) == [0]
    assert isinstance(serving.said["bad"][0], Failed)

    prompt = next(words for seed in range(99) for words in [text(50, seed)] if greedy(words, 12)[1] is not None)
    said, stop = greedy(prompt, 12)
    whole = [*prompt, *said, stop or 0]
    serving = Caching(overlap=True)
    serving.runner.poison.add(tuple(whole))
    serving.engine.add(generate("stops", prompt, max_tokens=12))
    while serving.engine.stats().running or "stops" not in serving.said:
        serving.step()
    assert serving.engine.busy, "the step with the stop token is still on its way"
    assert answer(serving.said["stops"]).finish_reason == "stop"
    serving.runner.poison.clear()
    assert serving.ask(generate("next", [*whole, 1, 2])) == [len(prompt)]


def test_pictures_are_told_apart_by_their_pixels():
    def request(name: str, digest: bytes) -> Request:
        prompt, pictures = [1, 7, 7, 7, 7, 2], object.__new__(Pictures)
        pictures.places, pictures.digests = [Place(1, 2, 2)], [digest]
        return Request(name, prompt, SamplingParams(max_tokens=1), 0, pictures=pictures)

    one, same, other = (request(name, digest * 16) for name, digest in (("a", b"x"), ("b", b"x"), ("c", b"y")))
    assert one.encoded() == same.encoded()
    size = TOKEN_BYTES
    assert [one.encoded()[i : i + size] == other.encoded()[i : i + size] for i in range(0, 6 * size, size)] == [
        True, *[False] * 4, True,
    ]  # fmt: skip
    assert one.encoded() != encode(one.prompt)
    assert one.tokens(0, 6) == one.prompt


def test_nothing_is_kept_without_rows():
    serving = Caching(reuse=ReuseOptions())
    assert serving.ask(generate("a", text(70))) == [0]
    assert serving.ask(generate("b", text(90))) == [0]
    stats = serving.engine.stats()
    assert (stats.kv_tokens_cached, stats.snapshots, stats.cached_tokens) == (0, 0, 0)
    assert all(not plan.saves for plan in serving.runner.plans)


def test_statistics_add_up():
    serving = Caching()
    found = [*serving.ask(generate("a", text(70))), *serving.ask(generate("b", text(80)), generate("c", text(75, 3)))]
    stats = serving.engine.stats()
    assert (stats.cached_tokens, stats.looked_up_tokens) == (sum(found), 70 + 80 + 75)
    assert sum(serving.computed.values()) == stats.looked_up_tokens - stats.cached_tokens
    assert 0 < stats.kv_tokens_cached <= stats.kv_tokens
    assert stats.kv_tokens_used == 0


def test_cached_pages_are_given_up_before_anyone_is_preempted():
    tight = replace(LONG, pages=12, page_tokens=8, max_model_len=96)
    serving = Caching(tight, reuse=KEEP_ALL)
    for i in range(6):
        serving.ask(generate(f"r{i}", text(60, i), max_tokens=30, ignore_eos=True))
    assert serving.engine.stats().preemptions == 0


OPTIONS = st.builds(
    ReuseOptions,
    snapshot_rows=st.integers(1, 7),
    every_tokens=st.integers(1, 9),
    boundaries=st.sampled_from([frozenset(), frozenset({EOS}), frozenset({0, 1})]),
    least_gap_tokens=st.integers(1, 4),
    host_pages=st.integers(1, 24),
    host_rows=st.sampled_from([0, 1, 2, 5, 9]),
)
# Sequences with much in common: a beginning of one of few texts, and an ending.
PROMPTS = st.builds(
    lambda seed, length, rest: (text(13, seed)[:length] + rest) or [1],
    st.integers(0, 1), st.integers(0, 13), st.lists(st.integers(0, 1), max_size=3),
)  # fmt: skip
REQUESTS = st.lists(
    st.tuples(
        PROMPTS,
        samplings,
        st.integers(0, 2),  # priority
        st.integers(0, 24),  # step it comes in
        st.none() | st.none() | st.integers(0, 20),  # steps until it is cancelled
    ),
    min_size=2,
    max_size=16,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(REQUESTS, limits, OPTIONS, st.booleans(), st.booleans())
def test_anything_served_together_is_as_alone(
    specs: list, limits: Limits, options: ReuseOptions, overlap: bool, poisoned: bool
):
    """Any arrivals, cancels, chunks, preemptions, failures and evictions: each gets what it gets without a cache."""
    everything = [
        generate(f"r{i}", prompt, priority, **{"min_tokens": min(i % 3, sampling["max_tokens"]), **sampling})
        for i, (prompt, sampling, priority, _, _) in enumerate(specs)
    ]
    serving = Caching(limits, overlap, options)
    poison = tuple(text(8, 1))
    if poisoned:
        serving.runner.poison.add(poison)
    for moment in range(46):
        for request, (*_, arrival, cancel) in zip(everything, specs, strict=True):
            if arrival == moment:
                serving.engine.add(request)
            if cancel is not None and arrival + cancel == moment:
                serving.engine.cancel(request.id)
        serving.step()
    serving.run(steps=sum(len(r.prompt) + r.sampling.max_tokens for r in everything) * (len(specs) + 1) * 2 + 10)
    for request, (*_, cancel) in zip(everything, specs, strict=True):
        length = len(request.prompt) + request.sampling.max_tokens
        if length > min(limits.max_model_len, limits.kv_tokens):
            continue
        plain = Serving()
        if poisoned:
            plain.runner.poison.add(poison)
        expected = plain.run(request).said[request.id]
        *_, last = said = serving.said[request.id]
        tokens = [token for m in said if isinstance(m, Tokens) for token in m.tokens]
        wanted = [token for m in expected if isinstance(m, Tokens) for token in m.tokens]
        if isinstance(last, Tokens) and last.finish_reason == "cancel":
            assert cancel is not None
            assert tokens == wanted[: len(tokens)]
            continue
        if isinstance(expected[-1], Failed):
            assert isinstance(last, Failed), "a hit got past what is not finite"
            assert tokens == wanted
        elif isinstance(last, Failed):
            assert poisoned
            assert not request.sampling.max_tokens, "without a cache, nobody looks at what follows it"
        else:
            assert answer(said) == answer(expected)
        if request.id not in serving.preempted and request.id in serving.cached and not isinstance(last, Failed):
            assert serving.cached[request.id] == len(request.prompt) - serving.computed[request.id]
    assert all(tuple(text(8, 1)) != snapshot_tokens[:8] for snapshot_tokens in kept(serving)) or not poisoned


def kept(serving: Caching) -> list[tuple[int, ...]]:
    """The sequences that there are snapshots of, as the fake ranks have them, and their host tiers."""
    rank, reuse = serving.runner.ranks[0], serving.engine.scheduler.reuse
    saves = {snapshot.row for _, snapshot in reuse._saves}
    found = [rank.states[snapshot.row] for snapshot in reuse.cache.snapshots if snapshot.row not in saves]
    if reuse.host is not None:
        going = reuse.host._rows_out
        found += [rank.host_states[s.row] for s in reuse.host.cache.snapshots if s.row not in going]
    return found


TIGHT = replace(LONG, pages=16, page_tokens=8, max_model_len=100)  # room for little more than one request
TO_HOST = replace(KEEP_ALL, snapshot_rows=1, host_pages=200, host_rows=50)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_the_device_has_no_room_for_comes_back_from_the_host(overlap: bool):
    serving = Caching(TIGHT, overlap, TO_HOST)
    for i in range(6):
        assert serving.ask(generate(f"r{i}", text(60 + i, i), max_tokens=2)) == [0]
    for length in range(1, 9):  # at every offset in a page, and with a remainder of one token
        for i in range(6):
            again = generate(f"again{length}.{i}", [*text(60 + i, i), *[12] * length], max_tokens=3)
            assert 60 + i <= serving.ask(again)[0] < 60 + i + length
            assert answer(serving.said[again.id]) == alone(again)
    stats = serving.engine.stats()
    assert stats.host_cached_tokens > 0.9 * stats.cached_tokens > 2000
    assert 0 < stats.host_snapshots <= 50
    assert 0 < stats.host_kv_tokens_used <= stats.host_kv_tokens == 1600


def test_without_a_host_tier_it_is_computed_again():
    serving = Caching(TIGHT, reuse=replace(TO_HOST, host_rows=0))
    for turn in range(2):
        for i in range(6):
            assert serving.ask(generate(f"r{turn}{i}", text(60 + i, i), max_tokens=2)) == [0]
    assert serving.engine.stats().host_cached_tokens == 0


def test_one_request_brings_what_many_share():
    serving = Caching(
        replace(LONG, pages=60, page_tokens=8, max_model_len=200), reuse=replace(TO_HOST, snapshot_rows=2)
    )
    system = text(80)
    serving.ask(generate("first", system))
    for i in range(4):
        serving.ask(generate(f"other{i}", text(90, i + 1)))
    before = len(serving.runner.plans)
    found = serving.ask(*[generate(f"u{i}", [*system, i, 12]) for i in range(5)])
    assert found == [80] * 5
    assert serving.engine.stats().host_cached_tokens == 80
    copies = [plan.host for plan in serving.runner.plans[before:] if plan.host]
    assert sum(len(each.pages_in) for each in copies) == 10


def test_what_failed_leaves_the_host_too():
    serving = Caching(TIGHT, reuse=replace(TO_HOST, snapshot_rows=2, every_tokens=20))
    words = [*text(60), *greedy(text(60), 30)[0]]
    serving.runner.poison.add(tuple(words[:61]))
    serving.engine.add(generate("bad", words[:60], max_tokens=9, ignore_eos=True))
    serving.engine.add(generate("good", text(30, 1), max_tokens=1))
    serving.run()
    assert isinstance(serving.said["bad"][-1], Failed)
    assert all(tokens[:20] != tuple(words[:20]) for tokens in kept(serving))
    assert serving.ask(generate("again", words[:60], max_tokens=1)) == [0]


def test_the_host_gives_up_what_is_used_least():
    serving = Caching(TIGHT, reuse=replace(TO_HOST, host_pages=24, host_rows=8))
    often = text(50)
    serving.ask(generate("first", often, max_tokens=1))
    for i in range(1, 12):
        serving.ask(generate(f"r{i}", text(50, i), max_tokens=1))
        assert serving.ask(generate(f"often{i}", [*often, 12, 12, i % 5], max_tokens=1))[0] >= 50
    host = serving.engine.scheduler.reuse.host
    assert host is not None
    assert host.pool.used <= 24
    assert serving.ask(generate("r1 again", [*text(50, 1), 12], max_tokens=1)) == [0]
