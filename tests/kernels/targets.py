"""Every Triton kernel of the package, compiled without a GPU for every card that is served.

    FULL_COMPILE=1 python -m tests.kernels.targets [--table FILE] [--behind PID] [MODULE ...]

Without TRITON_INTERPRET: compiles the cases of the modules named (default: all of shardwise.kernels), and prints a JSON
list of what each takes, or writes the page docs/hardware.md. Cards of one vendor need the same shared memory for the
same configuration, so that configurations are dealt out among them.
"""

import argparse
import contextlib
import importlib
import inspect
import io
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.compiler import compile as compile_source
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

import shardwise.kernels
from shardwise.engine.processes import die_with_parent
from shardwise.kernels.cases import CompileCase
from shardwise.kernels.linear.tiles import FP8, KIND, NATIVE, PLAIN
from tests.kernels.hardware import page, racing, registers

RACES = "a loop turns while a product may still read its left operand from registers (see kernels/products.py)"
LARGEST_TILE = 256  # elements; what is longer is the size of a weight


class Card(NamedTuple):
    """A kind of GPU: what Triton compiles for, and how much shared memory a block may have."""

    target: GPUTarget
    shared_bytes: int

    @property
    def native_fp8(self) -> bool:
        """Whether it has e4m3 in hardware: all but sm_86."""
        return self.target.arch != 86

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
LIMITS_BYTES = {card.name: card.shared_bytes for card in CARDS}


class Compiled(NamedTuple):
    """What became of a case on a card; an error is the compiler's."""

    case: str
    card: str
    shared_bytes: int
    limit_bytes: int  # of the smallest card of the vendor that is given the case
    error: str = ""
    registers: int = 0  # of a thread
    spilled_bytes: int = 0  # of a thread, on the stack for want of registers


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


def compile_case(case: CompileCase, card: Card, tell: bool = False) -> Compiled:
    """Compiles (or takes from Triton's cache) one case for one card. tell: ask for registers, too."""
    text = ", ".join(f"{name}={value}" for name, value in case.constexprs.items())
    kinds = ", ".join(dict.fromkeys(kind for kind in case.signature.values() if kind.startswith("*")))
    label = f"{case.kernel.__name__}({text}; {kinds}) warps={case.num_warps} stages={case.num_stages}"
    alike = (other for other in CARDS if other.target.backend == card.target.backend)
    limit_bytes = case.shared_bytes or min(other.shared_bytes for other in alike)
    if isinstance(case.kernel, GluonJITFunction):
        places = {(case.kernel.arg_names.index(name),): value for name, value in case.constexprs.items()}
        source = GluonASTSource(case.kernel, dict(case.signature), places, attributes(case))
    else:
        source = ASTSource(case.kernel, dict(case.signature), dict(case.constexprs), attributes(case))
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # a failing assembler prints the program
            compiled = compile_source(source, target=card.target, options=options)
    except Exception as error:  # a compiler may fail with anything
        return Compiled(label, card.name, 0, limit_bytes, f"{type(error).__name__}: {error}"[:2000])
    if racing(compiled.asm.get("ttgir", "")):
        return Compiled(label, card.name, compiled.metadata.shared, limit_bytes, RACES)
    taken = registers(told(compiled)) if tell else ()
    return Compiled(label, card.name, compiled.metadata.shared, limit_bytes, "", *taken)


