"""The oracle is worth asking: transformers reloads what we save, rounding is small, and every weight shows."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from shardwise.config import load_model_config
from tests.golden import hf

TOLERANCE = 2e-4  # of the comparisons that use these models


def some_ids(count: int, seed: int = 3) -> list[int]:
    return torch.randint(0, 131, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("layout", hf.RELOADED_BY_HF)
@pytest.mark.parametrize("name", ["moe", "moe_tied", "dense", "dense_tied"])
def test_transformers_reloads_it(name: str, layout: str, tmp_path: Path) -> None:
    chosen = hf.LAYOUTS[layout]
    model = hf.build(name, dtype=chosen.dtype)
    hf.save(model, tmp_path, layout)
    kind: Any = AutoModelForCausalLM if chosen.text_only else AutoModelForImageTextToText
    again, info = kind.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = some_ids(20)
    assert (hf.logits(again.eval(), ids) - hf.logits(model, ids)).abs().max() < TOLERANCE / 4


@pytest.mark.parametrize("layout", hf.LAYOUTS)
@pytest.mark.parametrize("name", hf.GEOMETRIES)
def test_files_hold_what_the_layout_says(name: str, layout: str, tmp_path: Path) -> None:
    chosen = hf.LAYOUTS[layout]
    geometry = hf.GEOMETRIES[name]
    stored = hf.save(hf.build(name), tmp_path, layout)
    found: dict[str, torch.Tensor] = {}
    files = sorted(tmp_path.glob("*.safetensors"))
    for path in files:
        with safe_open(path, "pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert len(files) == chosen.files
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[key], stored[key]) for key in stored)
    assert ("lm_head.weight" in stored) is not geometry.tied
    assert any(key.startswith("mtp.") for key in stored) is chosen.mtp
    assert any(key.startswith("model.visual.") for key in stored) is chosen.vision
    assert f"{chosen.prefix}layers.0.input_layernorm.weight" in stored
    if geometry.moe:
        assert (f"{chosen.prefix}layers.0.mlp.experts.gate_up_proj" in stored) is chosen.stacked_experts
        assert (f"{chosen.prefix}layers.0.mlp.experts.4.up_proj.weight" in stored) is not chosen.stacked_experts
    if chosen.files > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == stored.keys()
    config = load_model_config(tmp_path)
    assert (config.tied, config.text_only) == (geometry.tied, chosen.text_only)
    assert (config.experts, config.conv_width) == (geometry.experts[0] if geometry.moe else 0, geometry.conv_width)
    assert config.mrope_section == geometry.mrope_section


@pytest.mark.parametrize("name", hf.GEOMETRIES)
def test_rounding_is_far_below_the_tolerance(name: str) -> None:
    model, ids = hf.build(name), some_ids(80)
    expected = hf.logits(model, ids)
    assert expected.std() > 1
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 2**-24 * torch.randn(p.shape, generator=generator))
    assert (hf.logits(model, ids) - expected).abs().max() < TOLERANCE / 3


@pytest.mark.parametrize("name", hf.GEOMETRIES)
def test_every_weight_shows(name: str) -> None:
    """Any tensor with its first axis turned by one place, as a wrong cut would leave it, moves the logits far."""
    model, ids = hf.build(name), some_ids(40)
    expected = hf.logits(model, ids)
    for key, p in model.named_parameters():
        if key.endswith("shared_expert_gate.weight"):
            continue  # one row
        kept = p.data.clone()
        p.data = p.data.roll(1, 0)
        moved = (hf.logits(model, ids) - expected).abs().max().item()
        p.data = kept
        assert moved > 20 * TOLERANCE, f"{key}: moves the logits by {moved:.1e} only"


def test_greedy_follows_the_logits() -> None:
    model, prompt = hf.build("moe"), some_ids(3)
    answer = hf.greedy(model, prompt, 12)
    assert len(answer) == 12
    assert hf.logits(model, prompt + answer)[2:-1].argmax(-1).tolist() == answer


@pytest.mark.parametrize("name", ["moe", "dense_yarn"])
def test_positions_reach_all_sections(name: str) -> None:
    model, ids = hf.build(name), some_ids(12)
    positions = torch.arange(12).repeat(3, 1)
    plain = hf.logits(model, ids)
    assert torch.equal(hf.logits(model, ids, positions), plain)
    for axis in range(3):
        moved = positions.clone()
        moved[axis, 6:] += 5
        assert (hf.logits(model, ids, moved) - plain).abs().max() > 20 * TOLERANCE
