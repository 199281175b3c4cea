"""Text to token ids and back: the checkpoint's own tokenizer and chat template.

The family's tokenizers are byte-level: every token stands for some bytes, and an answer's text is those bytes decoded.
"""

import asyncio
import codecs
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from shardwise.config import ConfigError
from shardwise.engine.vocabulary import byte_of_character, spell

Result = TypeVar("Result")
INLINE_CHARACTERS = 2048  # of a text that is tokenised in the event loop: less than a millisecond
_PROBE = " é日本😀\n\tHello, 12!"


class ChatTemplateError(ValueError):
    """The chat template does not take these messages, tools or settings."""


class Detokenizer:
    """Text of one answer as its tokens come. A character that is split over tokens appears with its last one."""

    def __init__(self, tokenizer: "Tokenizer", skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """The text that `token` completes, often all of its own, sometimes none."""
        if self._skip_special_tokens and token in self._tokenizer.special_ids:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What is left: U+FFFD if the answer ends within a character."""
        return self._decoder.decode(b"", final=True)


class Tokenizer:
    """A checkpoint's tokenizer. Thread-safe; `run` moves long work off the event loop."""

    def __init__(self, hf: Any) -> None:
        """hf: a fast (Rust) tokenizer of transformers. Raises ConfigError if it is not byte-level."""
        backend = getattr(hf, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError("tokenizer: tokenizer.json is missing; a fast tokenizer is needed")
        self._hf = hf
        self._backend = backend
        self._bytes_by_id: dict[int, bytes] = {}
        self._byte_of_character = byte_of_character()
        added = backend.get_added_tokens_decoder()
        self._added = {token: value.content for token, value in added.items()}
        self.special_ids = frozenset(token for token, value in added.items() if value.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        # What apply_chat_template itself takes is ours to set: a caller could bring a template of his own.
        self.reserved_kwargs = frozenset(inspect.signature(hf.apply_chat_template).parameters) | {"messages"}
        self._pool = ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1), thread_name_prefix="tokenizer")
        if self.decode(self.encode(_PROBE)) != _PROBE:
            raise ConfigError("tokenizer: this vocabulary is not byte-level, and only such are served")

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """From a local checkpoint. Raises ConfigError if the files are missing or broken."""
        from transformers import AutoTokenizer  # takes seconds to import

        if not (folder / "tokenizer.json").is_file():
            raise ConfigError(f"{folder / 'tokenizer.json'}: no such file; the checkpoint must bring its tokenizer")
        try:
            return cls(AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{folder}: the tokenizer cannot be loaded ({error})") from error

    def close(self) -> None:
        """Let the threads go."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, characters: int, function: Callable[..., Result], *args: Any) -> Result:
        """function(*args): here if it works on few `characters`, else in a thread."""
        return function(*args) if characters <= INLINE_CHARACTERS else await self.in_thread(function, *args)

    async def in_thread(self, function: Callable[..., Result], *args: Any) -> Result:
        """function(*args) off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`."""
        if len(text) <= INLINE_CHARACTERS:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        # Of the two only the batch releases the interpreter's lock while it works.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def token_id(self, text: str) -> int | None:
        """The one token that is written `text`, if there is one."""
        return self._backend.token_to_id(text)

    @property
    def chat_template(self) -> str:
        """The template's source; empty if there is none."""
        return str(getattr(self._hf, "chat_template", None) or "")

    @cached_property
    def longest_token_bytes(self) -> int:
        """Bytes of the longest token: no text of n times as many bytes has fewer than n tokens."""
        # Of ordinary tokens each character stands for a byte; an added one is counted as it is written.
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return max(
            max(len(token), len(token.encode()) if number in self._added else 0) for token, number in vocabulary.items()
        )

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for; none if the id is only padding of the embedding."""
        found = self._bytes_by_id.get(token)
        if found is None:
            found = self._bytes_by_id[token] = self._spell(token)
        return found

    def _spell(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        characters = self._backend.id_to_token(token) if 0 <= token < self.vocab_size else None
        return b"" if characters is None else spell(characters, self._byte_of_character)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of `tokens`, at once."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(token) for token in tokens if token not in skipped).decode("utf-8", "replace")

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """For one answer."""
        return Detokenizer(self, skip_special_tokens)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]
    ) -> str:
        """The prompt that the chat template makes, up to where the assistant speaks. Raises ChatTemplateError."""
        reserved = sorted(self.reserved_kwargs.intersection(kwargs))
        if reserved:
            raise ChatTemplateError(f"chat_template_kwargs cannot set {', '.join(reserved)}")
        try:
            text = self._hf.apply_chat_template(
                list(messages), tools=list(tools) or None, add_generation_prompt=True, tokenize=False, **kwargs
            )
        except Exception as error:  # the template is fixed, so whatever it raises comes from the request
            raise ChatTemplateError(f"the chat template refuses this: {error}") from None
        # Template settings of the caller's may be lone surrogates, which are no text.
        return str(text).encode("utf-8", "replace").decode("utf-8")
