"""What penalised requests have said so far, kept on the device: no host value is needed to count a sampled token.

Legend: S slots, V vocabulary, P penalised rows of a step.
"""

from collections.abc import Sequence

import torch

from shardwise.engine.request import Request


def penalised(request: Request) -> bool:
    s = request.sampling
    return bool(s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1.0)


class TokenCounts:
    """For each request with penalties, which ids its prompt has and how often it generated each one.

    Slots are made as they are needed, so that a server nobody sends penalties to pays nothing.
    """

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}  # by the request's arrival
        self._free: list[int] = []
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None  # times generated, in prompt: int32, bool [S, V]

    def __len__(self) -> int:
        return len(self._slots)

    def slots(self, requests: Sequence[Request], like_LV: torch.Tensor) -> list[int]:
        """The slot of each of `requests`, filled from its prompt and output if it has none yet."""
        return [
            self._slots[r.arrival] if r.arrival in self._slots else self._fill(r, like_LV.shape[-1], like_LV.device)
            for r in requests
        ]

    def forget(self, request: Request) -> None:
        slot = self._slots.pop(request.arrival, None)
        if slot is not None:
            self._free.append(slot)

    def penalise(self, logits_PV: torch.Tensor, slots_P: torch.Tensor, factors_P3: torch.Tensor) -> torch.Tensor:
        """Repetition divides positive logits and multiplies negative ones, of all ids seen; then frequency is taken off
        once per time generated, and presence once. `factors`: presence, frequency, repetition of each row.
        """
        assert self._tables is not None
        generated_PV, in_prompt_PV = (table_SV[slots_P] for table_SV in self._tables)
        said_PV = generated_PV > 0
        seen_PV = said_PV | in_prompt_PV
        presence_P1, frequency_P1, repetition_P1 = factors_P3.split(1, dim=1)
        scaled_PV = torch.where(logits_PV > 0, logits_PV / repetition_P1, logits_PV * repetition_P1)
        logits_PV = torch.where(seen_PV, scaled_PV, logits_PV)
        return logits_PV - generated_PV * frequency_P1 - said_PV * presence_P1

    def record(self, slots_P: torch.Tensor, tokens_P: torch.Tensor) -> None:
        """Count one generated token for each of `slots`, all different; -1 counts for nothing."""
        assert self._tables is not None
        valid_P = (tokens_P >= 0).to(torch.int32)
        self._tables[0].index_put_((slots_P, tokens_P.clamp(min=0)), valid_P, accumulate=True)

    def _fill(self, request: Request, vocab: int, device: torch.device) -> int:
        if not self._free:
            self._grow(vocab, device)
        assert self._tables is not None
        generated_SV, in_prompt_SV = self._tables
        slot = self._slots[request.arrival] = self._free.pop()
        in_prompt_SV[slot].zero_()[torch.tensor(request.prompt, dtype=torch.int64, device=device)] = True
        output = torch.tensor(request.output, dtype=torch.int64, device=device)
        generated_SV[slot] = torch.bincount(output, minlength=vocab)
        return slot

    def _grow(self, vocab: int, device: torch.device) -> None:
        """Twice as many slots. What the old ones hold is copied."""
        old = 0 if self._tables is None else len(self._tables[0])
        new = max(4, 2 * old)
        tables = (
            torch.zeros(new, vocab, dtype=torch.int32, device=device),
            torch.zeros(new, vocab, dtype=torch.bool, device=device),
        )
        for table_SV, old_SV in zip(tables, self._tables or (), strict=False):
            table_SV[:old] = old_SV
        self._tables = tables
        self._free += range(new - 1, old - 1, -1)
