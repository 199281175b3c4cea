"""The engine's loop on the first rank: plan, run, sample, share the tokens, tell what came of it.

Legend: L sampled rows, V vocabulary, C tokens of a chunk, K chunks to check.
"""

import random
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import torch

from shardwise.cache.host import HostTier
from shardwise.config import VisionConfig
from shardwise.engine.grammar import Grammars, mask
from shardwise.engine.messages import Failed, Generate, GrammarError, Logprob, Picture, Stats, Tokens
from shardwise.engine.pictures import PictureCache, PictureCounts, Pictures
from shardwise.engine.plan import Chunk, Resize, StepPlan
from shardwise.engine.readback import Readback, Written
from shardwise.engine.request import SEED_MASK, Limits, Request, RequestRefused, check_fits, check_sampling
from shardwise.engine.reuse import ReuseOptions
from shardwise.engine.sampler import PromptScores, Sampled, Sampler, enough, score_prompt
from shardwise.engine.scheduler import Progress, Scheduler, Step
from shardwise.layers.embedding import LISTED_ROWS

COMPILE_WAIT_S = 0.005  # for a grammar, when there is nothing else to do


@dataclass(frozen=True)
class StepLogits:
    """What the model says of a step, in fp32, on the first rank's device. The sampler may write over it."""

    sampled_LV: torch.Tensor  # of the last token of each chunk with `sample`, in the plan's order
    prompt: dict[int, torch.Tensor] = field(default_factory=dict)  # by row: [C, V], chunks with `prompt_logits`
    checked_KV: torch.Tensor | None = None  # of the last token of each chunk with `check`, in the plan's order


class Runner(Protocol):
    """The model on all ranks, as the first one drives it. Steps are carried out in the order they are given."""

    def run(self, plan: StepPlan, sampled: Sequence[Request] = ()) -> StepLogits | Written | None:
        """Send `plan` to the other ranks and run it; None if none of its chunks wants logits. Need not wait for it.

        sampled: the requests that get a token, in order. Where the plan says that few ids matter (`keep`), the runner
        may choose and share these tokens by itself, and give them instead of logits.
        """
        ...

    def commit(self, rows: list[int], tokens_L: torch.Tensor) -> None:
        """Share the tokens sampled for `rows` with all ranks, as the rows' last tokens: int64, -1 for a failed row.

        Called once after each plan with a chunk to sample, unless `run` gave tokens.
        """
        ...


@dataclass(frozen=True)
class _Launched:
    step: Step
    sampled: Sampled | None
    scores: dict[Request, PromptScores]
    finite_K: Readback | None = None  # by chunk with `check`, in the plan's order


def host_stats(host: HostTier | None) -> dict[str, int]:
    """The host tier's part of Stats."""
    if host is None:
        return {}
    return {
        "host_snapshots": len(host.cache.snapshots),
        "host_kv_tokens": host.pool.pages * host.pool.page_tokens,
        "host_kv_tokens_used": host.pool.used * host.pool.page_tokens,
    }


def grammar_refused(request: Request, param: str, problem: str) -> Failed:
    """What is said of a request whose grammar cannot be kept to."""
    return Failed(request.id, f"{param}: the grammar {problem}", refused=True, param=param)


