"""Several linear layers of one input, after the norm of it: one launch where a few tokens stream the weights."""

from shardwise.kernels.linears.reference import Conv

__all__ = ["Conv"]
