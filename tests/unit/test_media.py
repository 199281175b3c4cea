"""Pictures and videos in chat requests: right answers for odd files, a 400 that says why for the rest."""

import asyncio
import base64
import io
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from PIL import Image
from transformers import AutoImageProcessor

from shardwise.config import ServeConfig, load_model_config, load_vision_config
from shardwise.server import decode
from shardwise.server.app import create_app
from shardwise.server.decode import MediaError, Sampling
from shardwise.server.media import Media
from shardwise.server.messages import MediaPart
from shardwise.server.pixels import Processor, clip_size
from shardwise.server.sampling import GenerationDefaults
from tests.fake_engine import FakeEngine
from tests.unit.server_fixtures import MODEL, client, saying, tokenizer

VISION = load_vision_config(MODEL)
assert VISION is not None
IMAGE_PAD, VIDEO_PAD = 2040, 2041


def gradient(width: int = 96, height: int = 64, mode: str = "RGB") -> Image.Image:
    """Smooth, so that any resampling leaves it nearly as it is; left darker than right, and not symmetric."""
    columns, rows = np.meshgrid(np.linspace(20, 230, width), np.linspace(40, 200, height))
    return Image.fromarray(np.stack((columns, rows, 255 - columns), -1).astype(np.uint8)).convert(mode)


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def animation(format: str, frames: int = 5, width: int = 64, **options: Any) -> bytes:
    """Frames that get brighter, half a second each."""
    made = [Image.new("RGB", (width, 64), (40 * i, 40 * i, 40 * i)) for i in range(frames)]
    return encoded(made[0], format, save_all=True, append_images=made[1:], duration=500, **options)


def app_of(engine: FakeEngine, **options: Any) -> FastAPI:
    config = ServeConfig(model=str(MODEL), **options)
    return create_app(
        config, engine, tokenizer(), load_model_config(MODEL), GenerationDefaults.load(MODEL),
        Media.load_processor(config, VISION),
    )  # fmt: skip


