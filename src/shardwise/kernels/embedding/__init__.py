"""Rows of the embedding table, of which a rank holds some."""
