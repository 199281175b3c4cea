"""Pictures on the first rank: those of each request, and which features all ranks hold."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.config import VisionConfig
from shardwise.engine.messages import Picture
from shardwise.engine.plan import Chunk, Encode, Span
from shardwise.engine.positions import Place, Positions


class Pictures:
    """Those of one request, in the order of its prompt. Raises ValueError if they cannot stand there."""

    def __init__(self, pictures: Sequence[Picture], prompt_tokens: int, config: VisionConfig) -> None:
        merge = config.merge
        still_bytes = config.channels * config.patch_size**2
        for picture in pictures:
            patches, size = picture.height * picture.width, len(picture.pixels)
            if picture.height % merge or picture.width % merge or size not in (
                patches * still_bytes, patches * still_bytes * config.frames
            ):  # fmt: skip
                raise ValueError(f"{size} bytes for a picture of {picture.height} x {picture.width} patches")
        self.places = [Place(one.at, one.height // merge, one.width // merge) for one in pictures]
        ends = [0, *(place.end for place in self.places)]
        starts = [*(place.at for place in self.places), prompt_tokens]
        if any(start < end for end, start in zip(ends, starts, strict=True)):
            raise ValueError(f"pictures at {starts[:-1]} do not fit a prompt of {prompt_tokens} tokens")
        self.by_digest = {picture.digest: picture for picture in pictures}
        self.digests = [picture.digest for picture in pictures]
        self.positions = Positions(self.places)

    def shift(self, start: int) -> int:
        """What a chunk from `start` on, behind all pictures, adds to its places."""
        return self.positions.shift if start >= self.positions.end else 0

    def axes(self, start: int, stop: int) -> bytes:
        """The positions of a chunk that begins before the end of the last picture, as Chunk has them; else nothing."""
        return b"" if start >= self.positions.end else self.positions.of(start, stop).tobytes()

    def keys(self, prompt: Sequence[int]) -> list[int]:
        """`prompt` as the prefix cache compares it: in the place of a picture's tokens, which are all alike, negative
        numbers that are the same for equal pictures only."""
        keys = list(prompt)
        for place, digest in zip(self.places, self.digests, strict=True):
            words = np.frombuffer(digest, np.int32) | np.int32(-(1 << 31))
            keys[place.at : place.end] = np.resize(words, place.end - place.at).tolist()
        return keys

    def spans(self, start: int, stop: int) -> list[Span]:
        """Where the chunk start .. stop takes features instead of embeddings."""
        found: list[Span] = []
        for place, digest in zip(self.places, self.digests, strict=True):
            first, last = max(place.at, start), min(place.end, stop)
            if first < last:
                found.append(Span(digest, first - start, first - place.at, last - first))
        return found


@dataclass
class PictureCounts:
    """Since the engine began."""

    encoded: int = 0
    reused: int = 0  # pictures whose features were there when a request came to them


class PictureCache:
    """Which features the ranks hold: those a step needs, and the ones used last, up to `capacity_tokens` in all.

    Every rank does what the plans of the first one say, so only this one decides.
    """

    def __init__(self, config: VisionConfig, capacity_tokens: int) -> None:
        self.counts = PictureCounts()
        self._config, self._capacity_tokens = config, capacity_tokens
        self._held: OrderedDict[bytes, int] = OrderedDict()  # tokens; used last at the end

    @property
    def tokens(self) -> int:
        return sum(self._held.values())

    def step(self, work: Sequence[tuple[Pictures, Chunk]]) -> tuple[list[Encode], list[bytes]]:
        """What to encode for the spans of these chunks, and what to forget before that."""
        needed: dict[bytes, Picture] = {}
        for pictures, chunk in work:
            for span in chunk.spans:
                there = span.digest in self._held or span.digest in needed
                self.counts.reused += there and span.first == 0
                needed.setdefault(span.digest, pictures.by_digest[span.digest])
        missing = [picture for digest, picture in needed.items() if digest not in self._held]
        for digest, picture in needed.items():
            self._held[digest] = self._config.tokens(picture.height, picture.width)
            self._held.move_to_end(digest)
        self.counts.encoded += len(missing)
        forget: list[bytes] = []
        excess = self.tokens - self._capacity_tokens
        for digest in [digest for digest in self._held if digest not in needed]:
            if excess <= 0:
                break
            excess -= self._held.pop(digest)
            forget.append(digest)
        return [Encode(one.digest, one.height, one.width, one.pixels) for one in missing], forget
