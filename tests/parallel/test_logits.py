"""Logits of every split, chunking and batch equal those of transformers, in fp32 to 2e-4."""

import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden import hf
from tests.parallel import model_ranks
from tests.ranks import Ranks

SPLITS: tuple[tuple[int, tuple[float, ...]], ...] = ((1, ()), (2, ()), (2, (5, 3)), (3, ()), (4, ()))
TOLERANCE = 2e-4
PAGE_TOKENS = 16
LENGTH = 75
Plans = list[list[tuple[Any, ...]]]


def name(split: tuple[int, tuple[float, ...]]) -> str:
    return ":".join(f"{weight:g}" for weight in split[1]) or f"tp{split[0]}"


class Pages:
    """Gives pages to rows, as a scheduler would."""

    def __init__(self) -> None:
        self.next_page = count(1)
        self.held: dict[int, int] = {}

    def chunk(self, row: int, start: int, tokens: Sequence[int], *, feed: bool = True) -> tuple[Any, ...]:
        """The fields of a Chunk of `tokens` whose logits are all wanted."""
        if start == 0:
            self.held[row] = 0
        needed = -(-(start + len(tokens)) // PAGE_TOKENS)
        new = [next(self.next_page) for _ in range(needed - self.held[row])]
        self.held[row] = needed
        return (row, start, len(tokens), list(tokens) if feed else [], new, True, True)


def prefill_plans(prompt: Sequence[int], pages: Pages, row: int, chunk: int) -> Plans:
    """`prompt` in chunks of `chunk` tokens, a step each."""
    return [[pages.chunk(row, at, prompt[at : at + chunk])] for at in range(0, len(prompt), chunk)]


def mixed_plans(prompts: dict[int, list[int]], pages: Pages) -> Plans:
    """All prompts at once, each in chunks of a size of its own, so that steps mix decodes with chunks of prompts."""
    sizes = dict(zip(prompts, (1, 7, 2, 30, 64), strict=False))
    at, plans = dict.fromkeys(prompts, 0), Plans()
    while any(at[row] < len(prompt) for row, prompt in prompts.items()):
        step = [
            pages.chunk(row, at[row], prompt[at[row] : at[row] + sizes[row]])
            for row, prompt in prompts.items()
            if at[row] < len(prompt)
        ]
        for row in at:
            at[row] += sizes[row]
        plans.append(sorted(step, key=lambda fields: fields[2] != 1))
    return plans


def by_row(plans: Plans, outputs: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Logits of each row, in the order of its tokens; of its last run where it started over."""
    found: dict[int, list[torch.Tensor]] = {}
    for chunks, logits in zip(plans, outputs, strict=True):
        parts = logits.split([fields[2] for fields in chunks])
        for (row, start, *_), part in zip(chunks, parts, strict=True):
            found[row] = ([] if start == 0 else found[row]) + [part]
    return {row: torch.cat(parts) for row, parts in found.items()}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """Each geometry of the oracle with its model, saved in one of the layouts."""
    layouts = ("published", "text_only", "each_expert", "nested", "text_only_each_expert", "one_file")
    made: dict[str, tuple[Any, Path]] = {}
    for geometry, layout in zip(hf.GEOMETRIES, layouts, strict=True):
        folder = tmp_path_factory.mktemp(geometry)
        model = hf.build(geometry)
        hf.save(model, folder, layout)
        made[geometry] = model, folder
    return made


def serve_options(folder: Path, ratio: tuple[float, ...]) -> dict[str, Any]:
    return {
        "model": str(folder), "ratio": ratio, "kv_tokens": 2048, "max_num_seqs": 6, "max_model_len": 128,
        "page_tokens": PAGE_TOKENS,
    }  # fmt: skip


def prompt(length: int, seed: int, vocab: int = 131) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def combinations() -> list[Any]:
    """Every geometry at every split; four ranks, which wait for two cores, only for two of them, unless FULL."""
    every = os.environ.get("FULL_EVALUATION") == "1"
    pairs = ((g, s) for g in hf.GEOMETRIES for s in SPLITS if every or s[0] < 4 or g in ("dense", "moe_linear"))
    return [pytest.param(geometry, split, id=f"{geometry}-{name(split)}") for geometry, split in pairs]


@pytest.mark.parametrize(("geometry", "split"), combinations())
def test_logits_equal_those_of_transformers(
    geometry: str, split: tuple[int, tuple[float, ...]], checkpoints: dict[str, tuple[Any, Path]], ranks: Ranks
) -> None:
    """Whole prefill, chunks of several sizes, token by token, and prompts of 1 to 5 tokens mixed with long ones."""
    model, folder = checkpoints[geometry]
    long = prompt(LENGTH, 0)
    chunk_sizes = (LENGTH, 1, 2, 3, 5, 16, 17, 64) if split[0] == 1 else (LENGTH, 1, 3)
    short = {row: prompt(length, row) for row, length in enumerate((1, 2, 3, 4, 70), start=1)}
    runs = [(prefill_plans(long, Pages(), 1, size), {1: long}) for size in chunk_sizes]
    runs.append((mixed_plans(short, Pages()), short))
    plans = [plan for plans, _ in runs for plan in plans]
    outputs = ranks.run(split[0], model_ranks.logits, serve=serve_options(folder, split[1]), plans=plans)
    at = 0
    for plans, prompts in runs:
        found = by_row(plans, outputs[0][at : at + len(plans)])
        at += len(plans)
        for row, tokens in prompts.items():
            torch.testing.assert_close(found[row], hf.logits(model, tokens), atol=TOLERANCE, rtol=0)
    for other in outputs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outputs[0], other, strict=True)), "ranks have different logits"


@pytest.mark.parametrize("geometry", ["moe", "dense_tied"])
def test_every_chunk_size_gives_the_same_logits(
    geometry: str, checkpoints: dict[str, tuple[Any, Path]], ranks: Ranks
) -> None:
    model, folder = checkpoints[geometry]
    tokens = prompt(67, 5)
    runs = [prefill_plans(tokens, Pages(), 1 + size % 5, size) for size in range(1, len(tokens) + 1)]
    options = serve_options(folder, ())
    outputs = ranks.run(1, model_ranks.logits, serve=options, plans=[plan for run in runs for plan in run])[0]
    expected, at = hf.logits(model, tokens), 0
    for run in runs:
        (found,) = by_row(run, outputs[at : at + len(run)]).values()
        at += len(run)
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_prompt_shorter_than_the_convolution(
    length: int, checkpoints: dict[str, tuple[Any, Path]], ranks: Ranks
) -> None:
    """A prompt of 1, 2, 3 or 4 tokens, alone, in a row that held a longer request before, then decoded on."""
    model, folder = checkpoints["moe"]
    pages, tokens = Pages(), prompt(length + 6, length)
    plans = prefill_plans(prompt(40, 9), pages, 2, 40)
    plans += [[pages.chunk(2, 0, tokens[:length])]]
    plans += [[pages.chunk(2, at, tokens[at : at + 1])] for at in range(length, len(tokens))]
    outputs = ranks.run(2, model_ranks.logits, serve=serve_options(folder, (5, 3)), plans=plans)[0]
    torch.testing.assert_close(by_row(plans, outputs)[2], hf.logits(model, tokens), atol=TOLERANCE, rtol=0)


def test_a_row_that_starts_over_remembers_nothing(checkpoints: dict[str, tuple[Any, Path]], ranks: Ranks) -> None:
    """Slot reuse and preempt-and-resume: another request ran in the row, then the first runs there again from 0."""
    model, folder = checkpoints["moe"]
    first, other = prompt(50, 1), prompt(33, 2)
    pages = Pages()
    plans = (
        prefill_plans(first[:20], pages, 3, 20)
        + prefill_plans(other, pages, 3, 11)
        + prefill_plans(first, pages, 3, 50)
    )
    for world in (1, 3):
        outputs = ranks.run(world, model_ranks.logits, serve=serve_options(folder, ()), plans=plans)[0]
        torch.testing.assert_close(by_row(plans, outputs)[3], hf.logits(model, first), atol=TOLERANCE, rtol=0)
