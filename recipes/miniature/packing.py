"""Encode Examples and pack many of them into each training row; done by worker processes while the GPU trains.

A batch is a dict of arrays: TOKENS_PER_ROW are [rows, length]; what `pack_images` returns is by patch.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from multiprocessing.queues import Queue
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from recipes.miniature.skills import SKILLS, training_example
from recipes.miniature.skills.example import Example

Batch = dict[str, Any]
SKILL_NAMES = tuple(skill.__name__ for skill in SKILLS)
PATCH, MERGE, SIDE = 16, 2, 8  # as in config.json: patch_size, spatial_merge_size, root of num_position_embeddings
TOKENS_PER_ROW = ("ids", "weight", "position", "rope_t", "rope_h", "rope_w", "skill")


def to_patches(image: np.ndarray) -> np.ndarray:
    """(height, width, 3) -> (patches, 3, 16, 16), each 2 x 2 block of patches together, as HF's processor does."""
    height, width, _ = image.shape
    blocks = image.reshape(height // PATCH // MERGE, MERGE, PATCH, width // PATCH // MERGE, MERGE, PATCH, 3)
    return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, PATCH, PATCH)


def patch_coordinates(rows: int, columns: int) -> np.ndarray:
    """The (row, column) of each patch, in the order of `to_patches`."""
    grid = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), -1)
    grid = grid.reshape(rows // MERGE, MERGE, columns // MERGE, MERGE, 2)
    return grid.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


def rope_positions(is_image: np.ndarray, grids: Sequence[tuple[int, int]]) -> np.ndarray:
    """The three positions (time, height, width) of each token; the tokens of one picture share their time."""
    positions, now, i = np.zeros((3, len(is_image)), np.int32), 0, 0
    left = iter(grids)
    while i < len(is_image):
        if not is_image[i]:
            positions[:, i] = now
            now, i = now + 1, i + 1
            continue
        rows, columns = (side // MERGE for side in next(left))
        n = rows * columns
        positions[:, i : i + n] = now
        positions[1, i : i + n] += np.repeat(np.arange(rows), columns)
        positions[2, i : i + n] += np.tile(np.arange(columns), rows)
        now, i = now + max(rows, columns), i + n
    return positions


class Encoder:
    """Turns an example into a document: arrays by token, and its pictures."""

    def __init__(self, tokenizer_file: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.image_pad = self.tokenizer.token_to_id("<|image_pad|>")

    def __call__(self, example: Example) -> dict[str, Any]:
        text = example.prompt_text()
        grids = [(image.shape[0] // PATCH, image.shape[1] // PATCH) for image in example.images]
        for rows, columns in grids:
            text = text.replace("<|image_pad|>", "<image>" * (rows * columns // MERGE**2), 1)
        prompt = self.tokenizer.encode(text.replace("<image>", "<|image_pad|>")).ids
        answer = self.tokenizer.encode(example.answer_text()).ids
        ids = np.array(prompt + answer, np.int32)
        is_image = ids == self.image_pad
        weight = np.array([example.prompt_weight] * len(prompt) + [example.answer_weight] * len(answer), np.float32)
        weight[is_image] = 0
        weight[0] = 0  # nothing comes before it
        rope = rope_positions(is_image, grids)
        return {
            "ids": ids,
            "weight": weight,
            "position": np.arange(len(ids), dtype=np.int32),
            "rope_t": rope[0],
            "rope_h": rope[1],
            "rope_w": rope[2],
            "skill": np.full(len(ids), SKILL_NAMES.index(example.skill), np.uint8),
            "images": example.images,
        }


def documents(encoder: Encoder, rng: Random, longest: int) -> Iterator[dict[str, Any]]:
    """Endless training documents of at most `longest` tokens, each skill with its share of the tokens."""
    share = {skill: weight / sum(SKILLS.values()) for skill, weight in SKILLS.items()}
    used = dict.fromkeys(share, 0)
    while True:
        skill = max(share, key=lambda s: share[s] * (1 + sum(used.values())) - used[s] + rng.random() * 200)
        document = encoder(training_example(rng, skill))
        if len(document["ids"]) <= longest:
            used[skill] += len(document["ids"])
            yield document


def pack(stream: "Stream", rows: int, length: int) -> Batch:
    """Fill rows with whole documents; the rest of a row stays empty (weight 0). There is at least one picture."""
    out = {key: np.zeros((rows, length), stream.dtypes[key]) for key in TOKENS_PER_ROW}
    images: list[np.ndarray] = []
    for row in range(rows):
        at = 0
        while (document := stream.take(length - at)) is not None:
            n = len(document["ids"])
            for key in TOKENS_PER_ROW:
                out[key][row, at : at + n] = document[key]
            images += document["images"]
            at += n
        out["position"][row, at:] = np.arange(length - at)
    return {**out, **pack_images(images)} if images else pack(stream, rows, length)


class Stream:
    """Documents, with a small store from which one that fits is taken."""

    def __init__(self, documents: Iterator[dict[str, Any]]) -> None:
        self.documents = documents
        self.store = list(islice(documents, 8))
        self.dtypes = {key: self.store[0][key].dtype for key in TOKENS_PER_ROW}

    def take(self, room: int) -> dict[str, Any] | None:
        for i, document in enumerate(self.store):
            if len(document["ids"]) <= room:
                self.store.append(next(self.documents))
                return self.store.pop(i)
        return None


def pack_images(images: Sequence[np.ndarray]) -> Batch:
    """All pictures of the rows as one list of patches."""
    grids = [(image.shape[0] // PATCH, image.shape[1] // PATCH) for image in images]
    counts = [rows * columns for rows, columns in grids]
    coordinates = [patch_coordinates(rows, columns) for rows, columns in grids]
    index, weight = zip(*(interpolation(c, *grid) for c, grid in zip(coordinates, grids, strict=True)), strict=True)
    return {
        "pixels": np.concatenate([to_patches(image) for image in images]),
        "coordinates": np.concatenate(coordinates).astype(np.uint8),
        "interpolation_index": np.concatenate(index).astype(np.uint8),
        "interpolation_weight": np.concatenate(weight).astype(np.float32),
        "image": np.repeat(np.arange(len(counts), dtype=np.int32), counts),  # which picture a patch belongs to
        "slot": np.concatenate([np.arange(n, dtype=np.int32) for n in counts]),  # and its place in it
        "layout": (len(counts), max(counts)),
    }


def interpolation(coordinates: np.ndarray, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Where a patch lies in the 8 x 8 table of learned positions: its four neighbours there and their weights."""
    at = coordinates * (SIDE - 1) / (rows - 1, columns - 1)
    low = np.minimum(at.astype(int), SIDE - 2)
    (y, x), (v, u) = low.T, (at - low).T
    index = np.stack([y * SIDE + x, y * SIDE + x + 1, (y + 1) * SIDE + x, (y + 1) * SIDE + x + 1], -1)
    return index, np.stack([(1 - v) * (1 - u), (1 - v) * u, v * (1 - u), v * u], -1)


def worker(queue: "Queue[Batch]", tokenizer_file: Path, seed: int, rows: int, length: int) -> None:
    """The main function of a worker process: put batches into the queue for ever."""
    stream = Stream(documents(Encoder(tokenizer_file), Random(seed), length))
    while True:
        queue.put(pack(stream, rows, length))
