"""The vocabulary, cut by rows: token embeddings going in, logits coming out.

Legend: T tokens, L rows with logits, H hidden, V vocabulary.
"""

from collections.abc import Mapping

import torch

from shardwise.checkpoint.names import PLAIN_FLOATS
from shardwise.checkpoint.weight import Weight
from shardwise.config import ConfigError
from shardwise.layers.linear import FormatOf, Linear, Specs
from shardwise.parallel.context import RankContext
from shardwise.shard import ParamSpec, Segment, local_shape

EMBED, HEAD = "embed", "head"


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
    """Rows of this rank's part of the vocabulary, zeros for other tokens: a partial sum over ranks, in fp32."""

    def __init__(self, weights: Mapping[str, Weight], ctx: RankContext) -> None:
        self.weight = weights[EMBED]
        segment = self.weight.spec.segments(0)[0]
        self.first_row = segment.span(ctx.partitions["vocab"], ctx.rank)[0]
        self.ops = ctx.ops

    def __call__(self, tokens_T: torch.Tensor, last_R: torch.Tensor | None = None) -> torch.Tensor:
        return self.ops.embed(tokens_T, self.weight.plain, self.first_row, last_R, torch.float32)


class Head:
    """Logits of the whole vocabulary, fp32, on every rank."""

    def __init__(self, weights: Mapping[str, Weight], ctx: RankContext) -> None:
        name = HEAD if HEAD in weights else EMBED
        self.linear = Linear(weights, name, ctx, torch.float32)
        spec = weights[name].spec
        self.widths = [local_shape(spec, ctx.partitions, rank)[0] for rank in range(ctx.world)]
        self.comm = ctx.comm

    def __call__(self, x_LH: torch.Tensor) -> torch.Tensor:
        return self.comm.all_gather(self.linear(x_LH), self.widths)
