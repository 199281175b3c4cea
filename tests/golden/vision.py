"""The oracle with a vision tower: random whole models of transformers in fp32, and what they make of pictures.

Legend: T tokens, V vocabulary, X tokens of pictures, O hidden of the text model.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeConfig

from tests.golden import hf

IMAGE_TOKEN, VIDEO_TOKEN = 129, 130
CHANNELS, PATCH, FRAMES, MERGE = 3, 4, 2, 2


@dataclass(frozen=True)
class TowerSizes:
    """Sixteen heads and 4304 columns, at a sixteenth of their sizes, and other sizes that fit nothing."""

    depth: int = 2
    heads: int = 16
    head_dim: int = 4
    intermediate_size: int = 269
    grid_side: int = 5


@dataclass(frozen=True)
class Pixels:
    """A still picture (grid[0] is 1) or a video, as the checkpoint's processors give it but in bytes."""

    grid: tuple[int, int, int]  # frames / 2, height and width in patches
    bytes_TX: torch.Tensor  # uint8 [T, C * F * P * P]

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2] // MERGE**2


def pixels(grid: tuple[int, int, int], seed: int = 0, *, still: bool | None = None) -> Pixels:
    """Random bytes. still: both frames of a patch are the same; by default those of a grid of one frame."""
    t, h, w = grid
    generator = torch.Generator().manual_seed(seed)
    shape = (t * h * w, CHANNELS, FRAMES, PATCH, PATCH)
    values = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    if t == 1 if still is None else still:
        values = values[:, :, :1].expand(shape)
    return Pixels(grid, values.flatten(1).contiguous())


def build(name: str, tower: TowerSizes = TowerSizes(), seed: int = 0) -> Any:
    """A random ...ForConditionalGeneration whose text model has the geometry `name`."""
    geometry = hf.GEOMETRIES[name]
    vision = {
        "depth": tower.depth, "hidden_size": tower.heads * tower.head_dim, "num_heads": tower.heads,
        "intermediate_size": tower.intermediate_size, "patch_size": PATCH, "temporal_patch_size": FRAMES,
        "spatial_merge_size": MERGE, "out_hidden_size": geometry.hidden_size,
        "num_position_embeddings": tower.grid_side**2,
    }  # fmt: skip
    config = (Qwen3_5MoeConfig if geometry.moe else Qwen3_5Config)(
        text_config=hf.text_config(geometry).to_dict(), vision_config=vision, image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN, vision_start_token_id=127, vision_end_token_id=128,
        tie_word_embeddings=geometry.tied,
    )  # fmt: skip
    kind: Any = Qwen3_5MoeForConditionalGeneration if geometry.moe else Qwen3_5ForConditionalGeneration
    model = kind(config).float().eval()
    hf.randomise(model, seed)
    with torch.no_grad():
        for key, p in model.model.visual.named_parameters():
            if "norm" in key and key.endswith("weight"):
                p.add_(1)
            elif p.ndim > 1:
                p.mul_(0.7)
    return model


def save(model: Any, folder: Path, prefixes: tuple[str, str] = ("model.language_model.", "model.visual.")) -> None:
    """Write `model` as a checkpoint whose text model and tower are under `prefixes`."""
    tensors = {
        name.replace("model.language_model.", prefixes[0]).replace("model.visual.", prefixes[1]): tensor
        for name, tensor in model.state_dict().items()
        if not (name == "lm_head.weight" and model.config.tie_word_embeddings)
    }
    hf._write_files({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder, 1)
    config = model.config.to_dict()
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config))


def scaled(pictures: Sequence[Pixels]) -> torch.Tensor:
    """What the processor makes of the bytes."""
    return (torch.cat([picture.bytes_TX for picture in pictures]).float() / 255 - 0.5) / 0.5


def features(model: Any, pictures: Sequence[Pixels]) -> torch.Tensor:
    """transformers' features of all pictures, [X, O]."""
    with torch.inference_mode():
        grids = torch.tensor([picture.grid for picture in pictures])
        return model.model.visual(scaled(pictures), grid_thw=grids).pooler_output


@dataclass(frozen=True)
class Prompt:
    """Token ids with placeholders; stills stand for image tokens, videos for video tokens, in order."""

    ids: list[int]
    stills: list[Pixels]
    videos: list[Pixels]

    def inputs(self) -> dict[str, Any]:
        """What transformers' models take."""
        ids = torch.tensor([self.ids])
        kinds = (ids == IMAGE_TOKEN).long() + 2 * (ids == VIDEO_TOKEN).long()
        given: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": kinds}
        for key, grid, found in (
            ("pixel_values", "image_grid_thw", self.stills),
            ("pixel_values_videos", "video_grid_thw", self.videos),
        ):
            if found:
                given |= {key: scaled(found), grid: torch.tensor([picture.grid for picture in found])}
        return given


def logits(model: Any, prompt: Prompt) -> torch.Tensor:
    """fp32 logits [T, V] of one prefill."""
    with torch.inference_mode():
        model.model.rope_deltas = None
        return model(**prompt.inputs(), use_cache=False).logits[0].float()


def positions(model: Any, prompt: Prompt) -> tuple[torch.Tensor, int]:
    """transformers' positions [3, T] and what is added behind the prompt."""
    given = {key: value for key, value in prompt.inputs().items() if not key.startswith("pixel")}
    found, shift = model.model.get_rope_index(**given)
    return found[:, 0], int(shift[0, 0])


def prompt(parts: Sequence[int | Pixels], seed: int = 0) -> Prompt:
    """Numbers are so many tokens of random text. The frames of a video are parted by two tokens, as timestamps do."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    stills: list[Pixels] = []
    videos: list[Pixels] = []
    for part in parts:
        if isinstance(part, int):
            ids += torch.randint(0, 127, (part,), generator=generator).tolist()
        elif part.grid[0] == 1:
            stills.append(part)
            ids += [IMAGE_TOKEN] * part.tokens
        else:
            videos.append(part)
            for _ in range(part.grid[0]):
                ids += [5, 6, *[VIDEO_TOKEN] * (part.tokens // part.grid[0])]
    return Prompt(ids, stills, videos)
