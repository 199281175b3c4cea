"""What a rank runs on: its device, who else is on it, and what of its memory others hold."""

import logging

import torch

from shardwise.cache.budget import GIB
from shardwise.config import ConfigError, RankEnvironment, ServeConfig, rank_threads
from shardwise.parallel.context import RankContext

logger = logging.getLogger(__name__)

OTHERS_SHARE = 0.05  # of a GPU's memory, from which on it is worth a warning that others hold it


def device_kind(serve: ServeConfig) -> str:
    """What ranks run on here: "cpu" or "cuda". Raises ConfigError for a GPU that is not here."""
    if serve.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here; use --device cpu, or a GPU build of torch")
    return ("cuda" if torch.cuda.is_available() else "cpu") if serve.device == "auto" else serve.device


def place(serve: ServeConfig, environment: RankEnvironment, device_type: str) -> torch.device:
    """This rank's device; on CPUs the ranks of a host share its cores, or take the fewer that OMP_NUM_THREADS says."""
    if device_type == "cpu":
        torch.set_num_threads(min(torch.get_num_threads(), rank_threads(environment.local_world)))
        return torch.device("cpu")
    if serve.gpu and len(serve.gpu) != environment.local_world:
        raise ConfigError(
            f"--gpu {','.join(serve.gpu)}: {len(serve.gpu)} for {environment.local_world} ranks of this host"
        )
    index = int(serve.gpu[environment.local_rank]) if serve.gpu else environment.local_rank
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {environment.rank} is for GPU {index} of this host and there are {torch.cuda.device_count()} GPUs; "
            f"use --tp {torch.cuda.device_count()} or less, or name them with --gpu"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def sharers(serve: ServeConfig, device: torch.device) -> int:
    """How many ranks of this host are on `device`."""
    return serve.gpu.count(str(device.index)) or 1


def warn_of_others(ctx: RankContext) -> None:
    """Say how much of the GPU is held by neither weights nor this process's other tensors, if that is a lot."""
    if ctx.device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(ctx.device)
    other = total - free - torch.cuda.memory_reserved(ctx.device)
    if other > OTHERS_SHARE * total:
        logger.warning(
            "%.2f GiB of %s are held by other processes; the KV cache is smaller for it",
            other / GIB, torch.cuda.get_device_name(ctx.device),
        )  # fmt: skip
