"""Every layout of names that is in use is found from the names, and every tensor is accounted for."""

from pathlib import Path

import pytest
import torch

from shardwise.checkpoint.index import CheckpointIndex
from shardwise.checkpoint.names import Names, account, bare, needed
from shardwise.checkpoint.synth import one_by_one, renamed, write_checkpoint
from shardwise.config import ConfigError
from shardwise.shard import ParamSpec, Segment, Stored

BF16 = (Stored(".weight", "BF16"),)
VISION = ("patch_embed.proj.weight", "blocks.0.attn.qkv.bias")


def tensors() -> dict[str, torch.Tensor]:
    def made(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    text = {
        "embed_tokens.weight": made(4, 2),
        "layers.0.input_layernorm.weight": made(2),
        "layers.0.mlp.experts.gate_up_proj": made(3, 4, 2),
        "layers.0.mlp.experts.down_proj": made(3, 2, 2),
        "layers.1.mlp.experts.gate_up_proj": made(3, 4, 2),
        "layers.1.mlp.experts.down_proj": made(3, 2, 2),
    }
    return {f"model.language_model.{name}": tensor for name, tensor in text.items()} | {"lm_head.weight": made(4, 2)}


def specs(names: Names) -> list[ParamSpec]:
    """A model of these tensors, as they are named in the checkpoint."""
    halves = (Segment("gate", 2), Segment("up", 2))
    found = [
        ParamSpec((4, 2), BF16, (names.text("embed_tokens"),)),
        ParamSpec((2,), BF16, (names.text("layers.0.input_layernorm"),)),
    ]
    for layer in range(2):
        experts = names.text(f"layers.{layer}.mlp.experts")
        if names.stacked(layer):
            bank = (Stored("", "BF16"),)
            found += [
                ParamSpec((3, halves, 2), bank, (f"{experts}.gate_up_proj",)),
                ParamSpec((3, 2, 2), bank, (f"{experts}.down_proj",)),
            ]
        else:
            each = (f"{experts}.{{e}}.gate_proj", f"{experts}.{{e}}.up_proj")
            found += [
                ParamSpec((3, halves, 2), BF16, each),
                ParamSpec((3, 2, 2), BF16, (f"{experts}.{{e}}.down_proj",)),
            ]
    return found + ([ParamSpec((4, 2), BF16, (names.head,))] if names.head else [])


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize(
    ("prefix", "head", "visual", "mtp"),
    [
        ("model.language_model.", "lm_head", "model.visual.", "mtp."),
        ("language_model.model.", "language_model.lm_head", "visual.", "language_model.mtp."),
        ("model.", "lm_head", "", ""),
    ],
)
def test_every_layout(tmp_path: Path, prefix: str, head: str, visual: str, mtp: str, stacked: bool, files: int) -> None:
    made = renamed(tensors() if stacked else one_by_one(tensors()), prefix)
    made |= {visual + name: torch.zeros(1) for name in VISION if visual}
    made |= {f"{mtp}layers.0.input_layernorm.weight": torch.zeros(2)} if mtp else {}
    index = CheckpointIndex.open(write_checkpoint(tmp_path, made, {}, files))
    names = Names.of(index)
    assert (names.prefix, names.head) == (prefix, head)
    assert names.text("layers.0.input_layernorm.weight") in index
    assert [names.stacked(layer) for layer in range(2)] == [stacked] * 2
    left_out = names.left_out(index)
    assert {kind: len(those) for kind, those in left_out.items()} == ({"visual": 2, "mtp": 1} if visual else {})
    everything = [name for those in left_out.values() for name in those]
    account(index, index, specs(names), everything)
    if everything:
        with pytest.raises(ConfigError, match=r"\(3 tensors\) are not used by this model"):
            account(index, index, specs(names), ())


def test_layers_may_differ_in_how_experts_are_stored() -> None:
    made = tensors()
    apart = one_by_one(made)
    mixed = {n: t for n, t in made.items() if ".layers.1." not in n} | {n: t for n, t in apart.items() if "s.1.m" in n}
    names = Names.of(mixed)
    assert [names.stacked(layer) for layer in range(2)] == [True, False]
    packed = [name.replace("_up_proj", "_up_proj_packed") for name in made]
    assert Names.of(packed).stacked(0)
    for wrong, found in ((made | apart, "both"), ({"model.layers.0.mlp.gate.weight": 0}, "neither")):
        with pytest.raises(ConfigError, match=f"layers.0.mlp.experts: found {found} gate_up_proj"):
            Names.of(wrong).stacked(0)


def test_tied_and_scales_of_the_cache() -> None:
    some = [
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.v_proj.v_scale",
        "lm_head.weight",
        "model.v.k_scale",
    ]
    names = Names.of(some)
    assert names.left_out(some) == {"kv_scale": tuple(some[:2])}
    assert names.left_out(some, tied=True) == {"head": ("lm_head.weight",), "kv_scale": tuple(some[:2])}
    assert Names.of(["model.layers.0.x"]).head is None
    assert Names.published(tied=False) == Names("model.language_model.", "lm_head")
    assert Names.published(tied=True, stacks=False).stacked(3) is False
    assert Names.published(tied=True).head is None


def test_a_checkpoint_of_another_family() -> None:
    with pytest.raises(ConfigError, match=r"text layers are under none of model\.language_model\.,"):
        Names.of(["transformer.h.0.weight"])
    with pytest.raises(ConfigError, match="text layers are under"):
        Names.of(["model.layers.0.a", "language_model.model.layers.0.a"])
    with pytest.raises(ConfigError, match=r"holds lm_head and language_model\.lm_head"):
        Names.of(["model.layers.0.a", "lm_head.weight", "language_model.lm_head.weight"])


def test_bare() -> None:
    for name in (
        "model.language_model.layers.0.a",
        "language_model.model.layers.0.a",
        "model.layers.0.a",
        "layers.0.a",
    ):
        assert bare(name) == "layers.0.a"
    for name in ("lm_head", "language_model.lm_head", "model.language_model.lm_head"):
        assert bare(name) == "lm_head"
    assert bare("model.visual.blocks.0") == "visual.blocks.0"


def test_needed_of_every_form() -> None:
    axes = (3, (Segment("gate", 5, 1), Segment("up", 7)), 48)
    format = (
        Stored(".weight", "U8", (1, 2), packed=True),
        Stored(".weight_scale", "F8_E4M3", (1, 16), role="scale"),
        Stored(".weight_scale_2", "F32", (None, None), role="scale"),
        Stored(".row", "F32", (1, None), role="scale"),
    )
    each = {n.name: n.shape for n in needed(ParamSpec(axes, format, ("x.{e}.gate", "x.{e}.up"), "cut", 1))}
    assert len(each) == 3 * 2 * 4
    assert each["x.2.up.weight"] == (7, 24)
    assert each["x.2.gate.weight_scale"] == (5, 3)
    assert each["x.0.up.weight_scale_2"] == ()
    assert each["x.1.gate.row"] == (5,)
    stacked = {n.name: n.shape for n in needed(ParamSpec(axes, format, ("x",), "cut", 1))}
    assert stacked == {
        "x.weight": (3, 12, 24),
        "x.weight_scale": (3, 12, 3),
        "x.weight_scale_2": (3,),
        "x.row": (3, 12),
    }
    blocks = (Stored("", "F32", (8, 8), role="scale"),)
    assert [n.shape for n in needed(ParamSpec(((Segment("a", 20), Segment("b", 13)), 9), blocks, ("w",)))] == [(5, 2)]


def test_the_first_few_and_their_number_are_named(tmp_path: Path) -> None:
    made = {f"model.layers.0.w{n}.weight": torch.zeros(2, 2) for n in range(6)}
    index = CheckpointIndex.open(write_checkpoint(tmp_path, made, {}))
    wanted = [ParamSpec((2, 2), BF16, (f"model.layers.0.w{n}",)) for n in range(5, 11)]
    with pytest.raises(ConfigError, match=r"'model.layers.0.w6.weight', .* and 2 more \(5 tensors\) are missing"):
        account(index, index, wanted, ())
    with pytest.raises(ConfigError, match=r"'model.layers.0.w1.weight', .* and 2 more \(5 tensors\) are not used"):
        account(index, index, wanted[:1], ())
    with pytest.raises(ConfigError, match=r"'model.layers.0.w1.weight' \(1 tensor\) is not used"):
        account(index, index, wanted[:1], [n for n in made if "w1" not in n])
