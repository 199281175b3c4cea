"""Experts in host memory: the same tokens as with all of them on the device, at every split, whatever the slots.

By itself a run takes a few cases and combinations; with FULL_EVALUATION=1 in the environment, all of them (six hours on
two cores), or with EVALUATION_EVERY=n beside it all combinations on every n-th case. Near-ties are counted and shown,
never dropped.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.golden import eval as evaluation
from tests.parallel import engine_ranks
from tests.parallel.test_logits import name
from tests.parallel.test_miniature import differing, requests
from tests.parallel.test_quantised import FULL, NEAR_TIE, TIMEOUT_S, Answer, answered, lead
from tests.ranks import Ranks

LAYOUTS = ("plain", *NEAR_TIE)
SPLITS: tuple[tuple[int, tuple[float, ...]], ...] = ((1, ()), (2, ()), (2, (5, 3)), (3, ()))
EVERY = int(os.environ.get("EVALUATION_EVERY", "1")) if FULL else 160  # of the cases, in order of their skills
SLOTS = {"100 %": 8, "50 %": 4, "25 %, the fewest": 2}  # of the miniature's 8 experts, of which a token wants 2
MODES = ("offload", "hybrid")
SERVE: Mapping[str, Any] = {"max_num_seqs": 3}  # of 6 pairs: more than some slots, fewer than experts


def combinations() -> list[Any]:
    """Layout, split, mode and slots; without FULL each layout at each split once, and each mode and number of slots."""
    every = [
        (layout, split, mode, slots) for layout in LAYOUTS for split in SPLITS for mode in MODES for slots in SLOTS
    ]
    thinned = [
        (layout, SPLITS[(n + turn) % len(SPLITS)], MODES[(n + turn) % 2], list(SLOTS)[(n + 2 * turn) % len(SLOTS)])
        for turn, layouts in enumerate((LAYOUTS, LAYOUTS[:1]))
        for n, layout in enumerate(layouts)
    ]
    return [pytest.param(*one, id=" ".join((one[0], name(one[1]), *one[2:]))) for one in (every if FULL else thinned)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(evaluation.miniature())


@pytest.fixture(scope="module")
def resident(siblings: Mapping[str, Path], tokenizer: Any, ranks: Ranks) -> Mapping[str, Mapping[int, Answer]]:
    """Answers of each layout at one rank with all experts on the device, by case."""
    cases = evaluation.load_cases()[::EVERY]
    folders = {"plain": evaluation.miniature(), **siblings}
    return {
        layout: answered(folders[layout], 1, (), cases, tokenizer, ranks, experts="resident", **SERVE)
        for layout in LAYOUTS
    }


@pytest.mark.timeout(4 * TIMEOUT_S)
@pytest.mark.parametrize(("layout", "split", "mode", "slots"), combinations())
def test_tokens_are_those_of_resident_experts(
    layout: str, split: tuple[int, tuple[float, ...]], mode: str, slots: str, siblings: Mapping[str, Path],
    resident: Mapping[str, Mapping[int, Answer]], tokenizer: Any, ranks: Ranks, record_property: Any,
) -> None:  # fmt: skip
    cases = evaluation.load_cases()[::EVERY]
    folder = evaluation.miniature() if layout == "plain" else siblings[layout]
    options = {"experts": mode, "expert_slots": SLOTS[slots], **SERVE}
    found = answered(folder, *split, cases, tokenizer, ranks, **options)
    leads = {case.id: lead(resident[layout][case.id], found[case.id]) for case in cases}
    different = {case: least for case, least in leads.items() if least is not None}
    record_property("near_ties", len(different))
    print(f"{layout} {name(split)} {mode} {slots}: {len(different)} of {len(cases)} differ, with leads {different}")
    assert {case: least for case, least in different.items() if least > NEAR_TIE.get(layout, 1e-3)} == {}


def test_banks_come_back_from_their_folder(tmp_path: Path, tokenizer: Any, ranks: Ranks) -> None:
    """Each rank keeps one file, which the next start takes as it is, and answers alike."""
    cases = evaluation.load_cases()[:: 2 * EVERY]
    options = {"experts": "offload", "expert_slots": 4, "bank_cache": str(tmp_path), **SERVE}
    runs = [answered(evaluation.miniature(), 2, (5, 3), cases, tokenizer, ranks, **options)]
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    runs.append(answered(evaluation.miniature(), 2, (5, 3), cases, tokenizer, ranks, **options))
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert len(before) == 2
    assert runs[0] == runs[1]


def test_memory_moves_while_requests_run(tokenizer: Any, ranks: Ranks) -> None:
    """Slots and KV cache change sizes every few steps, pages in use and cached ones among them; no answer does."""
    cases = [case for case in evaluation.load_cases() if case.prompt_tokens + case.max_tokens <= 160][
        :: 2 if FULL else 18
    ]
    serve = {
        "model": str(evaluation.miniature()), "experts": "offload", "expert_slots": 6, "kv_tokens": 1200,
        "max_model_len": 160, "page_tokens": 4, "max_num_seqs": 7, "max_num_batched_tokens": 64, "ratio": (5, 3),
    }  # fmt: skip
    wishes = [(2, 0), (0, 400), (6, 0), (0, 900), (1, 0), (0, 40_000_000)]
    outputs, _, told = ranks.run(
        2, engine_ranks.generate, serve=serve, requests=requests(cases, tokenizer), arrive_every=2, resizes=wishes,
        resized=True,
    )[0]  # fmt: skip
    assert differing(cases, outputs, evaluation.golden()) == []
    answers, moved = zip(*told, strict=True)
    print([(each.expert_slots, each.kv_tokens, each.message) for each in answers], moved)
    assert (answers[0].expert_slots, answers[0].message) == (2, "")
    assert answers[0].kv_tokens > 1200
    assert all("running requests hold" in each.message or not each.message for each in answers[:4])
    assert "2 to 8 are possible" in answers[4].message
    assert "ask for at most" in answers[5].message
    assert any(moved)
    assert {each.kv_tokens for each in answers if each.expert_slots == 2} == {answers[0].kv_tokens}, "none is lost"
