"""The vision tower of the family: which weights there are, and how pictures become tokens of the text model.

Cut, all ranks work on every picture and sum after each layer. Whole, each rank encodes some of the pictures alone and
all are gathered at the end. A video is a row of pictures here: no patch sees another frame.

Legend: T patches, H hidden, R half of the head dim, C channels, F frames of a patch, P pixels of a patch's side,
S side of the learned grid, X tokens, O hidden of the text model.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from shardwise.checkpoint.weight import Weight
from shardwise.config import VisionConfig
from shardwise.layers import vision
from shardwise.layers.linear import Specs, plain
from shardwise.layers.vision import Attention, LayerNorm, Merger, Mlp, Run
from shardwise.parallel.context import RankContext
from shardwise.shard import Stored

BATCH_PATCHES = 16384  # encoded at once; a larger picture is alone in its batch


class Picture(NamedTuple):
    """height x width patches, in the processor's order: merge x merge blocks row by row, rows within a block.

    pixels: uint8 [T, C * F * P * P], or [T, C * P * P] if all frames are the same, as in a still picture.
    """

    height: int
    width: int
    pixels: torch.Tensor


def declare(config: VisionConfig, source: str, dtype: str, whole: bool) -> Specs:
    """Every weight of the tower, by local name; `source` is its name in the checkpoint. whole: nothing is cut."""
    heads, columns = (None, None) if whole else (vision.GROUP, vision.MLP_GROUP)
    weight, bias = (Stored(".weight", dtype),), (Stored(".bias", dtype),)
    kernel = config.hidden_size, config.channels, config.frames, config.patch_size, config.patch_size
    specs: Specs = {
        "visual.patch": plain(kernel, f"{source}.patch_embed.proj", weight),
        "visual.patch_bias": plain((config.hidden_size,), f"{source}.patch_embed.proj", bias),
        "visual.position": plain((config.grid_side**2, config.hidden_size), f"{source}.pos_embed", weight),
    }
    for i in range(config.depth):
        name, block = f"visual.blocks.{i}", f"{source}.blocks.{i}"
        specs |= vision.declare_norm(f"{name}.attention_norm", config.hidden_size, f"{block}.norm1", dtype)
        specs |= vision.declare_attention(config, f"{name}.attention", f"{block}.attn", dtype, heads)
        specs |= vision.declare_norm(f"{name}.mlp_norm", config.hidden_size, f"{block}.norm2", dtype)
        specs |= vision.declare_mlp(config, f"{name}.mlp", f"{block}.mlp", dtype, columns)
    return specs | vision.declare_merger(config, "visual.merger", f"{source}.merger", dtype, heads)


class Tower:
    """A rank's part of the tower."""

    def __init__(self, config: VisionConfig, weights: Mapping[str, Weight], ctx: RankContext, whole: bool) -> None:
        self.config, self.ctx = config, ctx
        self.spread = whole and ctx.world > 1
        self.patch_HI = weights["visual.patch"].plain.flatten(1)
        self.patch_bias_H = weights["visual.patch_bias"].plain
        self.position_SSH = weights["visual.position"].plain.unflatten(0, (config.grid_side, config.grid_side)).float()
        self.blocks = [
            (
                LayerNorm(weights, f"{name}.attention_norm", ctx.dtype),
                Attention(config, weights, f"{name}.attention", ctx, whole),
                LayerNorm(weights, f"{name}.mlp_norm", ctx.dtype),
                Mlp(weights, f"{name}.mlp", ctx, whole),
            )
            for name in (f"visual.blocks.{i}" for i in range(config.depth))
        ]
        self.merger = Merger(config, weights, "visual.merger", ctx, whole)
        mean, std = (torch.tensor(each, device=ctx.device) for each in (config.pixel_mean, config.pixel_std))
        self.mean_C111, self.std_C111 = mean[:, None, None, None], std[:, None, None, None]
        exponents_R = torch.arange(0, config.head_dim // 2, 2, dtype=torch.float32) / (config.head_dim // 2)
        self.inverse_R = (1.0 / config.rope_theta**exponents_R).to(ctx.device)

    def __call__(self, pictures: Sequence[Picture]) -> list[torch.Tensor]:
        """The features of each picture, [tokens, O] in the compute dtype, on every rank.

        Every rank calls it with the same pictures; pixels may be on the host.
        """
        if not self.spread:
            return self._encode(pictures)
        shares = assign([picture.height * picture.width for picture in pictures], self.ctx.world)
        mine = self._encode([pictures[i] for i in shares[self.ctx.rank]])
        counts = [[self.config.tokens(*pictures[i][:2]) for i in share] for share in shares]
        own_XO = torch.cat(mine) if mine else self.patch_HI.new_zeros(0, self.config.out_hidden_size)
        all_XO = self.ctx.comm.all_gather(own_XO.T, [sum(each) for each in counts]).T
        parts = all_XO.split([count for each in counts for count in each])
        found = dict(zip((i for share in shares for i in share), parts, strict=True))
        return [found[i].contiguous() for i in range(len(pictures))]

    def _encode(self, pictures: Sequence[Picture]) -> list[torch.Tensor]:
        """The features of `pictures`, a batch at a time."""
        features: list[torch.Tensor] = []
        for batch in batches(pictures):
            tokens_XO = self._encode_batch(batch)
            features += tokens_XO.split([self.config.tokens(picture.height, picture.width) for picture in batch])
        return features

    def _encode_batch(self, pictures: Sequence[Picture]) -> torch.Tensor:
        x_TH = torch.cat([self._embed(picture) for picture in pictures])
        angles_TR = torch.cat([self._angles(picture.height, picture.width) for picture in pictures])
        cos_TR, sin_TR = angles_TR.cos(), angles_TR.sin()
        runs = list(runs_of(picture.height * picture.width for picture in pictures))
        for attention_norm, attention, mlp_norm, mlp in self.blocks:
            x_TH = x_TH + attention(attention_norm(x_TH), cos_TR, sin_TR, runs)
            x_TH = x_TH + mlp(mlp_norm(x_TH))
        return self.merger(x_TH).to(self.ctx.dtype)

    def _embed(self, picture: Picture) -> torch.Tensor:
        """Patches and their positions, [T, H] in fp32."""
        size = self.config.patch_size
        pixels_TX = picture.pixels
        if self.ctx.device.type != "cpu" and pixels_TX.device.type == "cpu":
            pixels_TX = pixels_TX.pin_memory()
        pixels_TX = pixels_TX.to(self.ctx.device, non_blocking=True)
        pixels_TCFPP = pixels_TX.unflatten(-1, (self.config.channels, -1, size, size)).float()
        scaled_TCFPP = (pixels_TCFPP / 255 - self.mean_C111) / self.std_C111
        scaled_TCFPP = scaled_TCFPP.expand(-1, -1, self.config.frames, -1, -1)
        patches_TI = scaled_TCFPP.flatten(1).to(self.ctx.dtype)
        x_TH = functional.linear(patches_TI, self.patch_HI, self.patch_bias_H).float()
        return x_TH + self._positions(picture.height, picture.width)

    def _positions(self, height: int, width: int) -> torch.Tensor:
        """The learned square grid stretched to height x width, corner on corner, linear in between; [T, H] in fp32."""
        rows_HS, columns_WS = (self._stretch(size) for size in (height, width))
        grid_HWH = torch.einsum("as,std->atd", rows_HS, self.position_SSH)
        return blocked(torch.einsum("bt,atd->abd", columns_WS, grid_HWH), self.config.merge)

    def _stretch(self, size: int) -> torch.Tensor:
        """[size, S]: the share of each place of the learned grid in each of `size` places."""
        side, device = self.config.grid_side, self.ctx.device
        at = torch.arange(size, dtype=torch.float32, device=device) * (side - 1) / max(size - 1, 1)
        return (1 - (at[:, None] - torch.arange(side, device=device)).abs()).clamp(min=0)

    def _angles(self, height: int, width: int) -> torch.Tensor:
        """[T, R]: the first half turns by the row of a patch, the second by its column."""
        rows, columns = (torch.arange(size, device=self.ctx.device).float() for size in (height, width))
        rows_HWR = (rows[:, None] * self.inverse_R)[:, None].expand(-1, width, -1)
        columns_HWR = (columns[:, None] * self.inverse_R).expand(height, -1, -1)
        return blocked(torch.cat((rows_HWR, columns_HWR), -1), self.config.merge)


def blocked(x_HWX: torch.Tensor, merge: int) -> torch.Tensor:
    """[height, width, ..] -> [T, ..] in the order of patches: merge x merge blocks one after the other."""
    return x_HWX.unflatten(1, (-1, merge)).unflatten(0, (-1, merge)).transpose(1, 2).flatten(0, 3)


def runs_of(patches: Iterator[int]) -> Iterator[Run]:
    """Neighbours of one size in one run, so that they are attended to in one call."""
    last: Run | None = None
    for count in patches:
        if last and last.patches == count:
            last = Run(last.frames + 1, count)
        else:
            if last:
                yield last
            last = Run(1, count)
    if last:
        yield last


def batches(pictures: Sequence[Picture]) -> Iterator[list[Picture]]:
    """Consecutive pictures of at most BATCH_PATCHES patches together, or one."""
    batch: list[Picture] = []
    patches = 0
    for picture in pictures:
        count = picture.height * picture.width
        if batch and patches + count > BATCH_PATCHES:
            yield batch
            batch, patches = [], 0
        batch.append(picture)
        patches += count
    if batch:
        yield batch


def assign(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Which of the pictures each rank encodes: the costliest first, each to the rank with the least so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank = loads.index(min(loads))
        shares[rank].append(i)
        loads[rank] += costs[i]
    return shares
