"""Linear layers: cut by output columns (the result stays cut) or by input rows (the result is a partial sum).

Legend: T tokens, I inputs, O outputs.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from shardwise.checkpoint.weight import Weight
from shardwise.parallel.context import RankContext
from shardwise.shard import ParamSpec, Segment, Stored

FormatOf = Callable[[str], tuple[Stored, ...]]  # of a module, by its name in the checkpoint
Specs = dict[str, ParamSpec]


def plain(shape: tuple[int, ...], source: str, format: tuple[Stored, ...]) -> ParamSpec:
    """A weight that every rank holds whole."""
    return ParamSpec(shape, format, (source,))


def declare_columns(
    name: str, segments: Sequence[Segment], inputs: int, sources: Sequence[str], format_of: FormatOf, group: str | None
) -> Specs:
    """[O, I] cut on O. Sources of one format become one weight, so that one kernel reads them; others stay apart."""
    formats = [format_of(source) for source in sources]
    if len(sources) == 1 or len(set(formats)) == 1:
        return {name: ParamSpec((tuple(segments), inputs), formats[0], tuple(sources), group)}
    return {
        f"{name}.{n}": ParamSpec(((segment,), inputs), formats[n], (sources[n],), group)
        for n, segment in enumerate(segments)
    }


def declare_rows(name: str, outputs: int, segment: Segment, source: str, format_of: FormatOf, group: str) -> Specs:
    """[O, I] cut on I."""
    return {name: ParamSpec((outputs, (segment,)), format_of(source), (source,), group, cut=1)}


class Linear:
    """y_TO = x_TI @ weight.T, of what this rank holds: its columns, or its part of the sum over rows."""

    def __init__(
        self, weights: Mapping[str, Weight], name: str, ctx: RankContext, out_dtype: torch.dtype | None = None
    ) -> None:
        one = weights.get(name)
        apart = sorted(int(key.removeprefix(f"{name}.")) for key in weights if key.startswith(f"{name}."))
        self.parts = [one] if one else [weights[f"{name}.{n}"] for n in apart]
        if not self.parts:
            raise KeyError(name)
        self.ops, self.out_dtype = ctx.ops, out_dtype

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        outputs = [self.ops.linear(x_TI, part, self.out_dtype) for part in self.parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
