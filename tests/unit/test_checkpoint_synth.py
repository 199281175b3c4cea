"""Made-up weights are the same whole for every split, sane in every format, and load like a checkpoint's."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from shardwise.checkpoint import synth
from shardwise.checkpoint.index import INDEX_FILE, CheckpointIndex
from shardwise.checkpoint.load import load
from shardwise.checkpoint.synth import DummySource, one_by_one, renamed, write_checkpoint
from shardwise.config import ConfigError
from shardwise.shard import ParamSpec, Partition, Segment, Stored

BF16, FP32 = (Stored(".weight", "BF16"),), (Stored("", "F32"),)
FORMATS: dict[str, tuple[Stored, ...]] = {
    "bf16": BF16,
    "fp8 block": (Stored(".weight", "F8_E4M3"), Stored(".weight_scale_inv", "BF16", (16, 16), role="scale")),
    "fp8 tensor": (Stored(".weight", "F8_E4M3"), Stored(".weight_scale", "F32", (None, None), role="scale")),
    "nvfp4": (
        Stored(".weight", "U8", (1, 2), packed=True),
        Stored(".weight_scale", "F8_E4M3", (1, 16), role="scale"),
        Stored(".weight_scale_2", "F32", (None, None), role="scale"),
        Stored(".input_scale", "F32", (None, None), role="input_scale"),
    ),
    "nvfp4 reciprocal": (
        Stored(".weight_packed", "U8", (1, 2), packed=True),
        Stored(".weight_scale", "F8_E4M3", (1, 16), role="scale"),
        Stored(".weight_global_scale", "F32", (None, 0), role="inverse_scale"),
    ),
}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def dequantised(spec: ParamSpec, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The whole weight of a spec with one source, in float64, straight from its stored tensors."""
    shape = [axis if isinstance(axis, int) else sum(s.size for s in axis) for axis in spec.axes]
    whole = torch.ones(shape, dtype=torch.float64)
    for stored in spec.format:
        values = tensors[spec.sources[0] + stored.suffix]
        if stored.packed:
            codes = torch.stack([values & 15, values >> 4], -1).flatten(-2)
            values = E2M1[(codes & 7).long()] * (1 - 2 * (codes >> 3).float())
        elif None in stored.block:
            values = values.reshape(1, 1)
        else:
            for axis, block in enumerate(stored.block):
                values = values.float().repeat_interleave(block or 0, axis).narrow(axis, 0, shape[axis])
        if stored.role != "input_scale":
            whole = whole / values.double() if stored.role == "inverse_scale" else whole * values.double()
    return whole


@pytest.mark.parametrize("format", FORMATS)
def test_weights_have_the_asked_spread(format: str) -> None:
    spec = ParamSpec((200, 320), FORMATS[format], ("layers.0.self_attn.q_proj",))
    source = DummySource([spec], std=0.05)
    whole = dequantised(spec, {name: source.whole(name) for name in source.names})
    assert whole.std().item() == pytest.approx(0.05, rel=0.45)  # a scale is off by up to a third
    assert abs(whole.mean().item()) < 0.05 * 4 / 200
    assert whole.abs().max() < 0.5


