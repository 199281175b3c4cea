"""From logits to token ids, on the device of the logits, for all the rows of a step at once.

Each row's result depends on its own logits, parameters, seed and history only: rows never share arithmetic whose
rounding could depend on the rest of the batch. Nothing here waits for the device before `Sampled.read`.

Order of effects: logit_bias, min_tokens (no stop token before), penalties; then logprobs are taken; then temperature,
min_p, top_k, top_p.

Legend: L rows of logits, V vocabulary, N rows of a group, K candidates, C tokens of a chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log
from typing import Protocol

import torch

from shardwise.engine.messages import Logprob, SamplingParams
from shardwise.engine.penalties import TokenCounts, penalised
from shardwise.engine.readback import Readback, Written
from shardwise.engine.request import Request
from shardwise.kernels.draw import reference
from shardwise.kernels.draw.reference import largest, split_seed

GREEDY_BELOW = 1e-5  # temperatures under this are 0: dividing by them says the same, with overflows
NARROW = 256  # up to this top_k, candidates are selected; above it, and for top_p alone, all ids are sorted
LISTED = 32  # up to this top_k, logits of ids that cannot be candidates may be left out


def enough(requests: Sequence[Request]) -> int:
    """How many of the likeliest ids of each row suffice to sample a token for each of `requests`; 0: whole rows."""
    most = 1
    for request in requests:
        s = request.sampling
        greedy = s.temperature < GREEDY_BELOW
        shaped = s.logit_bias or request.index < s.min_tokens or penalised(request) or request.constraint is not None
        if shaped or s.logprobs is not None or not (greedy or 0 < s.top_k <= LISTED):
            return 0
        most = max(most, 1 if greedy else s.top_k)
    return most


class Choosing(Protocol):
    """The operations of kernels/draw for a device."""

    @property
    def likeliest(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]: ...
    @property
    def draw(self) -> Callable[..., torch.Tensor]: ...
    @property
    def draw_among(self) -> Callable[..., torch.Tensor]: ...


@dataclass(frozen=True)
class Sampled:
    """What one step sampled, on its way to the host.

    results: tokens, -1 where a row's logits were not finite, and if any are wanted, logprobs: of each wanted row its
    own, top ids, top values. wanted: by row, how many of the likeliest to report. tokens_L: int64, on the device; None:
    every rank has them already.
    """

    results: Readback | Written
    wanted: dict[int, int] = field(default_factory=dict)
    tokens_L: torch.Tensor | None = None

    def read(self) -> list[tuple[int | None, Logprob | None]]:
        """Wait for the device. By row, the token (None: its logits were not finite) and its logprob if wanted."""
        numbered, *columns = self.results.lists()
        tokens = [None if token < 0 else token for token in numbered]
        found: dict[int, Logprob] = {}
        numbers = zip(*columns, strict=True) if columns else ()
        for (row, count), (own, ids, values) in zip(self.wanted.items(), numbers, strict=True):
            token = tokens[row]
            if token is not None:
                found[row] = _logprob(token, own, ids, values, count)
        return [(token, found.get(row)) for row, token in enumerate(tokens)]


def _logprob(token: int, own: float, ids: list[int], values: list[float], count: int) -> Logprob:
    """Ids that are ruled out altogether (a logprob of minus infinity) are not among the likeliest."""
    top = zip(ids[:count], values[:count], strict=True)
    return Logprob(token, own, [(other, value) for other, value in top if value != float("-inf")])


@dataclass(frozen=True)
class PromptScores:
    """What the model made of some tokens of a prompt, on its way to the host."""

    tokens: Sequence[int]
    top: int
    logprobs: Readback  # of each token: own, top ids, top values

    def read(self) -> list[Logprob] | None:
        """Wait for the device. None: a logit was not a number."""
        own, ids, values = self.logprobs.lists()
        if any(value != value for value in own):
            return None
        return [_logprob(*each, self.top) for each in zip(self.tokens, own, ids, values, strict=True)]


def score_prompt(logits_CV: torch.Tensor, tokens: Sequence[int], top: int) -> PromptScores:
    """The logprob of each of C `tokens` under its row of logits, and of the `top` likeliest."""
    logprobs_CV = logits_CV.float().log_softmax(dim=-1)
    own_C = logprobs_CV.gather(1, _ints(tokens, logits_CV.device).unsqueeze(1)).squeeze(1)
    ids_CK = largest(logprobs_CV, top)
    return PromptScores(tokens, top, Readback(own_C, ids_CK, logprobs_CV.gather(1, ids_CK)))


def _ints_of(request: Request, index: int) -> tuple[int, int, int, int]:
    """A row of what is called ints_N4 here, for the token of this index."""
    return request.sampling.top_k, *split_seed(request.seed), index


def _floats_of(s: SamplingParams) -> tuple[float, float, float]:
    """A row of what is called floats_N3 here."""
    return s.temperature, s.top_p, log(s.min_p) if s.min_p > 0 else float("-inf")


def parameters(request: Request) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """What `choose` needs of a request for which `enough` is not 0."""
    if request.sampling.temperature < GREEDY_BELOW:
        return (1, 0, 0, 0), (1.0, 1.0, float("-inf"))  # a draw from the likeliest one
    return _ints_of(request, request.index), _floats_of(request.sampling)


def choose(
    logits_LV: torch.Tensor, keep: int, rows_L: torch.Tensor, ints_L4: torch.Tensor, floats_L3: torch.Tensor,
    ops: Choosing,
) -> torch.Tensor:  # fmt: skip
    """A token of each row as Sampler.sample chooses it, int64 [L], in operations that a CUDA graph can hold.

    keep: 1: all rows are greedy, and the parameters of no account; else at least what is `enough` for their requests.
    rows: 0 to L - 1.
    """
    _, tokens_L = ops.likeliest(logits_LV)
    if keep == 1:
        return tokens_L
    drawn_L = ops.draw_among(logits_LV, rows_L, min(keep, logits_LV.shape[1]), floats_L3, ints_L4)
    return drawn_L.where(tokens_L >= 0, -1)


@dataclass
class _Draw:
    """Rows that draw at random in the same manner, and their parameters."""

    rows_N: torch.Tensor
    candidates: int  # how many of the likeliest ids of each row to look at; 0: all, nothing is cut off
    ints_N4: torch.Tensor  # top_k, low and high half of the seed, index of the token
    floats_N3: torch.Tensor  # temperature, top_p, logarithm of min_p

    def tokens(self, logits_LV: torch.Tensor, largest_L: torch.Tensor, ops: Choosing) -> torch.Tensor:
        """int64 [N]."""
        if not self.candidates:
            return ops.draw(logits_LV, self.rows_N, largest_L, self.floats_N3[:, 0], self.ints_N4[:, 1:])
        return ops.draw_among(logits_LV, self.rows_N, self.candidates, self.floats_N3, self.ints_N4)


@dataclass
class _Batch:
    """What the parameters of a step's requests come to, on the device. Used again while the requests stay the same."""

    key: list[tuple[int, bool]]  # arrival, whether stop tokens are ruled out
    indices: list[int]  # how many tokens each request had generated before
    draws: list[_Draw] = field(default_factory=list)
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # rows, ids, values
    banned: tuple[torch.Tensor, torch.Tensor] | None = None  # rows, ids
    penalties: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # rows, slots, factors
    wanted: dict[int, int] = field(default_factory=dict)  # by row: how many of the likeliest to report
    wanted_rows_N: torch.Tensor | None = None

    def advance(self) -> None:
        self.indices = [index + 1 for index in self.indices]
        for draw in self.draws:
            draw.ints_N4[:, 3] += 1


