"""Pictures and videos of chat requests: read, decoded and cut into patches in threads, and put into the prompt."""

import asyncio
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.config import ServeConfig, VisionConfig
from shardwise.engine.messages import Picture
from shardwise.server.decode import MediaError, picture, reading, video
from shardwise.server.errors import ApiError, invalid
from shardwise.server.fetch import Fetcher
from shardwise.server.messages import MediaPart
from shardwise.server.pixels import Pixels, Processor
from shardwise.server.tokenizer import Tokenizer

THREADS = max(1, min(4, (os.cpu_count() or 1) - 1))  # a core is left to the event loop


@dataclass(frozen=True)
class Loaded:
    """A picture, or a video with the time of each of its `parts` in seconds."""

    kind: Literal["image", "video"]
    parts: list[Pixels]
    seconds: list[float]


class Media:
    """What an app knows of pictures. Belongs to one event loop."""

    def __init__(self, config: ServeConfig, vision: VisionConfig, processor: Processor) -> None:
        self._vision, self._processor, self._max_images = vision, processor, config.max_images
        self._fetcher = Fetcher(config)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="pictures")

    @classmethod
    def load_processor(cls, config: ServeConfig, vision: VisionConfig) -> "Media":
        """With the checkpoint's processor. Raises ConfigError."""
        return cls(config, vision, Processor.load(config, vision))

    def close(self) -> None:
        """Let the threads go."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    async def load(self, parts: Sequence[MediaPart]) -> list[Loaded]:
        """What the parts hold, in their order. Raises ApiError (400) that names the part and the reason."""
        stills = sum(part.kind == "image" for part in parts)
        if len(parts) > self._max_images:
            raise invalid(
                f"messages: {len(parts)} pictures and videos; at most {self._max_images} (--max-images)", "messages"
            )
        videos = len(parts) - stills
        frames = (self._max_images - stills) // videos * self._vision.frames if videos else 0
        tasks = [asyncio.create_task(self._load(part, frames)) for part in parts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _load(self, part: MediaPart, max_frames: int) -> Loaded:
        try:
            data = await self._fetcher.read(part.url, part.kind, self._in_thread)
            return await self._in_thread(self._prepare, part.kind, data, max_frames)
        except MediaError as error:
            raise invalid(f"{part.where}: {error}", part.where) from None

    def _prepare(self, kind: Literal["image", "video"], data: bytes, max_frames: int) -> Loaded:
        if kind == "image":
            image = picture(data)
            with reading("picture"):
                return Loaded(kind, [self._processor.still(image)], [])
        clip = video(data, self._processor.sampling(max_frames))
        step = self._vision.frames
        seconds = [*clip.seconds, *[clip.seconds[-1]] * (-len(clip.seconds) % step)]
        middles = [(seconds[i] + seconds[i + step - 1]) / 2 for i in range(0, len(seconds), step)]
        with reading("video"):
            return Loaded(kind, self._processor.clip(clip.frames), middles)

    def prompt(self, tokenizer: Tokenizer, text: str, loaded: Sequence[Loaded]) -> tuple[list[int], list[Picture]]:
        """Token ids of the rendered chat, with as many placeholders as each picture has tokens, and the pictures.

        Raises ApiError if the text has other placeholders than those of the parts.
        """
        vision = self._vision
        start, video_pad, end = (
            re.escape(tokenizer.token_bytes(token).decode())
            for token in (vision.start_token, vision.video_token, vision.end_token)
        )
        videos = [one for one in loaded if one.kind == "video"]
        pieces = re.split(f"(?:{start})?{video_pad}(?:{end})?", text)
        if len(pieces) != len(videos) + 1:
            raise _misplaced()
        text = pieces[0] + "".join(
            self._frames(tokenizer, one) + rest for one, rest in zip(videos, pieces[1:], strict=True)
        )
        queues = {
            vision.image_token: [part for one in loaded if one.kind == "image" for part in one.parts][::-1],
            vision.video_token: [part for one in videos for part in one.parts][::-1],
        }
        ids, pictures = list[int](), list[Picture]()
        for token in tokenizer.encode(text):
            if token not in queues:
                ids.append(token)
                continue
            if not queues[token]:
                raise _misplaced()
            part = queues[token].pop()
            pictures.append(Picture("", len(ids), part.height, part.width, part.digest, part.data))
            ids += [token] * vision.tokens(part.height, part.width)
        if any(queues.values()):
            raise _misplaced()
        return ids, pictures

    def _frames(self, tokenizer: Tokenizer, one: Loaded) -> str:
        """What stands for a video: the time of each pair of frames, and a placeholder between its borders."""
        vision = self._vision
        tokens = (vision.start_token, vision.video_token, vision.end_token)
        pad = "".join(tokenizer.token_bytes(token).decode() for token in tokens)
        return "".join(f"<{second:.1f} seconds>{pad}" for second in one.seconds)


def _misplaced() -> ApiError:
    return invalid(
        "messages: the prompt has other placeholders than one for each picture and video; no text may contain them, "
        "and the chat template must take pictures where they are",
        "messages",
    )
