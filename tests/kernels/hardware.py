"""What was compiled, as the page docs/hardware.md: a row a kernel, a column a card."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Found = Mapping[str, Any]
KIB = 1024

HEAD = """# What the kernels need of a GPU

Written by `FULL_COMPILE=1 python -m tests.kernels.targets --table docs/hardware.md`, without a GPU: every kernel is
compiled in every configuration that it can choose (tiles, warps, stages, formats of weights), with Triton {triton}.
`tests/kernels/test_compile.py` compiles every configuration in CI, most of them for one card in turn, and fails if one
does not compile or needs more shared memory than its cards have.

**It has run on NVIDIA H200 (sm_90) alone.** For the other cards kernels are compiled and no more; nothing has been
measured there.

The first configuration of each kernel and type of operands is compiled for all cards that are given it, the others for
one card of each vendor, in turn: cards of a vendor need the same shared memory for the same configuration. Where tiles
are chosen by the size of shared memory, each size has its own configurations, on the cards of that size.

## Cards

Shared memory is that of a block, in KiB; registers are those of a thread. Spills: configurations in which the compiler
stores values to memory for want of registers, and the most bytes of a thread.

| card | such as | shared memory | most used | most registers | compiled | spill |
| --- | --- | --- | --- | --- | --- | --- |
"""
EXAMPLES = {
    "sm_86": "RTX 30, A10, A40",
    "sm_89": "RTX 40, L4, L40S",
    "sm_90": "H100, H200",
    "sm_120": "RTX 50, RTX PRO 6000",
    "gfx1201": "Radeon RX 9070, AI PRO R9700",
}


def registers(told: str) -> tuple[int, int]:
    """Registers of a thread and bytes spilled, from AMD's assembly or NVIDIA's `cuobjdump -res-usage`."""
    if used := re.search(r"\.vgpr_count:\s+(\d+)", told):
        spilled = re.search(r"\.vgpr_spill_count:\s+(\d+)", told)
        return int(used[1]), 4 * int(spilled[1]) if spilled else 0
    used, stack, local = (re.search(rf"\b{name}:(\d+)", told) for name in ("REG", "STACK", "LOCAL"))
    if not used or not stack or not local:
        raise ValueError(f"no registers are told in {told[:200]!r}")
    return int(used[1]), int(stack[1]) + int(local[1])


def kernel_name(found: Found) -> str:
    """`moe.gate_up_kernel`: kernels of several modules share a name."""
    return f"{found['module'].split('.')[-2]}.{found['case'].split('(')[0]}"


def most(found: Iterable[Found], what: str) -> int:
    return max((each[what] for each in found), default=0)


def spilling(found: Iterable[Found]) -> list[Found]:
    """Those that spill, the most bytes first."""
    return sorted((each for each in found if each["spilled_bytes"]), key=lambda each: -each["spilled_bytes"])


def spills(found: Sequence[Found]) -> str:
    there = spilling(found)
    return f"{len(there)}, up to {there[0]['spilled_bytes']} B" if there else "none"


def page(found: Sequence[Found], limits_bytes: Mapping[str, int], triton_version: str) -> str:
    """The page. limits_bytes: of shared memory, by the cards' names, in the order of its columns."""
    of_card = {card: [each for each in found if each["card"] == card] for card in limits_bytes}
    lines = [HEAD.format(triton=triton_version).rstrip("\n")]
    for card, limit_bytes in limits_bytes.items():
        ours = of_card[card]
        lines.append(
            f"| {card} | {EXAMPLES[card]} | {limit_bytes // KIB} | {most(ours, 'shared_bytes') / KIB:.1f} | "
            f"{most(ours, 'registers')} | {len(ours)} | {spills(ours)} |"
        )
    lines += [
        "\n## Kernels\n",
        "A card's column: the most shared memory of a block in KiB, the most registers of a thread, and of how many\n"
        "bytes the worst configuration spills, if one does. A dash: the card lacks what the kernel needs, e4m3 in "
        "hardware or NVIDIA's matrix instructions.\n",
        f"| kernel | configurations | {' | '.join(limits_bytes)} |",
        f"| --- | --- |{' --- |' * len(limits_bytes)}",
    ]
    for name in sorted({kernel_name(each) for each in found}):
        cells = list[str]()
        for ours in of_card.values():
            mine = [each for each in ours if kernel_name(each) == name]
            spilled = most(mine, "spilled_bytes")
            text = f"{most(mine, 'shared_bytes') / KIB:.1f}; {most(mine, 'registers')}"
            cells.append((text + f"; spills {spilled}" * bool(spilled)) if mine else "-")
        configurations = {each["case"] for each in found if kernel_name(each) == name}
        lines.append(f"| `{name}` | {len(configurations)} | {' | '.join(cells)} |")
    return "\n".join([*lines, *listing(spilling(found))]) + "\n"


def listing(there: Sequence[Found]) -> list[str]:
    """The worst configuration of each kernel on each card of those that spill."""
    if not there:
        return ["\nNothing spills."]
    lines = ["\n## Spills\n", "The worst configuration of each kernel on each card, and how many spill there.\n"]
    lines += [
        "| kernel | card | spill | worst, B | registers | its configuration |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    counts = Counter((kernel_name(each), each["card"]) for each in there)
    worst = {(kernel_name(each), each["card"]): each for each in reversed(there)}
    for (kernel, card), each in sorted(worst.items()):
        told = each["case"].partition("(")[2].replace(") warps", "; warps")
        figures = f"{counts[kernel, card]} | {each['spilled_bytes']} | {each['registers']}"
        lines.append(f"| `{kernel}` | {card} | {figures} | `{told}` |")
    return lines


def racing(ttgir: str) -> bool:
    """Whether a loop ends while products may read left operands in registers, which its next turn overwrites.

    Hopper's are asynchronous; what Triton 3.6 waits for counts products, not registers. Nothing is known to go wrong
    where the loop itself reads the sum, so that all are waited for.
    """
    loops = list[tuple[int, bool, bool]]()  # indentation of each open loop; a left operand in registers; all waited for
    for line in ttgir.splitlines():
        depth = len(line) - len(line.lstrip())
        while loops and depth <= loops[-1][0]:
            _, left, waited = loops.pop()
            if left and not waited:
                return True
        if " scf.for " in line:
            loops.append((depth, False, True))
        elif loops and "ttng.warp_group_dot " in line:
            loops[-1] = (loops[-1][0], loops[-1][1] or "dot_op<{opIdx = 0" in line, "isAsync = true" not in line)
        elif loops and "ttng.warp_group_dot_wait " in line and "pendings = 0" in line:
            loops[-1] = (*loops[-1][:2], True)
    return False
