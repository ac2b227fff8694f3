"""Counts the instructions of loops in the SASS that cuobjdump prints."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)
_BRANCH = re.compile(r"\bBRA\b.*?0x([0-9a-f]+)")
_PRODUCT = re.compile(r"\b(?:[HQI]G?MMA|UTC\w*MMA)\b")


@dataclass(frozen=True)
class Loops:
    """Number of instructions per warp.

    Args:
        step: Per iteration of the innermost loop that contains MMA instructions (the K loop), excluding `tile`.
        tile: Per iteration of the loop around the K loop (the tile loop), excluding the K loop; 0 without a tile loop.
            If both loops are flattened into one: the epilogue, which runs only in the last K iteration of a tile.
        once: Outside these loops.
    """

    step: int
    tile: int
    once: int


def count_loops(sass: str) -> Loops:
    """Returns the counts of a kernel. If no loop contains an MMA instruction, all instructions count as `once`.

    A backward branch over an MMA instruction is a loop. ptxas places the retry loops of some mbarrier waits out of
    line. They also branch backward, right after a TRYWAIT, and are not counted.
    """
    lines = [(int(m[1], 16), m[2]) for m in _LINE.finditer(sass)]
    index_of = {address: index for index, (address, _) in enumerate(lines)}
    branches = []
    for index, (_, text) in enumerate(lines):
        target = _BRANCH.search(text)
        waits = any("TRYWAIT" in line for _, line in lines[max(index - 2, 0) : index])
        if target is not None and int(target[1], 16) in index_of and not waits:
            branches.append((index, index_of[int(target[1], 16)]))
    products = [index for index, (_, text) in enumerate(lines) if _PRODUCT.search(text)]
    ends: dict[int, int] = {}
    for at, to in branches:
        if any(to <= product <= at for product in products):
            ends[to] = max(at, ends.get(to, 0))
    executed = sum("NOP" not in text for _, text in lines)
    if not ends:
        return Loops(0, 0, executed)
    (start, stop), *outer = sorted(ends.items(), key=lambda loop: loop[1] - loop[0])
    inner = stop - start + 1
    around = [end - begin + 1 for begin, end in outer if begin <= start and stop <= end]
    skipped = max((to - at for at, to in branches if start <= at < to <= stop + 1), default=0)
    # a forward branch over more than half of the loop is assumed to skip the epilogue
    tile = around[0] - inner if around else skipped if 2 * skipped > inner else 0
    return Loops(inner if around else inner - tile, tile, executed - max([inner, *around]))
