"""Programmatic dependent launch: a kernel starts before the previous kernel in the same stream has ended.

With small batches, launching a kernel and loading weights takes as long as the computation. A kernel with DEPENDENT
may start when every program of the previous kernel has called `wait_for_previous` or ended. Before its own call of
`wait_for_previous`, a kernel only computes addresses and prefetches weights into L2, even weights that are still being
written. The call returns when the previous kernel has ended and its results are visible.

Each kernel waits before it lets the next one start. So when `wait_for_previous` returns, all earlier kernels have
ended, not only the previous one.

Source: CUDA C++ Programming Guide, Programmatic Dependent Launch; PTX ISA, griddepcontrol (sm_90 and newer).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import is_interpreted

_INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Waits until the previous kernel has ended, then lets the next one start. Does nothing without DEPENDENT."""
    if DEPENDENT and not _INTERPRETED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_rows(pointer, row, first, last, rows, columns, ROWS: tl.constexpr, STEP: tl.constexpr):
    """Prefetches ROWS rows of a matrix [rows, columns] into L2: one address per STEP columns in [first, last)."""
    if _INTERPRETED:
        return
    index = tl.minimum(row + tl.arange(0, ROWS), rows - 1)
    start = pointer + index.to(tl.int64) * columns
    for column in tl.range(first, last, STEP):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [start + column], dtype=tl.int32, is_pure=False, pack=1
        )
