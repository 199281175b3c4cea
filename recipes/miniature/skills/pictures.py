"""Pictures of one or two coloured shapes, and two pictures in one question."""

from random import Random
from types import MappingProxyType

import numpy as np
from PIL import Image, ImageDraw

from recipes.miniature.skills.example import Example, chat, upper_first

Thing = tuple[str, str, float, float, float]  # colour, shape, x, y, radius

COLOURS = MappingProxyType(
    {
        "red": (220, 40, 40),
        "green": (40, 170, 60),
        "blue": (40, 70, 220),
        "yellow": (240, 215, 50),
        "purple": (140, 50, 170),
        "orange": (245, 140, 30),
        "black": (20, 20, 20),
    }
)
GROUNDS = ((255, 255, 255), (225, 225, 225), (190, 190, 190))
SHAPES = ("circle", "square", "triangle")


def draw(rng: Random, height: int, width: int, things: list[Thing]) -> np.ndarray:
    """Draw (colour, shape, x, y, radius) on a plain ground; often at another scale, as a photo would be resized."""
    scale = rng.choice([1, 1, 2, 3])
    picture = Image.new("RGB", (width * scale, height * scale), rng.choice(GROUNDS))
    pen = ImageDraw.Draw(picture)
    for colour, shape, x, y, radius in things:
        fill = tuple(max(0, min(255, c + rng.randint(-15, 15))) for c in COLOURS[colour])
        x, y, r = x * scale, y * scale, radius * scale
        if shape == "circle":
            pen.ellipse([x - r, y - r, x + r, y + r], fill=fill)
        elif shape == "square":
            pen.rectangle([x - r * 0.9, y - r * 0.9, x + r * 0.9, y + r * 0.9], fill=fill)
        else:
            pen.polygon([(x, y - r), (x + r, y + r * 0.8), (x - r, y + r * 0.8)], fill=fill)
    if scale > 1:
        picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(picture)


def place(rng: Random, low: float, high: float, radius: float) -> float:
    """A coordinate between low and high that keeps the whole shape inside."""
    return rng.uniform(low + radius + 1, high - radius - 1)


def about_picture(
    rng: Random, skill: str, image: np.ndarray, questions: list[tuple[str, str]], thought: str
) -> Example:
    """One of the questions, each with its answer, on a picture."""
    text, answer = rng.choice(questions)
    content = [{"type": "image"}, {"type": "text", "text": text}]
    if rng.random() < 0.2:
        content.reverse()
    return chat(rng, skill, content, answer, thought, images=[image])


def picture_one(rng: Random) -> Example:
    height, width = rng.choice([64, 96, 128]), rng.choice([64, 96, 128])
    colour, shape, radius = rng.choice(list(COLOURS)), rng.choice(SHAPES), rng.uniform(12, 28)
    image = draw(
        rng, height, width, [(colour, shape, place(rng, 0, width, radius), place(rng, 0, height, radius), radius)]
    )
    description = f"A{'n' if colour == 'orange' else ''} {colour} {shape}."
    return about_picture(
        rng,
        "picture_one",
        image,
        [
            ("What is in the picture?", description),
            ("What is in the picture?", description),
            ("Describe the picture.", description),
            (f"What colour is the {shape}?", upper_first(colour) + "."),
            ("Which shape do you see?", f"A {shape}."),
            ("How many shapes are there?", "One."),
        ],
        f"I see one shape. It is {colour}.",
    )


def picture_two(rng: Random) -> Example:
    """Two shapes of different colours, side by side or one above the other."""
    (c1, c2), s1, s2 = rng.sample(list(COLOURS), 2), rng.choice(SHAPES), rng.choice(SHAPES)
    r1, r2 = rng.uniform(11, 20), rng.uniform(11, 20)
    one, two = (f"{'an' if c == 'orange' else 'a'} {c} {s}" for c, s in [(c1, s1), (c2, s2)])
    if rng.random() < 0.5:
        height, width, relation = rng.choice([64, 96]), rng.choice([96, 128]), "left of"
        middle = width / 2
        things = [
            (c1, s1, place(rng, 0, middle, r1), place(rng, 0, height, r1), r1),
            (c2, s2, place(rng, middle, width, r2), place(rng, 0, height, r2), r2),
        ]
    else:
        height, width, relation = rng.choice([96, 128]), rng.choice([64, 96]), "above"
        middle = height / 2
        things = [
            (c1, s1, place(rng, 0, width, r1), place(rng, 0, middle, r1), r1),
            (c2, s2, place(rng, 0, width, r2), place(rng, middle, height, r2), r2),
        ]
    image = draw(rng, height, width, things)
    description = f"{upper_first(one)} {relation} {two}."
    questions = [("What is in the picture?", description)] * 3 + [("How many shapes are there?", "Two.")]
    if s1 != s2:
        questions.append((f"What colour is the {s1}?", upper_first(c1) + "."))
    return about_picture(rng, "picture_two", image, questions, f"I see two shapes. They are {c1} and {c2}.")


def picture_pair(rng: Random) -> Example:
    """Two pictures in one question."""
    examples = [picture_one(rng) for _ in range(2)]
    names = []
    for example in examples:
        while not example.answer.startswith(("A ", "An ")) or example.answer.count(" ") != 2:  # not a full description
            example = picture_one(rng)
        names.append(example)
    one, two = (e.answer[:-1] for e in names)
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "What is in the two pictures?"}]
    return chat(
        rng,
        "picture_pair",
        content,
        f"{one} and {two[0].lower()}{two[1:]}.",
        "I look at one picture after the other.",
        images=[names[0].images[0], names[1].images[0]],
    )
