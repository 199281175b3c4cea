"""Queries and keys normed and turned, and keys and values to their pages, as one operation."""
