"""The sequences of one step, as kernels see them: tensors of one device, no host values that a kernel would wait for.

Legend: T tokens of the step, S sequences, P pages of the longest, R rows of state.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sequences:
    """T tokens of S sequences, laid end to end; sequence s has rows starts[s] .. starts[s + 1].

    The first `decodes` sequences have exactly one token each; the others are chunks of prompts, of any length,
    none in graphs.
    Padding (for fixed shapes in a graph) is a sequence of one token with state_rows 0 and kv_slots 0: row 0 and page 0
    are never given to a request.
    """

    starts_S1: torch.Tensor  # int32 [S + 1]
    context_S: torch.Tensor  # int32 [S]: tokens of the sequence that are in the caches already
    state_rows_S: (
        torch.Tensor
    )  # int32 [S]: row of conv and delta state; a context of 0 starts from zeros, whatever is there
    pages_SP: torch.Tensor  # int32 [S, P]: page of each page_tokens positions; entries past the length are any
    kv_slots_T: torch.Tensor  # int64 [T]: page * page_tokens + offset, where this token's keys and values go
    decodes: int
    max_query: int  # most tokens of one sequence in this step (host number, for launch grids)
    max_length: int  # most tokens of one sequence, context and step together (host number)

    @property
    def count(self) -> int:
        return self.context_S.shape[0]
