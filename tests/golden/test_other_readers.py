"""What other programs make of the checkpoints that `shardwise quantize` writes: the same numbers as we do.

Optional: `pip install accelerate compressed-tensors`. Without them transformers does not open such checkpoints.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5MoeForConditionalGeneration

from shardwise.checkpoint.index import CheckpointIndex
from shardwise.checkpoint.load import load
from shardwise.config import RankEnvironment, ServeConfig
from shardwise.engine.build import blueprint, build_rank
from shardwise.engine.plan import Chunk
from shardwise.kernels.linear.reference import dequantise

TOLERANCE = 2e-4  # of logits, as for plain checkpoints
Q = "model.language_model.layers.3.self_attn.q_proj"
SHARED = "model.language_model.layers.0.mlp.shared_expert.down_proj"
EXPERT = "model.language_model.layers.0.mlp.experts.5.down_proj"


def whole(index: CheckpointIndex, name: str) -> torch.Tensor:
    return index.read(name, tuple(slice(0, size) for size in index.info(name).shape)).clone()


def ours(folder: Path) -> Mapping[str, torch.Tensor]:
    """The weights above as one rank dequantises them."""
    made = blueprint(ServeConfig(model=str(folder), device="cpu", vision="off"))
    assert made.source is not None
    weights = load(made.specs, made.partitions, 0, made.source, "cpu")
    rows = [segment.size for segment in made.specs["layers.3.attention.qkv"].segments(0)]
    return {
        Q: dequantise(weights["layers.3.attention.qkv"])[: rows[0]],
        SHARED: dequantise(weights["layers.0.mlp.shared.down"]),
        EXPERT: dequantise(weights["layers.0.mlp.experts.down"], expert=5),
        "lm_head": dequantise(weights["head"]),
    }


def test_transformers_gives_the_same_logits_for_block_fp8(siblings: Mapping[str, Path]) -> None:
    pytest.importorskip("accelerate", reason="transformers opens FP8 checkpoints only with accelerate")
    folder = siblings["fp8"]
    model, info = Qwen3_5MoeForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    ids = [(i * 37 + 11) % 2000 for i in range(60)]
    with torch.no_grad():
        expected = model.eval()(input_ids=torch.tensor([ids])).logits[0]
    serve = ServeConfig(model=str(folder), device="cpu", max_model_len=256, max_num_seqs=2)
    one = build_rank(serve, RankEnvironment(0, 1, 0, 1, 0))
    found = one.runner.forward([Chunk(1, 0, len(ids), ids, [1], True, True)])
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("layout", ["nvfp4-ct", "mixed"])
def test_compressed_tensors_dequantises_to_the_same_numbers(layout: str, siblings: Mapping[str, Path]) -> None:
    pytest.importorskip("compressed_tensors", reason="the library of this format is not installed")
    from compressed_tensors.compressors.nvfp4.helpers import (  # pyright: ignore[reportMissingImports]
        unpack_fp4_from_uint8,
    )
    from compressed_tensors.quantization import (  # pyright: ignore[reportMissingImports]
        QuantizationArgs,
        QuantizationConfig,
    )
    from compressed_tensors.quantization.lifecycle.forward import dequantize  # pyright: ignore[reportMissingImports]

    def theirs(module: str, args: Any) -> torch.Tensor:
        scale = whole(index, f"{module}.weight_scale").float()
        if args.num_bits == 8:
            values, shared = whole(index, f"{module}.weight").float(), None
        else:
            packed, shared = whole(index, f"{module}.weight_packed"), whole(index, f"{module}.weight_global_scale")
            values = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], dtype=torch.float32)
        return dequantize(x_q=values, scale=scale, args=args, global_scale=shared, dtype=torch.float32)

    index = CheckpointIndex.open(siblings[layout])
    raw = blueprint(ServeConfig(model=str(siblings[layout]), device="cpu")).model.raw["quantization_config"]
    assert QuantizationConfig.model_validate(raw).format == raw["format"]
    args = [QuantizationArgs.model_validate(group["weights"]) for group in raw["config_groups"].values()]
    found = ours(siblings[layout])
    kinds = {Q: 0, EXPERT: 0, SHARED: 0} if layout == "nvfp4-ct" else {Q: 0, EXPERT: 0, SHARED: 1, "lm_head": 1}
    for module, group in kinds.items():
        torch.testing.assert_close(found[module], theirs(module, args[group]), rtol=1e-6, atol=0)
