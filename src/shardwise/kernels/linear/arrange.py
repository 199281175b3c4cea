"""NVFP4 codes of expert banks in the order that is cheapest to unpack, moved once where weights are loaded.

A word has eight codes of sign and three bits, the lowest first. Its halves have four each, and their bits lie so that
few instructions bring two codes, one of each half, to the places of bf16: sign to 15, the rest to 8 .. 6. Of a half:

    bit   15  14  13  12  11 10  9   8  7  6   5  4  3   2  1  0
    code  0   2   3   1   3          0         1         2
          s   s   s   s   rest       rest      rest      rest

Code 0 is in place, code 1 three bits below; the other two take their signs from elsewhere. 15 instructions for a word,
of which the unit of logic has 7; 19 and 10 as they are stored.
"""

from dataclasses import replace

import torch

from shardwise.checkpoint.weight import Weight

# From where a code is stored, by a shift to the left, to where it is kept: the shift, and a half's bits there.
MOVES = ((6, 0x01C0), (12, 0x8000), (-1, 0x0038), (5, 0x1000), (-8, 0x0007), (3, 0x4000), (-3, 0x0E00), (-2, 0x2000))
CHUNK_WORDS = 1 << 25  # that are moved at a time, for what it takes meanwhile


def _both(half: int) -> int:
    """A half's bits in both halves of a word, as an int32."""
    bits = half << 16 | half
    return bits - (1 << 32) if bits >> 31 else bits


def _shifted(words: torch.Tensor, left: int) -> torch.Tensor:
    return words << left if left >= 0 else words >> -left


def moved(words: torch.Tensor) -> torch.Tensor:
    """Words of int32 as stored -> as kept."""
    return sum((_shifted(words, left) & _both(half) for left, half in MOVES), torch.zeros_like(words))


def as_stored(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `moved`."""
    found = torch.zeros_like(words)
    for left, half in MOVES:
        source = half >> left if left >= 0 else half << -left
        found |= _shifted(words, -left) & _both(source)
    return found


def arranged(weight: Weight) -> Weight:
    """`weight` with the codes of its only packed tensor moved, in place: what was given is then no longer of use."""
    (values,) = (tensor for held, tensor in zip(weight.held, weight.tensors, strict=True) if held.stored.packed)
    flat = values.view(-1).view(torch.int32)
    for part in flat.split(CHUNK_WORDS):
        part.copy_(moved(part))
    return replace(weight, moved=True, views={})
