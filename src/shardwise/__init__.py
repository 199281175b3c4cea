"""Shardwise: tensor-parallel serving of the Qwen3.5 / Qwen3.6 family over any number of GPUs, equal or not."""
