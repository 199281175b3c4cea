"""Writes docs/sharding.md: how every class of weight, cache and state is cut, from the specs themselves.

`python docs/sharding.py` writes the file; `--check` only says, by its exit code, whether it is up to date.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from shardwise.config import ServeConfig
from shardwise.engine.build import blueprint
from shardwise.shard import ParamSpec

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "sharding.md"
GEOMETRY = ROOT / "benchmarks" / "geometry" / "qwen3.6-35b-a3b"

HEAD = """\
# How weights are cut

Written by `python docs/sharding.py` from the specs that the layers declare; a test holds it to them. The model is
Qwen3.6-35B-A3B with made-up bf16 weights (`benchmarks/geometry/qwen3.6-35b-a3b`), experts stacked as published.

A **group** is a set of dimensions that are cut together: one `Partition` of its units over the ranks holds for all of
its weights, caches and states. An **axis** is written `segment size/grain`: a grain (a head, say) is never parted,
segments that follow one another on an axis are each cut in the same proportion, and the cut axis is in bold. A
**shared** segment is held by every rank whose units touch it, so neighbours may hold the same key-value head. A weight
without a group is on every rank. Cuts of the last axis leave partial sums, which an
all-reduce adds up; `src/shardwise/shard.py` says the rest, and `shardwise plan MODEL --tp N` what each rank holds.
"""


def declared(memory: Mapping[str, ParamSpec]) -> Iterator[tuple[str, int, ParamSpec]]:
    """Specs that differ only in their layer's number, as one: its name with a star, and how many there are."""
    classes: dict[tuple[str, ParamSpec], int] = defaultdict(int)
    for name, spec in memory.items():
        classes[_starred(name), _sourced(spec)] += 1
    for (name, spec), count in classes.items():
        yield name, count, spec


def _starred(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _sourced(spec: ParamSpec) -> ParamSpec:
    return ParamSpec(spec.axes, spec.format, tuple(map(_starred, spec.sources)), spec.group, spec.cut)


def axis_text(spec: ParamSpec, i: int) -> str:
    """`queries 8192/512 + keys 512/256`, in bold if it is cut."""
    axis = spec.axes[i]
    if isinstance(axis, int):
        return str(axis)
    parts = [f"{s.name} {s.size}" + (f"/{s.grain}" if s.grain > 1 else "") for s in axis]
    return f"**{' + '.join(parts)}**" if spec.group and spec.cut == i else " + ".join(parts)


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def cuts(memory: Mapping[str, ParamSpec], *, sources: bool) -> Iterator[str]:
    """The table of how each class of `memory` is cut."""
    titles = ["name", "count", "axes", "dtype", "group", "shared", *(["in the checkpoint"] if sources else [])]
    yield from (row(titles), row(["---"] * len(titles)))
    for name, count, spec in declared(memory):
        axes = " × ".join(axis_text(spec, i) for i in range(len(spec.axes)))
        shared = [segment.name for segment in spec.segments(spec.cut) if segment.shared] if spec.group else []
        stored = "<br>".join(f"`{source}{part.suffix}`" for source in spec.sources for part in spec.format)
        dtype = ", ".join(part.dtype for part in spec.format)
        cells = [f"`{name}`", str(count), axes, dtype, spec.group or "every rank", ", ".join(shared), stored]
        yield row(cells[: len(titles)])


def page() -> str:
    """The text of docs/sharding.md."""
    made = blueprint(ServeConfig(model=str(GEOMETRY), load_format="dummy", device="cpu", dtype="bfloat16"))
    lines = [HEAD, "## Weights", "", *cuts(made.specs, sources=True), ""]
    lines += ["## KV cache, a page", "", *cuts(made.caches.page, sources=False), ""]
    lines += ["## State, a row", "", *cuts(made.caches.row, sources=False)]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Write the page, or with --check only compare it: 1 if it is out of date."""
    text = page()
    if arguments == ["--check"]:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
