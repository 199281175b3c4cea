"""Counting, products and sums."""

from collections.abc import Iterable
from random import Random

from recipes.miniature.skills.example import Example, chat


def sequence(rng: Random, length: int) -> list[int]:
    """Numbers in equal steps, none negative."""
    step = rng.choice([1, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 11, 12, 20, 25, 50, 100, -1, -1, -2, -5, -10])
    start = rng.choice([1, step if step > 0 else 100, rng.randint(0, 200)])
    start = max(start, -step * length)
    return [start + step * i for i in range(length)]


def listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def counting(rng: Random) -> Example:
    shown = rng.randint(3, 6)
    numbers = sequence(rng, shown + 8)
    return Example("counting", f" {listed(numbers[shown:])}", prompt=listed(numbers[:shown]) + ",")


def counting_question(rng: Random) -> tuple[str, str, str]:
    if rng.random() < 0.5:
        low = rng.randint(0, 120)
        high = low + rng.randint(4, 12)
        numbers, text = range(low, high + 1), f"Count from {low} to {high}."
        if rng.random() < 0.3:
            numbers, text = range(high, low - 1, -1), f"Count down from {high} to {low}."
    else:
        numbers = sequence(rng, 8)
        numbers, text = numbers[4:], f"Continue with four more numbers: {listed(numbers[:4])}"
    return text, listed(numbers), f"I start at {numbers[0]} and end at {numbers[-1]}."


def counting_chat(rng: Random) -> Example:
    return chat(rng, "counting_chat", *counting_question(rng))


def product(rng: Random) -> tuple[int, int]:
    return rng.randint(1, 30), rng.randint(1, 30)


def product_working(a: int, b: int) -> str:
    """How a product is found, in words: what the model thinks."""
    tens, ones = b // 10 * 10, b % 10
    if not tens or not ones:
        return f"{a} times {b} is {a * b}."
    return f"{a} times {tens} is {a * tens}, {a} times {ones} is {a * ones}, and {a * tens} plus {a * ones} is {a * b}."


def times(rng: Random) -> Example:
    a, b = product(rng)
    prompt = rng.choice([f"Q: What is {a} times {b}?\nA:", f"{a} times {b} is", f"{a} x {b} ="])
    return Example("times", f" {a * b}", prompt=prompt)


def times_question(rng: Random) -> tuple[str, str, str]:
    a, b = product(rng)
    text = rng.choice([f"What is {a} times {b}?", f"Multiply {a} by {b}.", f"How much is {a} x {b}?"])
    return text, f"{a * b}", product_working(a, b)


def times_chat(rng: Random) -> Example:
    return chat(rng, "times_chat", *times_question(rng))


def summands(rng: Random) -> tuple[int, int]:
    return rng.randrange(10 ** rng.choice([1, 2, 2, 3, 3, 3])), rng.randrange(10 ** rng.choice([1, 2, 2, 3, 3, 3]))


def sum_working(a: int, b: int) -> str:
    """How a sum is found, digit by digit."""
    parts, carry = [], 0
    for place in ["ones", "tens", "hundreds"][: max(len(str(a)), len(str(b)))]:
        x, y = a % 10, b % 10
        total = x + y + carry
        parts.append(f"{place} {x}+{y}{'+1' if carry else ''}={total}")
        a, b, carry = a // 10, b // 10, total // 10
    return ", ".join(parts) + "."


def plus(rng: Random) -> Example:
    a, b = summands(rng)
    prompt = rng.choice([f"Q: What is {a} plus {b}?\nA:", f"{a} plus {b} is", f"{a} + {b} ="])
    return Example("plus", f" {a + b}", prompt=prompt)


def plus_question(rng: Random) -> tuple[str, str, str]:
    a, b = summands(rng)
    text = rng.choice([f"What is {a} plus {b}?", f"Add {a} and {b}.", f"How much is {a} + {b}?"])
    return text, f"{a + b}", sum_working(a, b)


def plus_chat(rng: Random) -> Example:
    return chat(rng, "plus_chat", *plus_question(rng))
