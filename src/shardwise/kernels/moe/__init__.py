"""Routed experts: the choice of experts, and their weighted sum over banks of any format."""
