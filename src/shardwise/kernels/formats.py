"""Which formats the Triton kernels have, from a weight's declaration alone: told before memory is taken."""

from collections.abc import Sequence

from shardwise.shard import Local


def problem(held: Sequence[Local]) -> str | None:
    """Why kernels cannot read a weight that is held so, or None. The reference operations read every format.

    A kernel takes values that are plain, e4m3 or pairs of e2m1 codes, one scale that has several values along `in`, and
    one that has a single one there.
    """
    values = [part for part in held if part.stored.role == "value"]
    scales = [part for part in held if part.stored.role in ("scale", "inverse_scale")]
    if len(values) != 1:
        return f"{len(values)} tensors of values"
    if values[0].stored.packed and values[0].block[-1] != 2:
        return f"codes packed by {values[0].block[-1]} where kernels unpack pairs"
    for kind, those in (
        ("blocks", [part for part in scales if part.block[-1]]),
        ("rows", [part for part in scales if not part.block[-1]]),
    ):
        if len(those) > 1:
            return f"two scales of {kind}, {those[0].stored.suffix} and {those[1].stored.suffix}"
    return None
