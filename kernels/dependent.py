"""Programmatic dependent launch: a kernel starts before the one before it in its stream has ended.

The launches of a small batch are short, so that starting a kernel and loading its weights takes as long as its work. A
kernel with DEPENDENT may start as soon as all programs of the previous one are running. It computes addresses and
prefetches weights into L2, and then waits for the end of the previous kernel, whose results it sees from then on. Until
then it neither reads nor writes memory: a prefetch into L2 is correct even of weights that are being written.

Every kernel that is launched this way waits. After its wait, all earlier launches have therefore ended, and it lets the
next one start.

Source: CUDA C++ Programming Guide, Programmatic Dependent Launch; PTX ISA, griddepcontrol (sm_90 and newer).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import is_interpreted

_INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Waits for the previous launch, and lets the next one start; does nothing without DEPENDENT."""
    if DEPENDENT and not _INTERPRETED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_rows(pointer, row, first, last, rows, columns, ROWS: tl.constexpr, STEP: tl.constexpr):
    """Prefetches columns first .. last of ROWS rows of [rows, columns] into L2, with one prefetch per STEP."""
    if _INTERPRETED:
        return
    index = tl.minimum(row + tl.arange(0, ROWS), rows - 1)
    start = pointer + index.to(tl.int64) * columns
    for column in tl.range(first, last, STEP):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [start + column], dtype=tl.int32, is_pure=False, pack=1
        )
