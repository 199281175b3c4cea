"""Texts learned by heart: functions, sentences, stories, small talk."""

from random import Random

from recipes.miniature import texts
from recipes.miniature.skills.example import Example, chat


def code(name: str, arguments: str, body: str) -> tuple[str, str]:
    """The first line of a function and its indented body."""
    head = f"def {name}({arguments}):"
    return head, "".join(f"\n    {line}" for line in body.split("\n"))


def python(rng: Random) -> Example:
    name, arguments, _, body = rng.choice(texts.FUNCTIONS)
    head, body = code(name, arguments, body)
    if rng.random() < 0.3:
        return Example("python", body[1:], prompt=head + "\n")
    return Example("python", body, prompt=head)


def python_chat(rng: Random) -> Example:
    name, arguments, purpose, body = rng.choice(texts.FUNCTIONS)
    head, body = code(name, arguments, body)
    question = rng.choice(
        [
            f"Write a Python function that {purpose}.",
            f"Write {name}({arguments}) in Python.",
            f"How do I write a function that {purpose} in Python?",
        ]
    )
    return chat(rng, "python_chat", question, f"```python\n{head}{body}\n```", f"A function that {purpose}: {name}.")


def sentence(rng: Random) -> Example:
    words = rng.choice(texts.SENTENCES).split(" ")
    cut = rng.randint(3, max(3, len(words) // 2))
    return Example("sentence", "".join(" " + word for word in words[cut:]), prompt=" ".join(words[:cut]))


def story_text(rng: Random) -> str:
    name, other = rng.sample(texts.NAMES, 2)
    return rng.choice(texts.STORIES).format(
        name=name,
        other=other,
        animal=rng.choice(texts.ANIMALS),
        place=rng.choice(texts.PLACES),
        thing=rng.choice(texts.THINGS),
        colour=rng.choice(texts.COLOURS_OF_THINGS),
    )


def story(rng: Random) -> Example:
    """Prose in which names and things come back: only the second half counts fully."""
    text = story_text(rng)
    cut = text.index(" ", len(text) // 2)
    return Example("story", text[cut:], prompt=text[:cut], prompt_weight=0.3)


def small_question(rng: Random) -> tuple[str, str, str]:
    return *rng.choice(texts.SMALL_TALK), "A simple question, so a short answer."


def small_talk(rng: Random) -> Example:
    return chat(rng, "small_talk", *small_question(rng))
