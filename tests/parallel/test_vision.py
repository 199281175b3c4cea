"""The vision tower and the whole model with pictures equal transformers in fp32, at every split."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden import vision as oracle
from tests.golden.vision import Pixels, Prompt
from tests.parallel import vision_ranks
from tests.parallel.test_logits import SPLITS, name
from tests.parallel.vision_ranks import Sent
from tests.ranks import Ranks

TOLERANCE = 2e-4
GRIDS = ((1, 4, 6), (1, 2, 2), (1, 8, 2), (1, 2, 10), (3, 4, 4))


def frames(picture: Pixels) -> list[tuple[int, int, torch.Tensor]]:
    """One picture of ours for each frame pair."""
    t, h, w = picture.grid
    parts = picture.bytes_TX.view(t, h * w, -1)
    if t == 1:  # as a still picture is sent: its frames are the same
        parts = parts.view(1, h * w, oracle.CHANNELS, oracle.FRAMES, -1)[:, :, :, 0].flatten(2)
    return [(h, w, part) for part in parts]


def sent(prompt: Prompt) -> list[Sent]:
    """The pictures of `prompt` as requests carry them."""
    queues = {
        oracle.IMAGE_TOKEN: [frame for picture in prompt.stills for frame in frames(picture)],
        oracle.VIDEO_TOKEN: [frame for picture in prompt.videos for frame in frames(picture)],
    }
    found, at = list[Sent](), 0
    while at < len(prompt.ids):
        if queue := queues.get(prompt.ids[at]):
            h, w, pixels = queue.pop(0)
            data = pixels.numpy().tobytes()
            found.append((at, h, w, hashlib.blake2b(data + bytes((h, w))).digest()[:16], data))
            at += h * w // oracle.MERGE**2
        else:
            at += 1
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    made = {}
    places = {
        "moe": ("model.language_model.", "model.visual."),
        "dense_tied": ("language_model.model.", "visual."),
    }
    for geometry, prefixes in places.items():
        folder = tmp_path_factory.mktemp(geometry)
        model = oracle.build(geometry)
        oracle.save(model, folder, prefixes)
        made[geometry] = model, folder
    return made


def options(folder: Path, ratio: tuple[float, ...], vision: str) -> dict[str, Any]:
    return {
        "model": str(folder), "ratio": ratio, "kv_tokens": 256, "max_num_seqs": 6, "max_model_len": 128,
        "page_tokens": 16, "vision": vision,
    }  # fmt: skip


@pytest.mark.parametrize("vision", ["shard", "replicate"])
@pytest.mark.parametrize("split", SPLITS, ids=name)
def test_features_equal_those_of_transformers(
    split: tuple[int, tuple[float, ...]], vision: str, models: dict[str, tuple[Any, Path]], ranks: Ranks
) -> None:
    model, folder = models["moe"]
    pictures = [oracle.pixels(grid, seed) for seed, grid in enumerate(GRIDS)]
    expected = oracle.features(model, pictures)
    assert expected.std() > 0.3
    serve = options(folder, split[1], vision)
    given = [frame for picture in pictures for frame in frames(picture)]
    for count in (len(given), 1):
        outputs = ranks.run(split[0], vision_ranks.features, serve=serve, pictures=given[:count])
        found = torch.cat(outputs[0])
        torch.testing.assert_close(found, expected[: len(found)], atol=TOLERANCE, rtol=0)
        for other in outputs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(outputs[0], other, strict=True)), "ranks differ"


PROMPTS = {
    "one": [7, oracle.pixels((1, 4, 6), 1), 5],
    "nothing around": [oracle.pixels((1, 4, 4), 2)],
    "several": [
        3, oracle.pixels((1, 2, 8), 3), 4, oracle.pixels((1, 6, 2), 4), 1, oracle.pixels((1, 2, 2), 5), 9,
        oracle.pixels((1, 2, 8), 3), 2,
    ],
    "video": [6, oracle.pixels((3, 4, 6), 6), 5],
    "both": [oracle.pixels((2, 2, 4), 7), 3, oracle.pixels((1, 4, 2), 8), 1, oracle.pixels((2, 4, 4), 9), 8],
}  # fmt: skip


@pytest.mark.parametrize("split", SPLITS, ids=name)
@pytest.mark.parametrize("geometry", ["moe", "dense_tied"])
def test_logits_with_pictures_equal_those_of_transformers(
    geometry: str, split: tuple[int, tuple[float, ...]], models: dict[str, tuple[Any, Path]], ranks: Ranks
) -> None:
    """Whole prefill and chunks of several sizes, which cut pictures; the cache is too small for two pictures."""
    model, folder = models[geometry]
    for seed, parts in enumerate(PROMPTS.values()):
        prompt = oracle.prompt(parts, seed)
        expected = oracle.logits(model, prompt)
        outputs = ranks.run(
            split[0],
            vision_ranks.logits,
            serve=options(folder, split[1], "shard" if seed % 2 else "replicate"),
            ids=prompt.ids,
            sent=sent(prompt),
            chunk_tokens=(len(prompt.ids), 1, 5) if split[0] == 1 else (len(prompt.ids), 5),
        )
        for found in outputs[0]:
            torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
        for other in outputs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(outputs[0], other, strict=True)), "ranks differ"
