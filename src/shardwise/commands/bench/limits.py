"""The byte limit: how fast each figure could be if a step took no longer than its bytes.

What a step must read is the cost model's (parallel/cost.py): weights once, the experts that at least one token of the
batch chooses if all are equally likely, keys and values, states; of several ranks, the one that takes longest counts.
"""

import time
from dataclasses import dataclass

import torch

from shardwise.cache.budget import DEFAULTS
from shardwise.config import ServeConfig
from shardwise.engine.build import Blueprint
from shardwise.models.stages import stages
from shardwise.parallel import probe
from shardwise.parallel.cost import Anatomy, Load, shared
from shardwise.parallel.devices import UNKNOWN, Device, Machine, select
from shardwise.shard import Partitions

READ_BYTES = 1 << 28  # of host memory, far more than any cache holds
ROUNDS = 5


@dataclass(frozen=True)
class Bandwidth:
    """What each rank's device reads, bytes a second, and how that is known."""

    read_bytes_per_s: tuple[float, ...]
    source: str


@dataclass(frozen=True)
class ByteLimit:
    """Limits of one split on its devices. step_tokens: the most that a step computes."""

    anatomy: Anatomy
    partitions: Partitions
    bandwidth: Bandwidth
    step_tokens: int

    def step_bytes(self, load: Load) -> float:
        """Of the rank with most."""
        ranks = range(len(self.bandwidth.read_bytes_per_s))
        return max(self.anatomy.moved_bytes(self.partitions, rank, load) for rank in ranks)

    def step_seconds(self, load: Load) -> float:
        """Of the rank that takes longest."""
        each = enumerate(self.bandwidth.read_bytes_per_s)
        return max(self.anatomy.moved_bytes(self.partitions, rank, load) / speed for rank, speed in each)

    def decode_tokens_per_s(self, requests: float, context_tokens: float) -> float:
        return requests / self.step_seconds(Load(requests, context_tokens))

    def prefill_seconds(self, requests: int, prompt_tokens: float) -> float:
        """Of prompts computed in as few steps as they fit into."""
        steps = max(1, -(-int(requests * prompt_tokens) // self.step_tokens))
        if steps <= requests:
            return steps * self.step_seconds(Load(requests / steps, prompt_tokens, prompt_tokens))
        # A prompt in parts: each part reads what the parts before it left, on average half of the prompt.
        part = Load(1, prompt_tokens / 2, requests * prompt_tokens / steps)
        return steps * self.step_seconds(part)


def byte_limit(config: ServeConfig, made: Blueprint, bandwidth: Bandwidth) -> ByteLimit:
    """The limit of what the ranks of `config` compute, all experts on their devices."""
    caches = made.caches
    anatomy = stages(made.model, made.specs, caches.page, caches.row, config.page_tokens)
    step_tokens = config.max_num_batched_tokens or DEFAULTS[made.device_type].max_num_batched_tokens
    return ByteLimit(anatomy, made.partitions, bandwidth, step_tokens)


def measure_bandwidth(config: ServeConfig, device_type: str) -> Bandwidth:
    """Read each rank's device, before the engine holds it. Raises ProbeError if the GPUs cannot be asked."""
    if device_type == "cpu":
        host = Device("host", 0, host_read_bytes_per_s(), UNKNOWN, index=0)
        machine, source = Machine((host,) * config.ranks), "a sum over 256 MiB of host memory, which the ranks share"
        return Bandwidth(tuple(shared(machine, rank).read_bytes_per_s for rank in range(config.ranks)), source)
    wanted = config.gpu or tuple(str(rank) for rank in range(config.ranks))
    machine = probe.measured(select(wanted, probe.ask().devices))
    speeds = tuple(shared(machine, rank).read_bytes_per_s for rank in range(config.ranks))
    return Bandwidth(speeds, "a sum over 1 GiB of each GPU's memory")


def host_read_bytes_per_s() -> float:
    """What this host's cores read together from memory; the best of several rounds."""
    data, best_s = torch.ones(READ_BYTES // 4), float("inf")
    for _ in range(ROUNDS):
        begin_s = time.perf_counter()
        data.sum()
        best_s = min(best_s, time.perf_counter() - begin_s)
    return READ_BYTES / best_s
