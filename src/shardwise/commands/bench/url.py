"""Any server of the OpenAI API as a target, so that others are measured the same way as this one.

Prompts are texts of random words, since not every server takes token ids. Tokens are counted by the server's own usage;
where it sends none, events with text are counted, and the report says so.
"""

import json
import random
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import httpx

from shardwise.commands.bench.target import Limits, Trace
from shardwise.config import ConfigError

TIMEOUT = httpx.Timeout(600, connect=10)
STARTS = tuple("bcdfghklmnprstvw")
ENDS = ("an", "at", "el", "en", "er", "in", "is", "on", "or", "un", "ar", "et", "ol", "um", "ip", "as")
TRIAL_WORDS = (16, 64)
API = Literal["completions", "chat"]
# What is asked for beside the standard, best first: answers of full length, and how many tokens they have.
EXTRAS: tuple[dict[str, Any], ...] = (
    {"ignore_eos": True, "stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True}},
    {"ignore_eos": True},
    {},
)


class UrlTarget:
    """`url` is the server's, with or without /v1. Make it with `connect`."""

    def __init__(self, client: httpx.AsyncClient, model: str, api: API, limits: Limits) -> None:
        self.limits = limits
        self.model = model
        self.notes: list[str] = []
        self._client = client
        self._api: API = api
        self._extras: dict[str, Any] = {}
        self._tokens_a_word, self._fixed_tokens = 1.0, 0.0

    @classmethod
    async def connect(cls, client: httpx.AsyncClient, model: str, api: API) -> "UrlTarget":
        """Ask what is served, what is understood beside the standard, and how many tokens a word has.

        Raises ConfigError for a server that is not there, that wants a key, or that does not serve `model`.
        """
        url = str(client.base_url).rstrip("/")
        try:
            response = await client.get("models")
        except httpx.HTTPError as error:
            raise ConfigError(f"--url {url}: {str(error) or type(error).__name__}; is the server up there?") from None
        if response.status_code in (401, 403):
            raise ConfigError(f"--url {url}: the server wants a key ({response.status_code}); give --api-key")
        served = _served(response)
        if not served and not model:
            raise ConfigError(f"--url {url}: GET /models names no model ({response.status_code}); give --model NAME")
        if served and model and model not in served:
            raise ConfigError(f"--url {url}: model {model!r} is not served there; it has {', '.join(served)}")
        name = model or next(iter(served))
        target = cls(client, name, api, Limits(served.get(name)))
        await target._try_out(url)
        return target

    def prompt(self, source: random.Random, tokens: int) -> str:
        """The first words are never the same again, lest a prefix cache has the prompt from an earlier run."""
        count = max(1, round((tokens - self._fixed_tokens) / self._tokens_a_word))
        fresh = random.Random(secrets.randbits(64))
        return " ".join(_word(fresh if n < 4 else source) for n in range(count))

    async def answer(self, prompt: str, tokens: int) -> Trace:
        trace = Trace(time.perf_counter())
        try:
            async with self._client.stream("POST", self._path, json=self._body(prompt, tokens)) as response:
                if response.status_code != 200:
                    trace.fault = f"{response.status_code}: {_message(await response.aread())}"
                else:
                    await _follow(response, trace)
        except httpx.HTTPError as error:
            trace.fault = str(error) or type(error).__name__
        except ValueError:
            trace.fault = "an event that is no JSON"
        trace.ended_s = time.perf_counter()
        if not trace.pieces and not trace.fault:
            trace.fault = "an answer without text"
        return trace

    @property
    def _path(self) -> str:
        return "chat/completions" if self._api == "chat" else "completions"

    def _body(self, prompt: str, tokens: int) -> dict[str, Any]:
        asked = {"messages": [{"role": "user", "content": prompt}]} if self._api == "chat" else {"prompt": prompt}
        return {
            "model": self.model, "max_tokens": tokens, "temperature": 0, "stream": True, **asked, **self._extras,
        }  # fmt: skip

    async def _try_out(self, url: str) -> None:
        source, counts, trace = random.Random(0), list[int](), Trace(0.0)
        for self._extras in EXTRAS:
            trace = await self.answer(self.prompt(source, TRIAL_WORDS[0]), 4)
            if not trace.fault.startswith(("400", "422")):
                break
        if trace.fault:
            raise ConfigError(f"--url {url}: {self._path} with model {self.model!r} fails: {trace.fault}")
        if "ignore_eos" not in self._extras:
            self.notes.append("the server does not know ignore_eos: answers may be shorter than asked for")
        for words in TRIAL_WORDS:
            counts.append((await self.answer(self.prompt(source, words), 1)).prompt_tokens)
        if not all(counts):
            self.notes.append("the server sends no usage: tokens are events with text, a prompt's tokens its words")
            return
        self._tokens_a_word = max((counts[1] - counts[0]) / (TRIAL_WORDS[1] - TRIAL_WORDS[0]), 0.1)
        self._fixed_tokens = max(counts[0] - TRIAL_WORDS[0] * self._tokens_a_word, 0.0)


def make_client(url: str, api_key: str, transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    """A client for the API below `url`. Raises ConfigError for what is no URL."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url}: give it with http:// or https://, such as http://127.0.0.1:8000")
    base = url.rstrip("/").removesuffix("/v1") + "/v1/"
    try:
        httpx.URL(base)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url {url}: {error}") from None
    return httpx.AsyncClient(
        base_url=base,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=TIMEOUT,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        transport=transport,
    )


async def _follow(response: httpx.Response, trace: Trace) -> None:
    """Note when text comes; usage at the end says how many tokens that was."""
    total = 0
    async for data in _events(response):
        if "error" in data:
            trace.fault = _message(json.dumps(data).encode())
            return
        if any(_text(choice) for choice in data.get("choices", ())):
            trace.pieces.append((time.perf_counter(), 1))
        if usage := data.get("usage"):
            trace.prompt_tokens, total = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    if trace.pieces and total > len(trace.pieces):  # some events held several tokens, or some tokens no text yet
        each, more = divmod(total, len(trace.pieces))
        trace.pieces = [(at_s, each + (n < more)) for n, (at_s, _) in enumerate(trace.pieces)]


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of server-sent events. Lines that are none are comments or belong to other fields."""
    async for line in response.aiter_lines():
        field, _, value = line.partition(":")
        if field != "data" or not (value := value.strip()) or value == "[DONE]":
            continue
        yield json.loads(value)


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    thought = delta.get("reasoning_content") or delta.get("reasoning")
    return choice.get("text") or delta.get("content") or thought or ""


def _served(response: httpx.Response) -> dict[str, int | None]:
    """Names of models, with the longest request each takes if that is told."""
    try:
        return {one["id"]: one.get("max_model_len") for one in response.json()["data"]}
    except (ValueError, KeyError, TypeError):
        return {}


def _message(body: bytes) -> str:
    """What an error's body says, in one line."""
    try:
        error = json.loads(body)["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):
        text = body.decode(errors="replace")
    return " ".join(str(text).split())[:300]


def _word(source: random.Random) -> str:
    return "".join(source.choice(STARTS) + source.choice(ENDS) for _ in range(source.choice((1, 2))))
