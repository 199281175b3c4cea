"""The name of a rank's bank: what it belongs to and what it was made of, so that no other checkpoint's has the same."""

import re
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path

from shardwise.checkpoint.index import INDEX_FILE, CheckpointIndex
from shardwise.shard import ParamSpec, Partitions, local

LAYOUT_VERSION = 1  # of banks: raise it whenever the same weights are laid out otherwise
SAMPLE_BYTES = 64 << 10
SAMPLES = 4  # of each file, evenly over it
NAME_LETTERS = 40


def bank_key(
    folder: Path,
    specs: Mapping[str, ParamSpec],
    partitions: Partitions,
    rank: int,
    source: CheckpointIndex | None,
    seed: int = 0,
) -> str:
    """SLOT.CONTENT, for a file's name. The slot: `folder`, the split, `rank` and the number of ranks.

    Content: specs with their formats, what the rank holds of them, the version of the layout, and the checkpoint: its
    config and index, each file's header, size, time of change and samples; without one, the seed of made-up weights.
    """
    groups = {spec.group for spec in specs.values()}
    split = sorted((group, cut.bounds) for group, cut in partitions.items() if group in groups)
    ranks = max((cut.ranks for cut in partitions.values()), default=1)
    held = sorted((name, local(spec, partitions, rank)) for name, spec in specs.items())
    made_of = [repr((LAYOUT_VERSION, sorted(specs.items(), key=lambda item: item[0]), held)).encode()]
    made_of += _content(source) if source is not None else [f"made up, {seed}".encode()]
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", folder.resolve().name)[:NAME_LETTERS].strip("-") or "model"
    place = _digest([str(folder.resolve()).encode(), repr(split).encode()], 6)
    return f"{name}-{place}-rank{rank}of{ranks}.{_digest(made_of, 12)}"


def _digest(parts: list[bytes], size: int) -> str:
    total = blake2b(digest_size=size)
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()


def _content(source: CheckpointIndex) -> Iterator[bytes]:
    """What tells one checkpoint from another, a few MB of it read."""
    for name in ("config.json", INDEX_FILE, "hf_quant_config.json"):
        path = source.folder / name
        yield path.read_bytes() if path.exists() else b""
    for name in sorted({source.info(tensor).file for tensor in source}):
        with (source.folder / name).open("rb") as file:
            facts = (source.folder / name).stat()
            yield f"{name} {facts.st_size} {facts.st_mtime_ns}".encode()
            size = int.from_bytes(file.read(8), "little")
            yield file.read(size)
            data_bytes = facts.st_size - 8 - size
            for n in range(SAMPLES):
                file.seek(8 + size + max(0, data_bytes - SAMPLE_BYTES) * n // (SAMPLES - 1))
                yield file.read(SAMPLE_BYTES)