def told(compiled: CompiledKernel) -> str:
    """What the vendor's tools say of a program's registers."""
    if "amdgcn" in compiled.asm:
        return compiled.asm["amdgcn"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(compiled.asm["cubin"])
        binary.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", binary.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def variant(case: CompileCase) -> tuple[Any, ...]:
    """What parts programs that a compiler handles unlike each other: the kernel, and what its pointers point to."""
    return (case.kernel.__name__, case.shared_bytes, *(kind for kind in case.signature.values() if kind[0] == "*"))


def configuration(case: CompileCase) -> tuple[Any, ...]:
    """A variant with its tiles. Sizes of a weight count as compilers see them: 0, 1, or whether 16 divides them."""

    gluon = isinstance(case.kernel, GluonJITFunction)

    def seen(value: Any) -> Any:
        if isinstance(value, tuple):
            if value[0] == PLAIN.value or gluon:  # to these it is nothing what else converts codes
                value = (*value[: NATIVE.value], 0, *value[NATIVE.value + 1 :])
            return tuple(part if part in (0, 1, -1) else part % 16 == 0 for part in value)
        return value % 16 == 0 if isinstance(value, int) and value > LARGEST_TILE else value

    constexprs = tuple((name, seen(value)) for name, value in case.constexprs.items())
    return (*variant(case), constexprs, case.num_warps, case.num_stages)


def layouts(case: CompileCase) -> list[tuple[int, ...]]:
    """Of the weights of a case."""
    return [value for name, value in case.constexprs.items() if name.startswith("W") and isinstance(value, tuple)]


def converted_in_software(case: CompileCase) -> bool:
    """Whether the case is for cards without e4m3 in hardware: of codes, by a kernel that goes by that."""
    by_codes = any(layout[KIND.value] != PLAIN.value and not layout[NATIVE.value] for layout in layouts(case))
    return by_codes and not isinstance(case.kernel, GluonJITFunction)


def converted_in_hardware(case: CompileCase) -> bool:
    """Whether the case has a card convert e4m3."""
    return any(layout[KIND.value] == FP8.value and layout[NATIVE.value] for layout in layouts(case))


def spread(
    cases: Iterable[CompileCase], cards: Sequence[Card], once: set[tuple[str, bool, str]]
) -> Iterator[tuple[CompileCase, Card]]:
    """Which case to compile for which card. once: kernels that cards had before, and then these, too.

    Each kernel, and each that has e4m3 converted in hardware, once for every card, and every configuration for one
    card, in turn. With FULL_COMPILE=1 in the environment, as for the page, the first of each variant for all that are
    given it and the others for one card of each vendor. A case of a configuration that has been is left out.
    """
    full = os.environ.get("FULL_COMPILE") == "1"
    variants, configurations = set[Any](), set[Any]()
    for case in cases:
        if configuration(case) in configurations:
            continue
        given = [card for card in cards if case.shared_bytes in (0, card.shared_bytes)]
        if converted_in_software(case):
            given = [card for card in given if not card.native_fp8]
        if not given:
            continue
        if isinstance(case.kernel, GluonJITFunction):  # written for instructions of NVIDIA's
            given = [card for card in given if card.target.backend == "cuda"]
        kernel = case.kernel.__name__, converted_in_hardware(case)
        if not full:
            lacking = [card for card in given if (*kernel, card.name) not in once]
            given = lacking or [given[len(configurations) % len(given)]]
        elif variant(case) in variants:
            backends = sorted({card.target.backend for card in given})
            alike = [[card for card in given if backend == card.target.backend] for backend in backends]
            given = [group[len(configurations) % len(group)] for group in alike]
        variants.add(variant(case))
        configurations.add(configuration(case))
        once |= {(*kernel, card.name) for card in given}
        for card in given:
            yield case, card


@cache
def jobs(module: str) -> tuple[tuple[CompileCase, Card], ...]:
    """All that is compiled of a module: its cases, and those that only cards with e4m3 in hardware are given."""
    compile_cases = importlib.import_module(module).compile_cases
    cases, once = [CompileCase(*case) for case in compile_cases()], set[tuple[str, bool, str]]()
    if "native_fp8" not in inspect.signature(compile_cases).parameters:
        return tuple(spread(cases, CARDS, once))
    known = {configuration(case) for case in cases}
    native = [CompileCase(*case) for case in compile_cases(native_fp8=True)]
    native = [case for case in native if configuration(case) not in known]
    native_cards = [card for card in CARDS if card.native_fp8]
    return (*spread(cases, CARDS, once), *spread(native, native_cards, once))


def compile_job(module: str, index: int, tell: bool) -> Compiled:
    return compile_case(*jobs(module)[index], tell)


def compile_all(names: Sequence[str], tell: bool = False) -> list[dict[str, Any]]:
    """All jobs of the modules, on all cores; workers are forked, so that they have the modules already."""
    todo = [(name, index) for name in names for index in range(len(jobs(name)))]
    with ProcessPoolExecutor(os.cpu_count(), get_context("fork"), die_with_parent, (os.getpid(),)) as pool:
        done = list(pool.map(compile_job, *zip(*todo, strict=True), repeat(tell), chunksize=4))
    return [{"module": name, **compiled._asdict()} for (name, _), compiled in zip(todo, done, strict=True)]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, metavar="FILE", help="write a page of tables there")
    parser.add_argument("--behind", type=int, metavar="PID", help="of the process that started this; end with it")
    parser.add_argument("modules", nargs="*", default=modules())
    options = parser.parse_args(arguments)
    if options.behind:
        die_with_parent(options.behind)
    found = compile_all(options.modules, tell=options.table is not None)
    if options.table is None:
        json.dump(found, sys.stdout)
    else:
        options.table.write_text(page(found, LIMITS_BYTES, triton.__version__), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
