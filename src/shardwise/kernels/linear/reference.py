"""What a linear layer means, for weights of every format: dequantise, then multiply in fp32.

Legend: T tokens, O out, I in, N elements of one row of codes.
"""

import torch
from torch.nn.functional import linear as torch_linear

from shardwise.checkpoint.weight import Weight
from shardwise.kernels.linear.arrange import as_stored

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the low three bits of a code; the fourth is the sign
E4M3_MAX = 448.0


def unpack_e2m1(packed: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of pairs of e2m1 codes: U8 [.., N / 2], low nibble first -> [.., N]."""
    values = torch.tensor((*E2M1, *(-v for v in E2M1)), dtype=dtype, device=packed.device)
    bytes_256 = torch.arange(256, device=packed.device)
    pairs = torch.stack((values[bytes_256 & 15], values[bytes_256 >> 4]), -1)
    return pairs.index_select(0, packed.flatten().int()).view(*packed.shape[:-1], 2 * packed.shape[-1])


def _widened(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`codes` in `dtype`. CPUs look e4m3 up, which takes a fraction of the time of torch's conversion."""
    if codes.dtype != torch.float8_e4m3fn or codes.device.type != "cpu" or codes.numel() < 256:
        return codes.to(dtype)
    values = torch.arange(256, dtype=torch.uint8).view(codes.dtype).to(dtype)
    return values.index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)


def _spread(tensor: torch.Tensor, block: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """`tensor` with one element for each of `shape`; axes of which it holds one element are left to broadcasting."""
    for axis, (grain, size) in enumerate(zip(block, shape, strict=True)):
        if grain > 1:  # a copy of repeat_interleave's result, in a fraction of its time
            sizes = [*tensor.shape[: axis + 1], grain, *tensor.shape[axis + 1 :]]
            tensor = tensor.unsqueeze(axis + 1).expand(sizes).flatten(axis, axis + 1).narrow(axis, 0, size)
    return tensor


def dequantise(weight: Weight, dtype: torch.dtype = torch.float32, expert: int | None = None) -> torch.Tensor:
    """The numbers that `weight` stands for, in `dtype`: all of them, or those of one index of the first axis.

    The definition of every format: value times all scales, divided by all inverse scales. Computed in fp32, or in
    float64 if `dtype` is that.
    """
    if len(weight.tensors) == 1 and weight.held[0].stored.dtype in ("F32", "F16", "BF16"):
        return (weight.plain if expert is None else weight.plain[expert]).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    value, factors = None, list[tuple[bool, torch.Tensor]]()
    for held, tensor in zip(weight.held, weight.tensors, strict=True):
        block, shape = held.block, weight.shape
        if expert is not None:
            tensor = tensor[expert // block[0] if block[0] else 0]
            block, shape = block[1:], shape[1:]
        if held.stored.role == "value":
            if weight.moved:
                tensor = as_stored(tensor.view(torch.int32)).view(torch.uint8)
            value = unpack_e2m1(tensor, wide) if held.stored.packed else _widened(tensor, wide)
        elif held.stored.role != "input_scale":
            factors.append((held.stored.role == "inverse_scale", _spread(_widened(tensor, wide), block, shape)))
    if value is None:
        raise TypeError(f"{weight.spec.sources[0]}: none of {[h.stored.suffix for h in weight.held]} holds its values")
    for inverse, factor in factors:
        value = value / factor if inverse else value * factor
    return value.to(dtype)


def arranged(weight: Weight) -> Weight:
    """As it is: codes are looked up one by one."""
    return weight


def linear(x_TI: torch.Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """x_TI @ weight_OI.T -> y_TO in `out_dtype` (x's, if None), accumulated in fp32; x may have more leading axes."""
    out_dtype = out_dtype or x_TI.dtype
    if len(weight.tensors) == 1 and weight.tensors[0].dtype == x_TI.dtype == out_dtype:
        return torch_linear(x_TI, weight.plain)
    return torch_linear(x_TI.float(), dequantise(weight)).to(out_dtype)


def quantise_tokens(x_TI: torch.Tensor, group: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations as e4m3, with one scale for each `group` elements of a token.

    -> codes_TI, scales_TG fp32 with x = code * scale. A scale is the group's largest magnitude / 448, or 1.
    """
    tokens, columns = x_TI.shape
    groups = -(-columns // group)
    padded_TGI = torch.nn.functional.pad(x_TI.float(), (0, groups * group - columns)).view(tokens, groups, group)
    most_TG = padded_TGI.abs().amax(-1)
    scales_TG = torch.where(most_TG > 0, most_TG / E4M3_MAX, 1.0)
    codes_TI = (padded_TGI / scales_TG[..., None]).view(tokens, -1)[:, :columns].to(torch.float8_e4m3fn)
    return codes_TI, scales_TG


def activation_group(weight: Weight) -> int:
    """Elements under one activation scale: the weight's block of `in` on this rank, or 128 without one."""
    blocks = [held.block[-1] for held in weight.held if held.stored.role != "value" and held.block[-1]]
    return min((128, *blocks))


def linear_w8a8(x_TI: torch.Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """x_TI @ weight_OI.T with x rounded to e4m3 in groups, which costs some 2 % of accuracy: only where asked for."""
    codes_TI, scales_TG = quantise_tokens(x_TI, activation_group(weight))
    factors_TI = scales_TG.repeat_interleave(activation_group(weight), 1)[:, : x_TI.shape[1]]
    return torch_linear(codes_TI.float() * factors_TI, dequantise(weight)).to(out_dtype or x_TI.dtype)
