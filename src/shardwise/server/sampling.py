"""From a request's parameters and the checkpoint's defaults to what the engine is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shardwise.config import ConfigError, read_json
from shardwise.engine.messages import Ready, SamplingParams
from shardwise.server.errors import invalid
from shardwise.server.requests import ChatBody, CompletionBody, GenerateBody, check_token_ids

Value = TypeVar("Value")
SMALLEST_TOP_P = 1e-6  # stands for 0: the likeliest token alone


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling when a request says nothing, from generation_config.json."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> "GenerationDefaults":
        """raw: generation_config.json. `do_sample: false` means greedy. Raises ConfigError for what is no number."""

        def number(name: str, default: float, low: float, high: float) -> float:
            value = raw.get(name)
            if value is None:
                return default
            if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
                raise ConfigError(f"generation_config.json: {name} is {value!r}; a number of {low} to {high} is needed")
            return value

        return cls(
            temperature=0.0 if raw.get("do_sample") is False else float(number("temperature", 1.0, 0, 10)),
            top_p=float(number("top_p", 1.0, 0, 1)),
            top_k=max(0, int(number("top_k", 0, -1, 2**31 - 1))),
            min_p=float(number("min_p", 0.0, 0, 1)),
            repetition_penalty=float(number("repetition_penalty", 1.0, 1e-3, 10)),
        )

    @classmethod
    def load(cls, folder: Path) -> "GenerationDefaults":
        """Of the checkpoint in `folder`; the file may be missing."""
        path = folder / "generation_config.json"
        return cls.parse(read_json(path)) if path.exists() else cls()


def _max_tokens(request: GenerateBody, prompt_tokens: int, limits: Ready) -> int:
    """Tokens that the answer may have. Raises ApiError with the numbers and the flag, if it can never fit."""
    name, asked = "max_tokens", request.max_tokens
    if isinstance(request, ChatBody) and request.max_completion_tokens is not None:
        name, asked = "max_completion_tokens", request.max_completion_tokens
    limit, flag = min((limits.max_model_len, "--max-model-len"), (limits.kv_tokens, "--kv-tokens"))
    room = limit - prompt_tokens
    if asked is not None and asked <= room:
        return asked
    if asked is None and room > 0:
        return room
    what = f"{prompt_tokens} tokens of prompt" + (f" and {name} of {asked}" if asked else "")
    end = "leave no room for an answer within" if asked is None else "are over"
    way_out = "shorten the prompt" if room <= 0 else f"ask for at most {room}"
    raise invalid(
        f"{what} {end} the limit of {limit} tokens a request; {way_out}, or start the server with a larger {flag}",
        name if room > 0 else "messages" if isinstance(request, ChatBody) else "prompt",
        "context_length_exceeded",
    )


def _given(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def resolve(
    request: GenerateBody, choice: int, prompt_tokens: int, limits: Ready, defaults: GenerationDefaults, vocab_size: int
) -> SamplingParams:
    """Sampling of the choice-th answer to one prompt. Raises ApiError.

    With a seed, each choice gets its own next to it: n answers are to differ, and to be the same n the next time.
    """

    check_token_ids(list(request.logit_bias or {}), vocab_size, "logit_bias")
    check_token_ids(list(request.stop_token_ids or []), vocab_size, "stop_token_ids")
    max_tokens = _max_tokens(request, prompt_tokens, limits)
    min_tokens = _given(request.min_tokens, 0)
    if min_tokens > max_tokens:
        raise invalid(f"min_tokens: {min_tokens} is over the {max_tokens} that the answer may have", "min_tokens")
    logprobs = prompt_logprobs = None
    if isinstance(request, CompletionBody):
        logprobs = request.logprobs
        prompt_logprobs = logprobs if request.echo else None
    elif isinstance(request, ChatBody) and request.logprobs:
        logprobs = request.top_logprobs or 0
    seed = request.seed
    if seed is not None and choice:
        seed = (seed + choice + 2**63) % 2**64 - 2**63
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_given(request.temperature, defaults.temperature),
        top_p=max(_given(request.top_p, defaults.top_p), SMALLEST_TOP_P),
        top_k=max(0, _given(request.top_k, defaults.top_k)),
        min_p=_given(request.min_p, defaults.min_p),
        presence_penalty=_given(request.presence_penalty, 0.0),
        frequency_penalty=_given(request.frequency_penalty, 0.0),
        repetition_penalty=_given(request.repetition_penalty, defaults.repetition_penalty),
        seed=seed,
        logit_bias=dict(request.logit_bias or {}),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=_given(request.ignore_eos, False),
    )
