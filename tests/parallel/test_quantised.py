"""The miniature's quantised siblings: as right as the plain one, skill by skill, and the same tokens at every split.

By itself a run takes every few cases of the evaluation set; with FULL_EVALUATION=1 in the environment, all of them at
every split (an hour on two cores). Near-ties are counted and shown, never dropped.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoTokenizer

from tests.golden import eval as evaluation
from tests.golden.eval import Case
from tests.parallel import quantised_ranks
from tests.parallel.test_logits import SPLITS, name
from tests.parallel.test_miniature import SERVE, answers, requests
from tests.ranks import Ranks

FULL = os.environ.get("FULL_EVALUATION") == "1"
ALONE_EVERY, SPLIT_EVERY = (1, 1) if FULL else (9, 36)  # of the cases, which lie in order of their skills
POINTS = 0.02  # of accuracy that a sibling may lose in a skill
# Logits, below which a lead is up to rounding. Where keys and values are rounded to e4m3, a difference in the last bit
# of one can become one of a sixteenth of it.
NEAR_TIE: Mapping[str, float] = {"fp8": 1e-3, "nvfp4-ct": 1e-3, "nvfp4": 0.05, "mixed": 0.05}
TIMEOUT_S = 3000 if FULL else 280


class Answer(NamedTuple):
    """Tokens at one rank, and the lead of each over the next best, in logits."""

    tokens: list[int]
    leads: list[float]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(evaluation.miniature())


@pytest.fixture(scope="module")
def alone(siblings: Mapping[str, Path], tokenizer: Any, ranks: Ranks) -> Mapping[str, Mapping[int, Answer]]:
    """Answers of each sibling at one rank, by case."""
    cases = evaluation.load_cases()[::ALONE_EVERY]
    return {layout: answered(folder, 1, (), cases, tokenizer, ranks) for layout, folder in siblings.items()}


def answered(
    folder: Path, world: int, ratio: tuple[float, ...], cases: Sequence[Case], tokenizer: Any, ranks: Ranks,
    **options: Any,
) -> dict[int, Answer]:  # fmt: skip
    serve = {**SERVE, "model": str(folder), "ratio": ratio, **options}
    asked = requests(list(cases), tokenizer)
    found = ranks.run(world, quantised_ranks.generate, serve=serve, requests=asked, timeout_s=TIMEOUT_S)[0]
    return {case.id: Answer(*each) for case, each in zip(cases, found, strict=True)}


def losses(cases: Sequence[Case], found: Mapping[int, Answer], tokenizer: Any) -> dict[str, tuple[float, float]]:
    """Skills in which `found` is more than POINTS less right than the plain miniature: both shares."""
    golden = evaluation.golden()
    plain = answers(list(cases), [list(golden[case.id].ids) for case in cases], tokenizer)
    ours = answers(list(cases), [found[case.id].tokens for case in cases], tokenizer)
    before, after = (evaluation.accuracy(cases, texts) for texts in (plain, ours))
    shares = {skill: (after[skill][0] / count, right / count) for skill, (right, count) in before.items()}
    return {skill: pair for skill, pair in shares.items() if pair[0] < pair[1] - POINTS}


@pytest.mark.timeout(4 * TIMEOUT_S)
@pytest.mark.parametrize("layout", NEAR_TIE)
def test_every_skill_is_kept(layout: str, alone: Mapping[str, Mapping[int, Answer]], tokenizer: Any) -> None:
    cases = evaluation.load_cases()[::ALONE_EVERY]
    assert losses(cases, alone[layout], tokenizer) == {}


@pytest.mark.timeout(4 * TIMEOUT_S)
@pytest.mark.parametrize("split", SPLITS[1:], ids=name)
@pytest.mark.parametrize("layout", NEAR_TIE)
def test_tokens_are_those_of_one_rank(
    layout: str, split: tuple[int, tuple[float, ...]], siblings: Mapping[str, Path],
    alone: Mapping[str, Mapping[int, Answer]], tokenizer: Any, ranks: Ranks, record_property: Any,
) -> None:  # fmt: skip
    cases = evaluation.load_cases()[::SPLIT_EVERY]
    found = answered(siblings[layout], *split, cases, tokenizer, ranks)
    leads = {case.id: lead(alone[layout][case.id], found[case.id]) for case in cases}
    different = {case: least for case, least in leads.items() if least is not None}
    record_property("near_ties", len(different))
    print(f"{layout} {name(split)}: {len(different)} of {len(cases)} answers differ, with leads {different}")
    assert {case: least for case, least in different.items() if least > NEAR_TIE[layout]} == {}


def lead(one: Answer, many: Answer) -> float | None:
    """None if the tokens are the same, else the lead that the first different one had at one rank.

    Stop tokens come without; then the lead is that of the other side's token, whose logits are alike but for rounding.
    """
    if one.tokens == many.tokens:
        return None
    at = next(i for i, (a, b) in enumerate(zip(one.tokens, many.tokens, strict=False)) if a != b)
    return (one.leads[at:] or many.leads[at:] or [float("inf")])[0]


@pytest.mark.timeout(4 * TIMEOUT_S)
def test_an_fp8_cache_costs_at_most_a_point(tokenizer: Any, ranks: Ranks) -> None:
    """By flag, without scales, for the plain miniature: keys are normed, and values fit e4m3."""
    cases = evaluation.load_cases()[:: ALONE_EVERY * 2]
    found = answered(evaluation.miniature(), 2, (5, 3), cases, tokenizer, ranks, kv_cache_dtype="fp8")
    golden = evaluation.golden()
    texts = answers(list(cases), [found[case.id].tokens for case in cases], tokenizer)
    plain = answers(list(cases), [list(golden[case.id].ids) for case in cases], tokenizer)
    right, before = (sum(evaluation.matches(case, those[case.id]) for case in cases) for those in (texts, plain))
    assert right >= before - 0.01 * len(cases)


def test_the_checkpoint_chooses_the_cache_and_its_scales(siblings: Mapping[str, Path], ranks: Ranks) -> None:
    """hf_quant_config.json alone asks for it in one, kv_cache_scheme in another, which also has scales."""
    for layout, dtype, scaled in (("fp8", "float32", False), ("nvfp4", "float8_e4m3fn", False),
                                  ("mixed", "float8_e4m3fn", True)):  # fmt: skip
        each = ranks.run(2, quantised_ranks.caches, serve={**SERVE, "model": str(siblings[layout])})
        for found in each:
            assert {kind for kind, *_ in found} == {f"torch.{dtype}"}
            assert all((k != 1.0 and v != 1.0) == scaled for _, k, v in found)
        assert each[0] == each[1]
    asked = {**SERVE, "model": str(siblings["mixed"]), "kv_cache_dtype": "bfloat16"}
    plain = ranks.run(1, quantised_ranks.caches, serve=asked)
    assert set(plain[0]) == {("torch.bfloat16", 1.0, 1.0)}
