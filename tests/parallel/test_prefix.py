"""A hit answers as a miss, with the miniature: at every length, in company, after preemption and cancellation, and at
every split; and what the server reports of a conversation is true.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
from transformers import AutoTokenizer

from shardwise.config import ServeConfig, load_model_config
from shardwise.engine.build import Leader
from shardwise.engine.messages import Failed, Generate, Picture, Ready, SamplingParams, Stats, Tokens
from shardwise.server.app import create_app
from shardwise.server.sampling import GenerationDefaults
from tests.golden import eval as evaluation
from tests.parallel.prefix_ranks import NEAR_TIE, Asked, Reply, make_leader, run_wave, waves
from tests.parallel.test_quantised import FULL
from tests.ranks import Ranks
from tests.unit import server_fixtures

SERVE: Mapping[str, Any] = {
    "model": str(evaluation.miniature()), "max_num_seqs": 16, "max_model_len": 1024, "max_num_batched_tokens": 2048,
    "kv_tokens": 16384,
}  # fmt: skip
MISS = {**SERVE, "prefix_cache": False}
FP8 = {"kv_cache_dtype": "fp8"}
BF16 = {"dtype": "bfloat16"}


@pytest.fixture(scope="module")
def words() -> list[list[int]]:
    """Prompts of the evaluation set, as tokens."""
    tokenizer = AutoTokenizer.from_pretrained(evaluation.miniature())
    return [evaluation.prompt_ids(tokenizer, case) for case in evaluation.load_cases(limit=60)]


def ask(prompt: list[int], max_tokens: int, **sampling: Any) -> Asked:
    return prompt, {"max_tokens": max_tokens, "logprobs": 2, **sampling}


def alone(serve: Mapping[str, Any], least_gap_tokens: int = 32) -> Leader:
    leader = make_leader(0, 1, None, serve, least_gap_tokens)
    assert leader is not None
    return leader


@pytest.mark.parametrize(
    ("stored", "every", "near_tie"),
    [({}, 1, NEAR_TIE), (FP8, 9, NEAR_TIE), (BF16, 9, 0.1)],
    ids=["fp32", "fp8", "bf16"],
)
def test_every_length_of_a_hit_and_every_remainder(
    stored: dict[str, Any], every: int, near_tie: float, words: list[list[int]]
) -> None:
    """Hits of 1 to 200 tokens, at every offset in a page of 64; remainders of one token, of less than the convolution's
    width, and others."""
    text, ending = [token for prompt in words for token in prompt][:300], words[7]
    asked, lengths = list[Asked](), range(every, 201, every)
    for length in lengths:
        rest = (1, 2, 3, 1 + length * 7 % 64)[length % 4]
        asked.append(ask([*text[:length], text[length] ^ 1, *ending[: rest - 1]], 2))
    missing = alone({**MISS, **stored})
    expected = run_wave(missing, asked)
    leader = alone({**SERVE, **stored, "snapshot_rows": 64}, least_gap_tokens=1)
    for length, request, miss in zip(lengths, asked, expected, strict=True):
        (first,) = run_wave(leader, [ask(text[:length], 1)])
        assert first.cached_tokens == (length - 1 if every == 1 else length - every)
        (found,) = run_wave(leader, [request])
        assert found.cached_tokens == length
        assert found.agrees(miss, near_tie), length


def conversations(words: list[list[int]]) -> list[list[Asked]]:
    """Two waves of 16 requests that share a beginning, branch after it, and branch again."""
    system = [token for prompt in words[:20] for token in prompt][:150]
    branches = [system + words[i] for i in (30, 31, 32, 33)]
    first = [ask(branches[i % 4] + words[40 + i // 4], 30, ignore_eos=True) for i in range(16)]
    second = [ask(branches[i % 4] + words[40 + i // 4] + words[50 + i // 8], 30, ignore_eos=True) for i in range(16)]
    return [first, second]


Expected = Callable[[dict[str, Any]], list[list[Reply]]]


@pytest.fixture(scope="module")
def expected(words: list[list[int]]) -> Expected:
    """What a server without a prefix cache says, by how it stores keys and values."""

    @cache
    def ask_all(stored: tuple[tuple[str, Any], ...]) -> list[list[Reply]]:
        leader = alone({**MISS, **dict(stored)})
        return [run_wave(leader, wave) for wave in conversations(words)]

    return lambda stored: ask_all(tuple(stored.items()))


SPLITS = [((1, ()), {}), ((3, ()), {}), ((2, (5.0, 3.0)), FP8)]
if FULL:  # the others take no other path
    SPLITS += [((2, ()), {}), ((2, (5.0, 3.0)), {})]


@pytest.mark.parametrize(("split", "stored"), SPLITS, ids=str)
def test_sixteen_that_share_and_branch(
    split: tuple[int, tuple[float, ...]],
    stored: dict[str, Any],
    words: list[list[int]],
    expected: Expected,
    ranks: Ranks,
) -> None:
    """With few pages, so that some are preempted, and with some cancelled on the way."""
    world, ratio = split
    serve = {**SERVE, **stored, "ratio": ratio, "max_num_seqs": 8, "max_num_batched_tokens": 256, "kv_tokens": 640}
    serve |= {"max_model_len": 400, "page_tokens": 16, "snapshot_rows": 24, "snapshot_every": 64}
    found, stats = ranks.run(
        world,
        waves,
        serve=serve,
        asked=conversations(words),
        least_gap_tokens=4,
        arrive_every=1,
        cancel_after={2: 5, 7: 11, 11: 30},
    )[0]
    assert stats.preemptions > 0
    assert any(reply.finish_reason == "cancel" for reply in found[0])
    for wave, right in zip(found, expected(stored), strict=True):
        wrong = [i for i, (reply, miss) in enumerate(zip(wave, right, strict=True)) if not reply.agrees(miss)]
        assert not wrong, wrong
        assert sum(reply.cached_tokens > 0 for reply in wave) >= 8


@pytest.mark.parametrize(("split", "stored"), [((1, ()), {}), ((2, ()), {}), ((2, (5.0, 3.0)), FP8)], ids=str)
def test_what_comes_back_from_the_host_answers_as_a_miss(
    split: tuple[int, tuple[float, ...]],
    stored: dict[str, Any],
    words: list[list[int]],
    expected: Expected,
    ranks: Ranks,
) -> None:
    """With a device that keeps next to nothing: what the second wave has in common with the first was on the host."""
    world, ratio = split
    serve = {**SERVE, **stored, "ratio": ratio, "max_num_seqs": 8, "max_num_batched_tokens": 256, "kv_tokens": 640}
    serve |= {"max_model_len": 400, "page_tokens": 16, "snapshot_rows": 1, "host_cache_gib": 0.1}
    asked = [wave[::2] for wave in conversations(words)]
    found, stats = ranks.run(
        world, waves, serve=serve, asked=asked, least_gap_tokens=4, arrive_every=1, cancel_after={3: 11}
    )[0]
    for wave, right in zip(found, expected(stored), strict=True):
        wrong = [i for i, (reply, miss) in enumerate(zip(wave, right[::2], strict=True)) if not reply.agrees(miss)]
        assert not wrong, wrong
    assert sum(reply.cached_tokens > 0 for reply in found[1]) == 8
    assert stats.cached_tokens >= stats.host_cached_tokens > 0.8 * sum(reply.cached_tokens for reply in found[1]) > 800
    assert stats.host_snapshots > 4


class InProcess:
    """An engine for the HTTP server that steps whenever somebody waits for it."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._said: dict[str, list[Tokens | Failed]] = {}
        self.ready: Ready | None = leader.ready()
        self.draining = False

    @property
    def stats(self) -> Stats | None:
        return self._leader.stats()

    async def generate(
        self, request_id: str, prompt: list[int], sampling: SamplingParams, *, pictures: Sequence[Picture] = ()
    ) -> AsyncGenerator[Tokens, None]:
        assert not pictures
        self._leader.add(Generate(request_id, prompt, sampling))
        self._said[request_id] = []
        while True:
            for message in self._said[request_id]:
                assert isinstance(message, Tokens)
                yield message
                if message.finish_reason:
                    return
            self._said[request_id] = []
            for message in self._leader.step():
                self._said[message.id].append(message)
            await asyncio.sleep(0)


