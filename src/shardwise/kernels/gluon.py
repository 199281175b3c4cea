"""Operations of Gluon that Triton 3.6 and 3.9 know by different names."""

# pyright: reportAttributeAccessIssue=false

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

all_wait = getattr(gl, "barrier", None) or gl.thread_barrier
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
