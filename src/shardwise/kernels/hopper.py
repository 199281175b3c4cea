"""What kernels that are for NVIDIA's Hopper alone are chosen by."""

import torch

CAPABILITY, SHARED_KIB = (9, 0), 227  # SHARED_KIB: the most that a program can have


def is_hopper(device: torch.device) -> bool:
    """Whether `device` is of that kind."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) == CAPABILITY
