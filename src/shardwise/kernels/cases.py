"""What a module of Triton kernels says of itself, so that every configuration can be compiled without a GPU."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class CompileCase(NamedTuple):
    """One way in which a kernel is launched. Plain tuples in this order serve, too.

    signature: the type of each argument by its name, as Triton writes them ("*bf16", "i32", "fp32", "constexpr").
    shared_bytes: shared memory per block of the cards that are given this one; 0: all cards.
    """

    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int
    shared_bytes: int = 0


def signature(kernel: Any, constexprs: Mapping[str, Any], types: Mapping[str, str]) -> dict[str, str]:
    """The types of all arguments of `kernel`: those in `types`, the constexprs, and i32 for the others."""
    return {name: "constexpr" if name in constexprs else types.get(name, "i32") for name in kernel.arg_names}
