"""Which scheme each module is under, in the three dialects of quantisation configs."""

from typing import Any

import pytest

from shardwise.checkpoint.formats import plain
from shardwise.checkpoint.quantization import Quantization
from shardwise.config import ConfigError
from tests.checkpoint_fakes import (
    CODES,
    E4M3,
    FP4,
    FP8,
    IN,
    LAYER,
    MIXED,
    NIBBLES,
    OUT,
    PACKED,
    PAIRS,
    SCALES,
    WEIGHT,
    K,
    Q,
    ct,
    formats,
    module,
    nvfp4,
    scale,
)


def test_mixed_precision_by_module() -> None:
    """As in nvidia/Qwen3.6-35B-A3B-NVFP4: experts, shared expert and head in NVFP4, attention in FP8, the rest bf16."""
    shared, z, a = f"{LAYER}mlp.shared_expert.up_proj", f"{LAYER}linear_attn.in_proj_z", f"{LAYER}linear_attn.in_proj_a"
    expert = f"{LAYER}mlp.experts.0.up_proj"
    layers = {
        name: {"quant_algo": "W4A16_NVFP4", "group_size": 16} for name in (shared, f"{LAYER}mlp.experts", "lm_head")
    }
    layers |= {z: {"quant_algo": "FP8"}, a: {"quant_algo": None}}
    headers = {
        **nvfp4(shared),
        **nvfp4(expert),
        **nvfp4("lm_head"),
        **module(z, weight=WEIGHT, weight_scale=("F32", ())),
        **module(a, weight=("BF16", (8, IN))),
        **module("model.language_model.embed_tokens", weight=("BF16", (8, IN))),
    }
    for config, beside in (
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}, None),
        ({"quant_method": "modelopt"}, {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}),
        (None, {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}),
    ):
        found = formats(config, headers, beside)
        assert found.of(shared) == found.of(expert) == found.of("lm_head")
        assert found.of(shared)[0] == PAIRS
        assert found.of(z) == (CODES, scale(".weight_scale", "F32", None, None))
        assert found.of(a) == found.of("model.language_model.embed_tokens") == plain("BF16")


def test_groups_by_name_pattern_and_class() -> None:
    """Attention in NVFP4, all else FP8 by block, linear_attn ignored; the config has another prefix."""
    config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": E4M3 | {"strategy": "block", "block_structure": [128, 128]}},
            "group_1": {"targets": ["re:.*self_attn\\.[qk]_proj$"], "weights": FP4},
            "group_2": {"targets": ["model.layers.0.self_attn.k_proj"], "weights": E4M3 | {"strategy": "channel"}},
        },
        "ignore": ["re:.*linear_attn.*", "lm_head", "model.layers.0.mlp.gate"],
    }
    o, z = f"{LAYER}self_attn.o_proj", f"{LAYER}linear_attn.in_proj_z"
    headers = {
        **module(Q, weight_packed=NIBBLES, weight_scale=SCALES, weight_global_scale=("F32", (1,))),
        **module(K, weight=WEIGHT, weight_scale=("BF16", (OUT, 1))),
        **module(o, weight=WEIGHT, weight_scale=("BF16", (2, 3))),
        **module(z, weight=("BF16", (OUT, IN))),
        **module("lm_head", weight=("BF16", (OUT, IN))),
    }
    found = formats(config, headers)
    assert found.of(Q)[0] == PACKED
    assert found.of(K) == (CODES, scale(".weight_scale", "BF16", 1, 0))
    assert found.of(o) == (CODES, scale(".weight_scale", "BF16", 128, 128))
    assert found.of(z) == found.of("lm_head") == plain("BF16")
    assert not found.same(Q, K)
    assert found.same(Q, Q)


@pytest.mark.parametrize(
    ("entry", "covers"),
    [
        ("model.language_model.layers.0.self_attn.q_proj", True),
        ("language_model.model.layers.0.self_attn.q_proj", True),
        ("model.layers.0.self_attn", True),
        ("re:.*self_attn.*", True),
        ("re:^model\\.layers\\.0", True),
        ("model.layers.0.self_attn*", True),
        ("*q_proj", True),
        ("Linear", True),
        ("model.layers.0.self_attn.q", False),
        ("re:self_attn", False),
        ("Embedding", False),
        ("q_proj", False),
    ],
)
def test_ignore_beats_targets(entry: str, covers: bool) -> None:
    """An ignored module has no scheme, so that finding it quantised is an error."""
    found = formats(
        ct(E4M3 | {"strategy": "tensor"}, Q, ignore=(entry,)), module(Q, weight=WEIGHT, weight_scale=("F32", ()))
    )
    if covers:
        with pytest.raises(
            ConfigError, match=r"q_proj.weight' is F8_E4M3 .*, expected a plain float as .* leaves it out"
        ):
            found.of(Q)
    else:
        assert found.of(Q)[0] == CODES


@pytest.mark.parametrize(
    ("entry", "covers"),
    [
        ("mlp.shared_expert", True),
        ("up_proj", True),
        ("shared_expert.up_proj", True),
        ("model.language_model.layers.0.mlp", True),
        ("shared_expert.up", False),
        ("layers.0.mlp.experts", False),
    ],
)
def test_modules_to_not_convert_may_be_parts_of_names(entry: str, covers: bool) -> None:
    name = f"{LAYER}mlp.shared_expert.up_proj"
    quantisation = Quantization({"quantization_config": FP8 | {"modules_to_not_convert": [entry]}})
    assert (quantisation.scheme(name) is None) == covers


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method is 'gptq', expected fp8, modelopt"),
        ({"bits": 4}, "quant_method is None"),
        ({"quant_method": "modelopt", "quant_algo": "INT4_AWQ"}, "quant_algo of .* is 'INT4_AWQ', expected one of FP8"),
        ({"quant_method": "modelopt", "quantized_layers": {Q: {"quant_algo": "W8"}}}, "quant_algo of .*q_proj is 'W8'"),
        ({"quant_method": "compressed-tensors"}, "no config_groups"),
        (ct({"num_bits": 4, "type": "int", "strategy": "group"}), "weights of group_0 are 4-bit int by group"),
        (ct(E4M3 | {"strategy": "group"}), "weights of group_0 are 8-bit float by group"),
        (ct(FP4, "re:("), r"pattern '\(' is no regular expression"),
        (FP8 | {"weight_block_size": [128]}, r"block of weights is \[128\], expected two sizes"),
    ],
)
def test_an_unknown_config_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        formats(config, {})
    assert "\n" not in str(caught.value)


def test_fp8_kv_cache() -> None:
    fp8_scheme = {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}
    asks = [
        (FP8 | fp8_scheme, None),
        (MIXED | {"kv_cache_scheme": "FP8"}, None),
        (MIXED, {"quantization": {"kv_cache_quant_algo": "FP8"}}),
        (None, {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}),
    ]
    assert [formats(config, {}, beside).kv_cache_dtype for config, beside in asks] == ["fp8"] * 4
    assert formats(FP8, {}).kv_cache_dtype is None
    assert formats(MIXED, {}, {"quantization": {"kv_cache_quant_algo": None}}).kv_cache_dtype is None
    with pytest.raises(ConfigError, match="kv_cache_quant_algo is 'NVFP4', expected FP8"):
        _ = formats(MIXED, {}, {"quantization": {"kv_cache_quant_algo": "NVFP4"}}).kv_cache_dtype
    with pytest.raises(ConfigError, match=r"kv_cache_scheme is .*, expected 8-bit float"):
        _ = formats(FP8 | {"kv_cache_scheme": {"num_bits": 4}}, {}).kv_cache_dtype
