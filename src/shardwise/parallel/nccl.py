"""NCCL through its own bindings (the package nccl4py): all-reduces in place, straight onto the current stream."""

import importlib
import importlib.util
from typing import Any

import torch

from shardwise.config import ConfigError
from shardwise.parallel.comm import TorchCommunicator

UNIQUE_ID_BYTES = 128


class NcclCommunicator(TorchCommunicator):
    """As TorchCommunicator, but for all-reduces. Raises ConfigError if nccl4py is not installed."""

    def __init__(self, base: TorchCommunicator) -> None:
        super().__init__(base.data, base.control)
        self.nccl = bindings()
        name = self.nccl.get_unique_id().as_bytes if self.rank == 0 else bytes(UNIQUE_ID_BYTES)
        if self.rank == 0:
            self.send(name)
        else:
            name = self.receive()
        self.communicator = self.nccl.Communicator.init(self.world, self.rank, self.nccl.UniqueId.from_bytes(name))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if x.numel():
            self.communicator.allreduce(x, x, self.nccl.SUM, stream=torch.cuda.current_stream(x.device).cuda_stream)
        return x


def bindings() -> Any:
    """The module nccl.core. Raises ConfigError if it is not installed."""
    if importlib.util.find_spec("nccl") is None:
        raise ConfigError("--comm nccl: the package nccl4py is not installed; install it, or use --comm torch")
    return importlib.import_module("nccl.core")