class Sampler:
    """Chooses tokens, and remembers what that needs of each request until `forget`."""

    def __init__(self, ops: Choosing = reference) -> None:
        self._ops = ops
        self._counts = TokenCounts()
        self._batch: _Batch | None = None

    @torch.inference_mode()  # the logits were made in it, and may be changed in no other
    def sample(self, logits_LV: torch.Tensor, requests: Sequence[Request]) -> Sampled:
        """One token for each of `requests`, whose rows `logits_LV` [L, V] in fp32 has in order; may change the logits.

        Call it once for each planned token, in order: after a step's plan, before that of the next.
        """
        batch = self._prepare(logits_LV, requests)
        logits_LV = self._shape(logits_LV, batch)
        values_L, tokens_L = self._ops.likeliest(logits_LV)
        for draw in batch.draws:
            drawn_N = draw.tokens(logits_LV, values_L, self._ops)
            if len(drawn_N) == len(tokens_L):  # rows are in order
                tokens_L = drawn_N.where(tokens_L >= 0, -1)
            else:
                tokens_L[draw.rows_N] = drawn_N.where(tokens_L[draw.rows_N] >= 0, -1)
        if batch.penalties is not None:
            rows_P, slots_P, _ = batch.penalties
            self._counts.record(slots_P, tokens_L[rows_P])
        if batch.wanted_rows_N is None:
            return Sampled(Readback(tokens_L), tokens_L=tokens_L)
        tokens_N1 = tokens_L[batch.wanted_rows_N].clamp(min=0).unsqueeze(1)
        logprobs_NV = logits_LV[batch.wanted_rows_N].log_softmax(dim=-1)
        top_ids_NK = largest(logprobs_NV, max(batch.wanted.values()))
        own_N = logprobs_NV.gather(1, tokens_N1).squeeze(1)
        results = Readback(tokens_L, own_N, top_ids_NK, logprobs_NV.gather(1, top_ids_NK))
        return Sampled(results, batch.wanted, tokens_L)

    def forget(self, request: Request) -> None:
        """Drop what is remembered of `request`, which will not be sampled again."""
        self._counts.forget(request)

    @property
    def remembered(self) -> int:
        """Requests that state is kept of."""
        return len(self._counts)

    def _shape(self, logits_LV: torch.Tensor, batch: _Batch) -> torch.Tensor:
        """Apply bias, bans and penalties."""
        if batch.bias is not None:
            rows, ids, values = batch.bias
            logits_LV[rows, ids] = logits_LV[rows, ids] + values
        if batch.banned is not None:
            logits_LV[batch.banned] = float("-inf")
        if batch.penalties is not None:
            rows_P, slots_P, factors_P3 = batch.penalties
            logits_LV[rows_P] = self._counts.penalise(logits_LV[rows_P], slots_P, factors_P3)
        return logits_LV

    def _prepare(self, logits_LV: torch.Tensor, requests: Sequence[Request]) -> _Batch:
        """The parameters of this step: the last step's, one token further, if the requests are the same."""
        indices = [request.index for request in requests]
        key = [(r.arrival, index < r.sampling.min_tokens) for r, index in zip(requests, indices, strict=True)]
        last = self._batch
        if last is not None and last.key == key:
            last.advance()
            if last.indices == indices:
                return last
        batch = self._batch = _Batch(key, indices)
        self._fill(batch, requests, logits_LV)
        return batch

    def _fill(self, batch: _Batch, requests: Sequence[Request], logits_LV: torch.Tensor) -> None:
        device, vocab = logits_LV.device, logits_LV.shape[-1]
        batch.draws = _draws(requests, batch.indices, vocab, device)
        batch.wanted = {row: r.sampling.logprobs for row, r in enumerate(requests) if r.sampling.logprobs is not None}
        batch.wanted_rows_N = _ints(list(batch.wanted), device) if batch.wanted else None
        triples = [(row, t, bias) for row, r in enumerate(requests) for t, bias in r.sampling.logit_bias.items()]
        if triples:
            rows, ids, values = zip(*triples, strict=True)
            batch.bias = _ints(rows, device), _ints(ids, device), _floats(values, device)
        banning = [requests[row] if ban else None for row, (_, ban) in enumerate(batch.key)]
        pairs = [(row, t) for row, r in enumerate(banning) if r for t in sorted(r.stop_ids) if 0 <= t < vocab]
        if pairs:
            rows, ids = zip(*pairs, strict=True)
            batch.banned = _ints(rows, device), _ints(ids, device)
        rows = [row for row, request in enumerate(requests) if penalised(request)]
        if rows:
            chosen = [requests[row] for row in rows]
            slots = self._counts.slots(chosen, logits_LV)
            factors = [
                (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) for s in (r.sampling for r in chosen)
            ]
            batch.penalties = _ints(rows, device), _ints(slots, device), _floats(factors, device)


def _ints(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _floats(values: Sequence[float] | Sequence[tuple[float, ...]], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _draws(requests: Sequence[Request], indices: list[int], vocab: int, device: torch.device) -> list[_Draw]:
    """Rows that are not greedy, grouped by how many candidates they need: none cut off, few, or all sorted."""
    groups: dict[str, list[int]] = {}
    for row, request in enumerate(requests):
        s = request.sampling
        if s.temperature < GREEDY_BELOW:
            continue
        top_k = s.top_k if s.top_k < vocab else 0
        cut = top_k or s.top_p < 1 or s.min_p > 0
        groups.setdefault("all" if not cut else "few" if 0 < top_k <= NARROW else "sorted", []).append(row)
    draws = []
    for kind, rows in groups.items():
        params = [requests[row].sampling for row in rows]
        candidates = {"all": 0, "sorted": vocab, "few": min(vocab, max(s.top_k for s in params))}[kind]
        ints = [_ints_of(requests[row], indices[row]) for row in rows]
        floats = [_floats_of(s) for s in params]
        draws.append(
            _Draw(
                _ints(rows, device),
                candidates,
                torch.tensor(ints, dtype=torch.int64, device=device),
                _floats(floats, device),
            )
        )
    return draws
