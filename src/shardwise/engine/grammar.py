"""What an answer must look like: grammars are compiled beside the engine's loop, and mask the logits of each step.

A grammar is a format of xgrammar's structural tags, as JSON: a schema, a regular expression, EBNF, marks around any of
them. xgrammar, or llguidance in its place, is imported when the first one comes.

Legend: L rows of logits, V vocabulary, W words of 32 bits of a mask, N constrained rows.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, Protocol

import torch

from shardwise.engine import guidance, xgrammars
from shardwise.engine.messages import Grammar, GrammarError

CACHED = 256  # compiled grammars that are kept, and
CACHED_BYTES = 512 << 20
BITS = 32
COMPILE_SECONDS = 10.0
# What the masks of one answer may take of the engine's time, which others wait for: at first, and by token.
FIRST_MASKS_SECONDS = 1.0
MASK_SECONDS = 0.01
Backend = Literal["xgrammar", "llguidance"]


def parse(grammar: Grammar, backend: Backend = "xgrammar") -> Any:
    """`grammar` as `backend` reads it, without any vocabulary: quick. Raises GrammarError."""
    return xgrammars.parse(grammar) if backend == "xgrammar" else guidance.parse(grammar)


class Matcher(Protocol):
    """A backend's side of a Constraint. error: why it cannot go on; empty if it can."""

    @property
    def finished(self) -> bool: ...
    @property
    def error(self) -> str: ...
    def fill(self, mask_NW: torch.Tensor, row: int) -> None: ...
    def accept(self, token: int) -> bool: ...


class Constrained(Protocol):
    """What `mask` needs of a request."""

    constraint: "Constraint | None"


class Constraint:
    """How far one answer has come in its grammar."""

    def __init__(self, matcher: Matcher, after: int | None, param: str = "grammar") -> None:
        """after: a token before which anything goes. param: of the API, that asked for it."""
        self._matcher = matcher
        self._after = after
        self._spent_s, self._allowed_s = 0.0, FIRST_MASKS_SECONDS
        self.param = param
        self.fault = ""  # why the answer cannot go on

    @property
    def active(self) -> bool:
        return self._after is None

    @property
    def finished(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.finished

    def fill(self, mask_NW: torch.Tensor, row: int) -> None:
        """Write into `row` which tokens may come next; all, if there is a fault."""
        begin_s = time.thread_time()
        try:
            self._matcher.fill(mask_NW, row)
        except Exception as error:  # as above
            self.fault = f"cannot be followed ({type(error).__name__}: {str(error)[:200]})"
        if not self.fault and not bool(mask_NW[row].any()):
            reason = f" ({self._matcher.error})" if self._matcher.error else ""
            self.fault = f"allows no token of this model where the answer has come to{reason}"
        self._spend(begin_s)
        if self.fault:
            mask_NW[row] = -1

    def accept(self, token: int) -> None:
        """Take in a sampled token."""
        if self._after is not None:
            self._after = None if token == self._after else self._after
            return
        if self.finished:
            return
        begin_s = time.thread_time()
        accepted = self._matcher.accept(token)
        self._allowed_s += MASK_SECONDS
        self._spend(begin_s)
        if not accepted and not self.fault:
            self.fault = "does not go on where the answer has come to"

    def _spend(self, begin_s: float) -> None:
        self._spent_s += time.thread_time() - begin_s
        self.fault = self.fault or self._matcher.error
        if self._spent_s > self._allowed_s and not self.fault:
            self.fault = (
                f"took {self._spent_s:.1f} s of computing so far, more than {MASK_SECONDS * 1000:g} ms a token; "
                "make it simpler, it can be read in too many ways"
            )


class Grammars:
    """Compiles grammars in a thread of its own; `close` lets it go."""

    def __init__(
        self,
        tokens: Callable[[], Sequence[str]],
        vocab_size: int,
        eos_token_ids: Iterable[int],
        backend: Backend = "xgrammar",
        limit_s: float = 0,
    ) -> None:
        """tokens: reads the vocabulary when the first grammar comes. vocab_size: width of the logits. limit_s: for
        compiling one of them; 0: none."""
        eos = sorted(eos_token_ids)
        self._backend = (
            xgrammars.XgrammarBackend(tokens, vocab_size, eos, limit_s)
            if backend == "xgrammar"
            else guidance.GuidanceBackend(tokens, eos)
        )
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiled: OrderedDict[str, Future[Any]] = OrderedDict()

    def compile(self, grammar: Grammar) -> Future[Any]:
        """The compiled grammar, soon; the same one for equal grammars. Its exception is a GrammarError."""
        future = self._compiled.get(grammar.format)
        if future is None:
            future = self._compiled[grammar.format] = self._pool.submit(self._compile, grammar)
        self._compiled.move_to_end(grammar.format)
        while len(self._compiled) > 1 and (len(self._compiled) > CACHED or self._held_bytes() > CACHED_BYTES):
            self._compiled.popitem(last=False)
        return future

    def _held_bytes(self) -> int:
        done = [each for each in self._compiled.values() if each.done() and not each.exception()]
        return sum(self._backend.size_bytes(each.result()) for each in done)

    def _compile(self, grammar: Grammar) -> Any:
        try:
            return self._backend.compile(grammar)
        except GrammarError:
            raise
        except Exception as error:  # a library's own fault ends the request, not the engine
            raise GrammarError(f"cannot be compiled ({type(error).__name__}: {str(error)[:200]})") from error

    def constraint(self, grammar: Grammar, compiled: Any) -> Constraint:
        """For one answer, from what `compile` came to. Raises GrammarError."""
        return Constraint(self._backend.matcher(compiled), grammar.after, grammar.param)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._backend.close()


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
