"""What tests of kernels share: the device they run on, and memory that is poisoned before it is written."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """A GPU if there is one; else kernels are interpreted."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tensors of torch.empty and its kin hold NaN (or a large integer), so that what is not written shows."""

    def poison(make):
        def made(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(float("nan") if x.is_floating_point() else 77)

        return made

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
