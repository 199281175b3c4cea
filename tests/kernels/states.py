"""Made-up steps for tests of ops with a state per request: rows out of order, and NaN in those that start from zero."""

import torch

from shardwise.kernels.sequences import Sequences
from tests.kernels.sequences import make_sequences

ROWS = 12


def make_steps(contexts: list[int], queries: list[int], device: torch.device) -> Sequences:
    """Sequences whose state rows go down from ROWS - 1."""
    seqs = make_sequences(contexts, queries, 16, device)
    rows_S = torch.arange(ROWS - 1, ROWS - 1 - len(queries), -1, dtype=torch.int32, device=device)
    return Sequences(
        seqs.starts_S1,
        seqs.context_S,
        rows_S,
        seqs.pages_SP,
        seqs.kv_slots_T,
        seqs.decodes,
        seqs.max_query,
        seqs.max_length,
    )


def poison_fresh(state: torch.Tensor, seqs: Sequences) -> torch.Tensor:
    """NaN in the rows of sequences without context, as a request before may have left them, and in the padding row."""
    state[seqs.state_rows_S[seqs.context_S == 0].long()] = float("nan")
    state[0] = float("nan")
    return state
