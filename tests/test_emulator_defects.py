"""Defects planted in PTX, each of which the emulator must report; without it, it must report nothing."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import build
from emulator.binding import Schedule
from emulator.snippets import Device, TensorMap

REASON = build.why_unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

SHARED = "mad.lo.u32 %r0, %t, 4, 1024;\nxor.b32 %r1, %r0, 128;\nmov.u32 %r2, %t;\n"
EXCHANGE = SHARED + "st.shared.b32 [%r0], %r2;\nbar.sync 0;\nld.shared.b32 %r3, [%r1];\n"
CP_ASYNC = """
    mad.wide.u32 %d0, %t, 4, %a0;
    mad.lo.u32 %r0, %t, 4, 1024;
    cp.async.ca.shared.global [%r0], [%d0], 4;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    ld.shared.b32 %r3, [%r0];
"""
TMA_LOAD = """
    mov.u32 %r0, 1024;
    mov.u32 %r1, 2048;
    setp.eq.u32 %p0, %t, 0;
    @%p0 mbarrier.init.shared.b64 [%r0], 1;
    bar.sync 0;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r0], 128;
    @%p0 cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%a1, {0}], [%r0];
    WAIT:
    mbarrier.try_wait.parity.shared.b64 %p1, [%r0], 0;
    @!%p1 bra WAIT;
    ld.shared.b32 %r3, [%r1];
    bar.sync 0;
    @%p0 mbarrier.inval.shared.b64 [%r0];
"""
TMA_STORE = """
    mad.lo.u32 %r0, %t, 4, 1024;
    mov.u32 %r1, 1024;
    st.shared.b32 [%r0], %t;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    setp.eq.u32 %p0, %t, 0;
    @%p0 cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%a1, {0}], [%r1];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
    bar.sync 0;
    st.shared.b32 [%r0], 7;
"""
WGMMA = """
    mov.u32 %r20, 0;
    mov.u32 %r21, 0;
    mov.u32 %r22, 0;
    mov.u32 %r23, 0;
    mad.lo.u32 %r0, %t, 16, 1024;
    st.shared.v4.b32 [%r0], {%r20, %r20, %r20, %r20};
    st.shared.v4.b32 [%r0+2048], {%r20, %r20, %r20, %r20};
    fence.proxy.async.shared::cta;
    bar.sync 0;
    mov.b64 %d0, DESCRIPTOR;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r20, %r21, %r22, %r23}, %d0, %d0, 1, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    bar.sync 0;
    st.shared.v4.b32 [%r0], {%r20, %r21, %r22, %r23};
""".replace("DESCRIPTOR", str(1024 >> 4 | 128 >> 4 << 16 | 256 >> 4 << 32))
GLOBAL = "mad.wide.u32 %d0, %t, 4, %a0;\nld.global.b32 %r0, [%d0];\nst.global.b32 [%d0], %r0;\n"
AFTER_ANOTHER = "griddepcontrol.wait;\ngriddepcontrol.launch_dependents;\n"
BRANCHES = """
    setp.lt.u32 %p0, %t, 16;
    @%p0 bra BELOW;
    mov.u32 %r0, 1;
    bra MEET;
    BELOW:
    mov.u32 %r0, 2;
    MEET:
    shfl.sync.bfly.b32 %r1, %r0, 16, 31, -1;
    bar.sync 0;
