"""Collectives between the ranks of one group, behind one small interface.

Data goes over the device's backend (NCCL or RCCL; Gloo on CPUs), step plans always over Gloo, so that a plan can be
sent while the device works.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardwise.kernels.norm.reference import summed

INLINE_BYTES = 16384  # a plan up to this size takes one broadcast, a longer one two
GATHERED_BYTES = 1 << 18  # over Gloo, sums of three ranks and more up to this size are made by the first rank


@dataclass(frozen=True)
class Partial:
    """This rank's part of a sum over ranks, which the norm that comes next makes, in the same launch; with one rank,
    what its layer makes of x_TH. It may be parts of that part, [S, T, H].

    norm_sum: (x, residual, weight, eps) -> norm of residual + the sum, and that new residual, as ops.add_rms_norm.
    route_sum: (x, residual, weight, eps, routers, top_k, arrivals) -> as ops.norm_route; None where it takes more than
    one launch, so that norm_sum serves as well.
    """

    x_TH: torch.Tensor
    norm_sum: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]

    route_sum: Callable[..., tuple[torch.Tensor, ...] | None] = lambda *_: None

    def normed(
        self, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of residual + the sum over ranks, and that new residual. To be called once, by every rank."""
        return self.norm_sum(self.x_TH, residual_TH, weight_H, eps)

    def routed(self, residual_TH: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...] | None:
        """Sum, norm and choice of experts; or None, and nothing has been done. Instead of `normed`."""
        return self.route_sum(self.x_TH, residual_TH, *rest)


class Communicator(Protocol):
    """What model and engine may ask of the group. Every rank calls the same methods in the same order."""

    rank: int
    world: int
    capturable: bool  # whether a CUDA graph can hold what it does

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, the same bits on each; `x` itself may hold it afterwards, or be as it was."""
        ...

    def for_norm(self, x_TH: torch.Tensor) -> "torch.Tensor | Partial":
        """The sum of all ranks' `x`, or a promise of it, if it costs less together with the norm behind it.

        A rank's x may itself be parts [S, T, H], as many as it likes; alone, it is left at that.
        """
        ...

    def for_block(self, x_TH: torch.Tensor) -> Callable[..., tuple[torch.Tensor, torch.Tensor]] | None:
        """What sums a block of experts of x over ranks, with the norm behind it (Then.over_ranks); or None."""
        ...

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """All ranks' `x` [.., widths[rank]], joined on the last axis in the order of ranks."""
        ...

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """The first rank's `x`; those of the others, of its shape, may hold it afterwards, or be as they were."""
        ...

    def check(self) -> None:
        """Raises RuntimeError if it is known that the group is lost. Waits for nothing."""
        ...

    def minimum(self, value: int) -> int:
        """The least of all ranks' host numbers."""
        ...

    def send(self, payload: bytes, wait: bool = True) -> None:
        """Give `payload` to all other ranks; only the first rank may. wait: until they have it; else the next `send`
        does, and raises what went wrong."""
        ...

    def receive(self) -> bytes:
        """What the first rank sent; waits for it."""
        ...


class Alone:
    """A group of one rank: nothing to say and nobody to wait for."""

    rank = 0
    world = 1
    capturable = True

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def for_norm(self, x_TH: torch.Tensor) -> torch.Tensor | Partial:
        return x_TH

    def for_block(self, x_TH: torch.Tensor) -> Callable[..., tuple[torch.Tensor, torch.Tensor]] | None:
        return None

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def check(self) -> None:
        pass

    def minimum(self, value: int) -> int:
        return value

    def send(self, payload: bytes, wait: bool = True) -> None:
        pass

    def receive(self) -> bytes:
        raise RuntimeError("a group of one rank has no other rank to hear from")


class TorchCommunicator:
    """torch.distributed: `data` for tensors of the device, `control` (Gloo) for host messages."""

    capturable = True

    def __init__(self, data: dist.ProcessGroup, control: dist.ProcessGroup) -> None:
        self.data, self.control = data, control
        self.rank, self.world = data.rank(), data.size()
        self.first = dist.get_global_rank(data, 0)
        self._sending: list[tuple[dist.Work, torch.Tensor]] = []  # on their way; what is sent must stay
        self._gathered_bytes = GATHERED_BYTES if self.world > 2 and dist.get_backend(data) == "gloo" else 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if 0 < x.nbytes <= self._gathered_bytes:
            return self._sum_on_first(x)
        dist.all_reduce(x, group=self.data)
        return x

    def _sum_on_first(self, x: torch.Tensor) -> torch.Tensor:
        """A message to the first rank and one back, where Gloo's ring has each rank wait for some four per rank."""
        parts = [torch.empty_like(x) for _ in range(self.world)] if self.rank == 0 else None
        dist.gather(x, parts, self.first, group=self.data)
        if parts is not None:
            torch.sum(torch.stack(parts), 0, dtype=x.dtype, out=x)
        dist.broadcast(x, self.first, group=self.data)
        return x

    def for_norm(self, x_TH: torch.Tensor) -> torch.Tensor | Partial:
        return self.all_reduce(summed(x_TH))

    def for_block(self, x_TH: torch.Tensor) -> Callable[..., tuple[torch.Tensor, torch.Tensor]] | None:
        return None

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        if len(set(widths)) > 1:
            padded = x.new_zeros(*x.shape[:-1], max(widths))
            padded[..., : x.shape[-1]] = x
            x = padded
        parts = [torch.empty_like(x) for _ in widths]
        dist.all_gather(parts, x.contiguous(), group=self.data)
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], -1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        dist.broadcast(x, self.first, group=self.data)
        return x

    def check(self) -> None:
        pass

    def minimum(self, value: int) -> int:
        least = torch.tensor(value)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.control)
        return int(least)

    def send(self, payload: bytes, wait: bool = True) -> None:
        head = struct.pack("<q", len(payload)) + payload[: INLINE_BYTES - 8]
        frames = [head.ljust(INLINE_BYTES, b"\0"), payload[INLINE_BYTES - 8 :]]
        self._delivered()
        tensors = [torch.frombuffer(bytearray(frame), dtype=torch.uint8) for frame in frames if frame]
        self._sending = [(self.control.broadcast(tensor, 0), tensor) for tensor in tensors]
        if wait:
            self._delivered()

    def _delivered(self) -> None:
        """Wait until what was sent has arrived."""
        for work, _ in self._sending:
            work.wait()
        self._sending = []

    def receive(self) -> bytes:
        frame = torch.empty(INLINE_BYTES, dtype=torch.uint8)
        dist.broadcast(frame, self.first, group=self.control)
        head = frame.numpy().tobytes()
        (size,) = struct.unpack_from("<q", head)
        payload = head[8 : 8 + size]
        if left := size - len(payload):
            rest = torch.empty(left, dtype=torch.uint8)
            dist.broadcast(rest, self.first, group=self.control)
            payload += rest.numpy().tobytes()
        return payload


class StagedCommunicator(TorchCommunicator):
    """The same for ranks that share a GPU, which NCCL refuses: tensors go through the host's memory, over Gloo."""

    capturable = False

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(super().all_reduce(x.cpu()))

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        return super().all_gather(x.cpu(), widths).to(x.device)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(super().broadcast(x.cpu()))