def test_values_do_not_repeat_nor_follow_one_another() -> None:
    spec = ParamSpec((8, 64, 128), (Stored("", "F32"),), ("experts.gate_up_proj",))
    whole = DummySource([spec]).whole("experts.gate_up_proj").reshape(8, -1).double()
    assert whole.unique().numel() > 0.7 * whole.numel()  # four lanes of 16 bits have fewer sums than there are elements
    for shift in (1, 128):
        assert abs(torch.corrcoef(torch.stack([whole.flatten(), whole.flatten().roll(shift)]))[0, 1]) < 0.02
    assert (torch.corrcoef(whole) - torch.eye(8)).abs().max() < 0.06


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("chunk", [7, 1 << 18])
def test_a_slice_is_part_of_the_whole(format: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ParamSpec((5, 40, 48), FORMATS[format], ("x.{e}.w",))
    source = DummySource([spec])
    whole = {name: source.whole(name) for name in source.names}
    monkeypatch.setattr(synth, "CPU_CHUNK_ELEMENTS", chunk)
    for name, tensor in whole.items():
        src = tuple(slice(size // 3, size - size // 4) for size in tensor.shape)
        part = source.read(name, src)
        assert part.dtype == tensor.dtype
        assert torch.equal(
            part.view(torch.uint8) if src else part, tensor[src].contiguous().view(torch.uint8) if src else tensor
        )
        empty = tuple(slice(1, 1) for _ in src)
        assert not src or source.read(name, empty).numel() == 0


def test_names_and_seeds_differ_and_nothing_else_does() -> None:
    spec = ParamSpec((4, 8), BF16, ("a",))
    other = replace(spec, sources=("b",))
    first = DummySource([spec, other], seed=1)
    assert torch.equal(first.whole("a.weight"), DummySource([spec], seed=1).whole("a.weight"))
    assert not torch.equal(first.whole("a.weight"), first.whole("b.weight"))
    assert not torch.equal(first.whole("a.weight"), DummySource([spec], seed=2).whole("a.weight"))
    # Values are a promise to other versions, devices and ranks.
    assert first.whole("a.weight")[0, :4].tolist() == [
        -0.00732421875,
        -0.0091552734375,
        -0.004241943359375,
        -0.0260009765625,
    ]


def test_special_tensors_are_in_range() -> None:
    layer = "model.layers.0.linear_attn."
    specs = [
        ParamSpec((64,), FP32, (f"{layer}A_log",)),
        ParamSpec((64,), FP32, (f"{layer}dt_bias",)),
        ParamSpec((64,), BF16, (f"{layer}norm",)),
        ParamSpec((64,), BF16, ("model.layers.0.input_layernorm",)),
    ]
    source = DummySource(specs)
    a_log, dt_bias, norm, zero_centred = (source.whole(name).float() for name in source.names)
    assert 0 <= a_log.min() < a_log.max() <= 2.78
    assert 0.0009 < torch.nn.functional.softplus(dt_bias).min() < torch.nn.functional.softplus(dt_bias).max() < 0.11
    assert norm.mean().item() == pytest.approx(1, abs=0.02)
    assert zero_centred.mean().item() == pytest.approx(0, abs=0.02)
    with pytest.raises(ConfigError, match="no tensor 'x'"):
        source.info("x")


@pytest.mark.parametrize("format", FORMATS)
def test_they_load_as_the_same_weights_from_a_checkpoint(tmp_path: Path, format: str) -> None:
    halves = (Segment("gate", 48), Segment("up", 48))
    spec = ParamSpec((3, halves, 32), FORMATS[format], ("x.{e}.gate", "x.{e}.up"), "mlp", 1)
    source = DummySource([spec])
    tensors = {name: source.whole(name) for name in source.names}
    index = CheckpointIndex.open(write_checkpoint(tmp_path, tensors, {}, 2))
    split = {"mlp": Partition.weighted(3, (2, 1))}
    for rank in range(2):
        made, read = (load({"w": spec}, split, rank, origin, "cpu")["w"].tensors for origin in (source, index))
        for a, b in zip(made, read, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_layouts_of_written_checkpoints(tmp_path: Path) -> None:
    bank, down = torch.arange(24.0).reshape(2, 4, 3), torch.arange(12.0).reshape(2, 3, 2)
    made = {"model.language_model.layers.0.mlp.experts.gate_up_proj": bank, "lm_head.weight": torch.ones(2, 3)}
    made["model.language_model.layers.0.mlp.experts.down_proj"] = down
    apart = one_by_one(made)
    assert len(apart) == 2 * 3 + 1
    assert torch.equal(apart["model.language_model.layers.0.mlp.experts.1.up_proj.weight"], bank[1, 2:])
    assert torch.equal(apart["model.language_model.layers.0.mlp.experts.0.gate_proj.weight"], bank[0, :2])
    assert torch.equal(apart["model.language_model.layers.0.mlp.experts.1.down_proj.weight"], down[1])
    moved = renamed(made, "language_model.model.")
    assert set(moved) == {
        "language_model.lm_head.weight",
        "language_model.model.layers.0.mlp.experts.gate_up_proj",
        "language_model.model.layers.0.mlp.experts.down_proj",
    }
    with pytest.raises(ValueError, match="use one of"):
        renamed(made, "transformer.")
    write_checkpoint(tmp_path, apart, {"a": 1}, 3, {"quantization": {}})
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json", "hf_quant_config.json", INDEX_FILE, *(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))
    }  # fmt: skip
    with safe_open(tmp_path / "model-00001-of-00003.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("lm_head.weight"), torch.ones(2, 3))
