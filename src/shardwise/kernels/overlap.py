"""Programmatic dependent launch (sm_90 and up): a kernel starts while the one before it ends.

Such a kernel asks for its weights first, so that they are on their way while the kernel before it ends; then it waits.
Only weights may be read before, and what the host wrote for the step: where the step's first kernel takes that over, no
other starts before it is there (see begin/triton.py). Nothing else that a kernel of a step writes. Every program waits
before it is done, whether it reads anything or not: a kernel that is done has seen everything before it done.

What a processor has beside its registers is shared memory and first-level cache in one, parted anew only when nothing
runs on it: where kernels overlap, those that read through the cache keep what others with much shared memory left. So
one in front of them may have to start without overlap (see moe/triton.py, attention/decode.py).
"""

from typing import Any

import torch
import triton
import triton.language as tl

CAPABILITY = (9, 0)


@triton.jit
def let_next_come(PDL: tl.constexpr):
    """Let the next kernel start, as far as there is room for it; nothing without PDL.

    After after_previous, it also tells the next kernel that all before this one is done.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # pyright: ignore[reportAttributeAccessIssue]


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Wait until the previous kernel is done, and all before it; nothing without PDL."""
    if PDL:
        tl.extra.cuda.gdc_wait()  # pyright: ignore[reportAttributeAccessIssue]


@triton.jit
def ask_for(address):
    """Have the lines of 128 bytes at these addresses (int64) brought to the second-level cache. Only with PDL."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


def launch(pdl: bool, registers: int = 0) -> dict[str, Any]:
    """Arguments of a launch.

    registers: the most of a thread. 0: no limit, nor a word of it, for ROCm's compiler does not know the option.
    """
    limit = {"maxnreg": registers} if registers else {}
    return ({"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}) | limit


def can_overlap(device: torch.device) -> bool:
    """Whether `device` has it."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= CAPABILITY
