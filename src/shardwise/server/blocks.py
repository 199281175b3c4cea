"""An answer as blocks, one after the other: a thought, a text, a call. So the newer APIs stream it."""

import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shardwise.server.generation import Piece, merge

Kind = Literal["thinking", "text", "call"]


@dataclass
class Block:
    """text: of a call, its arguments as JSON. complete: false for a call that was cut."""

    index: int
    kind: Kind
    text: str = ""
    id: str = ""
    name: str = ""
    complete: bool = True


@dataclass(frozen=True)
class BlockEvent:
    """A block starts, grows by `text`, or stops."""

    what: Literal["start", "delta", "stop"]
    block: Block
    text: str = ""


class Blocks:
    """Makes blocks of the pieces of one answer. `last`: the latest piece, which knows how the answer ended."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.last = Piece(index=0)
        self._open: Block | None = None
        self._call = -1

    def add(self, piece: Piece) -> Iterator[BlockEvent]:
        """What `piece` means for the blocks."""
        self.last = piece
        for kind, text in (("thinking", piece.reasoning), ("text", piece.text)):
            if text:
                if self._open is None or self._open.kind != kind:
                    yield from self._start(Block(len(self.blocks), kind))  # pyright: ignore[reportArgumentType]
                yield from self._grow(text)
        for call in piece.calls:
            if call.index != self._call:
                self._call = call.index
                block = Block(len(self.blocks), "call", id=call.id or "", name=call.name or "", complete=False)
                yield from self._start(block)
            if call.arguments:
                yield from self._grow(call.arguments)
            if call.done and self._open is not None:
                self._open.complete = True
        if piece.finish_reason is not None:
            yield from self._stop()

    def _start(self, block: Block) -> Iterator[BlockEvent]:
        yield from self._stop()
        self._open = block
        self.blocks.append(block)
        yield BlockEvent("start", block)

    def _grow(self, text: str) -> Iterator[BlockEvent]:
        assert self._open is not None
        self._open.text += text
        yield BlockEvent("delta", self._open, text)

    def _stop(self) -> Iterator[BlockEvent]:
        if self._open is not None:
            yield BlockEvent("stop", self._open)
        self._open = None


async def whole(streams: Sequence[AsyncGenerator[Piece, None]]) -> Blocks:
    """The one answer of `streams`, to its end."""
    blocks = Blocks()
    async with contextlib.aclosing(merge(streams)) as pieces:
        async for piece in pieces:
            for _ in blocks.add(piece):
                pass
    return blocks
