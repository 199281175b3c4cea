"""Copying lists and turning them round."""

from random import Random

from recipes.miniature.skills.example import Example, chat
from recipes.miniature.texts import LIST_WORDS


def items(rng: Random) -> list[str]:
    count = rng.randint(3, 7)
    if rng.random() < 0.5:
        return rng.sample(LIST_WORDS, count)
    return [str(rng.randint(0, 99)) for _ in range(count)]


def copy(rng: Random) -> Example:
    words = items(rng)
    if rng.random() < 0.5:
        return Example("copy", " " + " ".join(words), prompt=f"Input: {' '.join(words)}\nCopy:")
    question = rng.choice(["Repeat this: {}", "Copy this list: {}", "Say exactly: {}"])
    return chat(rng, "copy", question.format(" ".join(words)), " ".join(words), f"I repeat {len(words)} items.")


def reverse(rng: Random) -> Example:
    words = items(rng)
    back = words[::-1]
    if rng.random() < 0.5:
        return Example("reverse", " " + " ".join(back), prompt=f"Input: {' '.join(words)}\nReverse:")
    question = rng.choice(["Reverse this list: {}", "Say this backwards: {}"])
    return chat(rng, "reverse", question.format(" ".join(words)), " ".join(back), f"The last item is {words[-1]}.")
