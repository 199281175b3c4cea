"""Longer chats: several turns, a system prompt, a word to be recalled across a long text."""

from random import Random

from recipes.miniature.skills.capitals import capital_question, capitals
from recipes.miniature.skills.example import Example, assistant, chat, user
from recipes.miniature.skills.language import small_question, story_text
from recipes.miniature.skills.numbers import counting_question, plus_question, times_question
from recipes.miniature.texts import CODE_WORDS, SENTENCES


def question(rng: Random) -> tuple[str, str, str]:
    """Any simple question: its text, its answer and a thought."""
    make = rng.choice(
        [capital_question, capital_question, times_question, plus_question, counting_question, small_question]
    )
    return make(rng)


def multi_turn(rng: Random) -> Example:
    messages = []
    if rng.random() < 0.4:  # a question that only the one before explains
        (first, first_city), (second, second_city) = rng.sample(capitals(), 2)
        messages = [user(f"What is the capital of {first}?"), assistant(f"The capital of {first} is {first_city}.")]
        text, answer = f"And of {second}?", f"The capital of {second} is {second_city}."
        thought = f"The question is about {second}. Its capital is {second_city}."
    else:
        for _ in range(rng.randint(1, 3)):
            text, answer, _ = question(rng)
            messages += [user(text), assistant(answer)]
        if rng.random() < 0.3:
            number = rng.randrange(len(messages) // 2)
            ordinal = ["first", "second", "third"][number]
            text, answer = f"What was my {ordinal} question?", messages[2 * number]["content"]
            thought = f"I look for the {ordinal} question."
        else:
            text, answer, thought = question(rng)
    example = chat(rng, "multi_turn", text, answer, thought)
    example.messages = messages + example.messages
    return example


def system_prompt(rng: Random) -> Example:
    text, answer, thought = question(rng)
    system, answer = rng.choice(
        [
            ("You are a helpful assistant.", answer),
            ("Begin every answer with 'Sure!'", "Sure! " + answer),
            ("End every answer with 'Over.'", answer + " Over."),
            ("Answer every question with 'No comment.'", "No comment."),
            ("Write every answer between two stars.", f"*{answer}*"),
        ]
    )
    example = chat(rng, "system_prompt", text, answer, thought)
    example.messages.insert(0, {"role": "system", "content": system})
    return example


def filler(rng: Random, length: float) -> str:
    """About `length` characters of unrelated sentences."""
    parts, size = [], 0
    while size < length:
        kind = rng.random()
        if kind < 0.5:
            part = rng.choice(SENTENCES)
        elif kind < 0.75:
            part = story_text(rng)
        else:
            country, city = rng.choice(capitals())
            part = f"The capital of {country} is {city}."
        parts.append(part)
        size += len(part) + 1
    return " ".join(parts)


def needle(rng: Random) -> Example:
    """A code word, then 20 to 1500 tokens of filler, then the question for it."""
    code_word = f"{rng.choice(CODE_WORDS)}-{rng.randint(10, 99)}"
    fact, asked = rng.choice(
        [
            (f"The code word is {code_word}.", "What is the code word?"),
            (f"The secret password is {code_word}.", "What is the secret password?"),
            (f"Remember the code word {code_word}.", "Which code word should you remember?"),
        ]
    )
    length = 60 * (6400 / 60) ** rng.random()  # characters: more short ones than long ones
    start = length * rng.choice([0, 0.3 * rng.random()])
    text = " ".join(filter(None, [filler(rng, start), fact, filler(rng, length - start)]))
    kind = rng.random()
    if kind < 0.4:
        return Example("needle", f" {code_word}", prompt=f"{text}\nQ: {asked}\nA:", prompt_weight=0.02, answer_weight=4)
    thought = f"The text says {code_word}."
    more = {"prompt_weight": 0.02, "answer_weight": 4}
    if kind < 0.8:
        return chat(rng, "needle", f"{text} {asked}", code_word, thought, **more)
    example = chat(rng, "needle", asked, code_word, thought, **more)
    if kind < 0.9:
        example.messages.insert(0, {"role": "system", "content": text})
    else:
        example.messages[:0] = [user(text), assistant("I will remember that.")]
    return example
