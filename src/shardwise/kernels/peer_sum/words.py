"""Words that ranks write into one another's inboxes: what every kernel over peers' memory does with them.

A rank's inbox has SLOTS slots, each with room for one message of every sender. A word that has not come is EMPTY (the
bits of -0.0, which no sender writes), so each word says itself whether it is there: no flags, no fences, no barriers.

Message e goes into slot e % SLOTS. A launch that sends message e begins when the one before, which received e - 1, is
done; it clears the slot of e - 1. A peer writes into that slot again for e + 2, which it sends only after it has got
e + 1 from here, sent after the clearing. So three slots are enough, and no rank waits for a peer to have read, as long
as each rank sends at least one word of each message to each peer. Where a launch stands it reads from `state`, in the
device's memory, so that graphs and single launches may follow each other in any order, the same on all ranks.

Legend: W ranks (also the index of one), G programs of every launch.
"""
# pyright: reportCallIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from shardwise.kernels.peer_sum.mail import EMPTY_WORD, SLOTS

EMPTY = tl.constexpr(EMPTY_WORD)
SLOT_COUNT = tl.constexpr(SLOTS)


@triton.jit
def sent(value):
    """The word that stands for a value in fp32."""
    bits = value.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.where(bits == EMPTY, 0, bits)


@triton.jit
def value_of(word):
    """The value in fp32; NaN for what never came."""
    return tl.where(word == EMPTY, float("nan"), word.to(tl.float32, bitcast=True))


@triton.jit
def push(word, at, ok, peers, slot, RANK: tl.constexpr, W: tl.constexpr, CAPACITY: tl.constexpr):
    """Write words into the inbox of every peer."""
    place = (slot * W + RANK) * CAPACITY
    for w in tl.static_range(W):
        if w != RANK:
            tl.store(peers[w] + place + at, word, mask=ok)


@triton.jit
def clear(
    inbox, slot, blocks, RANK: tl.constexpr, W: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """Empty this program's blocks of the slot of the last message."""
    old = (slot + SLOT_COUNT - 1) % SLOT_COUNT
    for block in range(tl.program_id(0), blocks, G):
        at = block * BLOCK + tl.arange(0, BLOCK)
        for w in tl.static_range(W):
            if w != RANK:
                tl.store(inbox + (old * W + w) * CAPACITY + at, tl.full((BLOCK,), EMPTY, tl.int32))


@triton.jit
def awaited(inbox, place, at, ok, patience, trouble):
    """The words of one sender, once all of them are there, or after `patience` looks, which `trouble` then tells."""
    word = tl.load(inbox + place + at, mask=ok, other=0, volatile=True)
    looks = 0
    while (tl.max((word == EMPTY).to(tl.int32), 0) > 0) & (looks < patience):
        word = tl.load(inbox + place + at, mask=ok, other=0, volatile=True)
        looks += 1
    if looks >= patience:
        tl.store(trouble, 1)
    return word


@triton.jit
def summed(
    own, inbox, slot, at, ok, patience, trouble, RANK: tl.constexpr, W: tl.constexpr, WP: tl.constexpr,
    CAPACITY: tl.constexpr,
):  # fmt: skip
    """All ranks' values of the words `at`, added in the order of ranks."""
    own = value_of(sent(own))  # as the peers have it
    if W == 2:
        total = own + value_of(awaited(inbox, (slot * W + 1 - RANK) * CAPACITY, at, ok, patience, trouble))
    else:
        # One look at all senders is as quick as at one; what was seen is read again, to be added in order.
        w_W = tl.arange(0, WP)
        other_W = (w_W < W) & (w_W != RANK)
        places = ((slot * W + w_W) * CAPACITY)[:, None] + at[None, :]
        missing, looks = 1, 0
        while (missing > 0) & (looks < patience):
            word = tl.load(inbox + places, mask=other_W[:, None] & ok[None, :], other=0, volatile=True)
            missing = tl.max(tl.max((word == EMPTY).to(tl.int32), 1), 0)
            looks += 1
        if looks >= patience:
            tl.store(trouble, 1)
        for w in tl.static_range(W):
            if w == RANK:
                value = own
            else:
                value = value_of(tl.load(inbox + (slot * W + w) * CAPACITY + at, mask=ok, other=0, volatile=True))
            total = value if w == 0 else total + value
    return total


@triton.jit
def summed_norm(
    own_H, residual, total, inbox, slot, at_H, ok_H, factor_H, eps, patience, trouble, RANK: tl.constexpr,
    W: tl.constexpr, WP: tl.constexpr, CAPACITY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The norm in fp32 of a row of residual and all ranks' values, whose sum goes to `total`."""
    carried_H = tl.load(residual + at_H, mask=ok_H, other=0).to(tl.float32)
    sum_H = summed(own_H, inbox, slot, at_H, ok_H, patience, trouble, RANK, W, WP, CAPACITY)
    rounded_H = (sum_H + carried_H).to(total.dtype.element_ty)
    tl.store(total + at_H, rounded_H, mask=ok_H)
    value_H = tl.where(ok_H, rounded_H.to(tl.float32), 0)
    return value_H * tl.rsqrt(tl.sum(value_H * value_H, 0) / WIDTH + eps) * factor_H


@triton.jit
def done(state, slot, blocks):
    """The next message is another one; the next launch clears `blocks` of this one's."""
    tl.debug_barrier()  # all threads have read what is overwritten
    tl.store(state + 2 * tl.program_id(0), (slot + 1) % SLOT_COUNT)
    tl.store(state + 2 * tl.program_id(0) + 1, blocks)
