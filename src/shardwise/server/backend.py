"""What the server needs of an engine. `shardwise.engine.client.EngineClient` is the real one; tests bring their own."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from shardwise.engine.messages import CacheResized, Picture, Ready, SamplingParams, Stats, Tokens


class Engine(Protocol):
    """ready: the running engine's limits, None while it (re)starts. stats: its latest figures.

    draining: it finishes what runs and takes nothing new.
    """

    @property
    def ready(self) -> Ready | None: ...

    @property
    def stats(self) -> Stats | None: ...

    @property
    def draining(self) -> bool: ...

    async def resize(self, request_id: str, expert_slots: int = 0, kv_tokens: int = 0) -> CacheResized:
        """Move memory between KV cache and slots of experts, to so many of either. Raises EngineFailed."""
        ...

    def generate(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        priority: int = 0,
        pictures: Sequence[Picture] = (),
    ) -> AsyncGenerator[Tokens, None]:
        """New tokens as they come; the last message has a finish_reason.

        Raises RequestRefused or EngineFailed (shardwise.engine.client), at the first step or later. Closing the
        generator, or cancelling its task, cancels the request.
        """
        ...
