"""Sums, norms and gathers over ranks in processes that share inboxes; the order of words as a model of interleavings.

Legend: W ranks, T tokens, H hidden.
"""
# pyright: reportCallIssue=false

import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.kernels.moe_block.combine import Outputs
from shardwise.kernels.moe_block.reference import norm_route
from shardwise.kernels.peer_sum import reference
from shardwise.kernels.peer_sum.combine import peer_combine
from shardwise.kernels.peer_sum.mail import BLOCK, EMPTY_WORD, SLOTS, Mail, inbox_words
from shardwise.kernels.peer_sum.route import peer_route
from shardwise.kernels.peer_sum.triton import peer_gather, peer_norm, peer_sum
from tests.kernels.weights import make_weight
from tests.poison import poisoned

EPS, PROGRAMS, CAPACITY, ROWS = 1e-6, 3, 8 * BLOCK, 10
Message = tuple[str, tuple[int, ...]]
MESSAGES: tuple[Message, ...] = (
    ("sum", (1,)),
    ("sum", (4097,)),
    ("norm", (1, 64)),
    ("norm", (5, 100)),
    ("sum", (8 * BLOCK,)),
    ("gather", (2, 5, 3, 0)),
    ("norm", (2, 2048)),
    ("parts", (5, 100)),
    ("sum", (7,)),
    ("gather", (1, 2000, 1, 7)),
    ("gather", (1, 4, 0)),
    ("route", (1, 100)),
    ("route", (1, 64)),
    ("combine", (2, 64)),
    ("combine", (5, 100)),
    ("mixed", (4, 100)),
    ("combine", (7, 1100)),
    ("mixed", (1, 33)),
    ("sum", (3, 1000)),
)


def mails(world: int, patience: int = 1 << 30) -> list[Mail]:
    """One of each rank, over memory that forked processes share."""
    inboxes = tuple(
        torch.full((inbox_words(world, CAPACITY),), EMPTY_WORD, dtype=torch.int32).share_memory_() for _ in range(world)
    )
    states = [torch.zeros(PROGRAMS, 2, dtype=torch.int32) for _ in range(world)]
    return [
        Mail(rank, inboxes, states[rank], torch.zeros(1, dtype=torch.int32), CAPACITY, patience=patience)
        for rank in range(world)
    ]


def given_to(rank: int, n: int, shape: Sequence[int]) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(100 * rank + n))
    x.view(-1)[::5] = -0.0
    return x


def parts_of(rank: int, n: int, shape: Sequence[int]) -> torch.Tensor:
    """Of one rank's x; each rank has another number of them."""
    return given_to(rank, n, (1 + rank, *shape))


Choice = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def experts_of(rank: int, n: int, shape: tuple[int, ...]) -> tuple[Outputs, Choice]:
    """A rank's outputs of 3 experts a token and of the shared one, and the choice and gate, which all ranks have.

    Those of every other message are in bf16, as of pairs that were sorted; the gate is one of several columns.
    """
    rows, width = shape
    y_MH, shared_TH = given_to(rank, n, (rows * 3, width)), given_to(rank, n + 50, shape)
    ids = torch.arange(rows * 3, dtype=torch.int32).view(rows, 3)
    y_MH = y_MH.bfloat16() if n % 2 else y_MH
    return Outputs(y_MH, shared_TH), (ids, given_to(7, n, (rows, 3)).abs(), given_to(6, n, (rows, 4))[:, 3:])


def widths_of(shape: Sequence[int], world: int) -> list[int]:
    return [shape[1 + rank % (len(shape) - 1)] for rank in range(world)]


