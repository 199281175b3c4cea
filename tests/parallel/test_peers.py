"""The communicator over peers' memory on CPU ranks that share files as inboxes, as on GPUs."""

from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.kernels.peer_sum.mail import BLOCK, EMPTY_WORD, Mail, inbox_words
from shardwise.parallel.comm import TorchCommunicator
from shardwise.parallel.peers import PeerCommunicator
from tests.gpu import peer_case
from tests.ranks import Ranks

CPU, PROGRAMS, CAPACITY, MOST = torch.device("cpu"), 3, 128 * BLOCK, 8192


def checks(rank: int, world: int, group: dist.ProcessGroup, folder: str) -> list[str]:
    """What is wrong, over inboxes in files that all ranks map."""
    base, words = TorchCommunicator(group, group), inbox_words(world, CAPACITY)
    paths = [Path(folder) / f"inbox{peer}" for peer in range(world)]
    paths[rank].write_bytes(EMPTY_WORD.to_bytes(4, "little", signed=True) * words)
    base.minimum(0)
    inboxes = tuple(torch.from_file(str(path), shared=True, size=words, dtype=torch.int32) for path in paths)
    state, trouble = torch.zeros((PROGRAMS, 2), dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    peers = PeerCommunicator(base, Mail(rank, inboxes, state, trouble, CAPACITY, patience=2000))
    return peer_case.checked(base, peer_case.value_checks(base, peers, CPU, MOST))


def test_sums_norms_choices_and_gathers_are_right_and_no_rank_goes_another_way(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, checks, timeout_s=60, folder=str(tmp_path)) == [[], []]
