"""Ranks connect and prove their collectives, or say why not: a time-out, a wrong sum, a choice that cannot be had."""

import threading

import pytest
import torch
import torch.distributed as dist

from shardwise.config import ConfigError
from shardwise.parallel import connect as connecting
from shardwise.parallel import peers
from shardwise.parallel.comm import GATHERED_BYTES, INLINE_BYTES, Alone, TorchCommunicator
from shardwise.parallel.connect import WrongAnswer, connect, prove, within
from shardwise.parallel.peers import hindrance

CPU = torch.device("cpu")


def connected(rank: int, world: int, group: dist.ProcessGroup, choice: str) -> str:
    """What `connect` gives on a rank of the pool, in which a group is initialised already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connecting, "_join", lambda *_: TorchCommunicator(group, group))
        try:
            return type(connect(CPU, choice, world)).__name__  # pyright: ignore[reportArgumentType]
        except ConfigError as error:
            return str(error)


@pytest.mark.parametrize("choice", ["auto", "torch", "p2p"])
def test_cpu_ranks_talk_over_torch(ranks, choice):
    assert ranks.run(2, connected, choice=choice) == ["TorchCommunicator"] * 2


def test_nccl_bindings_are_refused_on_a_cpu(ranks):
    assert all("--comm torch" in answer for answer in ranks.run(2, connected, choice="nccl"))


def agreed_bytes(rank: int, world: int, group: dist.ProcessGroup) -> int:
    """Up to which size a communicator wins that is faster to 64 KiB on the first rank and to 16 KiB on the others."""
    one, other = TorchCommunicator(group, group), TorchCommunicator(group, group)

    def microseconds(comm: TorchCommunicator, x: torch.Tensor) -> float:
        comm.minimum(0)  # as any measurement, it needs all ranks
        return float(comm is one and x.nbytes > (65536 if rank == 0 else 16384)) + 0.5 * float(comm is other)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connecting, "graph_microseconds", microseconds)
        return connecting.winning_bytes(one, other, CPU, 1 << 20)


def test_ranks_agree_on_the_sizes_at_which_peers_win(ranks):
    assert ranks.run(2, agreed_bytes, timeout_s=20) == [16384, 16384]


def messages(rank: int, world: int, group: dist.ProcessGroup, sizes: list[int]) -> list[bytes]:
    """As sent, not waiting for all of them, with numbers of the host between."""
    comm, sent = TorchCommunicator(group, group), [bytes([n]) * size for n, size in enumerate(sizes)]
    for n, payload in enumerate(sent):
        if rank:
            sent[n] = comm.receive()
        else:
            comm.send(payload, wait=n % 3 == 2)
        assert n % 2 or comm.minimum(rank + n) == n
    return sent


def test_messages_arrive_in_order_whatever_is_waited_for(ranks):
    sizes = [0, 1, INLINE_BYTES - 8, INLINE_BYTES - 7, 5, 5 * INLINE_BYTES, 3, 2 * INLINE_BYTES]
    want = [bytes([n]) * size for n, size in enumerate(sizes)]
    assert ranks.run(3, messages, timeout_s=20, sizes=sizes) == [want] * 3


def sums(rank: int, world: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Of 1 + rank times 0, 1, 2, 3 and so on: nothing, little, and on either side of the size at which ways part."""
    comm, most = TorchCommunicator(group, group), GATHERED_BYTES // 4
    found = [comm.all_reduce((torch.arange(n) % 9 * (1 + rank)).float()) for n in (0, 1, 999, most, most + 1)]
    found += [comm.all_reduce((torch.arange(40) % 9 * (1 + rank)).to(kind)) for kind in (torch.bfloat16, torch.int32)]
    return [*found, comm.all_reduce(torch.arange(6.0).view(2, 3) * (1 + rank))]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_sums_of_every_size_and_type_are_on_every_rank(ranks, world):
    times, most = world * (world + 1) // 2, GATHERED_BYTES // 4
    for found in ranks.run(world, sums):
        *flat, square = found
        assert [len(x) for x in flat] == [0, 1, 999, most, most + 1, 40, 40]
        assert all(torch.equal(x, (torch.arange(len(x)) % 9 * times).to(x.dtype)) for x in flat)
        assert [x.dtype for x in flat[-2:]] == [torch.bfloat16, torch.int32]
        assert torch.equal(square, torch.arange(6.0).view(2, 3) * times)


class Wrong(Alone):
    world = 2

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_a_wrong_sum_is_named():
    with pytest.raises(WrongAnswer, match=r"rank 0: an all-reduce over 2 ranks gave \d+ of 4097 wrong"):
        prove(Wrong(), CPU)


def failing(error: Exception):
    def join(*_: object) -> TorchCommunicator:
        raise error

    return join


def test_only_setups_are_the_users_fault(monkeypatch):
    """A time-out is; a peer that died is not: the launcher starts the group again."""
    monkeypatch.setattr(
        connecting, "_join", failing(dist.DistStoreError("Timed out after 2 seconds waiting for clients"))
    )
    with pytest.raises(ConfigError, match="could not talk over gloo within 2 s: Timed out"):
        connect(CPU, timeout_s=2)
    for error in (RuntimeError("Connection closed by peer"), dist.DistNetworkError("Connection reset by peer")):
        monkeypatch.setattr(connecting, "_join", failing(error))
        with pytest.raises(RuntimeError, match="by peer") as raised:
            connect(CPU)
        assert not isinstance(raised.value, ConfigError)


def test_what_hangs_is_left_behind():
    never = threading.Event()
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        within(0.05, CPU, never.wait)
    never.set()
    assert within(5, CPU, lambda: 7) == 7
    with pytest.raises(KeyError):
        within(5, CPU, lambda: {}["absent"])


def test_why_peers_cannot_be_read():
    assert hindrance(CPU, 2, 2) == "the device is not a GPU"
    assert "9 ranks" in hindrance(torch.device("cuda", 0), 9, 9)
    assert "several hosts" in hindrance(torch.device("cuda", 0), 4, 2)


def test_ranks_on_one_card_do_not_wait_for_each_other_there(monkeypatch):
    """Nor do those that another GPU does not reach."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(peers, "_reaches", lambda one, other: {one, other} != {0, 2})
    gpu = torch.device("cuda", 0)
    assert "share a GPU" in hindrance(gpu, 2, 2, [(0, "GPU-a"), (0, "GPU-a")])
    assert hindrance(gpu, 2, 2, [(0, "GPU-a"), (3, "GPU-b")]) == ""
    assert "[2]" in hindrance(gpu, 2, 2, [(0, "GPU-a"), (2, "GPU-b")])
