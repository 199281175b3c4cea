"""The miniature's skills with pictures: every answer as in transformers, at every split, in chunks and preempted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from shardwise.cli import LAYOUTS
from tests.golden import eval as evaluation
from tests.golden.asked import Asked, picture_cases
from tests.golden.asked import asked as requests_of
from tests.golden.eval import Case, Golden
from tests.parallel import engine_ranks
from tests.parallel.test_logits import SPLITS, name
from tests.parallel.test_miniature import SERVE, answers, differing
from tests.parallel.test_quantised import FULL
from tests.ranks import Ranks


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return picture_cases()


@pytest.fixture(scope="module")
def golden() -> dict[int, Golden]:
    return evaluation.golden(evaluation.GOLDEN_PICTURES)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(evaluation.miniature())


@pytest.fixture(scope="module")
def asked(cases: list[Case], tokenizer: Any) -> Asked:
    return requests_of(cases, tokenizer)


@pytest.mark.parametrize("split", SPLITS, ids=name)
def test_every_picture_is_answered_as_in_transformers(
    split: tuple[int, tuple[float, ...]],
    cases: list[Case],
    asked: Asked,
    golden: Mapping[int, Golden],
    tokenizer: Any,
    ranks: Ranks,
) -> None:
    serve = {**SERVE, "model": str(evaluation.miniature()), "ratio": split[1]}
    outputs, _ = ranks.run(split[0], engine_ranks.generate, serve=serve, requests=asked)[0]
    assert differing(cases, outputs, golden) == []
    figures = evaluation.accuracy(cases, answers(cases, outputs, tokenizer))
    assert all(right == count for right, count in figures.values()), evaluation.table(figures)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantised_siblings_see_as_well_at_every_split(
    layout: str, siblings: Mapping[str, Path], cases: list[Case], asked: Asked, tokenizer: Any, ranks: Ranks
) -> None:
    """The tower stays as it is; the text model behind it is quantised. All cases at every split: FULL_EVALUATION=1."""
    every, splits = (1, SPLITS) if FULL else (9, (SPLITS[0], SPLITS[2]))
    outputs: dict[str, list[list[int]]] = {}
    for split in splits:
        serve = {**SERVE, "model": str(siblings[layout]), "ratio": split[1]}
        outputs[name(split)], _ = ranks.run(split[0], engine_ranks.generate, serve=serve, requests=asked[::every])[0]
    alone = outputs[name(SPLITS[0])]
    assert {split: found == alone for split, found in outputs.items()} == dict.fromkeys(outputs, True)
    figures = evaluation.accuracy(cases[::every], answers(cases[::every], alone, tokenizer))
    assert all(right == count for right, count in figures.values()), evaluation.table(figures)


def test_small_steps_preemption_and_spread_pictures_change_nothing(
    cases: list[Case], asked: Asked, golden: Mapping[int, Golden], ranks: Ranks
) -> None:
    """Chunks that cut pictures, requests that start over, features that are forgotten, and a whole tower a rank."""
    some = cases[::8]
    requests = [(ids, {**sampling, "ignore_eos": True}, pictures) for ids, sampling, pictures in asked[::8]]
    serve = {
        **SERVE, "model": str(evaluation.miniature()), "max_num_batched_tokens": 13, "max_num_seqs": 7,
        "kv_tokens": 88, "max_model_len": 88, "page_tokens": 4, "vision": "replicate", "vision_cache_tokens": 40,
    }  # fmt: skip
    for world in (1, 3):
        outputs, preemptions = ranks.run(world, engine_ranks.generate, serve=serve, requests=requests, arrive_every=1)[
            0
        ]
        begun = [tokens[: len(golden[case.id].ids)] for case, tokens in zip(some, outputs, strict=True)]
        assert differing(some, begun, golden) == []
        assert preemptions > 0