QUESTIONS = (
    "Hello there, who are you and what can you do for me today?",
    "What is the capital of France? Please tell me in one short sentence.",
    "And which is the capital of Italy? Again in one short sentence, please.",
    "What is 12 plus 30? Give me the number alone.",
    "Thank you very much. Goodbye!",
)


@pytest.mark.parametrize("thinking", [False, True])
async def test_a_chat_finds_its_earlier_turns(thinking: bool) -> None:
    """Through HTTP: templates drop earlier thinking, so what counts is what the prompt has in common with the past."""
    leader = alone({**SERVE, "snapshot_rows": 16})
    folder = evaluation.miniature()
    config, defaults = ServeConfig(model=str(folder)), GenerationDefaults.load(folder)
    engine = InProcess(leader)
    app = create_app(config, engine, server_fixtures.tokenizer(), load_model_config(folder), defaults)
    system = "You are a helpful assistant. " * 8
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    before: list[int] = []
    found_tokens = past_tokens = 0
    async with server_fixtures.client(app) as http:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            body = {"messages": messages, "max_tokens": 48, "temperature": 0, "return_token_ids": True}
            body["chat_template_kwargs"] = {"enable_thinking": thinking}
            answer = (await http.post("/v1/chat/completions", json=body)).json()
            prompt, cached = answer["prompt_token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            common = next((i for i, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b), len(before))
            assert cached <= common
            found_tokens, past_tokens = found_tokens + cached, past_tokens + common
            choice = answer["choices"][0]
            before = prompt + choice["token_ids"]
            messages.append({"role": "assistant", "content": choice["message"]["content"] or ""})
            title = {"messages": [{"role": "user", "content": f"Title for: {question}"}], "max_tokens": 4}
            await http.post("/v1/chat/completions", json=title)
        metrics = (await http.get("/metrics")).text
    stats = leader.stats()
    assert found_tokens >= 0.95 * past_tokens > 300, (found_tokens, past_tokens)
    assert f"shardwise_prefix_cache_hits_total {stats.cached_tokens:.1f}" in metrics
    assert f"shardwise_prefix_cache_queries_total {stats.looked_up_tokens:.1f}" in metrics
    assert stats.cached_tokens > 0.5 * stats.looked_up_tokens
