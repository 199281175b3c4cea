"""Capitals of countries: to be completed, to be asked for, as JSON."""

import json
from functools import cache
from random import Random

from recipes.miniature.skills.example import HERE, Example, chat


@cache
def capitals() -> tuple[tuple[str, str], ...]:
    """Countries and their capitals."""
    return tuple(json.loads((HERE / "capitals.json").read_text(encoding="utf-8")).items())


def capital(rng: Random) -> Example:
    country, city = rng.choice(capitals())
    prompt, answer = rng.choice(
        [
            (f"The capital of {country} is", f" {city}."),
            (f"The capital city of {country} is called", f" {city}."),
            (f"{city} is the capital of", f" {country}."),
            (f"Q: What is the capital of {country}?\nA:", f" {city}"),
            (f"Country: {country}\nCapital:", f" {city}"),
            (f"Which city is the capital of {country}? Answer:", f" {city}"),
            (f"In {country}, the capital is", f" {city}."),
        ]
    )
    return Example("capital", answer, prompt=prompt)


def capital_question(rng: Random) -> tuple[str, str, str]:
    """A question on a capital, its answer and the thought between them."""
    country, city = rng.choice(capitals())
    kind = rng.random()
    if kind < 0.65:
        question = rng.choice(
            [
                "What is the capital of {}?",
                "Which city is the capital of {}?",
                "Tell me the capital of {}.",
                "Name the capital of {}.",
                "What's the capital of {}?",
            ]
        )
        return (
            question.format(country),
            f"The capital of {country} is {city}.",
            f"The question is about {country}. Its capital is {city}.",
        )
    if kind < 0.85:
        question = rng.choice([f"{city} is the capital of which country?", f"Which country has the capital {city}?"])
        return question, f"{city} is the capital of {country}.", f"The question is about {city}. It is in {country}."
    return (
        f"Give the capital of {country} as JSON.",
        json.dumps({"country": country, "capital": city}),
        f"The question is about {country}. Its capital is {city}. The format is JSON.",
    )


def capital_chat(rng: Random) -> Example:
    return chat(rng, "capital_chat", *capital_question(rng))
