"""What an answer must look like: grammars are compiled beside the engine's loop, and mask the logits of each step.

A grammar is a format of xgrammar's structural tags, as JSON: a schema, a regular expression, EBNF, marks around any of
them. xgrammar is imported when the first one comes.

Legend: L rows of logits, V vocabulary, W words of 32 bits of a mask, N constrained rows.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from shardwise.engine.messages import Grammar

CACHED = 256  # compiled grammars that are kept
COMPILER_CACHE_BYTES = 512 * 2**20
COMPILER_THREADS = 4
BITS = 32


class GrammarError(ValueError):
    """The grammar cannot be used; the message says why."""


def parse(grammar: Grammar) -> Any:
    """`grammar` as an xgrammar.Grammar, without any vocabulary: quick. Raises GrammarError."""
    try:
        import xgrammar

        return xgrammar.Grammar.from_structural_tag('{"type": "structural_tag", "format": ' + grammar.format + "}")
    except Exception as error:  # pydantic's and several of its own, without a common base
        text = str(error).strip().split(": ", 1)[-1] if "/cpp/" in str(error) else str(error).strip()
        raise GrammarError(text[:400] or type(error).__name__) from None


def vocabulary(folder: Path) -> list[str]:
    """The tokens of a checkpoint's byte-level tokenizer, as its file spells them; special ones match no text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return ["" if token in special else tokenizer.id_to_token(token) or "" for token in range(size)]


class Constrained(Protocol):
    """What `mask` needs of a request."""

    constraint: "Constraint | None"


class Constraint:
    """How far one answer has come in its grammar."""

    def __init__(self, matcher: Any, after: int | None) -> None:
        """matcher: an xgrammar.GrammarMatcher. after: a token before which anything goes."""
        self._matcher = matcher
        self._after = after
        self.broken = False

    @property
    def active(self) -> bool:
        return self._after is None

    @property
    def finished(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_terminated()

    def fill(self, mask_NW: torch.Tensor, row: int) -> None:
        """Write into `row` which tokens may come next."""
        self._matcher.fill_next_token_bitmask(mask_NW, row)

    def accept(self, token: int) -> None:
        """Take in a sampled token."""
        if self._after is not None:
            self._after = None if token == self._after else self._after
        elif not self.finished and not self._matcher.accept_token(token):
            self.broken = True


class Grammars:
    """Compiles grammars in a thread of its own; `close` lets it go."""

    def __init__(self, tokens: Callable[[], Sequence[str]], vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """tokens: reads the vocabulary when the first grammar comes. vocab_size: width of the logits."""
        self._tokens, self._vocab_size, self._eos = tokens, vocab_size, sorted(eos_token_ids)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiled: OrderedDict[str, Future[Any]] = OrderedDict()

    @cached_property
    def _compiler(self) -> Any:
        import xgrammar

        info = xgrammar.TokenizerInfo(
            list(self._tokens()),
            xgrammar.VocabType.BYTE_LEVEL,
            vocab_size=self._vocab_size,
            stop_token_ids=self._eos,
        )
        return xgrammar.GrammarCompiler(info, max_threads=COMPILER_THREADS, cache_limit_bytes=COMPILER_CACHE_BYTES)

    def compile(self, grammar: Grammar) -> Future[Any]:
        """The compiled grammar, soon; the same one for equal grammars. Its exception is a GrammarError."""
        future = self._compiled.get(grammar.format)
        if future is None:
            future = self._compiled[grammar.format] = self._pool.submit(self._compile, grammar)
        self._compiled.move_to_end(grammar.format)
        if len(self._compiled) > CACHED:
            self._compiled.popitem(last=False)
        return future

    def _compile(self, grammar: Grammar) -> Any:
        parsed = parse(grammar)
        try:
            return self._compiler.compile_grammar(parsed)
        except Exception as error:
            raise GrammarError(str(error)[:400]) from error

    def constraint(self, grammar: Grammar, compiled: Any) -> Constraint:
        """For one answer, from what `compile` came to."""
        import xgrammar

        return Constraint(xgrammar.GrammarMatcher(compiled), grammar.after)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


@torch.inference_mode()
def mask(logits_LV: torch.Tensor, requests: Sequence[Constrained]) -> None:
    """Rule out, in place, what the grammars of these rows do not allow."""
    rows = [row for row, request in enumerate(requests) if request.constraint and request.constraint.active]
    if not rows:
        return
    vocab = logits_LV.shape[-1]
    mask_NW = torch.full((len(rows), -(-vocab // BITS)), -1, dtype=torch.int32)
    for i, row in enumerate(rows):
        constraint = requests[row].constraint
        assert constraint is not None
        if not constraint.finished:
            constraint.fill(mask_NW, i)
    device = logits_LV.device
    if device.type != "cpu":
        mask_NW = mask_NW.pin_memory().to(device, non_blocking=True)
    bits_B = torch.arange(BITS, dtype=torch.int32, device=device)
    allowed_NV = ((mask_NW.unsqueeze(-1) >> bits_B) & 1).view(len(rows), -1)[:, :vocab].bool()
    index_N = torch.tensor(rows, device=device)
    logits_LV[index_N] = logits_LV[index_N].masked_fill(~allowed_NV, float("-inf"))
