"""Made-up weights in seconds, for measurements: experts that are stored one by one share a few contents.

A quantised checkpoint of 35B-A3B has some 100,000 tensors of experts, and each takes a GPU a quarter of a millisecond
to make up, however small it is. Every expert still has memory of its own, so that a step reads what it would read.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from shardwise.checkpoint.synth import DummySource

CONTENTS = 8
PLACE = re.compile(r"\blayers\.\d+\.(.*\bexperts)\.(\d+)\.")


class AlikeSource(DummySource):
    """As DummySource, with `contents` different experts, the same in all layers."""

    contents = CONTENTS
    _known: dict[str, torch.Tensor]

    def read(self, name: str, src: tuple[slice, ...]) -> torch.Tensor:
        if not PLACE.search(name):
            return super().read(name, src)
        known = self.__dict__.setdefault("_known", {})
        key = PLACE.sub(lambda found: f"{found[1]}.{int(found[2]) % self.contents}.", name)
        if key not in known:
            known[key] = super().read(name, tuple(slice(0, size) for size in self.info(name).shape))
        return known[key][src] if src else known[key]


@contextmanager
def alike() -> Iterator[None]:
    """Engines that are built meanwhile make up their weights so."""
    with mock.patch("shardwise.engine.build.DummySource", AlikeSource):
        yield
