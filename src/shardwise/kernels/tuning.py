"""Configurations that were measured on a kind of GPU: tuned/NAME.json, as tests/gpu/tune.py writes it.

A GPU without a file, and a size that a file lacks, get what the kernels' own rules say.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files

BUCKETS = (1, 4, 16, 64, 128)  # tokens; other numbers take the next one's choice, and more than the last have none
SHARED_KIB = "shared_kib"  # a key of its own
KINDS = ("bf16", "fp8", "fp4", "fp4", "fp4")


@cache
def table(name: str) -> Mapping[str, Sequence[int]]:
    """Choices by key (see `key`) of the GPU `name`, as torch calls it; empty without a file."""
    file = files("shardwise.kernels") / "tuned" / f"{name.replace(' ', '_')}.json"
    return json.loads(file.read_text()) if name and file.is_file() else {}


def measured(native_fp8: bool = True) -> Iterator[tuple[str, int]]:
    """GPUs that have a file, with the KiB of shared memory of a program; none without e4m3 in hardware."""
    folder = files("shardwise.kernels") / "tuned"
    if native_fp8 and folder.is_dir():
        names = [file.name.removesuffix(".json").replace("_", " ") for file in folder.iterdir()]
        yield from ((name, table(name)[SHARED_KIB][0]) for name in sorted(names))


def bucket(tokens: int) -> int:
    """The number of tokens whose choice serves for `tokens`; 0: none does."""
    return next((most for most in BUCKETS if tokens <= most), 0)


def key(what: str, layouts: Sequence[tuple[int, ...]], tokens: int) -> str:
    """Of the choice `what` for weights of these layouts (see linear/tiles.py)."""
    return " ".join([what, *(f"{KINDS[each[0]]}:{each[2]}x{each[3]}" for each in layouts), str(bucket(tokens))])


def choice(name: str, what: str, layouts: Sequence[tuple[int, ...]], tokens: int) -> Sequence[int] | None:
    """What was measured best on the GPU `name`, or None."""
    return table(name).get(key(what, layouts, tokens)) if name else None
