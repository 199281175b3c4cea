"""Grammars by xgrammar. Compiling is tried in a process of its own first, which can be ended if it takes too long."""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch

from shardwise.engine.messages import Grammar, GrammarError
from shardwise.engine.probe import CompileProbe

COMPILER_THREADS = 4


def parse(grammar: Grammar) -> Any:
    """`grammar` as an xgrammar.Grammar, without any vocabulary: quick. Raises GrammarError."""
    try:
        import xgrammar

        return xgrammar.Grammar.from_structural_tag('{"type": "structural_tag", "format": ' + grammar.format + "}")
    except Exception as error:  # pydantic's and several of its own, without a common base
        text = str(error).strip().split(": ", 1)[-1] if "/cpp/" in str(error) else str(error).strip()
        raise GrammarError(text[:400] or type(error).__name__) from None


def make_compiler(tokens: Sequence[str], vocab_size: int, eos: Sequence[int]) -> Any:
    """An xgrammar.GrammarCompiler for a byte-level vocabulary, without its cache: that is slow with large grammars."""
    import xgrammar

    info = xgrammar.TokenizerInfo(
        list(tokens), xgrammar.VocabType.BYTE_LEVEL, vocab_size=vocab_size, stop_token_ids=list(eos)
    )
    return xgrammar.GrammarCompiler(info, max_threads=COMPILER_THREADS, cache_enabled=False)


class XgrammarMatcher:
    """How far one answer has come."""

    error = ""  # it knows of none

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def finished(self) -> bool:
        return self._matcher.is_terminated()

    def fill(self, mask_NW: torch.Tensor, row: int) -> None:
        self._matcher.fill_next_token_bitmask(mask_NW, row)

    def accept(self, token: int) -> bool:
        return self._matcher.accept_token(token)


class XgrammarBackend:
    """Compiles, and makes matchers of what it compiled."""

    def __init__(
        self, tokens: Callable[[], Sequence[str]], vocab_size: int, eos: Iterable[int], limit_s: float
    ) -> None:
        """limit_s: for compiling one grammar; 0: no limit, and no process for it."""
        self._tokens, self._vocab_size, self._eos = tokens, vocab_size, sorted(eos)
        self._probe = CompileProbe(self._vocabulary, limit_s) if limit_s else None

    def _vocabulary(self) -> tuple[list[str], int, list[int]]:
        return list(self._tokens()), self._vocab_size, self._eos

    @cached_property
    def _compiler(self) -> Any:
        return make_compiler(*self._vocabulary())

    def compile(self, grammar: Grammar) -> Any:
        """Raises GrammarError."""
        parsed = parse(grammar)
        if self._probe is not None:
            self._probe.check(grammar.format)
        try:
            return self._compiler.compile_grammar(parsed)
        except Exception as error:
            raise GrammarError(str(error)[:400]) from error

    def size_bytes(self, compiled: Any) -> int:
        return compiled.memory_size_bytes

    def matcher(self, compiled: Any) -> XgrammarMatcher:
        import xgrammar

        return XgrammarMatcher(xgrammar.GrammarMatcher(compiled))

    def close(self) -> None:
        if self._probe is not None:
            self._probe.close()
