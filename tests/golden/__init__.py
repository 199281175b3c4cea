"""The oracle: transformers in fp32, its checkpoints and its answers."""
