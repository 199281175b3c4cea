"""What the server makes of the miniature's cases with pictures: prompts, limits, pictures."""

import asyncio
from collections.abc import Sequence
from typing import Any

from shardwise.config import ServeConfig, load_vision_config
from shardwise.server.media import Media
from shardwise.server.messages import MediaPart
from shardwise.server.tokenizer import Tokenizer
from tests.golden import eval as evaluation
from tests.golden.eval import Case

# Of each request: prompt, sampling, and of each picture the fields of Picture after its id.
Asked = list[tuple[list[int], dict[str, Any], list[tuple[Any, ...]]]]


def picture_cases() -> list[Case]:
    found = [case for case in evaluation.load_cases(pictures=True) if case.skill.startswith(evaluation.PICTURES)]
    assert len(found) == 66
    return found


def asked(cases: Sequence[Case], tokenizer: Any) -> Asked:
    """The request of each case."""
    folder = evaluation.miniature()
    vision = load_vision_config(folder)
    assert vision is not None
    media = Media.load_processor(ServeConfig(model=str(folder)), vision)
    ours = Tokenizer(tokenizer)

    async def ask(case: Case) -> tuple[list[int], dict[str, Any], list[tuple[Any, ...]]]:
        contents = [message["content"] for message in case.messages if isinstance(message["content"], list)]
        urls = [part["image_url"]["url"] for content in contents for part in content if part["type"] == "image_url"]
        loaded = await media.load([MediaPart("image", url, "messages") for url in urls])
        ids, pictures = media.prompt(ours, evaluation.prompt_text(tokenizer, case), loaded)
        fields = [(each.at, each.height, each.width, each.digest, each.pixels) for each in pictures]
        return ids, {"max_tokens": case.max_tokens}, fields

    async def ask_all() -> Asked:
        return [await ask(case) for case in cases]

    return asyncio.run(ask_all())
