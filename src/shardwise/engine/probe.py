"""A process that compiles grammars, and follows them for some random tokens, only to see whether that comes to an end:
one that takes too long, or too much memory, or crashes the compiler, is refused, and only this process is lost.

`python -m shardwise.engine.probe PARENT`: frames (four bytes of length, then msgpack) on standard input and output.
First the vocabulary, answered when it is ready; then a grammar each, answered by what is wrong with it, or nothing.
"""

import os
import random
import resource
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

import msgspec

from shardwise.engine.messages import Grammar, GrammarError
from shardwise.engine.processes import die_with_parent

START_SECONDS = 120.0
MEMORY_BYTES = 4 << 30  # beyond what it takes to start
NICENESS = 5
WALK_TOKENS = 100
WALK_SECONDS = 1.0
BITS = 32


def _send(pipe: IO[bytes], value: Any) -> None:
    payload = msgspec.msgpack.encode(value)
    pipe.write(struct.pack("<I", len(payload)) + payload)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    """Raises EOFError."""
    head = pipe.read(4)
    payload = pipe.read(struct.unpack("<I", head)[0]) if len(head) == 4 else b""
    if not payload:
        raise EOFError
    return msgspec.msgpack.decode(payload)


class CompileProbe:
    """Asks the process, which is started with the first grammar, and again after each that ended it. For one thread."""

    def __init__(self, vocabulary: Callable[[], Any], limit_s: float) -> None:
        """vocabulary: the arguments of xgrammars.make_compiler."""
        self._vocabulary, self._limit_s = vocabulary, limit_s
        self._child: subprocess.Popen[bytes] | None = None

    def check(self, grammar_format: str) -> None:
        """Raises GrammarError for a grammar that cannot be compiled in time."""
        child = self._child or self._start()
        try:
            reply = self._ask(child, grammar_format, self._limit_s)
        except TimeoutError:
            self.close()
            raise GrammarError(f"takes more than {self._limit_s:g} s to compile and try; make it simpler") from None
        except (EOFError, OSError):
            self.close()
            raise GrammarError("is more than its compiler can take (memory, or depth); make it simpler") from None
        if reply:
            raise GrammarError(reply)

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for pipe in (self._child.stdin, self._child.stdout):
                if pipe is not None:
                    pipe.close()
        self._child = None

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "shardwise.engine.probe", str(os.getpid())]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            self._ask(self._child, self._vocabulary(), START_SECONDS)
        except (TimeoutError, EOFError, OSError) as error:
            self.close()
            raise GrammarError(f"the process that compiles grammars does not start ({type(error).__name__})") from error
        return self._child

    @staticmethod
    def _ask(child: "subprocess.Popen[bytes]", value: Any, limit_s: float) -> str:
        assert child.stdin is not None
        assert child.stdout is not None
        _send(child.stdin, value)
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            if not selector.select(limit_s):
                raise TimeoutError
        return _receive(child.stdout)


def _walk(compiled: Any, vocab_size: int, eos: Sequence[int]) -> str:
    """Follow some answer, not to an end if it can go on; what is wrong if its masks take too long."""
    import torch
    import xgrammar

    matcher, source = xgrammar.GrammarMatcher(compiled), random.Random(0)
    mask_NW = torch.full((1, -(-vocab_size // BITS)), -1, dtype=torch.int32)
    spent_s = 0.0
    for done in range(1, WALK_TOKENS + 1):
        begin_s = time.process_time()
        matcher.fill_next_token_bitmask(mask_NW)
        spent_s += time.process_time() - begin_s
        bits_V = (mask_NW[0].unsqueeze(1) >> torch.arange(BITS, dtype=torch.int32)) & 1
        allowed = sorted({*bits_V.flatten().nonzero().flatten().tolist()} - {*eos})
        begin_s = time.process_time()
        if not allowed or not matcher.accept_token(source.choice(allowed)) or matcher.is_terminated():
            break
        spent_s += time.process_time() - begin_s
        if spent_s > WALK_SECONDS:
            return f"takes {spent_s / done * 1000:.0f} ms a token to follow; make it simpler"
    return ""


def main() -> None:
    """Answer until standard input ends."""
    die_with_parent(int(sys.argv[1]))
    os.nice(NICENESS)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no reply
    from shardwise.engine.xgrammars import make_compiler, parse

    vocabulary = _receive(sys.stdin.buffer)
    compiler = make_compiler(*vocabulary)
    with open("/proc/self/statm", encoding="ascii") as file:
        size_bytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes + MEMORY_BYTES, resource.RLIM_INFINITY))
    _send(replies, "")
    while True:
        try:
            grammar_format = _receive(sys.stdin.buffer)
        except EOFError:
            return
        began_s, problem = time.monotonic(), ""
        try:
            problem = _walk(compiler.compile_grammar(parse(Grammar(grammar_format))), *vocabulary[1:])
        except GrammarError as error:
            problem = str(error)
        except MemoryError:
            problem = f"takes too much memory to compile (after {time.monotonic() - began_s:.1f} s); make it simpler"
        except Exception as error:
            problem = str(error)[:400] or type(error).__name__
        _send(replies, problem)


if __name__ == "__main__":
    main()
