"""Sums and gathers of small messages by writing into the peers' memory: every rank has all parts and adds them alike.

One launch of some microseconds inside a graph, where a ring of many steps takes many times that, and the norm behind
a sum is in the same launch. kernels/peer_sum says how. Multicast of the switch is never used.
"""

import importlib.util
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from shardwise.checkpoint.weight import Weight
from shardwise.config import forbid_multicast
from shardwise.kernels.norm.reference import summed
from shardwise.parallel.comm import Partial, TorchCommunicator

if TYPE_CHECKING:
    from shardwise.kernels.peer_sum.mail import Mail  # needs Triton

PAIR_BYTES, GROUP_BYTES = 4 << 20, 1 << 20  # of the largest message among two ranks, and more: each sends it to all
MOST_RANKS = 8
TYPES = (torch.float32, torch.bfloat16, torch.float16)
WORD_BYTES = 4  # what is sent is fp32
SECONDS_A_LOOK = 4e-7  # at what a peer sent, at least


class PeerCommunicator(TorchCommunicator):
    """As TorchCommunicator, but messages of up to `limit_bytes` (in fp32) go through the inboxes of the ranks."""

    def __init__(self, base: TorchCommunicator, mail: "Mail") -> None:
        super().__init__(base.data, base.control)
        import shardwise.kernels.peer_sum.combine as combining
        import shardwise.kernels.peer_sum.route as routing
        import shardwise.kernels.peer_sum.triton as kernels

        self.kernels, self.routing, self.combining, self.mail = kernels, routing, combining, mail
        self.limit_bytes = self.most_bytes = mail.capacity * WORD_BYTES

    def patient(self) -> "PeerCommunicator":
        """From now on wait for peers as long as a server may: one of them may compile for minutes."""
        self.mail = self.mail.patient()
        return self

    def _fits(self, elements: int, dtype: torch.dtype) -> bool:
        """The same on all ranks, of which none may go another way."""
        return 0 < elements * WORD_BYTES <= self.limit_bytes and dtype in TYPES

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if not self._fits(x.numel(), x.dtype):
            return super().all_reduce(x)
        return self.kernels.peer_sum(x.contiguous(), self.mail)

    def for_norm(self, x_TH: torch.Tensor) -> torch.Tensor | Partial:
        rows, width = x_TH.shape[-2:]
        if not self._fits(rows * width, x_TH.dtype) or width > self.kernels.WIDEST:
            return self.all_reduce(summed(x_TH))
        return Partial(x_TH, self._norm, self._route)

    def _norm(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kernels.peer_norm(x_TH.contiguous(), residual_TH.contiguous(), weight_H, eps, self.mail)

    def for_block(self, x_TH: torch.Tensor) -> Callable[..., tuple[torch.Tensor, torch.Tensor]] | None:
        """For what is then a message of fp32, whatever x is."""
        fits = self._fits(x_TH.numel(), torch.float32) and x_TH.shape[-1] <= self.combining.WIDEST
        return self._combine if fits else None

    def _combine(
        self,
        outputs: Any,
        choice: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        residual_TH: torch.Tensor,
        weight_H: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of outputs of experts, or of their weighted sum."""
        if isinstance(outputs, torch.Tensor):
            return self._norm(outputs, residual_TH, weight_H, eps)
        return self.combining.peer_combine(outputs, choice, residual_TH.contiguous(), weight_H, eps, self.mail)

    def _route(
        self,
        x_TH: torch.Tensor,
        residual_TH: torch.Tensor,
        weight_H: torch.Tensor,
        eps: float,
        routers: Sequence[Weight],
        top_k: int,
        arrivals: torch.Tensor,
    ) -> tuple[torch.Tensor, ...] | None:
        """In one launch for one token and a plain router."""
        fits = x_TH.shape[-2] == 1 and x_TH.shape[-1] <= self.routing.WIDEST and top_k > 0
        if not fits or len(routers) > 1 or len(routers[0].tensors) > 1:
            return None
        inputs = summed(x_TH).contiguous(), residual_TH.contiguous(), weight_H, eps
        return self.routing.peer_route(*inputs, routers[0].plain, top_k, arrivals, self.mail)

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        rows = prod(x.shape[:-1])  # not of this rank's elements, since it may have none where others have some
        if x.dtype != torch.float32 or not self._fits(rows * max(widths), x.dtype):
            return super().all_gather(x, widths)
        return self.kernels.peer_gather(x.contiguous(), widths, self.mail)

    def check(self) -> None:
        """Raises RuntimeError if a kernel has given up waiting for a peer: then nothing that this rank has is right."""
        if self.mail.trouble.device.type == "cpu" and int(self.mail.trouble):
            raise RuntimeError(f"rank {self.rank}: a peer did not send its part of a sum in time; the group is lost")

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Token ids (int64 below 2^31) go as a gather of which only the first rank has a part. Raises as `check`."""
        self.check()
        words = 2 * x.numel()
        if x.dtype != torch.int64 or not self._fits(words, torch.float32):
            return super().broadcast(x)
        widths = [words] + [0] * (self.world - 1)
        own = x.contiguous().view(-1).view(torch.float32) if self.rank == 0 else x.new_empty(0, dtype=torch.float32)
        return self.kernels.peer_gather(own[None], widths, self.mail)[0].view(torch.int64).view(x.shape)


def open_mail(base: TorchCommunicator, device: torch.device, overlap: bool = False, patience_s: float = 60.0) -> "Mail":
    """Inboxes in symmetric memory. To be used once this is done on all ranks' devices, so that all inboxes are empty.

    overlap: kernels may start before the previous one ends. patience_s: how long a kernel waits for a peer at least.
    """
    from shardwise.kernels.overlap import can_overlap
    from shardwise.kernels.peer_sum.mail import EMPTY_WORD, PROGRAMS, Mail, inbox_words

    forbid_multicast()
    capacity = capacity_words(base.world)
    words = inbox_words(base.world, capacity)
    inbox = symmetric.empty(words, dtype=torch.int32, device=device)
    handle = symmetric.rendezvous(inbox, base.data.group_name)
    inbox.fill_(EMPTY_WORD)
    peers = range(base.world)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    programs = base.minimum(min(PROGRAMS, processors))
    return Mail(
        rank=base.rank,
        inboxes=tuple(inbox if peer == base.rank else handle.get_buffer(peer, [words], torch.int32) for peer in peers),
        state=torch.zeros((programs, 2), dtype=torch.int32, device=device),
        trouble=torch.zeros(1, dtype=torch.int32, pin_memory=True),
        capacity=capacity,
        pdl=overlap and can_overlap(device),
        patience=int(patience_s / SECONDS_A_LOOK),
    )


def capacity_words(world: int) -> int:
    """Words of the largest message among `world` ranks."""
    return (PAIR_BYTES if world == 2 else GROUP_BYTES) // WORD_BYTES


def hindrance(device: torch.device, world: int, local_world: int, places: Sequence[tuple[int, str]] = ()) -> str:
    """Why this rank cannot write into its peers' memory, as far as it can be known without trying; empty if it can.

    places: index and UUID of every rank's GPU.
    """
    if device.type != "cuda":
        return "the device is not a GPU"
    if world > MOST_RANKS:
        return f"{world} ranks; at most {MOST_RANKS} reach one another"
    if local_world != world:
        return "the ranks are on several hosts"
    if not dist.is_nccl_available():
        return "this torch has no NCCL"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if len({uuid for _, uuid in places}) < len(places):
        return "ranks share a GPU, where one that waits would keep the other from its work"
    blind = [peer for peer, _ in places if peer != device.index and not _reaches(device.index, peer)]
    return f"GPU {device.index} cannot reach the memory of {blind}" if blind else ""


def place_of(device: torch.device) -> tuple[int, str]:
    """Index and UUID of a GPU; (-1, "") of what is none."""
    if device.type != "cuda":
        return -1, ""
    return device.index, str(getattr(torch.cuda.get_device_properties(device), "uuid", device.index))


def _reaches(one: int, other: int) -> bool:
    return torch.cuda.can_device_access_peer(one, other)
