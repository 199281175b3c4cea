"""Files of pictures and videos to frames in RGB. Whatever somebody sends ends as a picture or as a MediaError.

Pillow reads pictures, GIF and WebP, and the frames of their animations; other videos need PyAV (`av`), if installed.
"""

import io
import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageOps

FORMATS = (
    "PNG",
    "JPEG",
    "WEBP",
    "GIF",
    "BMP",
    "TIFF",
    "PPM",
    "AVIF",
    "MPO",
)  # what Pillow may try: others run programs
MAX_SOURCE_PIXELS = 1 << 26  # of one picture: what its file holds, before it is scaled down
MAX_VIDEO_PIXELS = 1 << 32  # of all frames of one video
MAX_ASPECT = 200


class MediaError(ValueError):
    """What was sent cannot be used as a picture or a video; the message says why, for the client."""


@dataclass(frozen=True)
class Clip:
    """Frames of a video, and the second that each was taken at."""

    frames: list[Image.Image]
    seconds: list[float]


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Everything that a decoder can raise, as MediaError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except MediaError:
            raise
        except Image.DecompressionBombError:
            raise MediaError(f"the {what} has more than {MAX_SOURCE_PIXELS:,} pixels") from None
        except Image.UnidentifiedImageError:
            raise MediaError(f"the {what} is in no known format; known: {', '.join(FORMATS[:-1])}") from None
        except MemoryError:
            raise MediaError(f"the {what} needs too much memory") from None
        except Exception as error:  # decoders raise whatever their formats make them stumble on
            raise MediaError(f"the {what} cannot be read: {str(error)[:200] or type(error).__name__}") from None


def opened(data: bytes, what: str) -> Image.Image:
    """The file's header read and its size checked; pixels are not decoded yet."""
    if not data:
        raise MediaError(f"the {what} is empty")
    image = Image.open(io.BytesIO(data), formats=[name for name in FORMATS if name in _known()])
    width, height = image.size
    if width < 1 or height < 1:
        raise MediaError(f"the {what} is {width} x {height} pixels, which is nothing")
    if width * height > MAX_SOURCE_PIXELS:
        raise MediaError(f"the {what} is {width} x {height} pixels; at most {MAX_SOURCE_PIXELS:,} are read")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise MediaError(f"the {what} is {width} x {height} pixels; one side is over {MAX_ASPECT} times the other")
    return image


def _known() -> set[str]:
    Image.init()
    return set(Image.OPEN)


def picture(data: bytes) -> Image.Image:
    """The picture in `data`, or the first of an animation, upright and in RGB. Raises MediaError."""
    with reading("picture"):
        image = opened(data, "picture")
        image.load()
        return rgb(ImageOps.exif_transpose(image))


def rgb(image: Image.Image) -> Image.Image:
    """`image` in RGB; what is transparent shows white, and 16 bits become 8."""
    if image.mode in ("I", "I;16", "I;16L", "I;16B", "I;16N"):
        values = np.asarray(image).astype(np.int64)
        values = values // 257 if values.max(initial=0) > 255 else values
        return Image.fromarray(values.clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise MediaError("the picture has floating-point pixels, whose range nobody knows; send 8 or 16 bits")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(ground, image).convert("RGB")
    return image.convert("RGB")


@dataclass(frozen=True)
class Sampling:
    """How many frames of a video are looked at, as the checkpoint's processor says."""

    frames_a_second: float
    min_frames: int
    max_frames: int

    def indices(self, count: int, seconds: float) -> list[int]:
        """Which of `count` frames, evenly from the first to the last; at least the two that share a patch."""
        wanted = int(seconds * self.frames_a_second)
        wanted = min(max(wanted, self.min_frames), self.max_frames, count)
        return np.linspace(0, count - 1, max(wanted, 1)).round().astype(int).tolist()


def video(data: bytes, sampling: Sampling) -> Clip:
    """Frames of the video in `data`: an animated picture, or what PyAV reads. Raises MediaError."""
    with reading("video"):
        try:
            image = opened(data, "video")
        except Image.UnidentifiedImageError:
            return _film(data, sampling)
        return _animation(image, sampling)


def _check_length(count: int, width: int, height: int) -> None:
    if count * width * height > MAX_VIDEO_PIXELS:
        raise MediaError(
            f"the video has {count} frames of {width} x {height} pixels; at most {MAX_VIDEO_PIXELS:,} pixels are read"
        )


def _animation(image: Image.Image, sampling: Sampling) -> Clip:
    count = getattr(image, "n_frames", 1)
    _check_length(count, *image.size)
    durations_s: list[float] = []
    for i in range(count):
        image.seek(i)
        if image.format == "WEBP":  # tells how long a frame stays only with its pixels
            image.load()
        durations_s.append(max(float(image.info.get("duration") or 0), 0.0) / 1000 or 0.1)
    starts_s = [0.0, *itertools.accumulate(durations_s)]
    frames, seconds = list[Image.Image](), list[float]()
    for i in sampling.indices(count, starts_s[-1]):
        image.seek(i)
        frames.append(rgb(image.copy()))
        seconds.append(starts_s[i])
    return Clip(frames, seconds)


def _film(data: bytes, sampling: Sampling) -> Clip:
    try:
        import av  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MediaError(
            "the video is no animated GIF or WebP, and others need PyAV, which this server lacks (pip install av)"
        ) from None
    with av.open(io.BytesIO(data)) as container:
        if not container.streams.video:
            raise MediaError("the file has no video stream")
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        rate = float(stream.average_rate or 24)
        length_s = float(stream.duration * stream.time_base) if stream.duration else (container.duration or 0) / 1e6
        count = stream.frames or int(length_s * rate)
        if count < 1:
            raise MediaError("the video does not say how long it is")
        _check_length(count, stream.width, stream.height)
        wanted = sampling.indices(count, count / rate)
        return _frames_of(container.decode(stream), set(wanted), rate)


def _frames_of(decoded: Any, wanted: set[int], rate: float) -> Clip:
    """Those frames that are wanted. A file may hold fewer than it says, and then has fewer here, too."""
    frames, seconds = list[Image.Image](), list[float]()
    for i, frame in enumerate(decoded):
        if i in wanted:
            frames.append(frame.to_image())
            seconds.append(i / rate)
        if i >= max(wanted):
            break
    if not frames:
        raise MediaError("the video has no frame that can be decoded")
    return Clip(frames, seconds)
