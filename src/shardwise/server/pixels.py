"""Frames to patches, by the checkpoint's own processor. Pixels stay bytes: the ranks scale them.

Legend: F frames, H rows, W columns and C channels of pixels; T patches, P pixels of a patch's side.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shardwise.config import ConfigError, ServeConfig, VisionConfig, read_json
from shardwise.server.decode import Sampling

DIGEST_BYTES = 16


@dataclass(frozen=True)
class Pixels:
    """A still picture, or the frames of a video that share patches; sizes in patches."""

    height: int
    width: int
    data: bytes
    digest: bytes

    @classmethod
    def of(cls, height: int, width: int, patches: np.ndarray) -> "Pixels":
        data = np.ascontiguousarray(patches).tobytes()
        digest = hashlib.blake2b(data, digest_size=DIGEST_BYTES, person=f"{height}x{width}".encode()[:16]).digest()
        return cls(height, width, data, digest)


class Processor:
    """The checkpoint's image processor, with its size limit lowered to the server's; thread-safe."""

    def __init__(self, hf: Any, video: Mapping[str, Any], vision: VisionConfig, max_image_pixels: int) -> None:
        """hf: an image processor of transformers. video: video_preprocessor_config.json, or nothing."""
        self._hf, self._vision = hf, vision
        for name, ours in (
            ("patch_size", vision.patch_size),
            ("merge_size", vision.merge),
            ("temporal_patch_size", vision.frames),
        ):
            if getattr(hf, name, None) != ours:
                raise ConfigError(
                    f"preprocessor_config.json: {name} is {getattr(hf, name, None)}, and {ours} in config.json; "
                    "do they belong together? --vision off serves text without it"
                )
        self._size = _limits(dict(hf.size), max_image_pixels)
        # A video's limits are of all its frames together.
        self._clip_size = {"shortest_edge": 4096, "longest_edge": 25165824} | dict(video.get("size") or {})
        self._frame_pixels = max_image_pixels
        self._sampling = Sampling(
            float(video.get("fps") or 2), int(video.get("min_frames") or 4), int(video.get("max_frames") or 768)
        )

    @classmethod
    def load(cls, config: ServeConfig, vision: VisionConfig) -> "Processor":
        """From the checkpoint's folder. Raises ConfigError if it brings none that serves."""
        from transformers import AutoImageProcessor  # takes seconds to import

        folder = Path(config.model)
        if not (folder / "preprocessor_config.json").is_file():
            raise ConfigError(
                f"{folder / 'preprocessor_config.json'}: no such file; the checkpoint must bring its image processor, "
                "or be served with --vision off"
            )
        try:
            hf = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
        except Exception as error:
            raise ConfigError(f"{folder}: the image processor cannot be loaded ({error})") from error
        path = folder / "video_preprocessor_config.json"
        video = read_json(path) if path.exists() else {}
        means = tuple(video.get("image_mean", vision.pixel_mean)), tuple(video.get("image_std", vision.pixel_std))
        if means != (vision.pixel_mean, vision.pixel_std):
            raise ConfigError(f"{path}: videos are scaled otherwise than pictures, which is not served")
        return cls(hf, video, vision, config.max_image_pixels)

    def sampling(self, max_frames: int) -> Sampling:
        """Which frames of a video, and never more than `max_frames`."""
        ours = self._sampling
        most = max(1, min(ours.max_frames, max_frames))
        return Sampling(ours.frames_a_second, min(ours.min_frames, most), most)

    def still(self, image: Image.Image) -> Pixels:
        """A picture in RGB. Raises ValueError for one that the processor refuses."""
        made = self._hf([image], return_tensors="np", do_rescale=False, do_normalize=False, size=self._size)
        _, height, width = (int(value) for value in made["image_grid_thw"][0])
        vision = self._vision
        shape = (height * width, vision.channels, vision.frames, vision.patch_size**2)
        # Both frames of a still picture are the same, so one is sent.
        return Pixels.of(height, width, made["pixel_values"].reshape(shape)[:, :, 0].round().astype(np.uint8))

    def clip(self, frames: Sequence[Image.Image]) -> list[Pixels]:
        """The frames of a video, RGB and of one size, `vision.frames` to a patch; the last is repeated to fill it."""
        vision = self._vision
        edge = vision.patch_size * vision.merge
        width, height = frames[0].size
        height, width = clip_size(
            len(frames), height, width, edge, vision.frames,
            self._clip_size["shortest_edge"], min(self._clip_size["longest_edge"], self._frame_pixels * len(frames)),
        )  # fmt: skip
        bicubic = Image.Resampling.BICUBIC
        resized = [np.asarray(frame.resize((width, height), bicubic)) for frame in frames]
        resized += [resized[-1]] * (-len(resized) % vision.frames)
        return [
            Pixels.of(height // vision.patch_size, width // vision.patch_size, self._patches(np.stack(part)))
            for part in (resized[i : i + vision.frames] for i in range(0, len(resized), vision.frames))
        ]

    def _patches(self, pixels_FHWC: np.ndarray) -> np.ndarray:
        """[T, C * F * P * P], merge x merge blocks of patches one after the other."""
        frames, height, width, channels = pixels_FHWC.shape
        size, merge = self._vision.patch_size, self._vision.merge
        rows, columns = height // size // merge, width // size // merge
        blocks = pixels_FHWC.reshape(frames, rows, merge, size, columns, merge, size, channels)
        return blocks.transpose(1, 4, 2, 5, 7, 0, 3, 6).reshape(rows * columns * merge**2, -1)


def _limits(size: Mapping[str, Any], max_image_pixels: int) -> dict[str, int]:
    """Least and most pixels of a picture."""
    least, most = size.get("shortest_edge"), size.get("longest_edge")
    if not least or not most:
        raise ConfigError(f"preprocessor_config.json: size is {dict(size)}; shortest_edge and longest_edge are needed")
    most = min(int(most), max_image_pixels)
    return {"shortest_edge": min(int(least), most), "longest_edge": most}


def clip_size(
    frames: int, height: int, width: int, edge: int, frame_step: int, least: int, most: int
) -> tuple[int, int]:
    """Height and width of the frames of a video: multiples of `edge`, with least .. most pixels in all frames."""
    if min(height, width) < edge:
        grow = edge / min(height, width)
        height, width = int(height * grow), int(width * grow)
    tall, wide = (max(edge, round(side / edge) * edge) for side in (height, width))
    counted = max(frame_step, round(frames / frame_step) * frame_step)
    if counted * tall * wide > most:
        shrink = math.sqrt(frames * height * width / most)
        return tuple(max(edge, math.floor(side / shrink / edge) * edge) for side in (height, width))  # pyright: ignore
    if counted * tall * wide < least:
        grow = math.sqrt(least / (frames * height * width))
        return tuple(math.ceil(side * grow / edge) * edge for side in (height, width))  # pyright: ignore
    return tall, wide
