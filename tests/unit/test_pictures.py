"""Positions of prompts with pictures, the spans of chunks, and what the ranks are told to encode and to forget."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.checkpoint.names import Names
from shardwise.config import ConfigError, ServeConfig, load_model_config, load_vision_config, parse_vision_config
from shardwise.engine.messages import Picture
from shardwise.engine.pictures import PictureCache, Pictures
from shardwise.engine.plan import Chunk
from shardwise.engine.positions import Place, Positions
from shardwise.engine.vision import AUTO, choose
from shardwise.models.vision import assign, declare
from shardwise.parallel.balance import overload, partitions
from shardwise.shard import Partition, local_shape
from tests.golden import eval as evaluation
from tests.golden import vision as oracle

GEOMETRY = Path(__file__).parents[2] / "benchmarks" / "geometry" / "qwen3.6-35b-a3b"

RAW = {
    "vision_config": {
        "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": 4, "out_hidden_size": 8,
        "num_position_embeddings": 16,
    },
    "text_config": {"hidden_size": 8}, "image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 3,
    "vision_end_token_id": 4,
}  # fmt: skip
CONFIG = parse_vision_config(RAW)


def picture(at: int, height: int = 4, width: int = 4, digest: bytes = b"a") -> Picture:
    return Picture("r", at, height, width, digest, bytes(height * width * 48))


@pytest.fixture(scope="module")
def model() -> object:
    return oracle.build("dense_tied", oracle.TowerSizes(depth=1, heads=2, head_dim=4, intermediate_size=8))


@pytest.mark.parametrize("seed", range(12))
def test_positions_equal_those_of_transformers(seed: int, model: object) -> None:
    """Random mixtures of text, pictures and videos, and any chunk of them."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    parts: list[int | oracle.Pixels] = [number(0, 4)]
    for _ in range(number(1, 5)):
        parts.append(oracle.pixels((number(1, 4), 2 * number(1, 5), 2 * number(1, 5)), seed))
        parts.append(number(1, 6))
    prompt = oracle.prompt(parts, seed)
    expected, shift = oracle.positions(model, prompt)
    places, at = [], 0
    sizes = {1: iter(prompt.stills), 2: (p for video in prompt.videos for p in [video] * video.grid[0])}
    kinds = prompt.inputs()["mm_token_type_ids"][0].tolist()
    while at < len(kinds):
        if kinds[at]:
            _, h, w = next(sizes[kinds[at]]).grid
            places.append(Place(at, h // 2, w // 2))
            at = places[-1].end
        else:
            at += 1
    found, length = Positions(places), len(prompt.ids)
    assert found.shift == shift
    np.testing.assert_array_equal(found.of(0, length), expected.numpy())
    for start in range(0, length, 3):
        for stop in range(start + 1, length, 5):
            np.testing.assert_array_equal(found.of(start, stop), expected[:, start:stop].numpy())
    np.testing.assert_array_equal(found.of(length, length + 3), np.arange(length, length + 3) + np.full((3, 1), shift))


def test_chunks_get_the_tokens_of_their_part() -> None:
    pictures = Pictures([picture(2), picture(9, 2, 6, b"b")], 14, CONFIG)
    assert pictures.positions.end == 12
    found = [(s.digest, s.at, s.first, s.count) for start in range(0, 14, 5) for s in pictures.spans(start, start + 5)]
    assert found == [(b"a", 2, 0, 3), (b"a", 0, 3, 1), (b"b", 4, 0, 1), (b"b", 0, 1, 2)]
    assert pictures.axes(10, 14)
    assert (pictures.axes(12, 14), pictures.shift(12), pictures.shift(11)) == (b"", -2, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        [picture(0, 3, 4)],
        [picture(12)],
        [picture(2), picture(5)],
        [picture(6), picture(1)],
        [Picture("r", 0, 2, 2, b"a", bytes(5))],
    ],
)
def test_pictures_that_cannot_stand_there_are_refused(wrong: list[Picture]) -> None:
    with pytest.raises(ValueError, match="picture"):
        Pictures(wrong, 14, CONFIG)


def test_a_picture_is_encoded_once_and_forgotten_when_others_need_the_room() -> None:
    cache = PictureCache(CONFIG, capacity_tokens=8)  # two pictures

    def step(*digests: bytes) -> tuple[list[bytes], list[bytes]]:
        work = []
        for digest in digests:
            held = Pictures([picture(1, digest=digest)], 6, CONFIG)
            work.append((held, Chunk(1, 0, 6, spans=held.spans(0, 6))))
        encode, forget = cache.step(work)
        return [one.digest for one in encode], forget

    assert step(b"a", b"a") == ([b"a"], [])
    assert step(b"b") == ([b"b"], [])
    assert step(b"a") == ([], [])
    assert step(b"c") == ([b"c"], [b"b"])
    assert step(b"d", b"e", b"f") == ([b"d", b"e", b"f"], [b"a", b"c"])  # more than fits, as the step needs them all
    assert cache.tokens == 12
    assert step(b"d") == ([], [b"e"])
    assert (cache.counts.encoded, cache.counts.reused) == (6, 3)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("uneven", [False, True])
def test_the_real_tower_is_cut_whole(ranks: int, uneven: bool) -> None:
    """16 heads and 4304 columns: every element of every cut weight is on one rank, and shares follow the ratio."""
    config = load_vision_config(GEOMETRY)
    assert config is not None
    weights = tuple(float(5 - rank % 3) for rank in range(ranks)) if uneven else (1.0,) * ranks
    specs = declare(config, "model.visual", "BF16", whole=False)
    cut = partitions(specs, ranks, weights)
    assert {spec.group for spec in specs.values()} == {None, "vision", "vision_mlp"}
    assert cut["vision"].units == 16
    assert overload(cut["vision_mlp"], weights) < 1.15
    for spec in specs.values():
        shapes = [local_shape(spec, cut, rank) for rank in range(ranks)]
        full = local_shape(spec, {group: Partition((0, each.units)) for group, each in cut.items()}, 0)
        if spec.group:
            assert sum(shape[spec.cut] for shape in shapes) == full[spec.cut]
        else:
            assert set(shapes) == {full}
    assert not {spec.group for spec in declare(config, "model.visual", "BF16", whole=True).values()} - {None}


def test_there_is_a_tower_only_where_it_can_be(tmp_path: Path) -> None:
    names = Names.published(tied=False)
    model = load_model_config(evaluation.miniature())
    folder = str(evaluation.miniature())

    def chosen(folder: str = folder, names: Names = names, **options: Any) -> Any:
        return choose(ServeConfig(model=folder, **options), model, names)

    assert chosen().whole is (AUTO == "replicate")
    assert chosen(vision="replicate").whole
    assert chosen(vision="off") is None
    (tmp_path / "config.json").write_bytes((GEOMETRY / "config.json").read_bytes())
    assert chosen(str(tmp_path)) is None  # no processor
    assert chosen(str(tmp_path), vision="shard").config.intermediate_size == 4304
    assert chosen(str(GEOMETRY)).config.intermediate_size == 4304
    bare = Names.of(["model.layers.0.x", "lm_head.weight"])
    assert chosen(names=bare) is None
    with pytest.raises(ConfigError, match="no vision tower"):
        chosen(names=bare, vision="shard")


def test_pictures_are_dealt_evenly() -> None:
    assert assign([5, 9, 4, 4], 2) == [[1, 3], [0, 2]]
    assert assign([], 3) == [[], [], []]
    assert sorted(i for share in assign(list(range(20)), 3) for i in share) == list(range(20))
    assert [len(share) for share in assign([1] * 20, 3)] == [7, 7, 6]
