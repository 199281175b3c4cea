"""Memory that torch leaves as it is, made visibly wrong: NaN instead of whatever was there, which is often zero."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
        tensor.detach().fill_(float("nan"))
    elif tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        tensor.detach().view(torch.uint8).fill_(0x7F)  # NaN in both
    return tensor


def _poison(fn: Any) -> Any:
    @wraps(fn)
    def poisoned_fn(*args: Any, **kwargs: Any) -> torch.Tensor:
        return _filled(fn(*args, **kwargs))

    return poisoned_fn


@contextmanager
def poisoned() -> Iterator[None]:
    """Within, torch.empty, its _like and _strided, and Tensor.new_empty and its _strided give floats that are NaN."""
    places = [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided")]
    places += [(torch.Tensor, "new_empty"), (torch.Tensor, "new_empty_strided")]
    patches = [mock.patch.object(owner, name, _poison(getattr(owner, name))) for owner, name in places]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in reversed(patches):
            patch.stop()
