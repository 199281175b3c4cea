"""Answers that are kept, so that the next request can name one instead of sending all turns again."""

from collections import OrderedDict
from typing import Any

import msgspec

MAX_ENTRIES = 4096
MAX_BYTES = 256 * 2**20


class Kept(msgspec.Struct, frozen=True):
    """messages: the conversation up to and with the answer, without instructions. response: the answer's body."""

    messages: list[dict[str, Any]]
    response: dict[str, Any]


class ResponseStore:
    """The answers used last, in this process's memory; the oldest go first."""

    def __init__(self, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._entries: OrderedDict[str, bytes] = OrderedDict()  # as JSON, which is a fraction of the objects' size
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, response_id: str, kept: Kept) -> None:
        """Keep an answer. One that is larger than the whole store is not kept."""
        self.delete(response_id)
        data = msgspec.json.encode(kept)
        if len(data) > self._max_bytes:
            return
        self._entries[response_id] = data
        self.size_bytes += len(data)
        while len(self._entries) > self._max_entries or self.size_bytes > self._max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self.size_bytes -= len(dropped)

    def get(self, response_id: str) -> Kept | None:
        data = self._entries.get(response_id)
        if data is None:
            return None
        self._entries.move_to_end(response_id)
        return msgspec.json.decode(data, type=Kept)

    def delete(self, response_id: str) -> bool:
        """Whether it was there."""
        data = self._entries.pop(response_id, None)
        self.size_bytes -= len(data or b"")
        return data is not None
