"""Features of pictures on one rank: encoded, kept and forgotten as the plans say, and given to chunks.

Legend: F rows that take a feature, O hidden of the text model.
"""

from collections.abc import Sequence

import torch

from shardwise.engine.plan import Chunk, StepPlan
from shardwise.models.vision import Picture, Tower


class Features:
    """What every rank holds is the same, whole: [tokens, O] by picture."""

    def __init__(self, tower: Tower) -> None:
        self.tower = tower
        self.held: dict[bytes, torch.Tensor] = {}

    @torch.inference_mode()
    def update(self, plan: StepPlan) -> None:
        """Forget and encode what `plan` says; all ranks at the same time."""
        for digest in plan.forget:
            del self.held[digest]
        if not plan.encode:
            return
        pictures = [
            Picture(one.height, one.width, torch.frombuffer(bytearray(one.pixels), dtype=torch.uint8))
            for one in plan.encode
        ]
        pictures = [one._replace(pixels=one.pixels.view(one.height * one.width, -1)) for one in pictures]
        for one, tokens_XO in zip(plan.encode, self.tower(pictures), strict=True):
            self.held[one.digest] = tokens_XO.clone()  # of its own: others of its batch are forgotten before it

    def of(self, chunks: Sequence[Chunk]) -> torch.Tensor | None:
        """The features for the spans of `chunks`, in their order; None if there are none."""
        spans = [span for chunk in chunks for span in chunk.spans]
        if not spans:
            return None
        return torch.cat([self.held[span.digest][span.first : span.first + span.count] for span in spans])
