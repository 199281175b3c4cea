"""A serving load: requests that arrive at random with lengths like those of chats, and what their senders saw of it.

Arrivals are a Poisson process. Lengths of prompts and answers are log-normal, as in ShareGPT's conversations: with the
default medians of 90 and 200 tokens and the sigmas below, clipped, the means are about 157 and 295 tokens. All of it
follows from a seed.
"""

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.commands.bench.limits import ByteLimit
from shardwise.commands.bench.target import Target, Trace

PROMPT_MEDIAN, PROMPT_SIGMA = 90, 1.1
ANSWER_MEDIAN, ANSWER_SIGMA = 200, 1.0
LEAST_TOKENS, MOST_TOKENS = 4, 1024  # of a prompt and of an answer
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Asked:
    """A request to come: when, in seconds from the beginning, and how many tokens there and back."""

    at_s: float
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class LoadFigures:
    """Of all requests at one rate of arrivals. Percentiles by their number, in seconds, None if nothing was answered.

    mean_at_once: requests under way, on average over wall_s. limit_tokens_per_s: of answers, what reading allows with
    so many decoded at once. failures: how many requests ended so.
    """

    rate: float
    requests: int
    answered: int
    wall_s: float
    prompt_tokens: int
    answer_tokens: int
    requests_per_s: float
    answer_tokens_per_s: float
    tokens_per_s: float
    mean_at_once: float
    first_token_s: Mapping[int, float] | None
    between_tokens_s: Mapping[int, float] | None
    whole_s: Mapping[int, float] | None
    failures: Mapping[str, int]
    limit_tokens_per_s: float | None = None

    @property
    def share(self) -> float | None:
        """Of the limit."""
        return self.answer_tokens_per_s / self.limit_tokens_per_s if self.limit_tokens_per_s else None


def arrivals_s(rate: float, count: int, source: random.Random) -> list[float]:
    """Times of a Poisson process of `rate` a second, the first at 0; all at 0 for an infinite rate."""
    if math.isinf(rate):
        return [0.0] * count
    at_s, found = 0.0, list[float]()
    for _ in range(count):
        found.append(at_s)
        at_s += source.expovariate(rate)
    return found


def length_tokens(median: float, sigma: float, source: random.Random) -> int:
    """A log-normal length, clipped."""
    return min(max(round(source.lognormvariate(math.log(median), sigma)), LEAST_TOKENS), MOST_TOKENS)


def mix(rate: float, count: int, medians: tuple[int, int], seed: int, longest: int | None = None) -> list[Asked]:
    """`count` requests; their lengths are the same at every rate. longest: of prompt and answer together; prompts get
    half of it at most, and answers what is left."""
    lengths, found = random.Random(f"lengths {seed}"), list[Asked]()
    for at_s in arrivals_s(rate, count, random.Random(f"arrivals {seed}")):
        prompt = length_tokens(medians[0], PROMPT_SIGMA, lengths)
        answer = length_tokens(medians[1], ANSWER_SIGMA, lengths)
        if longest is not None:
            prompt = max(1, min(prompt, longest // 2))
            answer = max(1, min(answer, longest - prompt))
        found.append(Asked(at_s, prompt, answer))
    return found


async def offer(target: Target, asked: Sequence[Asked], seed: int) -> list[Trace]:
    """Send each request when its time has come, whatever became of those before."""
    source = random.Random(f"prompts {seed}")
    prompts = [target.prompt(source, one.prompt_tokens) for one in asked]
    begin_s = time.perf_counter()

    async def one(number: int) -> Trace:
        await asyncio.sleep(begin_s + asked[number].at_s - time.perf_counter())
        return await target.answer(prompts[number], asked[number].answer_tokens)

    return await asyncio.gather(*(one(number) for number in range(len(asked))))


def percentiles(values: Sequence[float]) -> dict[int, float] | None:
    """Each of PERCENTILES, between neighbours in proportion; None of nothing."""
    ordered, found = sorted(values), dict[int, float]()
    if not ordered:
        return None
    for wanted in PERCENTILES:
        place = (len(ordered) - 1) * wanted / 100
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        found[wanted] = ordered[low] + (ordered[high] - ordered[low]) * (place - low)
    return found


def figures(rate: float, traces: Sequence[Trace], limit: ByteLimit | None = None) -> LoadFigures:
    """What `traces` come to. Times and tokens are of requests with whole answers; the others are failures."""
    whole = [trace for trace in traces if not trace.fault]
    wall_s = max(trace.ended_s for trace in traces) - min(trace.sent_s for trace in traces)
    prompts, answers = (sum(getattr(trace, name) for trace in whole) for name in ("prompt_tokens", "tokens"))
    at_once = sum(trace.whole_s for trace in whole) / wall_s
    context = (prompts + answers / 2) / max(len(whole), 1)
    return LoadFigures(
        rate=rate,
        requests=len(traces),
        answered=len(whole),
        wall_s=wall_s,
        prompt_tokens=prompts,
        answer_tokens=answers,
        requests_per_s=len(whole) / wall_s,
        answer_tokens_per_s=answers / wall_s,
        tokens_per_s=(prompts + answers) / wall_s,
        mean_at_once=at_once,
        first_token_s=percentiles([trace.first_s for trace in whole]),
        between_tokens_s=percentiles([gap for trace in whole for gap in trace.gaps_s()]),
        whole_s=percentiles([trace.whole_s for trace in whole]),
        failures=dict(Counter(trace.fault for trace in traces if trace.fault)),
        limit_tokens_per_s=limit.decode_tokens_per_s(at_once, context) if limit and whole else None,
    )
