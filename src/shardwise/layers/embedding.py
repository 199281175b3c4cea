"""The vocabulary, cut by rows: token embeddings going in, logits coming out.

Legend: T tokens, L rows with logits, H hidden, V vocabulary, S rows of last tokens.
"""

from collections.abc import Mapping

import torch

from shardwise.checkpoint.names import PLAIN_FLOATS
from shardwise.checkpoint.weight import Weight
from shardwise.config import ConfigError
from shardwise.kernels.begin.reference import Handover
from shardwise.kernels.rope import RopeTable
from shardwise.kernels.shortlist.reference import Shortlist, make_shortlist, shortlist_bytes
from shardwise.layers.linear import FormatOf, Linear, Specs
from shardwise.parallel.context import RankContext
from shardwise.shard import ParamSpec, Partitions, Segment, local_shape

EMBED, HEAD = "embed", "head"
LISTED_ROWS = 16  # up to so many rows of logits, bounds from a copy in 8 bits take fewer reads than the head itself


def declare_vocabulary(vocab: int, hidden: int, embed: str, head: str | None, format_of: FormatOf) -> Specs:
    """`head` is the name of the output projection, None if the embedding serves for it (tied).

    Raises ConfigError for a quantised embedding.
    """
    axes, rows = ((Segment("vocab", vocab),), hidden), format_of(embed)
    if rows[0].dtype not in PLAIN_FLOATS:
        raise ConfigError(f"{embed} is {rows[0].dtype}, expected a plain float: quantised embeddings are not served")
    specs = {EMBED: ParamSpec(axes, rows, (embed,), "vocab")}
    if head:
        specs[HEAD] = ParamSpec(axes, format_of(head), (head,), "vocab")
    return specs


class Embedding:
    """Rows of this rank's part of the vocabulary, zeros for other tokens: a partial sum over ranks, in fp32. In the
    same launch, what else a step begins with."""

    def __init__(self, weights: Mapping[str, Weight], rope: RopeTable, ctx: RankContext) -> None:
        self.weight, self.rope = weights[EMBED], rope
        segment = self.weight.spec.segments(0)[0]
        self.first_row = segment.span(ctx.partitions["vocab"], ctx.rank)[0]
        self.ops = ctx.ops

    def __call__(
        self,
        tokens_T: torch.Tensor,
        positions_3T: torch.Tensor,
        last_S: torch.Tensor | None = None,
        handover: Handover | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """The partial sum, zeros for the residual, cosines and sines; as of kernels/begin."""
        weight_VH, first_row = self.weight.plain, self.first_row
        return self.ops.begin(tokens_T, positions_3T, weight_VH, first_row, self.rope, last_S, handover)


def listed_bytes(specs: Mapping[str, ParamSpec], partitions: Partitions, rank: int) -> int:
    """What the shortlist of a rank's part of the head takes; 0: a head of these formats has none."""
    spec = specs.get(HEAD, specs[EMBED])
    return shortlist_bytes(*local_shape(spec, partitions, rank)) if spec.format[0].dtype in PLAIN_FLOATS else 0


class Head:
    """Logits of the whole vocabulary, fp32, on every rank.

    With a shortlist, logits of a few rows of which only the likeliest matter are computed for ids that can be among
    these, and the others' are minus infinity.
    """

    def __init__(self, weights: Mapping[str, Weight], ctx: RankContext) -> None:
        name = HEAD if HEAD in weights else EMBED
        self.linear = Linear(weights, name, ctx, torch.float32)
        spec = weights[name].spec
        self.widths = [local_shape(spec, ctx.partitions, rank)[0] for rank in range(ctx.world)]
        self.comm, self.ops = ctx.comm, ctx.ops
        self.shortlist: Shortlist | None = None

    def make_shortlist(self) -> bool:
        """Keep a copy in 8 bits beside a plain weight; on every rank, or on none. Whether it makes short lists."""
        self.shortlist = make_shortlist(self.linear.parts[0].plain)
        return self.shortlist.sharp

    def __call__(self, x_LH: torch.Tensor, keep: int = 0) -> torch.Tensor:
        """keep: how many of each row's likeliest matter; 0: all."""
        if keep and self.shortlist is not None and 0 < len(x_LH) <= LISTED_ROWS:
            own_LV = self.ops.shortlist_logits(x_LH, self.linear.parts[0].plain, self.shortlist, keep)
        else:
            own_LV = self.linear(x_LH)
        return self.comm.all_gather(own_LV, self.widths)
