"""What is planned, step by step: order, budget, pages, preemption, refusals."""

import pytest

from shardwise.engine.messages import SamplingParams
from shardwise.engine.plan import Chunk
from shardwise.engine.request import Limits, Request, RequestRefused, Status, check_sampling
from shardwise.engine.scheduler import Progress, Scheduler, Step


def make_limits(**changes: int) -> Limits:
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "pages": 16, "page_tokens": 4}
    return Limits(**{"vocab_size": 100, **values, **changes})


def make(arrival: int, prompt: int = 4, max_tokens: int = 8, priority: int = 0, stop: int = -1, **sampling) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    stops = frozenset({stop})
    tokens = [arrival * 10 + i for i in range(prompt)]
    return Request(f"r{arrival}", [t % 100 for t in tokens], params, arrival, stop_ids=stops, priority=priority)


def started(scheduler: Scheduler, *requests: Request) -> list[Request]:
    for request in requests:
        scheduler.add(request)
    return list(requests)


def finish(scheduler: Scheduler, step: Step, token: int = 50) -> list[Progress]:
    return scheduler.finish(step, {chunk.row: token for chunk in step.plan.chunks if chunk.sample})


def counts(step: Step) -> list[tuple[str, int, int]]:
    return [(r.id, chunk.start, chunk.count) for r, chunk in zip(step.requests, step.plan.chunks, strict=True)]


def test_nothing_to_do_is_a_step_without_chunks():
    scheduler = Scheduler(make_limits())
    assert scheduler.plan().plan.chunks == []
    assert scheduler.steps == 0


def test_long_prompts_are_cut_and_the_rest_of_the_budget_goes_on():
    scheduler = Scheduler(make_limits())
    started(scheduler, make(0, prompt=20), make(1, prompt=20))
    first = scheduler.plan()
    assert first.plan.chunks == [
        Chunk(row=1, start=0, count=16, tokens=[*range(16)], new_pages=[1, 2, 3, 4], sample=False, reset=True)
    ]
    assert finish(scheduler, first) == []
    second = scheduler.plan()
    assert counts(second) == [("r0", 16, 4), ("r1", 0, 12)]
    assert [chunk.sample for chunk in second.plan.chunks] == [True, False]
    assert second.plan.chunks[0].new_pages == [5]
    finish(scheduler, second)
    third = scheduler.plan()
    assert counts(third) == [("r0", 20, 1), ("r1", 12, 8)]
    assert third.plan.chunks[0].tokens == []  # the token sampled last is on the device
    assert third.plan.chunks[0].new_pages == [9]


def test_steps_are_shorter_while_answers_go_on():
    scheduler = Scheduler(make_limits(busy_tokens=6))
    started(scheduler, make(0, prompt=3), make(1, prompt=30))
    steps = []
    for _ in range(3):
        steps.append(scheduler.plan())
        finish(scheduler, steps[-1])
    assert [counts(step) for step in steps[:2]] == [[("r0", 0, 3), ("r1", 0, 13)], [("r0", 3, 1), ("r1", 13, 5)]]
    assert [sum(count for _, _, count in counts(step)) for step in steps] == [16, 6, 6]


def test_answers_go_before_prompts_that_came_earlier():
    scheduler = Scheduler(make_limits(max_num_batched_tokens=4))
    old, new = started(scheduler, make(0, prompt=4), make(1, prompt=12, priority=-1))
    steps = []
    while new.status is not Status.FINISHED or old.status is not Status.FINISHED:
        steps.append(scheduler.plan())
        finish(scheduler, steps[-1])
    assert counts(steps[0]) == [("r1", 0, 4)]  # by priority
    assert counts(steps[3]) == [("r1", 12, 1), ("r0", 0, 3)]


def test_one_token_prompts_go_with_the_answers():
    scheduler = Scheduler(make_limits())
    started(scheduler, make(0, prompt=3), make(1, prompt=1))
    step = scheduler.plan()
    assert counts(step) == [("r1", 0, 1), ("r0", 0, 3)]
    assert step.plan.chunks[0].tokens == [10]


def test_steps_can_be_planned_ahead_of_their_tokens():
    scheduler = Scheduler(make_limits())
    (request,) = started(scheduler, make(0, max_tokens=3))
    steps = [scheduler.plan() for _ in range(4)]
    assert [counts(step) for step in steps] == [[("r0", 0, 4)], [("r0", 4, 1)], [("r0", 5, 1)], []]
    assert [r.index for r in steps[2].sampled] == [2]
    for token, step in enumerate(steps[:3]):
        finish(scheduler, step, token)
    assert request.output == [0, 1, 2]
    assert request.status is Status.FINISHED
    scheduler.check()


