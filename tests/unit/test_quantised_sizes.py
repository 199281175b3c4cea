"""What each rank of 35B-A3B holds in every format and at every split, from headers alone, against plain arithmetic."""

import json
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.recipes import RECIPES
from shardwise.cli import main
from shardwise.commands.plan import weights_by_class
from shardwise.config import ServeConfig
from shardwise.engine.build import Blueprint, blueprint
from shardwise.parallel.balance import partitions
from shardwise.shard import local, local_bytes, local_shape
from tests import checkpoint_sparse

GEOMETRY = Path(__file__).parents[2] / "benchmarks" / "geometry" / "qwen3.6-35b-a3b"
LAYOUTS = ("bf16", *RECIPES)
SPLITS: tuple[tuple[int, tuple[float, ...]], ...] = ((1, ()), (2, ()), (3, ()), (4, ()), (8, ()), (2, (5, 3)))
HIDDEN, EXPERTS, WIDTH, LAYERS = 2048, 256, 512, 40
EXPERT_BYTES = {"bf16": 6 << 20, "fp8": 3_146_112, "nvfp4": 1_769_484, "nvfp4-ct": 1_769_484, "mixed": 1_769_484}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Path, Blueprint]]:
    """Every layout's folder and blueprint at one rank."""
    root = tmp_path_factory.mktemp("sizes")
    found: dict[str, tuple[Path, Blueprint]] = {}
    for layout in LAYOUTS:
        folder = checkpoint_sparse.write(GEOMETRY, None if layout == "bf16" else layout, root / layout)  # pyright: ignore
        found[layout] = folder, blueprint(ServeConfig(model=str(folder), device="cpu", dtype="bfloat16"))
    return found


def widths(one: Blueprint, cut: Mapping[str, Any]) -> list[int]:
    """Columns of every expert that each rank owns."""
    bounds = cut["expert"].bounds
    return [(stop - start) * WIDTH // bounds[-1] for start, stop in pairwise(bounds)]


def expert_scales(layout: str, width: int, start: int) -> int:
    """Bytes of one expert's scales on a rank that owns `width` columns from `start` on, by counting them."""
    if layout == "bf16":
        return 0
    if layout != "fp8":  # a group of 16 along `in`; one global value for gate, up and down
        assert start % 16 == 0
        assert width % 16 == 0
        return 2 * width * HIDDEN // 16 + HIDDEN * width // 16 + 12
    # One value of 2 bytes for each square, 128 wide along hidden, and along the cut axis of the finest grain that
    # meets the rank's edges.
    grain = next(g for g in (128, 64, 32, 16, 8) if start % g == 0 and (start + width) % g == 0 and width % g == 0)
    return 2 * (3 * (width // grain) * (HIDDEN // 128))


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_banks_and_bytes_of_every_rank(
    layout: str, split: tuple[int, tuple[float, ...]], made: Mapping[str, tuple[Path, Blueprint]]
) -> None:
    ranks, ratio = split
    _, one = made[layout]
    cut = partitions({**one.specs, **one.caches.page, **one.caches.row}, ranks, ratio)
    gate_up, down = (one.specs[f"layers.7.mlp.experts.{part}"] for part in ("gate_up", "down"))
    owned = widths(one, cut)
    assert sum(owned) == WIDTH
    start = 0
    for rank, width in enumerate(owned):
        assert local_shape(gate_up, cut, rank) == (EXPERTS, 2 * width, HIDDEN)
        assert local_shape(down, cut, rank) == (EXPERTS, HIDDEN, width)
        bits = {"bf16": 16, "fp8": 8}.get(layout, 4)
        each = 3 * width * HIDDEN * bits // 8 + expert_scales(layout, width, start)
        assert local_bytes(gate_up, cut, rank) + local_bytes(down, cut, rank) == EXPERTS * each
        for spec, rows, columns in ((gate_up, 2 * width, HIDDEN), (down, HIDDEN, width)):
            values = local(spec, cut, rank)[0]
            assert values.shape == (EXPERTS, rows, columns // (2 if values.stored.packed else 1))
        start += width


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plan_tells_the_sizes_of_the_family(layout: str, made: Mapping[str, tuple[Path, Blueprint]]) -> None:
    """At every split the plan of a rank is the sum of its local tensors; at one rank experts have their known sizes."""
    _, one = made[layout]
    for ranks, ratio in SPLITS:
        cut = partitions({**one.specs, **one.caches.page, **one.caches.row}, ranks, ratio)
        for rank in range(ranks):
            held = weights_by_class(one.specs, cut, rank)
            parts = [part for spec in one.specs.values() for part in local(spec, cut, rank)]
            assert sum(held.values()) == sum(prod(part.shape) * part.stored.bits // 8 for part in parts)
        if ranks == 1:
            experts = weights_by_class(one.specs, cut, 0)["experts"]
            assert experts == LAYERS * EXPERTS * EXPERT_BYTES[layout]
            assert experts / 2**30 == pytest.approx({"bf16": 60.0, "fp8": 30.0}.get(layout, 16.88), abs=0.01)
            asks = layout in ("nvfp4", "mixed")  # for an FP8 cache, in hf_quant_config.json or kv_cache_scheme
            assert one.caches.page_bytes(cut, 0) == ServeConfig(model="").page_tokens * (10_240 if asks else 20_480)


def test_the_command_prints_that_plan(
    made: Mapping[str, tuple[Path, Blueprint]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, one = made["fp8"]
    flags = ["--tp", "3", "--device", "cpu", "--dtype", "bfloat16", "--memory", "200GiB", "--json"]
    assert main(["plan", str(folder), *flags]) == 0
    plan = json.loads(capsys.readouterr().out)
    cut = partitions({**one.specs, **one.caches.page, **one.caches.row}, 3)
    for rank, held in enumerate(plan["each"]):
        assert held["total_weights_bytes"] == sum(local_bytes(spec, cut, rank) for spec in one.specs.values())


def test_a_flag_halves_the_bytes_of_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    def token_bytes(*flags: str) -> float:
        arguments = [
            "plan",
            str(GEOMETRY),
            "--load-format",
            "dummy",
            "--dtype",
            "bfloat16",
            "--device",
            "cpu",
            "--json",
        ]
        assert main([*arguments, "--memory", "200GiB", *flags]) == 0
        return json.loads(capsys.readouterr().out)["each"][0]["kv_token_bytes"]

    assert token_bytes() == token_bytes("--kv-cache-dtype", "bfloat16") == 20_480
    assert token_bytes("--kv-cache-dtype", "fp8") == 10_240
    assert token_bytes("--kv-cache-dtype", "float32") == 40_960


def test_a_config_alone_plans_what_the_files_plan(made: Mapping[str, tuple[Path, Blueprint]]) -> None:
    """The geometries with a quantization_config but no weights hold what checkpoints in such layouts hold."""
    for layout, like in (("fp8", "fp8"), ("nvfp4", "nvfp4")):
        folder = GEOMETRY.with_name(f"{GEOMETRY.name}-{layout}")
        alone = blueprint(
            ServeConfig(model=str(folder), load_format="dummy", device="cpu", dtype="bfloat16", vision="off")
        )
        one = made[like][1]
        cut = partitions({**one.specs, **one.caches.row}, 3)
        for rank in range(3):
            bytes_alone, bytes_files = (
                {name: local_bytes(spec, cut, rank) for name, spec in made.specs.items()} for made in (alone, one)
            )
            assert bytes_alone == bytes_files
        assert alone.specs == one.specs or layout == "nvfp4"
