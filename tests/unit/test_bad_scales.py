"""Bad quantised checkpoints: one line with the tensor, what was found and what was expected, before memory is taken."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint.quantize import quantize
from shardwise.checkpoint.synth import DummySource
from shardwise.cli import main
from shardwise.commands.prepare import check_split
from shardwise.config import ConfigError, ServeConfig
from shardwise.engine.build import blueprint
from shardwise.kernels.formats import problem
from shardwise.shard import ParamSpec, Stored, local
from tests.checkpoint_sparse import patched
from tests.golden.eval import miniature

LAYERS = "model.language_model.layers"
UP = f"{LAYERS}.1.mlp.experts.2.up_proj.weight"
Q = f"{LAYERS}.3.self_attn.q_proj.weight"
V_SCALE = f"{LAYERS}.3.self_attn.v_scale"
SMALL = {
    "vocab_size": 96, "hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape).to(dtype)


def with_one(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Ones, but for the last element."""
    tensor = torch.ones(shape)
    tensor.view(-1)[-1] = value
    return tensor.to(dtype)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A small MoE of text in every layout."""
    root = tmp_path_factory.mktemp("bad")
    raw = json.loads((miniature() / "config.json").read_text())["text_config"]
    rope = raw["rope_parameters"] | {"mrope_section": [2, 1, 1]}
    raw = {**raw, **SMALL, "rope_parameters": rope, "architectures": ["Qwen3_5MoeForCausalLM"]}
    plain = root / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(raw))
    made = blueprint(ServeConfig(model=str(plain), load_format="dummy", dtype="bfloat16", device="cpu"))
    source = DummySource(made.specs.values())
    found = {"plain": plain}
    for layout in ("fp8", "nvfp4", "nvfp4-ct", "mixed"):
        found[layout] = root / layout
        quantize(source, source.names, raw, layout, found[layout])
    return found


E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
HEADERS: dict[str, tuple[str, dict[str, torch.Tensor | None], str]] = {
    "scale missing": ("fp8", {f"{Q}_scale_inv": None}, f"{Q}_scale_inv' or '{Q}_scale' of an fp8 weight is missing"),
    "expert's scale missing": ("nvfp4-ct", {f"{UP}_scale": None}, f"'{UP}_scale' of an nvfp4 weight is missing"),
    "global missing": ("nvfp4", {f"{UP}_scale_2": None}, f"'{UP}_scale_2' or '{UP}_global_scale' of an nvfp4"),
    "weight missing": ("nvfp4", {UP: None}, f"{UP.removesuffix('.weight')} has no weight, expected {UP}"),
    "wrong shape": (
        "fp8", {f"{Q}_scale_inv": ones(3, 3, dtype=BF16)},
        f"scale '{Q}_scale_inv' is BF16 [3, 3], expected F32 or BF16 or F16 [1, 1] for a weight of [128, 64]",
    ),
    "wrong dtype": (
        "nvfp4", {f"{UP}_scale": ones(32, 4)},
        f"scale '{UP}_scale' is F32 [32, 4], expected F8_E4M3 [32, 4] for a weight of [32, 64]",
    ),
    "weight not as the config says": (
        "fp8", {Q: ones(128, 32, dtype=torch.uint8)}, f"tensor '{Q}' is U8 [128, 32], expected F8_E4M3",
    ),
    "weight that the config leaves out": (
        "fp8", {"lm_head.weight": ones(96, 64, dtype=E4M3)}, "tensor 'lm_head.weight' is F8_E4M3 [96, 64], expected",
    ),
    "one of a pair": ("mixed", {V_SCALE: None}, "self_attn.k_scale is there without its pair"),
    "cache scale of another shape": ("mixed", {V_SCALE: ones(2)}, f"scale '{V_SCALE}' is F32 [2], expected one F32 or"),
    "cache scale of zero": ("mixed", {V_SCALE: ones(1) * 0}, f"scale '{V_SCALE}' holds 0.0, expected finite values"),
    "gate and up in two formats": (
        "nvfp4-ct",
        {f"{UP}_packed": None, f"{UP}_scale": None, f"{UP}_global_scale": None, UP: ones(32, 64, dtype=BF16)},
        "mlp.experts.2.up_proj is .weight F32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_what_headers_show(case: str, folders: Mapping[str, Path], tmp_path: Path) -> None:
    layout, changes, words = HEADERS[case]
    folder = patched(folders[layout], tmp_path / "bad", changes)
    with pytest.raises(ConfigError) as error:
        blueprint(ServeConfig(model=str(folder), device="cpu"))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


VALUES: dict[str, tuple[str, dict[str, torch.Tensor | None], str]] = {
    "block NaN": ("fp8", {f"{Q}_scale_inv": with_one(torch.nan, 1, 1, dtype=BF16)}, f"'{Q}_scale_inv' holds nan"),
    "group zero": ("nvfp4-ct", {f"{UP}_scale": with_one(0, 32, 4, dtype=E4M3)}, f"'{UP}_scale' holds 0.0"),
    "group NaN": ("nvfp4", {f"{UP}_scale": with_one(torch.nan, 32, 4, dtype=E4M3)}, f"'{UP}_scale' holds nan"),
    "global infinite": ("nvfp4", {f"{UP}_scale_2": torch.tensor(torch.inf)}, f"'{UP}_scale_2' holds inf"),
    "tensor zero": ("nvfp4", {f"{Q}_scale": torch.tensor(0.0)}, f"'{Q}_scale' holds 0.0"),
    "channel negative": (
        "mixed", {"lm_head.weight_scale": with_one(-1, 96, 1, dtype=BF16)}, "'lm_head.weight_scale' holds -1.0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", VALUES)
def test_what_values_show(
    case: str, folders: Mapping[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found by the process that starts the ranks; `serve` ends with 2 and one line."""
    layout, changes, words = VALUES[case]
    folder = patched(folders[layout], tmp_path / "bad", changes)
    with pytest.raises(ConfigError, match="expected finite values above zero"):
        check_split(ServeConfig(model=str(folder), device="cpu", ranks=2))
    assert main(["serve", str(folder), "--port", "0", "--device", "cpu", "--tp", "2"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("shardwise: error: ") == 1


@pytest.mark.parametrize("layout", ["fp8", "nvfp4", "nvfp4-ct", "mixed"])
def test_good_ones_pass(layout: str, folders: Mapping[str, Path]) -> None:
    check_split(ServeConfig(model=str(folders[layout]), device="cpu", ranks=2))


def changed_config(folder: Path, out: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    patched(folder, out, {})
    raw = json.loads((out / "config.json").read_text())
    change(raw["quantization_config"])
    (out / "config.json").write_text(json.dumps(raw))
    return out


def test_an_unknown_method_is_named(
    folders: Mapping[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = changed_config(folders["fp8"], tmp_path / "bad", lambda config: config.update(quant_method="awq"))
    assert main(["plan", str(folder), "--device", "cpu"]) == 2
    assert capsys.readouterr().err.startswith("shardwise: error: config.json: quant_method is 'awq', expected fp8, ")


def test_an_embedding_is_not_served_quantised(folders: Mapping[str, Path], tmp_path: Path) -> None:
    embed = "model.language_model.embed_tokens.weight"
    changes = {embed: ones(96, 64, dtype=E4M3), f"{embed}_scale": ones(96, 1, dtype=BF16)}
    folder = patched(folders["mixed"], tmp_path / "bad", changes)

    def target(config: dict[str, Any]) -> None:
        config["ignore"].remove(embed.removesuffix(".weight"))
        config["config_groups"]["group_1"]["targets"].append("re:.*embed_tokens$")

    folder = changed_config(folder, tmp_path / "worse", target)
    with pytest.raises(ConfigError, match=r"embed_tokens is F8_E4M3, expected a plain float"):
        blueprint(ServeConfig(model=str(folder), device="cpu"))


def test_a_scale_in_a_file_that_lacks_it(folders: Mapping[str, Path], tmp_path: Path) -> None:
    folder = patched(folders["fp8"], tmp_path / "bad", {})
    listed = {"weight_map": {f"{Q}_scale_inv": "model.safetensors", f"{UP}_scale_3": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listed))
    with pytest.raises(ConfigError, match=r"_scale_3' is in no file, expected in model\.safetensors"):
        blueprint(ServeConfig(model=str(folder), device="cpu"))


def test_a_format_that_kernels_lack_is_told_before_anything_runs() -> None:
    values = Stored(".weight", "U8", (1, 2), packed=True)
    groups = Stored(".weight_scale", "F8_E4M3", (1, 16), role="scale")
    fine = Stored(".weight_scale_3", "F8_E4M3", (1, 32), role="scale")
    wide = Stored(".weight", "U8", (1, 4), packed=True)
    for format, words in (
        ((values, groups), None),
        ((values, groups, fine), "two scales of blocks, .weight_scale and .weight_scale_3"),
        ((wide,), "codes packed by 4"),
    ):
        found = problem(local(ParamSpec((32, 64), format, ("m",)), {}, 0))
        assert found == words if words is None else found and words in found