def test_a_stop_noticed_late_throws_the_rest_away():
    scheduler = Scheduler(make_limits())
    (request,) = started(scheduler, make(0, stop=7))
    first, second = scheduler.plan(), scheduler.plan()
    assert finish(scheduler, first, 7) == [Progress(request, [], "stop", 7)]
    assert finish(scheduler, second, 8) == []
    assert request.output == []
    assert scheduler.pages.used == scheduler.rows.used == 0


def test_rows_bound_what_runs():
    scheduler = Scheduler(make_limits(max_num_seqs=2))
    started(scheduler, *(make(i) for i in range(3)))
    step = scheduler.plan()
    assert [r.id for r in step.requests] == ["r0", "r1"]
    scheduler.end(step.requests[0])
    finish(scheduler, step)
    assert [r.id for r in scheduler.plan().requests] == ["r1", "r2"]


def test_the_latest_gives_its_pages_to_an_earlier_one_and_starts_again():
    scheduler = Scheduler(make_limits(pages=4, max_model_len=16))
    old, new = started(scheduler, make(0, prompt=4, max_tokens=12), make(1, prompt=4, max_tokens=12))
    seen: dict[str, list[Chunk]] = {"r0": [], "r1": []}
    told: dict[str, list[int]] = {"r0": [], "r1": []}
    for token in range(60):
        step = scheduler.plan()
        for request, chunk in zip(step.requests, step.plan.chunks, strict=True):
            seen[request.id].append(chunk)
        for progress in finish(scheduler, step, token):
            told[progress.request.id] += progress.tokens
        scheduler.check()
        if not scheduler.has_requests:
            break
    assert (old.preemptions, new.preemptions, scheduler.preemptions) == (0, 1, 1)
    again = next(chunk for chunk in seen["r1"][1:] if chunk.start == 0)
    assert again.tokens == (new.prompt + new.output)[: again.count]
    assert again.count > len(new.prompt), "what was said is computed again, not said again"
    assert told == {"r0": old.output, "r1": new.output}
    assert len(new.output) == 12
    assert scheduler.pages.used == 0


def test_a_preempted_request_comes_before_those_that_wait():
    scheduler = Scheduler(make_limits(pages=4, max_model_len=16))
    old, new = started(scheduler, make(0, max_tokens=12), make(1, max_tokens=12))
    while not new.preemptions:
        finish(scheduler, scheduler.plan())
        if scheduler.steps == 3:
            scheduler.add(make(2, prompt=1, max_tokens=1))
    assert [r.id for r in scheduler.waiting] == ["r1", "r2"]
    scheduler.end(old)
    assert counts(scheduler.plan()) == [("r1", 0, len(new.prompt + new.output))]


def preempted_in_flight(max_tokens: int) -> tuple[Scheduler, Request, Request, list[Step]]:
    """Four steps in flight, the last of which takes the pages of the newer request, which sampled in the first two."""
    scheduler = Scheduler(make_limits(pages=8, page_tokens=1, max_model_len=8))
    old, new = started(scheduler, make(0, prompt=2, max_tokens=5), make(1, prompt=3, max_tokens=max_tokens))
    steps = [scheduler.plan() for _ in range(4)]
    assert [counts(step) for step in steps] == [
        [("r0", 0, 2), ("r1", 0, 3)],
        [("r0", 2, 1), ("r1", 3, 1)],
        [("r0", 3, 1)],
        [("r0", 4, 1)],
    ]
    assert (new.status, new.preemptions, new.pending) == (Status.WAITING, 1, 2)
    return scheduler, old, new, steps


def test_a_preempted_request_waits_for_its_tokens_in_flight():
    scheduler, old, new, steps = preempted_in_flight(max_tokens=5)
    scheduler.end(old)
    finish(scheduler, steps[0], 33)
    assert scheduler.plan().plan.chunks == []  # a token of r1 is still on its way
    finish(scheduler, steps[1], 34)
    (chunk,) = scheduler.plan().plan.chunks
    assert (chunk.start, chunk.tokens, chunk.sample) == (0, [*new.prompt, 33, 34], True)