"""
UNDEFINED = "mov.u32 %r0, 1;\nsetp.eq.u32 %p0, %t, 99;\nmad.wide.u32 %d0, %t, 4, %a0;\nst.global.b32 [%d0], %r0;\n"
CTAS = "mov.u32 %r0, %ctaid.x;\nmad.wide.u32 %d0, %r0, 4, %a0;\nst.global.b32 [%d0], %r0;\n"

# Correct code, what is replaced in it, by what, and one of the kinds that must be reported then.
DEFECTS = {
    "no barrier before a read": (EXCHANGE, "bar.sync 0;", "", "shared-race-read"),
    "two warps write other values": (EXCHANGE, "st.shared.b32 [%r0]", "and.b32 %r0, %r0, 1087;\nst.shared.b32 [%r0]", "shared-race-write"),
    "written after another warp's read": (EXCHANGE, "ld.shared.b32 %r3, [%r1];", "ld.shared.b32 %r3, [%r1];\nst.shared.b32 [%r0], 5;",
                                          "shared-race-write-after-read"),
    "shared memory never written": (EXCHANGE, "ld.shared.b32 %r3, [%r1];", "ld.shared.b32 %r3, [%r1+256];", "shared-read-of-unwritten"),
    "past shared memory": (EXCHANGE, "st.shared.b32 [%r0]", "st.shared.b32 [%r0+262144]", "shared-out-of-bounds"),
    "misaligned in shared memory": (EXCHANGE, "st.shared.b32 [%r0]", "st.shared.b32 [%r0+2]", "shared-misaligned"),
    "no cp.async.wait_group": (CP_ASYNC, "cp.async.wait_group 0;", "", "shared-race-async"),
    "no cp.async.commit_group": (CP_ASYNC, "cp.async.commit_group;", "", "shared-race-async"),
    "overwritten before a copy has arrived": (CP_ASYNC, "cp.async.wait_group 0;", "st.shared.b32 [%r0], %t;", "shared-race-async"),
    "no wait for the mbarrier": (TMA_LOAD, "@!%p1 bra WAIT;", "", "shared-race-async"),
    "mbarrier not initialized": (TMA_LOAD, "@%p0 mbarrier.init.shared.b64 [%r0], 1;", "", "mbarrier-not-initialized"),
    "an mbarrier of too many bytes": (TMA_LOAD, "[%r0], 128;", "[%r0], 256;", "deadlock"),
    "an mbarrier overwritten": (TMA_LOAD, "WAIT:", "@%p0 st.shared.b64 [%r0], 0;\nWAIT:", "write-over-live-mbarrier"),
    "an mbarrier invalidated too early": (TMA_LOAD, "WAIT:", "@%p0 mbarrier.inval.shared.b64 [%r0];\nWAIT:", "mbarrier-inval-with-pending-loads"),
    "an mbarrier initialized twice": (TMA_LOAD, "bar.sync 0;", "@%p0 mbarrier.init.shared.b64 [%r0], 1;\nbar.sync 0;", "mbarrier-init-of-live"),
    "more arrivals than expected": (TMA_LOAD, "[%r0], 128;", "[%r0], 128;\nmbarrier.arrive.shared.b64 _, [%r0], 2;", "mbarrier-arrive-overflow"),
    "a box at a misaligned address": (TMA_LOAD, "mov.u32 %r1, 2048;", "mov.u32 %r1, 2064;", "tma-misaligned"),
    "coordinates of another rank": (TMA_LOAD, "1d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%a1, {0}]",
                                    "2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%a1, {0, 0}]", "tensor-map"),
    "a map that is none": (TMA_LOAD, "[%a1, {0}]", "[%a0, {0}]", "tensor-map"),
    "no fence before a TMA store": (TMA_STORE, "fence.proxy.async.shared::cta;", "", "missing-proxy-fence"),
    "no wait for a TMA store": (TMA_STORE, "cp.async.bulk.wait_group.read 0;", "", "shared-changed-under-tma-store"),
    "a TMA store not committed": (TMA_STORE, "cp.async.bulk.commit_group;", "", "tma-store-not-waited"),
    "no fence before wgmma reads": (WGMMA, "fence.proxy.async.shared::cta;", "", "missing-proxy-fence"),
    "no wgmma.fence": (WGMMA, "wgmma.fence.sync.aligned;", "", "wgmma-without-fence"),
    "no wait for wgmma": (WGMMA, "wgmma.wait_group.sync.aligned 0;", "", "register-of-wgmma-in-flight"),
    "wgmma never waited for": (WGMMA, "wgmma.wait_group.sync.aligned 0;\n    bar.sync 0;\n    st.shared.v4.b32 [%r0], {%r20, %r21, %r22, %r23};",
                               "", "wgmma-not-waited"),
    "an operand of wgmma overwritten": (WGMMA, "wgmma.commit_group", "st.shared.b32 [%r0], 9;\nwgmma.commit_group", "shared-changed-under-wgmma"),
    "past global memory": (GLOBAL, "ld.global.b32 %r0, [%d0];", "ld.global.b32 %r0, [%d0+4];", "global-out-of-bounds"),
    "a store before global memory": (GLOBAL, "st.global.b32 [%d0]", "st.global.b32 [%d0+-4]", "global-out-of-bounds"),
    "misaligned in global memory": (GLOBAL, "ld.global.b32 %r0, [%d0];", "ld.global.b32 %r0, [%d0+2];", "global-misaligned"),
    "a load before the wait for the previous grid": (AFTER_ANOTHER + GLOBAL, "griddepcontrol.wait;", "ld.global.b32 %r0, [%a0];\ngriddepcontrol.wait;",
                                                     "global-before-grid-wait"),
    "a TMA load before the wait for the previous grid": (AFTER_ANOTHER + TMA_LOAD, "griddepcontrol.wait;", "", "global-before-grid-wait"),
    "no wait for the previous grid": (AFTER_ANOTHER, "griddepcontrol.wait;", "", "grid-not-waited"),
    "a shuffle in a branch": (BRANCHES, "mov.u32 %r0, 2;", "mov.u32 %r0, 2;\nshfl.sync.bfly.b32 %r1, %r0, 16, 31, -1;", "divergent-collective"),
    "a barrier in a branch": (BRANCHES, "mov.u32 %r0, 2;", "mov.u32 %r0, 2;\nbar.sync 0;", "barrier-divergence"),
    "a barrier that one warp skips": (BRANCHES, "bar.sync 0;", "setp.ge.u32 %p1, %t, 32;\n@%p1 bra END;\nbar.sync 0;\nEND:", "barrier-after-exit"),
    "an undefined value stored": (UNDEFINED, "mov.u32 %r0, 1;", "", "undefined-value-used"),
    "an undefined value in a guard": (UNDEFINED, "setp.eq.u32 %p0, %t, 99;\n", "@%p0 ", "undefined-value-used"),
    "two CTAs write other values": (CTAS, "%r0, 4, %a0;", "0, 4, %a0;", "cross-cta-write-conflict"),
    "a CTA reads what another wrote": (CTAS, "st.global.b32 [%d0], %r0;", "st.global.b32 [%d0], %r0;\nld.global.b32 %r1, [%a0];",
                                       "cross-cta-read-after-write"),
    "a CTA writes what another read": (CTAS, "st.global.b32 [%d0], %r0;", "ld.global.b32 %r1, [%a0+4];\nst.global.b32 [%d0], %r0;",
                                       "cross-cta-write-after-read"),
    "trap": (CTAS, "st.global.b32 [%d0], %r0;", "trap;", "trap"),
}  # fmt: skip


@pytest.fixture
def device() -> Device:
    return Device(build.build())


def _kinds(device: Device, body: str, schedule: Schedule) -> set[str]:
    wgmma = body.count("wgmma") > 0
    device.emulator.schedule(schedule)
    threads = 128 if wgmma else 64
    array, tensor = np.zeros(threads, np.uint32), TensorMap(np.zeros(256, np.uint32), (32,))
    grid, dependent = 2 if "ctaid" in body else 1, "griddepcontrol" in body
    reports = device.run(body, array, tensor, threads=threads, grid=grid, shared=8192, dependent=dependent)
    return {report.kind for report in reports}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found(name: str, device: Device) -> None:
    """Copies arrive as late as allowed; with random schedules the correct code is still reported clean."""
    body, removed, planted, kind = DEFECTS[name]
    assert removed in body
    for schedule in (Schedule(), Schedule(early=1), Schedule(seed=3, early=2, reverse=True)):
        assert _kinds(device, body, schedule) == set()
    assert kind in _kinds(device, body.replace(removed, planted, 1), Schedule())


def test_a_missing_wait_gives_wrong_values(device: Device) -> None:
    """Not only a report: a copy is done as late as it may be."""
    source, out = np.arange(1, 33, dtype=np.uint32), np.zeros(32, np.uint32)
    store = "mad.wide.u32 %d1, %t, 4, %a1;\nst.global.b32 [%d1], %r3;"
    assert device.run(CP_ASYNC + store, source, out, shared=1024) == []
    assert (out == source).all()
    device.run(CP_ASYNC.replace("cp.async.wait_group 0;", "") + store, source, out, shared=1024)
    assert (out == 0xFFFFFFFF).all()
