"""Examples for training and for the test: every skill is a function that draws one random Example.

A prompt belongs to the test set or to the training set by a hash of its text (`held_out`), so the two never meet.
"""

from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType

from recipes.miniature.skills.capitals import capital, capital_chat
from recipes.miniature.skills.conversation import multi_turn, needle, system_prompt
from recipes.miniature.skills.example import Example, held_out
from recipes.miniature.skills.language import python, python_chat, sentence, small_talk, story
from recipes.miniature.skills.lists import copy, reverse
from recipes.miniature.skills.numbers import counting, counting_chat, plus, plus_chat, times, times_chat
from recipes.miniature.skills.pictures import picture_one, picture_pair, picture_two
from recipes.miniature.skills.tools import tool_answer, tool_call

Skill = Callable[[Random], Example]

# Share of each skill in the training tokens.
SKILLS: Mapping[Skill, int] = MappingProxyType(
    {
        capital: 5,
        capital_chat: 6,
        counting: 4,
        counting_chat: 4,
        times: 5,
        times_chat: 8,
        plus: 6,
        plus_chat: 8,
        python: 2,
        python_chat: 3,
        sentence: 2,
        story: 3,
        small_talk: 2,
        copy: 4,
        reverse: 5,
        multi_turn: 7,
        system_prompt: 4,
        needle: 20,
        tool_call: 10,
        tool_answer: 8,
        picture_one: 6,
        picture_two: 10,
        picture_pair: 3,
    }
)
# These have few different prompts, all of them learned by heart: the test asks for them too.
BY_HEART = frozenset({python, python_chat, sentence, story, small_talk})


def training_example(rng: Random, skill: Skill) -> Example:
    """An example whose prompt the test set cannot have."""
    while True:
        example = skill(rng)
        if skill in BY_HEART or example.images or not held_out(example):
            return example


def held_out_example(rng: Random, skill: Skill) -> Example:
    """An example for the test set."""
    while True:
        example = skill(rng)
        if skill in BY_HEART or example.images or held_out(example):
            return example