def test_a_preempted_request_whose_last_token_was_in_flight_just_ends():
    scheduler, _, new, steps = preempted_in_flight(max_tokens=2)
    assert [p.finish_reason for p in finish(scheduler, steps[0])] == [None, None]
    assert [p.finish_reason for p in finish(scheduler, steps[1])] == [None, "length"]
    assert not scheduler.waiting
    assert new.output == [50, 50]
    scheduler.check()


def test_no_request_is_started_into_pages_that_others_are_about_to_need():
    scheduler = Scheduler(make_limits(pages=3, max_model_len=12))
    started(scheduler, make(0, prompt=4, max_tokens=5), make(1, prompt=8, max_tokens=1))
    finish(scheduler, scheduler.plan())
    for _ in range(4):
        finish(scheduler, scheduler.plan())
        assert scheduler.preemptions == 0
    assert counts(scheduler.plan()) == [("r1", 0, 8)]


def test_max_tokens_zero_computes_the_prompt_and_ends():
    scheduler = Scheduler(make_limits(max_num_batched_tokens=3))
    (request,) = started(scheduler, make(0, prompt=5, max_tokens=0))
    first = scheduler.plan()
    assert finish(scheduler, first) == []
    second = scheduler.plan()
    assert [chunk.sample for chunk in first.plan.chunks + second.plan.chunks] == [False, False]
    assert scheduler.plan().plan.chunks == []
    assert finish(scheduler, second) == [Progress(request, [], "length")]
    scheduler.check()


def test_prompt_logits_are_bounded_per_step():
    scheduler = Scheduler(make_limits(prompt_logits_tokens=3))
    started(scheduler, make(0, prompt=5, prompt_logprobs=0), make(1, prompt=2), make(2, prompt=2, prompt_logprobs=1))
    step = scheduler.plan()
    assert counts(step) == [("r0", 0, 3), ("r1", 0, 2)]
    assert [chunk.prompt_logits for chunk in step.plan.chunks] == [True, False]
    finish(scheduler, step)
    assert counts(scheduler.plan()) == [("r1", 2, 1), ("r2", 0, 1), ("r0", 3, 2)]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param", "parts"),
    [
        ([], 4, "prompt", ["empty"]),
        ([1, 100], 4, "prompt", ["token 1", "is 100", "vocabulary of 100"]),
        ([-1], 4, "prompt", ["token 0", "is -1"]),
        ([1] * 70, 1, "prompt", ["70 tokens", "64", "--max-model-len"]),
        ([1] * 64, 1, "prompt", ["64 tokens", "--max-model-len"]),
        ([1] * 60, 5, "max_tokens", ["60 tokens", "max_tokens 5", "65 together", "at most 4", "--max-model-len"]),
        ([1] * 30, 11, "max_tokens", ["30 tokens", "41 together", "40", "--kv-tokens"]),
        ([1] * 41, 0, "prompt", ["41 tokens", "40", "--kv-tokens"]),
        ([1], -1, "max_tokens", ["-1"]),
    ],
)
def test_what_can_never_fit_is_refused(prompt: list[int], max_tokens: int, param: str, parts: list[str]):
    scheduler = Scheduler(make_limits(pages=10))
    with pytest.raises(RequestRefused) as error:
        scheduler.add(Request("r", prompt, SamplingParams(max_tokens=max_tokens), 0))
    assert error.value.param == param
    assert all(part in error.value.message for part in parts), error.value.message
    assert not scheduler.has_requests


@pytest.mark.parametrize("prompt", [63, 40, 1])
def test_what_just_fits_is_taken(prompt: int):
    scheduler = Scheduler(make_limits(pages=16))
    scheduler.add(make(0, prompt=prompt, max_tokens=64 - prompt))


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 1.5),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", float("inf")),
        ("repetition_penalty", 0.0),
        ("min_tokens", 9),
        ("logprobs", -1),
        ("logprobs", 101),
        ("prompt_logprobs", 101),
        ("logit_bias", {100: 1.0}),
        ("logit_bias", {1: float("nan")}),
    ],
)
def test_meaningless_parameters_are_refused(param: str, value: object):
    with pytest.raises(RequestRefused, match=param) as error:
        check_sampling(SamplingParams(**{"max_tokens": 8, param: value}), 100)  # pyright: ignore[reportArgumentType]
    assert error.value.param == param


def test_limits_of_nothing_are_refused():
    with pytest.raises(ValueError, match="pages is 0"):
        make_limits(pages=0)
