"""Training on packed rows computes what the plain HF model does on each document; and the data is as shipped."""

import itertools
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, Qwen3_5MoeForConditionalGeneration

from recipes.miniature import fast_model, packing, train
from recipes.miniature.check import Prompts
from recipes.miniature.packing import Encoder
from recipes.miniature.prepare import prepare
from recipes.miniature.skills import SKILLS, python, training_example
from recipes.miniature.skills.example import Example
from tests.golden.eval import miniature

Plain = list[tuple[Example, np.ndarray, torch.Tensor]]


def stock_logits(model: Any, prompts: Prompts, example: Example) -> tuple[np.ndarray, torch.Tensor]:
    """Logits of the unchanged HF model, the inputs made by HF's tokenizer and image processor."""
    text = example.prompt_text() + example.answer_text()
    inputs = prompts.inputs([text], [Image.fromarray(image) for image in example.images])
    with torch.no_grad():
        return inputs["input_ids"][0].numpy(), model(**inputs).logits[0]


def packed_logits(model: Any, batch: packing.Batch) -> torch.Tensor:
    with torch.no_grad(), fast_model.installed():
        hidden, _ = fast_model.hidden_states(model, train.to_device(batch, "cpu"))
        return model.lm_head(hidden)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config: Any = AutoConfig.from_pretrained(miniature())
    model = Qwen3_5MoeForConditionalGeneration(config).float().eval()
    train.initialise(model)
    return model


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(miniature() / "tokenizer.json")


@pytest.fixture(scope="module")
def plain(model: Any, encoder: Encoder) -> Plain:
    """Examples of all skills with their tokens and logits from the unchanged model."""
    # Not `python`: there the prompt ends within what would be one token, "):\\n", if prompt and answer were one text.
    rng, prompts = Random(5), Prompts(miniature())
    examples = [training_example(rng, skill) for skill in SKILLS if skill is not python for _ in range(2)]
    examples = [example for example in examples if len(encoder(example)["ids"]) < 500]
    return [(example, *stock_logits(model, prompts, example)) for example in examples]


def test_encoding_and_template_agree_with_transformers(plain: Plain, encoder: Encoder) -> None:
    tokenizer = Prompts(miniature()).tokenizer
    for example, ids, _ in plain:
        assert (encoder(example)["ids"] == ids).all(), (example.skill, tokenizer.decode(ids))
        if example.messages and not example.images:
            assert example.prompt_text() == tokenizer.apply_chat_template(
                example.messages,
                tools=example.tools,
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=example.reasoning is not None,
            )


def test_packed_texts(model: Any, plain: Plain, encoder: Encoder) -> None:
    examples = [example for example, _, _ in plain]
    documents = itertools.chain(map(encoder, examples), itertools.repeat(encoder(examples[0])))
    batch = packing.pack(packing.Stream(documents), 6, 1024)
    logits = packed_logits(model, batch)
    starts = {}
    for row in range(6):
        for at in np.flatnonzero(batch["position"][row] == 0):
            starts[tuple(batch["ids"][row, at : at + 12])] = row, at  # the first tokens tell most documents apart
    worst, compared = 0.0, 0
    for example, ids, expected in plain:
        if example.images or tuple(ids[:12]) not in starts:
            continue
        row, at = starts[tuple(ids[:12])]
        if np.array_equal(batch["ids"][row, at : at + len(ids)], ids):
            worst = max(worst, (logits[row, at : at + len(ids)] - expected).abs().max().item())
            compared += 1
    assert compared > 20
    assert worst < 1e-3


def test_packed_pictures(model: Any, plain: Plain, encoder: Encoder) -> None:
    """Each kind alone, since their text is the same: the second of three copies."""
    pictures = [entry for entry in plain if entry[0].images]
    assert len(pictures) > 3
    for example, ids, expected in pictures:
        batch = packing.pack(packing.Stream(itertools.repeat(encoder(example))), 1, 3 * len(ids) + 1)
        again = packed_logits(model, batch)[0, len(ids) : 2 * len(ids)]
        assert (again - expected).abs().max() < 1e-3


def test_installed_leaves_transformers_as_it_was() -> None:
    before = fast_model.hf.Qwen3_5MoeExperts.forward
    with fast_model.installed():
        assert fast_model.hf.Qwen3_5MoeExperts.forward is fast_model.experts
    assert fast_model.hf.Qwen3_5MoeExperts.forward is before


@pytest.mark.slow
def test_prepare_makes_what_is_shipped(tmp_path: Path) -> None:
    prepare(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (miniature() / path.name).read_bytes(), path.name
    assert len(list(tmp_path.iterdir())) == 8
