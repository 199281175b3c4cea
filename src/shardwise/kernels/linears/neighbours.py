"""Plain weights of one input that lie one behind another in memory: to the vendor's product they are one weight.

Legend: T tokens, H hidden (columns of the weights).
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import linear as torch_linear

from shardwise.checkpoint.weight import Weight


def adjoin(weights: Sequence[Weight]) -> None:
    """Moves plain weights of one type and width to one place, in order, in place; leaves others where they are.

    The memory that they had goes back to the device at once: what an allocator keeps of all layers is much, and a size
    that the next one has no use for.
    """
    tensors = [weight.tensors[0] for weight in weights]
    kinds = {(tensor.dtype, tensor.device, tensor.shape[1:]) for tensor in tensors}
    alone = all(len(weight.tensors) == 1 and weight.tensors[0].shape == weight.shape for weight in weights)
    if len(tensors) < 2 or not alone or len(kinds) > 1 or not all(tensor.numel() for tensor in tensors):
        return
    parts = torch.cat(tensors).split([len(tensor) for tensor in tensors])
    for weight, tensor, part in zip(weights, tensors, parts, strict=True):
        tensor.data = part
        weight.views.clear()  # of where it was
    if tensors[0].is_cuda:
        torch.cuda.empty_cache()


def together(weights: Sequence[Weight], dtype: torch.dtype) -> list[int]:
    """Rows of the first weights, as many as are plain, of `dtype` and width, and lie one behind another."""
    rows = list[int]()
    for weight in weights:
        tensor = weight.tensors[0]
        alike = len(weight.tensors) == 1 and tensor.dtype == dtype and tensor.is_contiguous() and len(tensor)
        if not alike or tensor.shape[1:] != weights[0].shape[1:]:
            break
        if rows and not _follows(tensor, weights[0].tensors[0], sum(rows) * tensor.shape[1]):
            break
        rows.append(len(tensor))
    return rows


def product(x_TH: torch.Tensor, weights: Sequence[Weight], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """The outputs of the first weights, as many as are neighbours, as slices of wider rows; none if they are not.

    Weights and outputs are of x's type.
    """
    rows = together(weights, x_TH.dtype)
    rows = rows[: next((n for n, dtype in enumerate(dtypes) if dtype != x_TH.dtype), len(dtypes))]
    if len(rows) < 2:
        return []
    width = x_TH.shape[1]
    return list(torch_linear(x_TH, weights[0].tensors[0].as_strided((sum(rows), width), (width, 1))).split(rows, -1))


def _follows(tensor: torch.Tensor, first: torch.Tensor, elements: int) -> bool:
    """Whether it begins so many elements behind `first`, in one piece of memory: others may lie there by chance."""
    together = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    return together and tensor.storage_offset() == first.storage_offset() + elements
