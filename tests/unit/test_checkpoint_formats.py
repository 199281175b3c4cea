"""Every format that is published for the family is read from its config and from headers alone, module by module."""

from typing import Any

import pytest

from shardwise.checkpoint.formats import Formats, blocks, plain
from shardwise.checkpoint.names import check
from shardwise.config import ConfigError
from shardwise.shard import ParamSpec, Segment, Stored
from tests.checkpoint_fakes import (
    BANK,
    CODES,
    E4M3,
    EXPERT,
    FP4,
    FP8,
    GROUPS,
    IN,
    LAYER,
    MIXED,
    NIBBLES,
    OUT,
    PACKED,
    PAIRS,
    SCALES,
    WEIGHT,
    Fake,
    Headers,
    Q,
    ct,
    formats,
    module,
    nvfp4,
    scale,
)

CASES: dict[str, tuple[Any, Headers, tuple[Stored, ...]]] = {
    "bf16": (None, module(Q, weight=("BF16", (OUT, IN))), plain("BF16")),
    "f32 file": (None, module(Q, weight=("F32", (OUT, IN))), plain("BF16")),
    "fp8 block": (
        FP8,
        module(Q, weight=WEIGHT, weight_scale_inv=("BF16", (2, 3))),
        (CODES, scale(".weight_scale_inv", "BF16", 128, 128)),
    ),
    "fp8 other block": (
        FP8 | {"weight_block_size": [64, 100]},
        module(Q, weight=WEIGHT, weight_scale_inv=("F32", (4, 4))),
        (CODES, scale(".weight_scale_inv", "F32", 64, 100)),
    ),
    "fp8 without block": (
        FP8 | {"weight_block_size": None, "activation_scheme": "static"},
        module(Q, weight=WEIGHT, weight_scale=("F32", ()), input_scale=("F32", ())),
        (
            CODES,
            scale(".weight_scale", "F32", None, None),
            scale(".input_scale", "F32", None, None, role="input_scale"),
        ),
    ),
    "modelopt fp8": (
        MIXED,
        module(Q, weight=WEIGHT, weight_scale=("F32", ()), input_scale=("F32", ())),
        (
            CODES,
            scale(".weight_scale", "F32", None, None),
            scale(".input_scale", "F32", None, None, role="input_scale"),
        ),
    ),
    "modelopt nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        module(Q, weight=NIBBLES, weight_scale=SCALES, weight_scale_2=("F32", ()), input_scale=("F32", ())),
        (
            PAIRS,
            GROUPS,
            scale(".weight_scale_2", "F32", None, None),
            scale(".input_scale", "F32", None, None, role="input_scale"),
        ),
    ),
    "modelopt nvfp4 by row": (
        {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"},
        module(Q, weight=NIBBLES, weight_scale=SCALES, weight_scale_2=("F32", (OUT,))),
        (PAIRS, GROUPS, scale(".weight_scale_2", "F32", 1, None)),
    ),
    "compressed nvfp4": (
        ct(FP4),
        module(
            Q,
            weight_packed=NIBBLES,
            weight_scale=SCALES,
            weight_global_scale=("F32", (1,)),
            input_global_scale=("F32", (1,)),
        ),
        (
            PACKED,
            GROUPS,
            scale(".weight_global_scale", "F32", None, 0, role="inverse_scale"),
            scale(".input_global_scale", "F32", None, 0, role="input_scale"),
        ),
    ),
    "compressed fp8 block": (
        ct(E4M3 | {"strategy": "block", "block_structure": [128, 128]}),
        module(Q, weight=WEIGHT, weight_scale=("BF16", (2, 3))),
        (CODES, scale(".weight_scale", "BF16", 128, 128)),
    ),
    "compressed fp8 channel": (
        ct(E4M3 | {"strategy": "channel"}),
        module(Q, weight=WEIGHT, weight_scale=("BF16", (OUT, 1))),
        (CODES, scale(".weight_scale", "BF16", 1, 0)),
    ),
    "compressed fp8 channel vector": (
        ct(E4M3 | {"strategy": "channel"}),
        module(Q, weight=WEIGHT, weight_scale=("F32", (OUT,))),
        (CODES, scale(".weight_scale", "F32", 1, None)),
    ),
    "compressed fp8 tensor": (
        ct(E4M3 | {"strategy": "tensor"}),
        module(Q, weight=WEIGHT, weight_scale=("F32", (1,))),
        (CODES, scale(".weight_scale", "F32", None, 0)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_linear_layer(case: str) -> None:
    config, headers, expected = CASES[case]
    found = formats(config, headers).of(Q)
    assert found == expected
    # A spec in that format needs exactly these tensors, at these shapes.
    spec = ParamSpec(((Segment("q", OUT),), IN), found, (Q,))
    assert check(Fake(headers), [spec]) == set(headers)  # pyright: ignore[reportArgumentType]


STACKED: dict[str, tuple[Any, Headers, tuple[Stored, ...]]] = {
    "bf16": (None, {"": ("BF16", (4, OUT, IN))}, plain("BF16", "")),
    "nvfp4": (
        ct(FP4, "re:.*mlp.experts.*"),
        {
            "_packed": ("U8", (4, OUT, IN // 2)),
            "_scale": ("F8_E4M3", (4, OUT, IN // 16)),
            "_global_scale": ("F32", (4,)),
        },
        (
            Stored("_packed", "U8", (1, 2), packed=True),
            scale("_scale", "F8_E4M3", 1, 16),
            scale("_global_scale", "F32", None, None, role="inverse_scale"),
        ),
    ),
    "nvfp4, a global for gate and for up": (
        ct(FP4),
        {
            "_packed": ("U8", (4, OUT, IN // 2)),
            "_scale": ("F8_E4M3", (4, OUT, IN // 16)),
            "_global_scale": ("F32", (4, 2)),
        },
        (
            Stored("_packed", "U8", (1, 2), packed=True),
            scale("_scale", "F8_E4M3", 1, 16),
            scale("_global_scale", "F32", OUT // 2, None, role="inverse_scale"),
        ),
    ),
    "nvfp4, a global in three axes": (
        ct(FP4),
        {
            "_packed": ("U8", (4, OUT, IN // 2)),
            "_scale": ("F8_E4M3", (4, OUT, IN // 16)),
            "_global_scale": ("F32", (4, 1, 1)),
        },
        (
            Stored("_packed", "U8", (1, 2), packed=True),
            scale("_scale", "F8_E4M3", 1, 16),
            scale("_global_scale", "F32", 0, 0, role="inverse_scale"),
        ),
    ),
    "fp8 block": (
        FP8,
        {"": ("F8_E4M3", (4, OUT, IN)), "_scale_inv": ("BF16", (4, 2, 3))},
        (Stored("", "F8_E4M3"), scale("_scale_inv", "BF16", 128, 128)),
    ),
    "fp8 channel": (
        ct(E4M3 | {"strategy": "channel"}),
        {"": ("F8_E4M3", (4, OUT, IN)), "_scale": ("BF16", (4, OUT, 1))},
        (Stored("", "F8_E4M3"), scale("_scale", "BF16", 1, 0)),
    ),
}


@pytest.mark.parametrize("case", STACKED)
def test_stacked_experts(case: str) -> None:
    config, suffixes, expected = STACKED[case]
    headers = {BANK + suffix: header for suffix, header in suffixes.items()}
    found = formats(config, headers).of(BANK)
    assert found == expected
    spec = ParamSpec((4, (Segment("gate", OUT // 2), Segment("up", OUT // 2)), IN), found, (BANK,))
    assert check(Fake(headers), [spec]) == set(headers)  # pyright: ignore[reportArgumentType]


def test_experts_one_by_one_must_be_alike() -> None:
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    each = {}
    for e in range(3):
        for half in ("gate_proj", "up_proj"):
            each |= nvfp4(EXPERT.replace("{e}", str(e)) + half)
    sources = (f"{EXPERT}gate_proj", f"{EXPERT}up_proj")
    found = formats(config, each).of(*sources, experts=3)
    spec = ParamSpec((3, (Segment("gate", OUT), Segment("up", OUT)), IN), found, sources)
    assert check(Fake(each), [spec]) == set(each)  # pyright: ignore[reportArgumentType]
    odd = f"{LAYER}mlp.experts.2.up_proj"
    each = {name: header for name, header in each.items() if not name.startswith(odd)}
    with pytest.raises(ConfigError, match=rf"{odd} has no weight, expected {odd}\.weight"):
        formats(config, each).of(*sources, experts=3)
    each |= module(odd, weight=("BF16", (OUT, IN)))
    with pytest.raises(ConfigError, match=rf"{odd} is \.weight BF16 .*, expected \.weight U8 .* as in .*0\.gate_proj"):
        formats(config, each).of(*sources, experts=3)
    assert not formats(config, each).same(*sources, experts=3)
    with pytest.raises(ValueError, match="say how many"):
        formats(config, each).of(*sources)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (
            "fp8 block",
            {"weight_scale_inv": None},
            "scale '.*weight_scale_inv' or '.*weight_scale' of an fp8 .* is missing",
        ),
        ("fp8 block", {"weight_scale": ("BF16", (2, 3))}, "of an fp8 weight is there twice"),
        (
            "fp8 block",
            {"weight_scale_inv": ("BF16", (3, 2))},
            r"is BF16 \[3, 2\], expected .* \[2, 3\] for a weight of",
        ),
        ("fp8 block", {"weight_scale_inv": ("BF16", ())}, r"is BF16 \[\], expected F32 or BF16 or F16 \[2, 3\]"),
        ("fp8 block", {"weight_scale_inv": ("I32", (2, 3))}, r"is I32 \[2, 3\], expected F32"),
        (
            "fp8 block",
            {"weight": ("F8_E5M2", (OUT, IN))},
            "is F8_E5M2 .*, expected F8_E4M3 as quantization_config says",
        ),
        ("fp8 block", {"weight": ("F8_E4M3", (OUT,))}, r"is F8_E4M3 \[256\], expected F8_E4M3"),
        ("fp8 block", {"weight": None}, "q_proj has no weight, expected .*q_proj.weight"),
        (
            "compressed fp8 tensor",
            {"weight_scale": ("F32", (2, 3))},
            r"\[2, 3\], expected .* \[\] or \[1\] or \[1, 1\] for",
        ),
        ("compressed fp8 channel", {"weight_scale": ("F32", (1,))}, r"\[1\], expected .* \[256, 1\] or \[256\] for"),
        ("modelopt fp8", {"weight_scale": ("F32", (OUT, 1))}, r"\[256, 1\], expected"),
        ("modelopt fp8", {"input_scale": ("F32", (7,))}, r"input_scale' is F32 \[7\], expected"),
        ("modelopt nvfp4", {"weight_scale": None}, "weight_scale' of an nvfp4 weight is missing"),
        (
            "modelopt nvfp4",
            {"weight_scale_2": None},
            "weight_scale_2' or .*weight_global_scale' of an nvfp4 .* missing",
        ),
        (
            "modelopt nvfp4",
            {"weight_scale": ("F8_E4M3", (OUT, 12))},
            r"F8_E4M3 \[256, 12\], expected F8_E4M3 \[256, 24\]",
        ),
        ("modelopt nvfp4", {"weight_scale": ("F32", (OUT, 24))}, r"is F32 \[256, 24\], expected F8_E4M3"),
        ("modelopt nvfp4", {"weight": WEIGHT}, "is F8_E4M3 .*, expected U8 as quantization_config says"),
        ("bf16", {"weight": WEIGHT}, "is F8_E4M3 .*, expected a plain float as quantization_config leaves it out"),
    ],
)
def test_bad_tensors_are_named_with_what_was_expected(case: str, change: dict[str, Any], message: str) -> None:
    config, headers, _ = CASES[case]
    headers = {**headers, **{f"{Q}.{suffix}": header for suffix, header in change.items()}}
    headers = {name: header for name, header in headers.items() if header}
    with pytest.raises(ConfigError, match=message) as caught:
        formats(config, headers).of(Q)
    assert "\n" not in str(caught.value)


def test_scales_of_the_kv_cache() -> None:
    attention = f"{LAYER}self_attn"
    ends = (".k_scale", ".v_scale")
    assert formats(None, {}).kv_scales(attention) is None
    whole = {attention + end: ("F32", ()) for end in ends}
    assert formats(None, whole).kv_scales(attention) == (f"{attention}.k_scale", f"{attention}.v_scale")
    apart = {f"{attention}.k_proj.k_scale": ("F32", ()), f"{attention}.v_proj.v_scale": ("F32", ())}
    assert formats(None, apart).kv_scales(attention) == tuple(apart)
    with pytest.raises(ConfigError, match="k_scale is there without its pair"):
        formats(None, {f"{attention}.k_scale": ("F32", ())}).kv_scales(attention)


@pytest.mark.parametrize(
    ("config", "q", "bank"),
    [
        (None, plain("BF16"), plain("BF16", "")),
        (
            FP8,
            (CODES, scale(".weight_scale_inv", "BF16", 128, 128)),
            (Stored("", "F8_E4M3"), scale("_scale_inv", "BF16", 128, 128)),
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            (PAIRS, GROUPS, scale(".weight_scale_2", "F32", None, None)),
            None,
        ),
        (ct(FP4), (PACKED, GROUPS, scale(".weight_global_scale", "F32", None, 0, role="inverse_scale")), None),
        (ct(E4M3 | {"strategy": "channel"}), (CODES, scale(".weight_scale", "BF16", 1, 0)), None),
        (MIXED, (CODES, scale(".weight_scale", "F32", None, None)), plain("BF16", "")),
    ],
)
def test_formats_from_the_config_alone(config: Any, q: tuple[Stored, ...], bank: tuple[Stored, ...] | None) -> None:
    found = Formats({"quantization_config": config} if config else {}, dtype="BF16")
    assert found.of(Q) == q
    assert found.of(f"{LAYER}mlp.gate") == found.of(f"{LAYER}linear_attn.conv1d") == plain("BF16")
    assert bank is None or found.of(BANK) == bank
    assert len(found.of(f"{EXPERT}up_proj", experts=4)) == len(found.of(BANK))


def test_shapes_of_scales() -> None:
    assert blocks("block", (300, 100), (128, 64)) == [((3, 2), (128, 64))]
    assert [shape for shape, _ in blocks("tensor", (6, 4), (1, 1))] == [(), (1,), (1, 1)]
    assert [shape for shape, _ in blocks("tensor", (5, 6, 4), (1, 1))] == [
        (5,), (5, 1), (5, 1, 1), (5, 2), (5, 2, 1), (), (1,),
    ]  # fmt: skip