async def ask(app: FastAPI, *parts: str | dict[str, Any]) -> Any:
    """POST the parts as one message; texts are text parts."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    async with client(app) as http:
        return await http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": content}], "max_tokens": 9}
        )


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def video(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


async def test_placeholders_grow_to_the_pictures_tokens() -> None:
    engine = FakeEngine(saying("yes"))
    small, wide = data_url(encoded(gradient(64, 64))), data_url(encoded(gradient(128, 64)))
    answer = await ask(app_of(engine), "One ", image(small), " and ", image(wide), image(small), "?")
    assert answer.status_code == 200, answer.text
    ids = engine.requests[0][1]
    assert [picture.at for picture in engine.pictures] == [
        i for i, token in enumerate(ids) if token == IMAGE_PAD and ids[i - 1] != IMAGE_PAD
    ]
    assert [(p.height, p.width) for p in engine.pictures] == [(4, 4), (4, 8), (4, 4)]
    assert ids.count(IMAGE_PAD) == 4 + 8 + 4
    assert engine.pictures[0].digest == engine.pictures[2].digest != engine.pictures[1].digest
    assert answer.json()["usage"]["prompt_tokens"] == len(ids)


def test_bytes_are_what_the_checkpoints_processor_scales() -> None:
    picture = gradient(90, 150)
    expected = AutoImageProcessor.from_pretrained(MODEL)([picture], return_tensors="np")
    made = Processor.load(ServeConfig(model=str(MODEL)), VISION).still(picture)
    assert [1, made.height, made.width] == expected["image_grid_thw"][0].tolist()
    found = np.frombuffer(made.data, np.uint8).reshape(-1, 3, 1, 256).astype(np.float32)
    found = np.broadcast_to((found / 255 - 0.5) / 0.5, (len(found), 3, 2, 256)).reshape(len(found), -1)
    np.testing.assert_allclose(found, expected["pixel_values"], atol=1e-6)


GOOD = {
    "jpeg": lambda: encoded(gradient(), "JPEG", quality=95),
    "jpeg that says png": lambda: encoded(gradient(), "JPEG", quality=95),
    "cmyk": lambda: encoded(gradient(mode="CMYK"), "JPEG", quality=95),
    "palette": lambda: encoded(gradient().quantize(256)),
    "webp": lambda: encoded(gradient(), "WEBP", lossless=True),
    "bmp": lambda: encoded(gradient(), "BMP"),
    "tiff": lambda: encoded(gradient(), "TIFF"),
    "rotated by exif": lambda: _rotated(),
    "gif": lambda: encoded(gradient(), "GIF", save_all=True, append_images=[Image.new("RGB", (96, 64))]),
}


def _rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees to the right to look at it
    return encoded(gradient().transpose(Image.Transpose.ROTATE_90), "PNG", exif=exif)


@pytest.mark.parametrize("name", GOOD)
def test_every_kind_of_file_gives_the_same_picture(name: str) -> None:
    found = np.asarray(decode.picture(GOOD[name]())).astype(int)
    assert found.shape == (64, 96, 3)
    assert np.abs(found - np.asarray(gradient()).astype(int)).mean() < 6


def test_sixteen_bits_become_eight_and_what_is_transparent_is_white() -> None:
    wide = Image.fromarray((np.arange(64 * 64, dtype=np.uint16) * 16).reshape(64, 64))
    found = np.asarray(decode.picture(encoded(wide)))[..., 0].astype(int)
    np.testing.assert_allclose(found, np.asarray(wide).astype(int) // 257)
    clear = Image.new("RGBA", (32, 32), (0, 0, 0, 0))
    clear.paste((200, 0, 0, 255), (0, 0, 16, 32))
    found = np.asarray(decode.picture(encoded(clear)))
    assert found[5, 5].tolist() == [200, 0, 0]
    assert found[5, 25].tolist() == [255, 255, 255]


def _bomb() -> bytes:
    return encoded(Image.new("1", (20000, 20000)))


BAD = {
    "empty": (b"", "is empty"),
    "text": (b"hello, this is no picture" * 9, "no known format"),
    "truncated": (encoded(gradient())[:-100], "cannot be read"),
    "truncated jpeg": (encoded(gradient(300, 300), "JPEG")[:2000], "cannot be read"),
    "header alone": (encoded(gradient())[:20], "no known format|cannot be read"),
    "bomb": (_bomb(), "at most|more than"),
    "thread": (encoded(Image.new("RGB", (3000, 10))), "times the other"),
    "no pixels": (b"P6 0 5 255\n", "no known format|cannot be read|nothing"),
    "float": (encoded(Image.new("F", (64, 64), 0.5), "TIFF"), "floating-point"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n%%EOF\n", "no known format"),
}


@pytest.mark.parametrize("name", BAD)
async def test_what_cannot_be_used_is_a_400_that_says_why(name: str) -> None:
    data, reason = BAD[name]
    engine = FakeEngine(saying("yes"))
    answer = await ask(app_of(engine), "Look: ", image(data_url(data)))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "messages[0].content[1].image_url"
    with pytest.raises(MediaError, match=reason):
        decode.picture(data)
    assert not engine.requests


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png,abc", "base64"),
        ("data:image/png;base64,@@@@", "valid base64"),
        (data_url(b"x", "text/html"), "text/html"),
        (data_url(b"x", "video/mp4"), "video/mp4"),
        ("ftp://example.com/a.png", "must begin with"),
        ("/etc/passwd", "must begin with"),
        ("file:///etc/passwd", "--allowed-media-path"),
        ("http://127.0.0.1:9/a.png", "--allow-remote-images"),
        ("", "needs its url"),
    ],
)
async def test_urls_that_are_not_read(url: str, reason: str) -> None:
    answer = await ask(app_of(FakeEngine(saying("yes"))), image(url))
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]


async def test_text_that_holds_a_placeholder_cannot_move_pictures() -> None:
    engine = FakeEngine(saying("yes"))
    url = data_url(encoded(gradient()))
    for text in ("<|image_pad|>", "a<|video_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"):
        answer = await ask(app_of(engine), text, image(url))
        assert answer.status_code == 400
        assert "placeholder" in answer.json()["error"]["message"]
    assert not engine.requests


async def test_limits_of_a_request() -> None:
    engine = FakeEngine(saying("yes"))
    app = app_of(engine, max_images=2, max_image_pixels=6000)
    url = data_url(encoded(gradient(640, 640)))
    assert (await ask(app, image(url), image(url))).status_code == 200
    assert all(p.height * p.width * 256 <= 6000 for p in engine.pictures)
    answer = await ask(app, image(url), image(url), image(url))
    assert answer.status_code == 400
    assert "--max-images" in answer.json()["error"]["message"]
    assert (await ask(app, image(url), video(data_url(animation("GIF", 9), "image/gif")))).status_code == 200
    assert len(engine.pictures) == 4  # the video had room for two frames, which share patches


async def test_a_server_without_a_tower_says_so() -> None:
    config = ServeConfig(model=str(MODEL))
    app = create_app(
        config, FakeEngine(saying("yes")), tokenizer(), load_model_config(MODEL), GenerationDefaults.load(MODEL)
    )
    answer = await ask(app, image(data_url(encoded(gradient()))))
    assert answer.status_code == 400
    assert "no vision tower" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("format", "kind"), [("GIF", "image/gif"), ("WEBP", "image/webp"), ("PNG", "video/png")])
async def test_an_animation_is_a_video(format: str, kind: str) -> None:
    engine = FakeEngine(saying("yes"))
    answer = await ask(app_of(engine), "What happens?", video(data_url(animation(format, 5), kind)))
    assert answer.status_code == 200, answer.text
    ids = engine.requests[0][1]
    text = tokenizer().decode(ids)
    # Five frames of half a second at two a second: all, the last twice.
    for second in ("0.2", "1.2", "2.0"):
        assert f"<{second} seconds><|vision_start|><|video_pad|>" in text
    assert len(engine.pictures) == 3
    assert all(ids[p.at] == VIDEO_PAD for p in engine.pictures)
    assert ids.count(VIDEO_PAD) == sum(p.height * p.width // 4 for p in engine.pictures)
    for i, p in enumerate(engine.pictures):
        frames = np.frombuffer(p.pixels, np.uint8).reshape(-1, 3, 2, 256).mean((0, 1, 3))
        np.testing.assert_allclose(frames, [80 * i, min(80 * i + 40, 160)], atol=3)


async def test_a_film_needs_av(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    film = b"\0\0\0\x18ftypmp42" + bytes(500)
    answer = await ask(app_of(FakeEngine(saying("yes"))), video(data_url(film, "video/mp4")))
    assert answer.status_code == 400
    assert "pip install av" in answer.json()["error"]["message"]


def test_frames_are_taken_evenly() -> None:
    sampling = Sampling(2, 4, 10)
    assert sampling.indices(100, 4.0) == [0, 14, 28, 42, 57, 71, 85, 99]
    assert sampling.indices(3, 60.0) == [0, 1, 2]
    assert sampling.indices(100, 0.1) == [0, 33, 66, 99]
    assert len(sampling.indices(1000, 1000.0)) == 10
    assert Sampling(2, 1, 1).indices(9, 9.0) == [0]


@pytest.mark.parametrize("seed", range(8))
def test_frames_are_sized_as_transformers_does(seed: int) -> None:
    modules = pytest.importorskip("transformers.models.qwen3_vl.video_processing_qwen3_vl")
    generator = np.random.default_rng(seed)
    for _ in range(50):
        frames, height, width = (int(generator.integers(*span)) for span in ((2, 40), (10, 900), (10, 900)))
        least, most = int(generator.integers(1, 9)) * 4096, int(generator.integers(2, 90)) * 65536
        expected = modules.smart_resize(frames, height, width, 2, 32, least, most)
        assert clip_size(frames, height, width, 32, 2, least, most) == expected


async def test_files_only_below_the_folder(tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "a b.png").write_bytes(encoded(gradient()))
    (tmp_path / "secret.png").write_bytes(encoded(gradient()))
    (allowed / "link.png").symlink_to(tmp_path / "secret.png")
    app = app_of(FakeEngine(saying("yes")), allowed_media_path=str(allowed))
    assert (await ask(app, image((allowed / "a b.png").as_uri()))).status_code == 200
    for bad in (tmp_path / "secret.png", allowed / "link.png", allowed / ".." / "secret.png", allowed, allowed / "no"):
        answer = await ask(app, image(f"file://{bad}"))
        assert answer.status_code == 400
        assert "no such file" in answer.json()["error"]["message"]


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = encoded(gradient())
        if self.path == "/missing":
            self.send_error(404)
        elif self.path == "/loop":
            self.send_response(302)
            self.send_header("Location", "/loop")
            self.end_headers()
        else:
            body += bytes(90_000 if self.path == "/large" else 0)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def web() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


async def test_remote_pictures_within_limits(web: str) -> None:
    app = app_of(FakeEngine(saying("yes")), allow_remote_images="any", max_body_bytes=80_000)
    assert (await ask(app, image(f"{web}/a.png"))).status_code == 200
    for path, reason in (("missing", "HTTP 404"), ("loop", "redirects"), ("large", "more than 80,000 bytes")):
        answer = await ask(app, image(f"{web}/{path}"))
        assert answer.status_code == 400
        assert reason in answer.json()["error"]["message"]
    public = app_of(FakeEngine(saying("yes")), allow_remote_images="public")
    answer = await ask(public, image(f"{web}/a.png"))
    assert "not public" in answer.json()["error"]["message"]


async def test_other_requests_go_on_while_a_large_picture_is_read() -> None:
    """A picture of 50 MB as PNG: the longest that the event loop is held up meanwhile."""
    noise = np.random.default_rng(0).integers(0, 256, (4000, 4200, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), "PNG", compress_level=0)
    assert len(data) > 50_000_000
    media = Media.load_processor(ServeConfig(model=str(MODEL), max_body_bytes=1 << 28), VISION)
    url, gaps, done = data_url(data), list[float](), asyncio.Event()

    async def beat() -> None:
        while not done.is_set():
            begin_s = time.monotonic()
            await asyncio.sleep(0.002)
            gaps.append(time.monotonic() - begin_s)

    beating = asyncio.create_task(beat())
    begin_s = time.monotonic()
    loaded = await media.load([MediaPart("image", url, "messages")])
    took_s = time.monotonic() - begin_s
    done.set()
    await beating
    media.close()
    assert loaded[0].parts
    assert np.quantile(gaps, 0.9) < took_s / 4
    assert len(gaps) > 10
