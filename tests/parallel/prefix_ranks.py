"""What the ranks of the pool run in tests of the prefix cache: one engine, and requests in waves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch

from shardwise.config import RankEnvironment, ServeConfig
from shardwise.engine.build import Leader, build_rank
from shardwise.engine.messages import Failed, Generate, Logprob, SamplingParams, Stats
from shardwise.parallel.comm import Alone, TorchCommunicator

Asked = tuple[list[int], dict[str, Any]]  # a prompt and its sampling
NEAR_TIE = 1e-3  # what closer leads decide is up to rounding


@dataclass
class Reply:
    """One answer: its tokens, a stop token at the end, and what was reported as found in the cache."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: str = ""

    def agrees(self, reference: "Reply", near_tie: float = NEAR_TIE) -> bool:
        """Whether the tokens are the same, but for what follows a near-tie of the reference (whose logprobs it has)."""
        for mine, right, entry in zip(self.tokens, reference.tokens, reference.logprobs, strict=False):
            if mine != right:
                (_, first), (_, second) = entry.top[:2]
                return first - second < near_tie
        return self.finish_reason == "cancel" or len(self.tokens) == len(reference.tokens)


def make_leader(
    rank: int, world: int, group: Any, serve: Mapping[str, Any], least_gap_tokens: int = 32
) -> Leader | None:
    """The first rank's engine; the other ranks follow it to its end, and get None."""
    config = ServeConfig(ranks=world, device="cpu", **serve)
    comm = TorchCommunicator(group, group) if world > 1 else Alone()
    one = build_rank(config, RankEnvironment(rank, world, rank, world, 0), comm)
    torch.set_num_threads(1)  # building it has taken all cores
    if rank:
        one.runner.follow()
        return None
    leader = Leader(one, config)
    reuse = leader.engine.scheduler.reuse
    reuse._options = replace(reuse._options, least_gap_tokens=least_gap_tokens)
    return leader


def run_wave(
    leader: Leader, asked: Sequence[Asked], arrive_every: int = 0, cancel_after: Mapping[int, int] | None = None
) -> list[Reply]:
    """Serve `asked`. arrive_every: steps between arrivals; 0: all at once. cancel_after: by number, the step."""
    waiting = [
        Generate(str(n), prompt, msgspec.convert({"temperature": 0.0, **sampling}, SamplingParams))
        for n, (prompt, sampling) in enumerate(asked)
    ]
    replies, steps = [Reply() for _ in asked], 0
    while waiting or leader.has_work():
        while waiting and (not arrive_every or steps % arrive_every == 0 or not leader.has_work()):
            leader.add(waiting.pop(0))
            if arrive_every:
                break
        for number, step in (cancel_after or {}).items():
            if step == steps:
                leader.cancel(str(number))
        for message in leader.step():
            if isinstance(message, Failed):
                raise RuntimeError(message.message)
            reply = replies[int(message.id)]
            stop = [message.stop_token] if message.stop_token is not None else []
            reply.tokens += message.tokens + stop
            reply.logprobs += message.logprobs
            reply.cached_tokens, reply.finish_reason = message.cached_tokens, message.finish_reason or ""
        steps += 1
    leader.engine.check()
    return replies


def waves(
    rank: int,
    world: int,
    group: Any,
    *,
    serve: Mapping[str, Any],
    asked: Sequence[Sequence[Asked]],
    least_gap_tokens: int = 32,
    arrive_every: int = 0,
    cancel_after: Mapping[int, int] | None = None,
) -> tuple[list[list[Reply]], Stats] | None:
    """On the first rank the replies of one wave after another, and the counts. The last wave is not cancelled."""
    leader = make_leader(rank, world, group, serve, least_gap_tokens)
    if leader is None:
        return None
    replies = [run_wave(leader, wave, arrive_every, cancel_after) for wave in asked[:-1]]
    replies.append(run_wave(leader, asked[-1], arrive_every))
    leader.stop()
    return replies, leader.stats()
