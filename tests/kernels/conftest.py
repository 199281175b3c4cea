"""What tests of kernels share."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """A GPU if there is one; else the CPU, where Triton's kernels are interpreted."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
