"""Choosing tokens from whole rows of logits: the likeliest, or at random."""
