"""Positions of a prompt with pictures: time, height and width of each token, as the family counts them.

Text counts on by one on all three axes. The tokens of a picture share one time; its rows and columns count from there,
and the text behind it goes on after the longer side. So behind the last picture a position is the token's place plus
one number, the shift.

Legend: T tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Place(NamedTuple):
    """A picture of height x width tokens, the first of which is token `at` of the prompt."""

    at: int
    height: int
    width: int

    @property
    def end(self) -> int:
        return self.at + self.height * self.width


class Positions:
    """Of one request. places: in order, none reaching into the next."""

    def __init__(self, places: Sequence[Place]) -> None:
        parts: list[np.ndarray] = []
        place, position = 0, 0
        for picture in places:
            text = picture.at - place
            parts.append(np.broadcast_to(np.arange(text) + position, (3, text)))
            position += text
            rows, columns = np.divmod(np.arange(picture.height * picture.width), picture.width)
            parts.append(np.stack((np.zeros_like(rows), rows, columns)) + position)
            position += max(picture.height, picture.width)
            place = picture.end
        self.until_3T = np.concatenate(parts, 1).astype(np.int32) if parts else np.zeros((3, 0), np.int32)
        self.shift = position - place

    @property
    def end(self) -> int:
        """The place behind the last picture."""
        return self.until_3T.shape[1]

    def of(self, start: int, stop: int) -> np.ndarray:
        """int32 [3, stop - start]."""
        behind = np.arange(max(start, self.end), max(stop, self.end), dtype=np.int32) + np.int32(self.shift)
        return np.concatenate((self.until_3T[:, start:stop], np.broadcast_to(behind, (3, len(behind)))), 1)
