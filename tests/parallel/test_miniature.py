"""The miniature answers as transformers does, token by token, at every split and however its requests are batched."""

from collections.abc import Mapping
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.golden import eval as evaluation
from tests.golden.eval import Case, Golden
from tests.parallel import engine_ranks
from tests.parallel.test_logits import SPLITS, name
from tests.ranks import Ranks

NEAR_TIE = 1e-3  # logits; what closer leads decide is up to rounding
SERVE: Mapping[str, Any] = {"max_num_seqs": 64, "max_model_len": 2304, "max_num_batched_tokens": 1024}


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return evaluation.load_cases()


@pytest.fixture(scope="module")
def golden() -> dict[int, Golden]:
    return evaluation.golden()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(evaluation.miniature())


def requests(cases: list[Case], tokenizer: Any) -> list[tuple[list[int], dict[str, Any]]]:
    return [(evaluation.prompt_ids(tokenizer, case), {"max_tokens": case.max_tokens}) for case in cases]


def answers(cases: list[Case], outputs: list[list[int]], tokenizer: Any) -> dict[int, str]:
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in outputs]
    return {case.id: evaluation.answer_of(text) for case, text in zip(cases, texts, strict=True)}


def differing(cases: list[Case], outputs: list[list[int]], golden: Mapping[int, Golden]) -> list[int]:
    """Cases whose tokens are not those of transformers, near-ties excused."""
    return [
        case.id
        for case, tokens in zip(cases, outputs, strict=True)
        if tuple(tokens) != golden[case.id].ids and golden[case.id].margin > NEAR_TIE
    ]


@pytest.mark.parametrize("split", SPLITS, ids=name)
def test_every_skill_is_as_in_transformers(
    split: tuple[int, tuple[float, ...]], cases: list[Case], golden: dict[int, Golden], tokenizer: Any, ranks: Ranks
) -> None:
    """All text cases, batched as they come: equal tokens, and so equal accuracy of each skill."""
    serve = {**SERVE, "model": str(evaluation.miniature()), "ratio": split[1]}
    result = ranks.run(
        split[0], engine_ranks.generate, serve=serve, requests=requests(cases, tokenizer), timeout_s=600
    )[0]
    assert differing(cases, result[0], golden) == []
    expected = answers(cases, [list(golden[case.id].ids) for case in cases], tokenizer)
    figures = evaluation.accuracy(cases, answers(cases, result[0], tokenizer))
    assert figures == evaluation.accuracy(cases, expected), evaluation.table(figures)
    right, count = (sum(column) for column in zip(*figures.values(), strict=True))
    assert right >= 0.99 * count, "the miniature has learned its lesson"


def test_tokens_depend_neither_on_company_nor_on_chunks_nor_on_preemption(
    cases: list[Case], golden: dict[int, Golden], tokenizer: Any, ranks: Ranks
) -> None:
    """Few requests at a time, small steps, arrivals in between, and so few pages that requests are preempted."""
    short = [case for case in cases if case.prompt_tokens + case.max_tokens <= 160]
    small = {"model": str(evaluation.miniature()), "max_num_batched_tokens": 37, "max_num_seqs": 7}
    serve = {**SERVE, **small, "prefix_cache": False}
    tight = serve | {"kv_tokens": 160, "max_model_len": 160, "page_tokens": 4}
    for world, options, some, arrive_every in (
        (1, serve, cases[::12], 3), (2, tight, short[::14], 1), (3, tight, short[::14], 2),
    ):  # fmt: skip
        outputs, preemptions = ranks.run(
            world, engine_ranks.generate, serve=options, requests=requests(some, tokenizer), arrive_every=arrive_every
        )[0]
        assert differing(some, outputs, golden) == []
        assert preemptions > 0 or options is serve


def test_four_identical_requests_at_once_get_equal_answers(
    cases: list[Case], golden: dict[int, Golden], tokenizer: Any, ranks: Ranks
) -> None:
    four = [next(case for case in cases if case.skill == "needle")] * 4
    serve = {**SERVE, "model": str(evaluation.miniature())}
    outputs, _ = ranks.run(2, engine_ranks.generate, serve=serve, requests=requests(four, tokenizer))[0]
    assert {tuple(tokens) for tokens in outputs} == {golden[four[0].id].ids}


def test_cutting_packed_rows_as_one_block_ruins_the_answers(cases: list[Case], tokenizer: Any, ranks: Ranks) -> None:
    """Negative control: the comparison above would see the classic mistake."""
    some = cases[::16]
    serve = {**SERVE, "model": str(evaluation.miniature())}
    for world, wrong_cut in ((1, True), (2, True)):
        outputs, _ = ranks.run(
            world, engine_ranks.generate, serve=serve, requests=requests(some, tokenizer), wrong_cut=wrong_cut
        )[0]
        figures = evaluation.accuracy(some, answers(some, outputs, tokenizer))
        right, count = (sum(column) for column in zip(*figures.values(), strict=True))
        assert (right >= 0.9 * count) if world == 1 else (right <= 0.1 * count), evaluation.table(figures)
