"""Rotary embeddings: the table of a model, cosines and sines of a step, the rotation fused with head norms."""

from shardwise.kernels.rope.reference import RopeTable, cos_sin, rope_table

__all__ = ["RopeTable", "cos_sin", "rope_table"]
