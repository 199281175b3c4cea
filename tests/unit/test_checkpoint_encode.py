"""Rounding to the formats that are written: exact where it can be, nearest otherwise, and never out of range."""

import pytest
import torch

from shardwise.checkpoint.encode import E2M1_MAX, E4M3_MAX, Kind, encode, planned, row_steps, shared_scale
from shardwise.checkpoint.weight import Weight
from shardwise.kernels.linear.reference import dequantise
from shardwise.shard import ParamSpec, Role, Stored, local

BLOCKS: dict[Kind, tuple[Stored, ...]] = {
    "fp8_block": (Stored(".weight", "F8_E4M3"), Stored(".weight_scale_inv", "BF16", (128, 128), role="scale")),
    "fp8_channel": (Stored(".weight", "F8_E4M3"), Stored(".weight_scale", "BF16", (1, 0), role="scale")),
    "fp8_tensor": (Stored(".weight", "F8_E4M3"), Stored(".weight_scale", "F32", (None, None), role="scale")),
}
LAST: dict[Kind, tuple[str, str, Role]] = {
    "nvfp4": (".weight", ".weight_scale_2", "scale"),
    "nvfp4_ct": (".weight_packed", ".weight_global_scale", "inverse_scale"),
}
for kind, (values, name, role) in LAST.items():
    codes, groups = Stored(values, "U8", (1, 2), packed=True), Stored(".weight_scale", "F8_E4M3", (1, 16), role="scale")
    BLOCKS[kind] = codes, groups, Stored(name, "F32", (None, None if kind == "nvfp4" else 0), role=role)


def written(kind: Kind, weight_OI: torch.Tensor, step_elements: int = 1 << 20) -> Weight:
    """As the files would hold it, and as a rank that owns all of it would."""
    shared = shared_scale(kind, float(weight_OI.abs().max()))
    made = [encode(weight_OI[step], kind, shared) for step in row_steps(*weight_OI.shape, step_elements)]
    tensors = [torch.cat([part.values for part in made])]
    if made[0].scales is not None:
        tensors.append(torch.cat([part.scales for part in made if part.scales is not None]))
    tensors += [shared] if shared is not None else []
    spec = ParamSpec(tuple(weight_OI.shape), BLOCKS[kind], ("m",))
    for plan, tensor in zip(planned("m", kind, *weight_OI.shape), tensors, strict=True):
        assert plan.shape == tuple(tensor.shape)
    held = tuple(local(spec, {}, 0))
    shaped = tuple(tensor.view(part.shape) for tensor, part in zip(tensors, held, strict=True))
    return Weight(spec, tuple(weight_OI.shape), held, shaped)


@pytest.mark.parametrize("kind", BLOCKS)
def test_values_come_back_within_half_a_step(kind: Kind) -> None:
    """Partial blocks of rows and columns, rows of very different size, and rows of zeros."""
    generator = torch.Generator().manual_seed(3)
    weight_OI = torch.randn(300, 208, generator=generator) * torch.logspace(-2, 0, 300)[:, None]
    weight_OI[7] = 0
    back_OI = dequantise(written(kind, weight_OI))
    assert torch.isfinite(back_OI).all()
    assert not back_OI[7].any()
    if kind.startswith("fp8"):
        # Three bits of mantissa: half a step is 1/16 of the value, or of the smallest normal number's scale.
        floor = {"fp8_channel": weight_OI.abs().amax(1, keepdim=True)}.get(kind, weight_OI.abs().max())
        assert ((back_OI - weight_OI).abs() <= weight_OI.abs() / 15.5 + floor * 2.0**-9 / E4M3_MAX * 1.01).all()
    else:
        largest = weight_OI.unflatten(1, (-1, 16)).abs().amax(2, keepdim=True).expand(-1, -1, 16).flatten(1)
        least = 2.0**-9 * weight_OI.abs().max() / E4M3_MAX  # of a group's scale times e2m1's largest
        assert ((back_OI - weight_OI).abs() <= (largest * 1.07 / E2M1_MAX).clamp(min=float(least))).all()


@pytest.mark.parametrize("kind", BLOCKS)
def test_steps_of_rows_change_nothing(kind: Kind) -> None:
    weight_OI = torch.randn(400, 64, generator=torch.Generator().manual_seed(4))
    whole, parts = written(kind, weight_OI), written(kind, weight_OI, 1)
    for a, b in zip(whole.tensors, parts.tensors, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("kind", ["nvfp4", "nvfp4_ct"])
def test_numbers_that_the_format_has_are_exact(kind: Kind) -> None:
    """Every e2m1 value of both signs, under group scales that e4m3 has, and the largest number at the top of both."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    row = torch.cat((values, -values))
    weight_OI = torch.stack([row * E4M3_MAX, row * 2.0, row / 8])
    assert torch.equal(dequantise(written(kind, weight_OI)), weight_OI)


def test_half_way_goes_to_the_even_code() -> None:
    row = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 0])
    expected = torch.tensor([6.0, 0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4, 0])
    assert torch.equal(dequantise(written("nvfp4", row[None] * E4M3_MAX))[0], expected * E4M3_MAX)


def test_groups_that_do_not_fill_the_columns_are_refused() -> None:
    with pytest.raises(ValueError, match=r"m: 24 columns are not whole groups of 16"):
        planned("m", "nvfp4", 8, 24)
