"""Sums and gathers over ranks that write into one another's memory: one launch each, with a norm or without."""
