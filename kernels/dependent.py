"""Programmatic dependent launch: a kernel starts before the previous kernel in its stream has ended.

For small batches, starting a kernel and loading its weights takes as long as its work. A kernel with DEPENDENT may
start as soon as every program of the previous kernel has passed its own wait or ended. It computes addresses,
prefetches weights into L2, and then waits until the previous kernel has ended and its results are visible. Before this
wait it neither loads nor stores. It may prefetch into L2 even weights that are still being written.

Each kernel first waits and then lets the next one start. After its wait, all earlier kernels have therefore ended, not
only the previous one.

Source: CUDA C++ Programming Guide, Programmatic Dependent Launch; PTX ISA, griddepcontrol (sm_90 and newer).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import is_interpreted

_INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Waits for the previous kernel, then lets the next one start; does nothing without DEPENDENT."""
    if DEPENDENT and not _INTERPRETED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_rows(pointer, row, first, last, rows, columns, ROWS: tl.constexpr, STEP: tl.constexpr):
    """Prefetches columns first .. last of ROWS rows of a matrix [rows, columns] into L2, once per STEP columns."""
    if _INTERPRETED:
        return
    index = tl.minimum(row + tl.arange(0, ROWS), rows - 1)
    start = pointer + index.to(tl.int64) * columns
    for column in tl.range(first, last, STEP):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [start + column], dtype=tl.int32, is_pure=False, pack=1
        )
