"""Uneven splits end to end: ranks with nothing of a group, a split chosen from made-up devices, data by the host."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoTokenizer

from shardwise.config import ServeConfig
from shardwise.engine.decide import decide
from shardwise.parallel.comm import StagedCommunicator
from shardwise.parallel.connect import prove
from tests.golden import eval as evaluation
from tests.parallel import engine_ranks
from tests.parallel.test_miniature import SERVE, differing, requests
from tests.ranks import Ranks

SPLITS: tuple[tuple[int, Mapping[str, tuple[float, ...]]], ...] = (
    (3, {"attention": (1, 0, 1), "expert": (2, 1, 1)}),
    (3, {"delta": (0, 1, 3), "vocab": (1, 0, 0)}),
    (4, {"expert": (1, 0, 0, 1), "mlp": (0, 1, 1, 0), "attention": (0, 0, 1, 1)}),
)


def chosen(spec: str) -> ServeConfig:
    """What `serve --gpu-spec` settles on here, for the miniature on a CPU."""
    model = str(evaluation.miniature())
    settled, decision = decide(ServeConfig(model=model, ranks=2, gpu_spec=spec, device="cpu"))
    assert decision is not None
    return settled


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "-".join(split[1]))
def test_a_rank_with_nothing_of_a_group_skips_its_work_and_joins(
    split: tuple[int, Mapping[str, tuple[float, ...]]], ranks: Ranks
) -> None:
    serve = {**SERVE, "model": str(evaluation.miniature()), "group_ratios": dict(split[1])}
    answer_as_golden(serve, split[0], ranks)


def test_a_split_chosen_for_unequal_devices_answers_the_same(ranks: Ranks) -> None:
    settled = chosen("4GiB:200MB/s,4GiB:50MB/s")
    assert any(weights[0] > weights[1] for weights in settled.group_ratios.values())
    answer_as_golden({**SERVE, "model": settled.model, "group_ratios": settled.group_ratios}, 2, ranks)
    assert msgspec.json.decode(msgspec.json.encode(settled), type=ServeConfig) == settled


def answer_as_golden(serve: dict[str, Any], world: int, ranks: Ranks) -> None:
    some = evaluation.load_cases()[::12]
    tokenizer = AutoTokenizer.from_pretrained(evaluation.miniature())
    outputs, _ = ranks.run(world, engine_ranks.generate, serve=serve, requests=requests(some, tokenizer))[0]
    assert differing(some, outputs, evaluation.golden()) == []


def staged(rank: int, world: int, group: Any) -> tuple[list[float], list[float]]:
    comm = StagedCommunicator(group, group)
    prove(comm, torch.device("cpu"))
    x = torch.full((3,), float(rank + 1))
    summed = comm.all_reduce(x)
    assert summed is x, "callers go on with what they gave"
    sent = comm.broadcast(torch.full((2,), float(rank + 7)))
    assert not comm.capturable
    return summed.tolist(), sent.tolist()


def test_data_through_the_host_is_the_same_data(ranks: Ranks) -> None:
    assert ranks.run(3, staged) == [([6.0] * 3, [7.0] * 2)] * 3
