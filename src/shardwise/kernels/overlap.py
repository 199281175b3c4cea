"""Programmatic dependent launch (sm_90 and up): a kernel starts while the one before it ends.

Every program of such a kernel must wait before it touches memory that an earlier kernel writes, or still reads. As all
do so first of all, a kernel that is done has seen everything before it done.
"""

from typing import Any

import torch
import triton
import triton.language as tl

CAPABILITY = (9, 0)


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Let the next kernel come, and wait until the previous one is done; nothing without PDL."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # pyright: ignore[reportAttributeAccessIssue]
        tl.extra.cuda.gdc_wait()  # pyright: ignore[reportAttributeAccessIssue]


def launch(pdl: bool) -> dict[str, Any]:
    """Arguments of a launch."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


def can_overlap(device: torch.device) -> bool:
    """Whether `device` has it."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= CAPABILITY
