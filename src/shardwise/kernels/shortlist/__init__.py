"""Logits of those tokens alone that can be among the likeliest: exact, by half the reads of a plain head."""
