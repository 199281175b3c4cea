"""Every Triton kernel of the package, compiled without a GPU for every card that is served.

Run as a program, without TRITON_INTERPRET: compiles all cases of the modules named (default: all of
shardwise.kernels), and prints a JSON list of what each takes.
"""

import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator
from typing import NamedTuple

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

import shardwise.kernels
from shardwise.kernels.cases import CompileCase


class Card(NamedTuple):
    """A kind of GPU: what Triton compiles for, and how much shared memory a block may have."""

    target: GPUTarget
    shared_bytes: int

    @property
    def name(self) -> str:
        return f"sm_{self.target.arch}" if self.target.backend == "cuda" else str(self.target.arch)


CARDS = (
    Card(GPUTarget("cuda", 86, 32), 99 * 1024),
    Card(GPUTarget("cuda", 89, 32), 99 * 1024),
    Card(GPUTarget("cuda", 90, 32), 227 * 1024),
    Card(GPUTarget("cuda", 120, 32), 99 * 1024),
    Card(GPUTarget("hip", "gfx1201", 32), 64 * 1024),
)


class Compiled(NamedTuple):
    """What became of a case on a card; an error is the compiler's."""

    case: str
    card: str
    shared_bytes: int
    limit_bytes: int
    error: str = ""


def modules() -> list[str]:
    """All modules of Triton kernels in the package."""
    return [
        found.name
        for found in pkgutil.walk_packages(shardwise.kernels.__path__, "shardwise.kernels.")
        if found.name.endswith(".triton")
    ]


def attributes(case: CompileCase) -> dict[tuple[int, ...], list[list[object]]]:
    """Pointers and strides are multiples of 16, as for real sizes: only then does a kernel pipeline its loads."""
    unaligned = {p.name for p in case.kernel.params if p.do_not_specialize or p.do_not_specialize_on_alignment}
    return {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(case.signature.items())
        if name not in unaligned and (kind.startswith("*") or "stride" in name)
    }


def compile_case(case: CompileCase, card: Card) -> Compiled:
    """Compiles (or takes from Triton's cache) one case for one card."""
    text = ", ".join(f"{name}={value}" for name, value in case.constexprs.items())
    kinds = ", ".join(dict.fromkeys(kind for kind in case.signature.values() if kind.startswith("*")))
    label = f"{case.kernel.__name__}({text}; {kinds}) warps={case.num_warps} stages={case.num_stages}"
    source = ASTSource(case.kernel, dict(case.signature), dict(case.constexprs), attributes(case))
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    try:
        shared_bytes = compile_source(source, target=card.target, options=options).metadata.shared
    except Exception as error:  # a compiler may fail with anything
        return Compiled(label, card.name, 0, card.shared_bytes, f"{type(error).__name__}: {error}"[:2000])
    return Compiled(label, card.name, shared_bytes, card.shared_bytes)


def compile_module(name: str) -> Iterator[Compiled]:
    """All cases of a module, each for the cards that are given it."""
    for case in importlib.import_module(name).compile_cases():
        case = CompileCase(*case)
        for card in CARDS:
            if case.shared_bytes in (0, card.shared_bytes):
                yield compile_case(case, card)


if __name__ == "__main__":
    done = [compiled for name in sys.argv[1:] or modules() for compiled in compile_module(name)]
    json.dump([compiled._asdict() for compiled in done], sys.stdout)