def expected(n: int, what: str, shape: tuple[int, ...], world: int) -> tuple[torch.Tensor, ...]:
    if what == "gather":
        widths = widths_of(shape, world)
        return (reference.peer_gather([given_to(rank, n, (shape[0], widths[rank])) for rank in range(world)]),)
    parts = [given_to(rank, n, shape) for rank in range(world)]
    if what in ("combine", "mixed"):
        found = [experts_of(rank, n, shape) for rank in range(world)]
        parts = [reference.weighted(*outputs, choice) for outputs, choice in found]
    if what == "sum":
        return (reference.peer_sum(parts),)
    if what == "route":
        router = make_weight((ROWS, shape[1]), "fp32", n, "cpu")
        return norm_route(
            reference.peer_sum(parts), given_to(9, n, shape), given_to(8, n, shape[-1:]), EPS, [router], 3
        )
    if what == "parts":
        parts = [reduce(torch.add, parts_of(rank, n, shape)) for rank in range(world)]
    return reference.peer_norm(parts, given_to(9, n, shape), given_to(8, n, shape[-1:]).bfloat16(), EPS)


def answers(rank: int, mail: Mail, messages: Sequence[Message], pause_s: float) -> list[tuple[torch.Tensor, ...]]:
    """All messages from the point of view of one rank, which is late now and then."""
    assert all(max(prod(shape), 1) <= mail.capacity for what, shape in messages if what != "gather")
    torch.set_num_threads(1)
    noise, found = random.Random(rank), list[tuple[torch.Tensor, ...]]()
    for n, (what, shape) in enumerate(messages):
        time.sleep(noise.choice((0, pause_s)))
        with poisoned():
            if what == "gather":
                widths = widths_of(shape, len(mail.inboxes))
                found.append((peer_gather(given_to(rank, n, (shape[0], widths[rank])), widths, mail),))
            elif what == "sum":
                found.append((peer_sum(given_to(rank, n, shape), mail),))
            elif what == "route":
                router, arrivals = make_weight((ROWS, shape[1]), "fp32", n, "cpu"), torch.zeros(1, dtype=torch.int32)
                inputs = given_to(rank, n, shape), given_to(9, n, shape), given_to(8, n, shape[-1:]), EPS
                found.append(peer_route(*inputs, router.plain, 3, arrivals, mail))
                assert arrivals.tolist() == [0]
            elif what in ("combine", "mixed"):  # mixed: some ranks have their weighted sums already
                outputs, choice = experts_of(rank, n, shape)
                rest = given_to(9, n, shape), given_to(8, n, shape[-1:]).bfloat16(), EPS, mail
                if what == "mixed" and rank != 1:
                    found.append(peer_norm(reference.weighted(*outputs, choice), *rest))
                else:
                    found.append(peer_combine(outputs, choice, *rest))
            else:
                weight = given_to(8, n, shape[-1:]).bfloat16()
                x = parts_of(rank, n, shape) if what == "parts" else given_to(rank, n, shape)
                found.append(peer_norm(x, given_to(9, n, shape), weight, EPS, mail))
    return found


