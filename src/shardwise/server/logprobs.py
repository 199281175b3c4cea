"""Logprobs in the shapes of the two APIs."""

from collections.abc import Sequence

from shardwise.engine.messages import Logprob
from shardwise.server.responses import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob
from shardwise.server.tokenizer import Tokenizer

LEAST = -9999.0  # stands for minus infinity, which JSON does not have


def token_text(tokenizer: Tokenizer, token: int) -> str:
    r"""Text of one token; `bytes:\xe2\x80` if it is no whole character, as OpenAI writes it."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _top(tokenizer: Tokenizer, token: int, logprob: float) -> TopLogprob:
    return {
        "token": token_text(tokenizer, token),
        "logprob": max(logprob, LEAST),
        "bytes": list(tokenizer.token_bytes(token)),
    }


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[Logprob]) -> ChatLogprobs:
    """One entry a token, each with its likeliest alternatives."""

    def entry(each: Logprob) -> ChatLogprob:
        alternatives = [_top(tokenizer, token, logprob) for token, logprob in each.top]
        return {**_top(tokenizer, each.token, each.logprob), "top_logprobs": alternatives}

    return {"content": [entry(each) for each in logprobs]}


def completion_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[Logprob | None], tokens: Sequence[int], offsets: Sequence[int]
) -> CompletionLogprobs:
    """logprobs: of each of `tokens`, None where there is no distribution (the first token of a prompt)."""
    result: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for each, token, offset in zip(logprobs, tokens, offsets, strict=False):
        result["tokens"].append(token_text(tokenizer, token))
        result["text_offset"].append(offset)
        if each is None:
            result["token_logprobs"].append(None)
            result["top_logprobs"].append(None)
            continue
        result["token_logprobs"].append(max(each.logprob, LEAST))
        top: dict[str, float] = {}
        for alternative, logprob in (*each.top, (each.token, each.logprob)):
            top.setdefault(token_text(tokenizer, alternative), max(logprob, LEAST))
        result["top_logprobs"].append(top)
    return result


def prompt_offsets(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """Where in the prompt's text each of its tokens starts, in characters."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    offsets, characters = [], 0
    for token in prompt:
        offsets.append(characters)
        characters += len(detokenizer.add(token))
    return offsets
