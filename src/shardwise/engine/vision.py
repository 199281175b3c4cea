"""The vision tower's part in building a rank: whether there is one, its weights, and the memory that pictures take."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from shardwise.checkpoint.names import Names
from shardwise.checkpoint.weight import Weight
from shardwise.config import ConfigError, ModelConfig, ServeConfig, VisionConfig, load_vision_config
from shardwise.engine.features import Features
from shardwise.layers.linear import Specs
from shardwise.models.vision import BATCH_PATCHES, Picture, Tower, declare
from shardwise.parallel.context import RankContext

# What --vision auto means for several ranks. On two H200s (benchmarks/vision_bench.py) a whole tower on each encodes
# 1.2 to 1.8 times the pictures a second, and a cut one is 1.6 times faster for one large picture at a time. The cut one
# leaves more memory, 422 MiB a rank at two ranks, which is what cards are short of.
AUTO: Literal["shard", "replicate"] = "shard"


@dataclass(frozen=True)
class Vision:
    """The tower of a server. source: its name in the checkpoint. whole: each rank holds all of it."""

    config: VisionConfig
    source: str
    whole: bool

    def declare(self, dtype: str) -> Specs:
        return declare(self.config, self.source, dtype, self.whole)

    def features(self, weights: Mapping[str, Weight], ctx: RankContext) -> Features:
        """This rank's tower."""
        return Features(Tower(self.config, weights, ctx, self.whole))

    def cache_bytes(self, serve: ServeConfig, ctx: RankContext) -> int:
        """What the kept features may take on each rank."""
        return serve.vision_cache_tokens * self.config.out_hidden_size * ctx.dtype.itemsize


def choose(serve: ServeConfig, model: ModelConfig, names: Names) -> Vision | None:
    """The tower that --vision asks for; None: text only. Raises ConfigError if it cannot be.

    auto: if the checkpoint brings both a tower and the processor that pictures need.
    """
    processor = Path(serve.model) / "preprocessor_config.json"
    if serve.vision == "off" or (serve.vision == "auto" and not processor.exists()):
        return None
    config = None if model.text_only else load_vision_config(Path(serve.model))
    if config is None or names.visual is None:
        if serve.vision != "auto":
            raise ConfigError(f"--vision {serve.vision}: {serve.model} has no vision tower; leave the flag out")
        return None
    wanted = AUTO if serve.vision == "auto" else serve.vision
    return Vision(config, names.visual, whole=wanted == "replicate")


def largest_picture(serve: ServeConfig, config: VisionConfig) -> Picture:
    """As many patches as one batch of the tower can have, all black."""
    patches = max(BATCH_PATCHES, serve.max_image_pixels // config.patch_size**2)
    height = config.merge * max(1, int(patches**0.5) // config.merge)
    width = config.merge * -(-patches // (height * config.merge))
    shape = (height * width, config.channels * config.patch_size**2)
    return Picture(height, width, torch.zeros(shape, dtype=torch.uint8))


@torch.inference_mode()
def trial(serve: ServeConfig, features: Features, ctx: RankContext) -> int:
    """Encode the largest picture on all ranks; the bytes that this took on a GPU."""
    config = features.tower.config
    if ctx.device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(ctx.device)
    before = torch.cuda.memory_allocated(ctx.device)
    # One for each rank: where pictures are spread, every rank has to prove that it can.
    found = features.tower([largest_picture(serve, config)] * (ctx.world if features.tower.spread else 1))
    if not all(bool(torch.isfinite(each).all()) for each in found):
        raise RuntimeError(f"rank {ctx.rank}: the vision tower made features that are not finite of a black picture")
    return torch.cuda.max_memory_allocated(ctx.device) - before