def on_ranks(all_mail: Sequence[Mail], messages: Sequence[Message], pause_s: float = 0.02) -> list[Any]:
    """`answers` of every rank, each in a process of its own."""
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank, mail in enumerate(all_mail):
        here, there = context.Pipe(duplex=False)

        def run(rank: int = rank, mail: Mail = mail, there: Any = there) -> None:
            found = answers(rank, mail, messages, pause_s)
            there.send([[each.float().numpy() for each in one] for one in found])

        processes.append(context.Process(target=run, daemon=True))
        pipes.append(here)
    for process in processes:
        process.start()
    try:
        return [pipe.recv() if pipe.poll(60) else pytest.fail("a rank hangs") for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_agree_bit_for_bit_with_sums_in_their_order(world: int) -> None:
    found = on_ranks(mails(world), MESSAGES)
    for n, (what, shape) in enumerate(MESSAGES):
        known = expected(n, what, shape, world)
        for rank in range(world):
            got = [torch.from_numpy(each) for each in found[rank][n]]
            if what in ("norm", "parts"):  # its own sum may be in any order, though alike on all ranks
                torch.testing.assert_close(got[0], known[0].float(), atol=2e-2, rtol=2e-2)
                assert torch.equal(got[0], torch.from_numpy(found[0][n][0]))
            if what in ("route", "combine", "mixed"):
                for one, other, first in zip(got, known, found[0][n], strict=True):
                    close = 2e-2 if other.dtype == torch.bfloat16 else 2e-5
                    torch.testing.assert_close(one, other.float(), atol=close, rtol=close)
                    assert torch.equal(one, torch.from_numpy(first))
                continue
            assert torch.equal(got[-1], known[-1]), (n, what, shape, rank)


def test_a_peer_that_never_sends_makes_nan_and_no_hang() -> None:
    x = given_to(0, 0, (5,))
    for world in (2, 3):
        mail = mails(world, patience=3)[0]
        assert peer_sum(x, mail).isnan().all()
        assert int(mail.trouble) == 1


@dataclass
class Rules:
    """What the protocol consists of, so that leaving out a part of it can be shown to fail."""

    slots: int = SLOTS
    clears: bool = True
    behind: int = 1  # messages ago that the slot was used which is cleared
    least: int = 1  # words of a rank that has nothing to say


def launches(rank: int, world: int, sizes: Sequence[Sequence[int]], inboxes: list[Any], rules: Rules) -> Iterator[str]:
    """One rank's launches, one memory access at a time; what it got wrong ends it with AssertionError.

    sizes: words of each rank, by message. Word i of message n from rank r is (n, r, i). Of the programs of a launch,
    those of even words go first here: they do not depend on one another.
    """
    last = 0
    for n, each in enumerate(sizes):
        counts = [max(each[peer], rules.least) for peer in range(world)]
        slot, old = n % rules.slots, (n - rules.behind) % rules.slots
        for peer in range(world):
            for i in range(counts[rank]) if peer != rank else ():
                assert inboxes[peer].get((slot, rank, i)) is None, f"{n}: written over before it was read or cleared"
                inboxes[peer][slot, rank, i] = (n, rank, i)
                yield "push"
        for peer in range(world) if rules.clears else ():
            for i in range(last):
                inboxes[rank][old, peer, i] = None
                yield "clear"
        for i in (*range(0, max(counts), 2), *range(1, max(counts), 2)):
            for peer in range(world):
                if peer == rank or i >= counts[peer]:
                    continue
                while inboxes[rank].get((slot, peer, i)) is None:
                    yield "wait"
                assert inboxes[rank][slot, peer, i] == (n, peer, i), f"{n}: an old word was taken"
        last = max(counts)
        yield "end"


def interleaved(order: random.Random, world: int, sizes: Sequence[Sequence[int]], rules: Rules) -> None:
    """Ranks take turns as `order` says, mostly one for long. Raises AssertionError if all wait for ever."""
    inboxes: list[Any] = [{} for _ in range(world)]
    running = {rank: launches(rank, world, sizes, inboxes, rules) for rank in range(world)}
    idle = 0
    while running:
        rank = order.choice(sorted(running))
        for _ in range(order.choice((1, 3, 50))):
            step = next(running[rank], None)
            if step is None:
                del running[rank]
            if step in (None, "wait"):
                break
        idle = idle + 1 if step == "wait" else 0  # pyright: ignore[reportPossiblyUnboundVariable]
        assert idle < 1000, "no rank can go on"


SEEDS = st.integers(0, 1 << 32)


@settings(max_examples=150, deadline=None)
@given(SEEDS, st.integers(2, 4), st.lists(st.tuples(*[st.integers(0, 4)] * 4), max_size=9))
def test_no_order_of_accesses_loses_or_repeats_a_word(seed: int, world: int, sizes: list[tuple[int, ...]]) -> None:
    interleaved(random.Random(seed), world, sizes, Rules())


def many(rules: Rules) -> None:
    for seed in range(200):
        order = random.Random(seed)
        interleaved(order, 2 + seed % 2, [[order.randrange(4) for _ in range(3)] for _ in range(8)], rules)


@pytest.mark.parametrize("rules", [Rules(slots=2), Rules(clears=False), Rules(behind=2), Rules(least=0)], ids=str)
def test_each_part_of_the_protocol_is_needed(rules: Rules) -> None:
    many(Rules())
    with pytest.raises(AssertionError):
        many(rules)
