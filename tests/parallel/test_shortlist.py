"""Answers are the same where a shortlist says which logits can be the largest, and fewer logits are made."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.golden import eval as evaluation
from tests.parallel import engine_ranks
from tests.ranks import Ranks

RANDOM = {"temperature": 0.9, "seed": 11}
WAYS: list[dict[str, Any]] = [
    {}, {**RANDOM, "top_k": 5}, {**RANDOM, "top_k": 20, "top_p": 0.8}, {**RANDOM, "top_k": 3, "min_p": 0.1},
]  # fmt: skip


@pytest.mark.parametrize("world", [1, 3])
def test_tokens_are_those_of_whole_rows(world: int, ranks: Ranks) -> None:
    cases = evaluation.load_cases()[:: 418 // len(WAYS)][: len(WAYS)]
    tokenizer = AutoTokenizer.from_pretrained(evaluation.miniature())
    prompts = [evaluation.prompt_ids(tokenizer, case) for case in cases]
    requests = [(prompt, {"max_tokens": 8} | way) for prompt, way in zip(prompts, WAYS, strict=True)]
    serve = {"model": str(evaluation.miniature()), "max_num_seqs": 4, "max_model_len": 1024}
    want, _ = ranks.run(world, engine_ranks.generate, serve=serve, requests=requests)[0]
    got, _, listed = ranks.run(world, engine_ranks.generate, serve=serve, requests=requests, shortlist=True)[0]
    assert got == want
    there, left_out = listed.tolist()
    assert 0 < there < left_out


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("arrive_every", [0, 3])
def test_tokens_are_the_same_if_steps_choose_them(world: int, arrive_every: int, ranks: Ranks) -> None:
    """Requests that want other logits are among them for a while, and some end early."""
    counts = (12, 30, 4, 25, 9, 17)
    ways = [*WAYS, {**RANDOM, "top_p": 0.7}, {"logprobs": 1}]
    requests = [
        (list(range(5 + n, 25 + 3 * n)), {"max_tokens": count} | way)
        for n, (count, way) in enumerate(zip(counts, ways, strict=True))
    ]
    serve = {"model": str(evaluation.miniature()), "max_num_seqs": 4, "max_model_len": 1024}
    asked = {"serve": serve, "requests": requests, "arrive_every": arrive_every}
    want, _ = ranks.run(world, engine_ranks.generate, **asked)[0]
    got, _, choosing = ranks.run(world, engine_ranks.generate, **asked, graphs=True)[0]
    assert got == want
    assert choosing >= 2


def test_who_wants_other_logits_gets_whole_rows(ranks: Ranks) -> None:
    serve = {"model": str(evaluation.miniature()), "max_num_seqs": 4, "max_model_len": 1024}
    both = {"max_tokens": 3, "ignore_eos": True}
    requests = [([5, 6, 7], both | {"logprobs": 2}), ([8, 9], both)]
    *_, listed = ranks.run(1, engine_ranks.generate, serve=serve, requests=requests, shortlist=True)[0]
    assert isinstance(listed, int)  # the sum of nothing
