"""Linear layers: cut by output columns (the result stays cut) or by input rows (the result is a partial sum).

Legend: T tokens, H hidden, I inputs, O outputs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise.checkpoint.weight import Weight
from shardwise.kernels.linears import Conv
from shardwise.parallel.comm import Partial
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
        return self.join(self.ops.linears(x_TI, self.parts, [self.out_dtype] * len(self.parts)))

    def summands(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Parts [S, T, O] of y_TO in fp32, which the norm behind a layer adds; of a weight that is one."""
        return self.ops.linear_parts(x_TI, self.parts[0])

    def join(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """y_TO from the outputs of `parts`."""
        return outputs[0] if len(outputs) == 1 else torch.cat(list(outputs), -1)


@dataclass(frozen=True)
class Norm:
    """The norm in front of a layer, with the sum before it: what is added to the residual, and the residual."""

    weight_H: torch.Tensor
    eps: float

    def then(
        self,
        added_TH: torch.Tensor | Partial | None,
        residual_TH: torch.Tensor,
        linears: Sequence[Linear],
        conv: Conv | None = None,
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Each linear's output for norm(residual + added), the first one's through `conv`; and the new residual."""
        ops = linears[0].ops
        parts = [part for one in linears for part in one.parts]
        dtypes = [one.out_dtype for one in linears for _ in one.parts]
        joined = conv if len(linears[0].parts) == 1 else None
        if isinstance(added_TH, Partial):
            x_TH, residual_TH = added_TH.normed(residual_TH, self.weight_H, self.eps)
            found = ops.linears(x_TH, parts, dtypes, joined)
        else:
            found, residual_TH = ops.norm_linears(added_TH, residual_TH, self.weight_H, self.eps, parts, dtypes, joined)
        outputs, at = list[torch.Tensor](), 0
        for one in linears:
            outputs.append(one.join(found[at : at + len(one.parts)]))
            at += len(one.parts)
        if conv is not None and joined is None:
            outputs[0] = ops.causal_conv(outputs[0], conv.weight_CW, conv.state_RCW1, conv.seqs)
        return outputs, residual_TH
