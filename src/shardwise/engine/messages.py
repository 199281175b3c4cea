"""What the API process and the first rank say to each other, over one Unix socket: length-prefixed msgpack frames."""

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "cancel", "error"]


class GrammarError(ValueError):
    """The grammar cannot be used; the message says why."""


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What an answer must match. format: of xgrammar's structural tags, as JSON. after: a token, such as </think>,
    before which anything goes. param: of the API, that asks for it."""

    format: str
    after: int | None = None
    param: str = "grammar"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen. Temperature 0 is greedy. Penalties and bias as in the OpenAI API."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # how many of the likeliest tokens to report beside the chosen one; None: nothing
    prompt_logprobs: int | None = None  # likewise for each token of the prompt but the first (echo with logprobs)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms, of the distribution before temperature and truncation, after penalties and bias."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = []  # likeliest first


# API process -> first rank


class Picture(msgspec.Struct, frozen=True, tag=True):
    """A picture in the prompt of request `id`, or the frames of a video that share patches. Sent before its Generate.

    at: the first of its tokens in the prompt. height, width: patches. digest: the same for equal pictures only.
    pixels: bytes in the processor's order of patches; see models.vision.Picture.
    """

    id: str
    at: int
    height: int
    width: int
    digest: bytes
    pixels: bytes


class Generate(msgspec.Struct, frozen=True, tag=True):
    """pictures: how many were sent for it."""

    id: str
    prompt: list[int]
    sampling: SamplingParams
    priority: int = 0
    pictures: int = 0


class Cancel(msgspec.Struct, frozen=True, tag=True):
    id: str


class ResizeCache(msgspec.Struct, frozen=True, tag=True):
    """Move memory between KV cache and slots of experts: to so many slots of each layer, or else tokens of KV cache."""

    id: str
    expert_slots: int = 0
    kv_tokens: int = 0


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Finish what runs, take nothing new, then leave."""


# First rank -> API process


class RankMemory(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one rank's memory is for. Rows and pages are counted with those that are padding.

    device, device_id (of the vendor's tools), memory_bytes: empty and 0 if the rank is on another host or on a CPU.
    """

    device: str = ""
    device_id: str = ""
    memory_bytes: int = 0
    weights_bytes: dict[str, int]  # by class, such as "experts"
    state_bytes: int
    state_row_bytes: int
    kv_bytes: int
    kv_token_bytes: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A real step has run on every rank. The limits hold for every request. memory: of each rank, in their order."""

    max_model_len: int
    kv_tokens: int
    max_num_seqs: int
    ranks: int
    restarts: int = 0
    memory: tuple[RankMemory, ...] = ()


class Tokens(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """New tokens of a request. The last message of one has a finish_reason; a stop token is not among `tokens`."""

    id: str
    tokens: list[int]
    logprobs: list[Logprob] = []
    prompt_logprobs: list[Logprob] | None = None  # with the first message, if asked for
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    cached_tokens: int = 0


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The request ended without an answer. `refused`: it can never fit, or was not valid (HTTP 400)."""

    id: str
    message: str
    refused: bool = False
    param: str | None = None


class Stats(msgspec.Struct, frozen=True, tag=True):
    """Counters and gauges of the engine, sent about once a second and after the last request ends."""

    running: int
    waiting: int
    kv_tokens_used: int
    kv_tokens: int
    state_rows_used: int
    state_rows: int
    preemptions: int
    prompt_tokens: int
    generated_tokens: int
    steps: int
    cached_tokens: int = 0  # of prompts, not computed but found in the prefix cache
    pictures_encoded: int = 0
    pictures_reused: int = 0
    picture_tokens_held: int = 0
    looked_up_tokens: int = 0  # of prompts that came to the prefix cache
    kv_tokens_cached: int = 0  # held by the prefix cache alone, to be had at any time; not among kv_tokens_used
    snapshots: int = 0
    snapshot_rows: int = 0
    snapshot_evictions: int = 0
    host_cached_tokens: int = 0  # of cached_tokens, those that only the host tier had
    host_snapshots: int = 0
    host_kv_tokens: int = 0  # room in the host tier
    host_kv_tokens_used: int = 0
    expert_slots: int = 0  # of each layer, on the first rank's device; 0: all experts are there
    expert_hits: int = 0  # experts that a step wanted of a layer and found there
    expert_misses: int = 0
    expert_copied_bytes: int = 0  # to the first rank's device


class CacheResized(msgspec.Struct, frozen=True, tag=True):
    """What there is now. message: why it is as it was, if the change was refused."""

    id: str
    expert_slots: int
    kv_tokens: int
    message: str = ""


class Drained(msgspec.Struct, frozen=True, tag=True):
    """Answer to Drain: nothing runs any more."""


ToEngine = Picture | Generate | Cancel | ResizeCache | Drain
FromEngine = Ready | Tokens | Failed | Stats | CacheResized | Drained
