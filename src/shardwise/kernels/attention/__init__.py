"""Causal attention over paged keys and values, and what stores them."""
