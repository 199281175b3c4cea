"""How late the API process is with tokens of text while it reads large pictures of other requests.

    PYTHONPATH=src:. python benchmarks/pictures_latency.py [--pictures 8] [--side 2048]

An engine that answers at once takes the ranks' place, so that only the API process is measured: a token is due every
10 ms in its event loop, and this is how long each really takes, without and with pictures.
"""

import argparse
import asyncio
import base64
import io
import time
from pathlib import Path

import httpx
import msgspec
import numpy as np
from PIL import Image

from shardwise.config import ServeConfig, load_model_config, load_vision_config
from shardwise.server.app import create_app
from shardwise.server.media import Media
from shardwise.server.sampling import GenerationDefaults
from shardwise.server.tokenizer import Tokenizer
from tests.fake_engine import FakeEngine

MODEL = Path(__file__).parents[1] / "src" / "shardwise" / "miniature"
TOKEN_SECONDS = 0.01


def body(side: int) -> bytes:
    """A request with one photo-like picture, as JPEG in a data URL."""
    noise = np.random.default_rng(0).integers(0, 256, (side // 4, side // 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=95)
    url = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    return msgspec.json.encode({"messages": [{"role": "user", "content": content}], "max_tokens": 4})


async def intervals(over: asyncio.Event) -> list[float]:
    """Milliseconds between tokens."""
    found: list[float] = []
    last_s = time.perf_counter()
    while not over.is_set():
        await asyncio.sleep(TOKEN_SECONDS)
        now_s = time.perf_counter()
        found.append((now_s - last_s) * 1000)
        last_s = now_s
    return found


def line(what: str, found: list[float]) -> str:
    p50, p90, p99 = np.quantile(found, (0.5, 0.9, 0.99))
    return f"{what:28} p50 {p50:6.1f} ms, p90 {p90:6.1f} ms, p99 {p99:6.1f} ms, worst {max(found):6.1f} ms"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=8)
    parser.add_argument("--side", type=int, default=2048, help="pixels")
    args = parser.parse_args()
    config = ServeConfig(model=str(MODEL), max_body_bytes=1 << 28)
    vision = load_vision_config(MODEL)
    assert vision is not None
    media = Media.load_processor(config, vision)
    defaults = GenerationDefaults.load(MODEL)
    app = create_app(
        config, FakeEngine(lambda *_: [5, 6, 7]), Tokenizer.load(MODEL), load_model_config(MODEL), defaults, media
    )
    sent = body(args.side)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=300) as client:

        async def ask() -> None:
            answer = await client.post("/v1/chat/completions", content=sent)
            answer.raise_for_status()

        await ask()
        over = asyncio.Event()
        beating = asyncio.create_task(intervals(over))
        await asyncio.sleep(2)
        over.set()
        alone = await beating
        over = asyncio.Event()
        beating = asyncio.create_task(intervals(over))
        begin_s = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(args.pictures)))
        took_s = time.perf_counter() - begin_s
        over.set()
        busy = await beating
    what = f"{args.pictures} pictures of {args.side} x {args.side} pixels, bodies of {len(sent) / 1e6:.1f} MB"
    print(f"{what}: {took_s:.2f} s")
    print(line("text alone", alone))
    print(line("while pictures are read", busy))


if __name__ == "__main__":
    asyncio.run(main())