class Engine:
    """Requests in, messages out. `step` does one round and says what the API process must hear.

    overlap: launch the next step before the tokens of the last one are read, so that the device never waits for the
    host. Answers are the same; a stop token is noticed one step late, and what that step did for it is thrown away.
    """

    def __init__(
        self,
        limits: Limits,
        runner: Runner,
        eos_token_ids: Iterable[int] = (),
        seed: int = 0,
        overlap: bool = False,
        vision: VisionConfig | None = None,
        picture_tokens: int = 0,
        grammars: Grammars | None = None,
        reuse: ReuseOptions | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        """grammars: compiles what answers must match; without, such requests are refused. sampler: of the device."""
        self.scheduler = Scheduler(limits, reuse)
        self._runner = runner
        self._sampler = sampler or Sampler()
        self._eos = frozenset(eos_token_ids)
        self._seeds = random.Random(seed)
        self._steps_ahead = int(overlap)
        self._grammars = grammars
        self._compiling: dict[str, tuple[Request, Future[Any]]] = {}  # requests that wait for their grammar
        self._requests: dict[str, Request] = {}
        self._launched: deque[_Launched] = deque()
        self._outbox: list[Tokens | Failed] = []
        self._vision = vision
        self._picture_cache = PictureCache(vision, picture_tokens) if vision else None
        self._arrived: dict[str, list[Picture]] = {}  # pictures whose request has not come yet
        self._arrivals = self._prompt_tokens = self._generated_tokens = 0

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do or to say."""
        return bool(self._outbox or self._launched or self._compiling or self.scheduler.has_requests)

    def add_picture(self, picture: Picture) -> None:
        """Keep a picture for the request that is about to come."""
        self._arrived.setdefault(picture.id, []).append(picture)

    def add(self, generate: Generate) -> None:
        """Queue a request; if it can never be served, the next `step` says why."""
        sampling, arrived = generate.sampling, self._arrived.pop(generate.id, [])
        try:
            if generate.id in self._requests:
                raise RequestRefused(f"a request with id {generate.id!r} is running already", "request_id")
            check_sampling(sampling, self.scheduler.limits.vocab_size)
            request = Request(
                id=generate.id,
                prompt=generate.prompt,
                sampling=sampling,
                arrival=self._arrivals,
                seed=(self._seeds.getrandbits(64) if sampling.seed is None else sampling.seed) & SEED_MASK,
                stop_ids=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos),
                priority=generate.priority,
                pictures=self._place(generate, arrived),
            )
            self._queue(request)
        except RequestRefused as error:
            self._outbox.append(Failed(generate.id, error.message, refused=True, param=error.param))
            return
        self._arrivals += 1
        self._requests[request.id] = request

    def cancel(self, request_id: str) -> None:
        """End a request at once; one that has ended already, or never was, is no error: messages cross."""
        self._arrived.pop(request_id, None)
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request)
            self._outbox.append(Tokens(request_id, [], finish_reason="cancel"))

    def step(self) -> list[Tokens | Failed]:
        """Plan and run one step, and read one that ran. Returns what there is to tell, in order."""
        self._take_compiled()
        step = self.scheduler.plan()
        if step.plan.chunks:
            self._launched.append(self._launch(step))
        if self._launched and (len(self._launched) > self._steps_ahead or not step.plan.chunks):
            self._land(self._launched.popleft())
        messages, self._outbox = self._outbox, []
        return messages

    def resize(self, pages: int, slots: int) -> None:
        """Have `pages` pages, without that of padding, and so many slots of experts, on all ranks, once what was
        launched is done. Raises ValueError, and changes nothing, if requests hold more pages.
        """
        while self._launched:
            self._land(self._launched.popleft())
        moves, reuse = self.scheduler.resize(pages), self.scheduler.reuse
        plan = StepPlan(self.scheduler.steps, host=reuse.copies(), resize=Resize(pages + 1, slots, moves))
        reuse.planned(0)
        self._runner.run(plan)

    def _queue(self, request: Request) -> None:
        """Give `request` to the scheduler, or to the grammars first. Raises RequestRefused."""
        grammar = request.sampling.grammar
        if grammar is None:
            self.scheduler.add(request)
            return
        if self._grammars is None:
            raise RequestRefused("this engine has no grammars", "grammar")
        check_fits(request.prompt, request.sampling.max_tokens, self.scheduler.limits)
        self._compiling[request.id] = request, self._grammars.compile(grammar)

    def _take_compiled(self) -> None:
        """Queue the requests whose grammars are there. With nothing else to do, wait a little for one."""
        if not self._compiling:
            return
        idle = not (self._outbox or self._launched or self.scheduler.has_requests)
        futures = [future for _, future in self._compiling.values()]
        done = wait(futures, COMPILE_WAIT_S if idle else 0, FIRST_COMPLETED).done
        for request, future in [pair for pair in self._compiling.values() if pair[1] in done]:
            del self._compiling[request.id]
            grammar = request.sampling.grammar
            assert grammar is not None
            assert self._grammars is not None
            try:
                request.constraint = self._grammars.constraint(grammar, future.result())
            except GrammarError as error:
                del self._requests[request.id]
                self._outbox.append(grammar_refused(request, grammar.param, str(error)))
            else:
                self.scheduler.add(request)

    def stats(self) -> Stats:
        pages, rows, reuse = self.scheduler.pages, self.scheduler.rows, self.scheduler.reuse
        cache = self._picture_cache
        counts = cache.counts if cache else PictureCounts()
        return Stats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + len(self._compiling),
            kv_tokens_used=(pages.used - pages.idle) * pages.page_tokens,
            kv_tokens=pages.pages * pages.page_tokens,
            state_rows_used=rows.used,
            state_rows=rows.rows,
            preemptions=self.scheduler.preemptions,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            steps=self.scheduler.steps,
            pictures_encoded=counts.encoded,
            pictures_reused=counts.reused,
            picture_tokens_held=cache.tokens if cache else 0,
            cached_tokens=reuse.hit_tokens,
            host_cached_tokens=reuse.host_hit_tokens,
            looked_up_tokens=reuse.query_tokens,
            kv_tokens_cached=pages.idle * pages.page_tokens,
            snapshots=len(reuse.cache.snapshots),
            snapshot_rows=reuse.cache.rows,
            snapshot_evictions=reuse.cache.evictions,
            **host_stats(reuse.host),
        )

    def check(self) -> None:
        """Raises AssertionError if anything is kept for requests that are gone."""
        self.scheduler.check()
        live = len(self.scheduler.running) + len(self.scheduler.waiting) + len(self._compiling)
        if len(self._requests) != live or self._sampler.remembered > live:
            raise AssertionError(
                f"{live} live requests; {len(self._requests)} known, {self._sampler.remembered} sampled"
            )

    def _place(self, generate: Generate, arrived: list[Picture]) -> Pictures | None:
        """The pictures of a request. Raises RequestRefused for what the tower cannot take."""
        if len(arrived) != generate.pictures:
            raise RequestRefused(f"{len(arrived)} pictures came for a request that has {generate.pictures}", "messages")
        if not arrived:
            return None
        if self._vision is None:
            raise RequestRefused("this server has no vision tower, so it takes no pictures", "messages")
        try:
            return Pictures(arrived, len(generate.prompt), self._vision)
        except ValueError as error:
            raise RequestRefused(str(error), "messages") from None

    def _plan_of(self, step: Step) -> StepPlan:
        """The plan of `step`, with how many of the likeliest ids will do, and the pictures that are to be encoded."""
        listed = len(step.sampled) <= LISTED_ROWS and not any(chunk.prompt_logits for chunk in step.plan.chunks)
        return msgspec.structs.replace(self._with_pictures(step), keep=enough(step.sampled) if listed else 0)

    def _with_pictures(self, step: Step) -> StepPlan:
        """The plan of `step`, with the pictures that the ranks have to encode for it."""
        pairs = zip(step.requests, step.plan.chunks, strict=True)
        work = [(request.pictures, chunk) for request, chunk in pairs if request.pictures and chunk.spans]
        if not work or self._picture_cache is None:
            return step.plan
        encode, forget = self._picture_cache.step(work)
        return msgspec.structs.replace(step.plan, encode=encode, forget=forget)

    def _launch(self, step: Step) -> _Launched:
        """Give a step to the device: model, sampler, and the scores of prompts. Nothing here waits for it."""
        logits = self._runner.run(self._plan_of(step), step.sampled)
        if isinstance(logits, Written):
            return _Launched(step, Sampled(logits), {})
        if logits is None:
            if step.sampled:
                raise RuntimeError(
                    f"step {step.plan.step} samples {len(step.sampled)} tokens; its runner gave no logits"
                )
            return _Launched(step, None, {})
        scores = {
            request: found
            for request, chunk in zip(step.requests, step.plan.chunks, strict=True)
            if chunk.prompt_logits and (found := self._score(request, chunk, logits.prompt[chunk.row]))
        }
        finite_K = None if logits.checked_KV is None else Readback(logits.checked_KV.amax(dim=-1).isfinite())
        sampled = None
        if step.sampled:
            mask(logits.sampled_LV, step.sampled)
            sampled = self._sampler.sample(logits.sampled_LV, step.sampled)
            assert sampled.tokens_L is not None
            self._runner.commit([request.row for request in step.sampled], sampled.tokens_L)
            for request in step.sampled:
                if request.constraint is not None and request.constraint.fault and request.id in self._requests:
                    self._end(request)
                    self._outbox.append(grammar_refused(request, request.constraint.param, request.constraint.fault))
        return _Launched(step, sampled, scores, finite_K)

    @staticmethod
    def _score(request: Request, chunk: Chunk, logits_CV: torch.Tensor) -> PromptScores | None:
        """Score the prompt tokens that this chunk predicts and none before it did, if any."""
        first = max(chunk.start, len(request.prompt_logprobs))
        last = min(chunk.start + chunk.count, len(request.prompt) - 1)
        if first >= last:
            return None
        logits_CV = logits_CV[first - chunk.start : last - chunk.start]
        return score_prompt(logits_CV, request.prompt[first + 1 : last + 1], request.sampling.prompt_logprobs or 0)

    def _land(self, launched: _Launched) -> None:
        """Wait for a step's results and tell them."""
        step = launched.step
        for request, scores in launched.scores.items():
            found = scores.read()
            if found is None:
                self._fail(request, f"the model's output within the {len(request.prompt)} prompt tokens is not finite")
            else:
                request.prompt_logprobs += found
        checked = [each for each in zip(step.requests, step.plan.chunks, strict=True) if each[1].check]
        finite = launched.finite_K.lists()[0] if launched.finite_K is not None else []
        unsound = [each for each, fine in zip(checked, finite, strict=True) if not fine]
        for request, chunk in unsound:
            self._fail(request, f"the model's output after {chunk.start + chunk.count} tokens is not finite")
        results = launched.sampled.read() if launched.sampled else []
        chunks = [chunk for chunk in step.plan.chunks if chunk.sample]
        tokens: dict[int, int] = {}
        logprobs: dict[Request, Logprob] = {}
        for request, chunk, (token, logprob) in zip(step.sampled, chunks, results, strict=True):
            if token is None:
                self._fail(request, f"the model's output after {request.length - request.pending} tokens is not finite")
            else:
                tokens[chunk.row] = token
            if logprob is not None:
                logprobs[request] = logprob
        for progress in self.scheduler.finish(step, tokens, [chunk.row for _, chunk in unsound]):
            self._tell(progress, logprobs.get(progress.request))

    def _tell(self, progress: Progress, logprob: Logprob | None) -> None:
        request = progress.request
        first = not request.answered
        request.answered = True
        self._prompt_tokens += len(request.prompt) * first
        self._generated_tokens += len(progress.tokens)
        if progress.finish_reason is not None:
            self._end(request)
        if progress.finish_reason == "error" and request.constraint is not None:
            self._outbox.append(grammar_refused(request, request.constraint.param, request.constraint.fault))
            return
        wants_prompt = first and request.sampling.prompt_logprobs is not None
        self._outbox.append(
            Tokens(
                request.id,
                progress.tokens,
                logprobs=[logprob] if logprob is not None and progress.tokens else [],
                prompt_logprobs=request.prompt_logprobs if wants_prompt else None,
                finish_reason=progress.finish_reason,
                stop_token=progress.stop_token,
                cached_tokens=request.cached_tokens or 0,
            )
        )

    def _fail(self, request: Request, message: str) -> None:
        """End one request with an error. One that has ended meanwhile has had its last word, but must not be reused."""
        if self._requests.get(request.id) is not request:
            self.scheduler.reuse.failed(request)
        else:
            self._end(request, failed=True)
            self._outbox.append(Failed(request.id, message))

    def _end(self, request: Request, failed: bool = False) -> None:
        if self._compiling.pop(request.id, None) is None:
            self.scheduler.end(request, failed)
        self._sampler.forget(request)
        del self._requests[request.id]
