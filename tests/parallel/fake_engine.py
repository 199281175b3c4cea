"""An engine without a model: real ranks that meet in a broadcast every step, and tokens that count upwards.

A served model name asks for a fault: "wrong" is a config error on rank 1, "broken" a crash on rank 1.
"""

import time

import torch
import torch.distributed as dist

from shardwise.config import ConfigError, RankEnvironment, ServeConfig
from shardwise.engine.messages import Failed, Generate, Ready, Stats, Tokens

STEP_SECONDS = 0.02
STOP = -1


class FakeLeader:
    def __init__(self, config: ServeConfig, world: int) -> None:
        self._config, self._world = config, world
        self._requests: dict[str, tuple[Generate, int]] = {}
        self._outbox: list[Tokens | Failed] = []
        self._steps = self._cancelled = 0
        self._broadcast(0)

    def _broadcast(self, word: int) -> None:
        dist.broadcast(torch.tensor([word]), src=0)
        self._steps += 1

    def ready(self) -> Ready:
        return Ready(max_model_len=1000, kv_tokens=4000, max_num_seqs=8, ranks=self._world)

    def add(self, generate: Generate) -> None:
        if len(generate.prompt) > 1000:
            self._outbox.append(Failed(id=generate.id, message="too long", refused=True, param="prompt"))
        else:
            self._requests[generate.id] = (generate, 0)

    def cancel(self, request_id: str) -> None:
        self._cancelled += self._requests.pop(request_id, None) is not None

    def has_work(self) -> bool:
        return bool(self._requests or self._outbox)

    def step(self) -> list[Tokens | Failed]:
        time.sleep(STEP_SECONDS)
        self._broadcast(len(self._requests))
        out, self._outbox = self._outbox, []
        for name, (request, done) in list(self._requests.items()):
            last = done + 1 == request.sampling.max_tokens
            self._requests[name] = (request, done + 1)
            token = request.prompt[-1] + done + 1
            out.append(Tokens(id=name, tokens=[token], finish_reason="length" if last else None))
            if last:
                del self._requests[name]
        return out

    def idle(self) -> None:
        self._broadcast(0)

    def stats(self) -> Stats:
        used = len(self._requests)
        return Stats(used, 0, used, 4000, used, 8, preemptions=self._cancelled, prompt_tokens=0, generated_tokens=0,
                     steps=self._steps)  # fmt: skip

    def stop(self) -> None:
        self._broadcast(STOP)


class FakeFollower:
    def run_forever(self) -> None:
        word = torch.zeros(1, dtype=torch.int64)
        while word.item() != STOP:
            dist.broadcast(word, src=0)


def build(config: ServeConfig, environment: RankEnvironment) -> FakeLeader | FakeFollower:
    if environment.rank == 1 and "wrong" in config.served_model_name:
        raise ConfigError("model: this one is wrong for rank 1")
    if environment.rank == 1 and "broken" in config.served_model_name:
        raise RuntimeError("a bug in rank 1")
    dist.init_process_group("gloo")
    if environment.rank:
        follower = FakeFollower()
        dist.broadcast(torch.zeros(1, dtype=torch.int64), src=0)
        return follower
    return FakeLeader(config, environment.world)
