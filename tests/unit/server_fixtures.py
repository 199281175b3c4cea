"""Apps over a FakeEngine and the miniature's tokenizer, for the server's tests."""

import importlib.resources
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from shardwise.config import ServeConfig, load_model_config
from shardwise.engine.messages import SamplingParams
from shardwise.server.app import create_app
from shardwise.server.media import Media
from shardwise.server.sampling import GenerationDefaults
from shardwise.server.tokenizer import Tokenizer
from tests.fake_engine import FakeEngine

MODEL = Path(str(importlib.resources.files("shardwise") / "miniature"))
ANSWER = "the quick brown fox, é日本😀 jumps"


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL)


def saying(text: str) -> Callable[[list[int], SamplingParams], list[int]]:
    """A reply that is `text`, whatever the prompt."""
    tokens = tokenizer().encode(text)
    return lambda prompt, sampling: list(tokens)


def echo(prompt: list[int], sampling: SamplingParams) -> list[int]:
    """A reply that is the prompt."""
    return list(prompt)


def make_app(engine: FakeEngine, media: Media | None = None, **options: Any) -> FastAPI:
    config = ServeConfig(model=str(MODEL), **options)
    return create_app(config, engine, tokenizer(), load_model_config(MODEL), GenerationDefaults.load(MODEL), media)


def client(app: FastAPI, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=20, **options)
