"""A request inside the engine: what was asked, what came out so far, and what it holds. Data, no policy."""

from dataclasses import dataclass, field
from enum import Enum, auto
from math import isfinite
from typing import TYPE_CHECKING

from shardwise.cache.prefix import Snapshot, encode
from shardwise.engine.messages import FinishReason, Logprob, SamplingParams
from shardwise.engine.pictures import Pictures

if TYPE_CHECKING:  # it imports torch, and the command line imports this file
    from shardwise.engine.grammar import Constraint

SEED_MASK = (1 << 64) - 1


class RequestRefused(ValueError):
    """The request can never be served as it is (HTTP 400). `param` names the field of the API at fault, if one is."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class Status(Enum):
    WAITING = auto()  # holds no row and no page
    RUNNING = auto()
    FINISHED = auto()


@dataclass(frozen=True)
class Limits:
    """What a step and a request may use. Pages and rows are those that requests can have: the tensors behind them
    have one more, number 0, for padding."""

    max_num_seqs: int  # rows
    max_num_batched_tokens: int
    max_model_len: int
    pages: int
    page_tokens: int
    vocab_size: int
    busy_tokens: int = 1 << 30  # of a step in which any answer goes on, if that is less
    prompt_logits_tokens: int = 128  # prompt tokens of one step whose logits are kept: each is a vocabulary wide

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; 1 or more is needed")

    @property
    def kv_tokens(self) -> int:
        return self.pages * self.page_tokens


@dataclass(eq=False)
class Request:
    """Compared by identity. `arrival` numbers requests in the order they came, and is never used twice."""

    id: str
    prompt: list[int]
    sampling: SamplingParams
    arrival: int
    seed: int = 0  # resolved: sampling.seed, or one the engine drew
    stop_ids: frozenset[int] = frozenset()  # of the request and, unless it ignores them, of the model
    priority: int = 0  # lower is served first
    pictures: Pictures | None = None

    output: list[int] = field(default_factory=list)  # tokens known to the host, a final stop token not among them
    pending: int = 0  # tokens sampled, or to be, by steps in flight, that the host has not seen yet
    in_flight: int = 0  # steps planned and not finished that have a chunk of this request
    status: Status = Status.WAITING
    row: int = 0
    pages: list[int] = field(default_factory=list)
    announced_pages: int = 0  # the first so many of `pages` are in the page tables of all ranks
    computed: int = 0  # positions that the planned steps leave in the caches
    decoding: bool = False  # its next input is the token sampled last in its row
    preemptions: int = 0
    cached_tokens: int | None = None  # of the prompt, not computed; None until it first starts
    host_tokens: int = 0  # of these, found in the host tier alone
    reset: bool = False  # its next chunk is the first in its row
    restore: int = 0  # if so, the row that its state comes from
    copy_page: int = 0  # and the page that its last page, used in part, is a copy of
    snapshot_points: list[int] = field(default_factory=list)  # positions after which its state is to be kept, rising
    snapshot_at: int = 0  # position of the latest snapshot on its way
    snapshots: list[Snapshot] = field(default_factory=list)  # of its states, not known to be sound yet
    stop_token: int | None = None
    prompt_logprobs: list[Logprob] = field(default_factory=list)  # of prompt tokens 1 .. so far
    constraint: "Constraint | None" = None  # of its grammar, once that is compiled
    answered: bool = False  # a message about it has gone out
    _encoded_prompt: bytes | None = None

    @property
    def order(self) -> tuple[int, int]:
        """First come, first served, within a priority."""
        return self.priority, self.arrival

    @property
    def length(self) -> int:
        """Tokens of prompt and answer, those on their way included."""
        return len(self.prompt) + len(self.output) + self.pending

    @property
    def generated(self) -> int:
        return len(self.output) + self.pending

    @property
    def index(self) -> int:
        """How many tokens it generated before the one that its latest planned step samples."""
        return self.generated - 1

    @property
    def max_length(self) -> int:
        return len(self.prompt) + self.sampling.max_tokens

    @property
    def complete(self) -> bool:
        """Every token that it may have is sampled or planned (one, for max_tokens 0, is never sampled)."""
        if self.sampling.max_tokens == 0:
            return self.computed >= len(self.prompt)
        return self.generated >= self.sampling.max_tokens

    def tokens(self, start: int, stop: int) -> list[int]:
        """Ids of the known tokens at positions start .. stop."""
        skip = len(self.prompt)
        return self.prompt[start:stop] + self.output[max(0, start - skip) : max(0, stop - skip)]

    def encoded(self) -> bytes:
        """The key of all known tokens in the prefix cache, a final stop token among them."""
        if self._encoded_prompt is None:
            self._encoded_prompt = encode(self.pictures.keys(self.prompt) if self.pictures else self.prompt)
        last = [] if self.stop_token is None else [self.stop_token]
        return self._encoded_prompt + encode([*self.output, *last])

    def wants_prompt_logits(self, start: int) -> bool:
        """Whether a chunk from position `start` on predicts prompt tokens whose logprobs are asked for and missing."""
        predicted = len(self.prompt) - 1
        return self.sampling.prompt_logprobs is not None and max(start, len(self.prompt_logprobs)) < predicted

    def accept(self, token: int) -> tuple[FinishReason | None, int | None]:
        """Take in the oldest pending token: why this ends the request, if it does, and the stop token, if it is one."""
        self.pending -= 1
        if self.constraint is not None:
            self.constraint.accept(token)
        if token in self.stop_ids:
            self.stop_token = token
            return "stop", token
        self.output.append(token)
        if self.constraint is not None and (self.constraint.finished or self.constraint.fault):
            return ("error" if self.constraint.fault else "stop"), None
        return ("length" if len(self.output) >= self.sampling.max_tokens else None), None


def check_fits(prompt: list[int], max_tokens: int, limits: Limits) -> None:
    """Raises RequestRefused for what could never be served, with the numbers and the way out."""
    tokens, wanted, most = len(prompt), max_tokens, limits.max_model_len
    if not tokens:
        raise RequestRefused("the prompt is empty; at least one token is needed", "prompt")
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        where, token = next((i, t) for i, t in enumerate(prompt) if not 0 <= t < limits.vocab_size)
        raise RequestRefused(
            f"token {where} of the prompt is {token}, outside the vocabulary of {limits.vocab_size}", "prompt"
        )
    if wanted < 0:
        raise RequestRefused(f"max_tokens is {wanted}; 0 or more is needed", "max_tokens")
    if tokens > most or (tokens == most and wanted):
        raise RequestRefused(
            f"the prompt has {tokens} tokens, and the limit is {most} for prompt and answer together; "
            f"shorten it, or start the server with a larger --max-model-len",
            "prompt",
        )
    if tokens + wanted > most:
        raise RequestRefused(
            f"the prompt's {tokens} tokens and max_tokens {wanted} are {tokens + wanted} together, over the limit of "
            f"{most}; ask for at most {most - tokens}, or start the server with a larger --max-model-len",
            "max_tokens",
        )
    if tokens + wanted > limits.kv_tokens:
        raise RequestRefused(
            f"the prompt's {tokens} tokens and max_tokens {wanted} are {tokens + wanted} together, and the KV cache "
            f"holds {limits.kv_tokens}; ask for less, or start the server with a larger --kv-tokens",
            "max_tokens" if tokens < limits.kv_tokens else "prompt",
        )


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises RequestRefused for parameters that the sampler has no meaning for."""
    s = sampling
    rules = (
        ("temperature", s.temperature, s.temperature >= 0, "0 or more"),
        ("top_p", s.top_p, 0 < s.top_p <= 1, "above 0 and at most 1"),
        ("top_k", s.top_k, s.top_k >= 0, "0 (all) or more"),
        ("min_p", s.min_p, 0 <= s.min_p <= 1, "from 0 to 1"),
        ("presence_penalty", s.presence_penalty, True, "finite"),
        ("frequency_penalty", s.frequency_penalty, True, "finite"),
        ("repetition_penalty", s.repetition_penalty, s.repetition_penalty > 0, "above 0"),
        ("min_tokens", s.min_tokens, 0 <= s.min_tokens <= s.max_tokens, f"from 0 to max_tokens, {s.max_tokens}"),
        ("logprobs", s.logprobs, 0 <= (s.logprobs or 0) <= vocab_size, f"from 0 to {vocab_size}"),
        ("prompt_logprobs", s.prompt_logprobs, 0 <= (s.prompt_logprobs or 0) <= vocab_size, f"from 0 to {vocab_size}"),
    )
    for name, value, right, rule in rules:
        if not right or not isfinite(value or 0):
            raise RequestRefused(f"{name} is {value}; it must be {rule}", name)
    for token, bias in s.logit_bias.items():
        if not 0 <= token < vocab_size or not isfinite(bias):
            raise RequestRefused(
                f"logit_bias gives token {token} a bias of {bias}; the vocabulary is 0 to {vocab_size - 1}, "
                f"and a bias is finite",
                "logit_bias",
            )
