"""The emulator's memory, exchange between lanes, and asynchronous copies, against numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from emulator import build
from emulator.binding import Report, Schedule
from emulator.snippets import Device, TensorMap, swizzled

REASON = build.why_unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
SCHEDULES = (Schedule(), Schedule(early=1), Schedule(seed=7, early=2, reverse=True))
LANES = np.arange(32)
RANDOM = np.random.default_rng(0)


@pytest.fixture
def device() -> Device:
    return Device(build.build())


def words(count: int) -> np.ndarray:
    return RANDOM.integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32)


def lane_addresses(registers: str, size: int, arrays: int) -> str:
    """%d0.. point to element `%t` of the arrays."""
    return "\n".join(f"mad.wide.u32 %{registers}{i}, %t, {size}, %a{i};" for i in range(arrays))


# ---- global and shared memory ----


@pytest.mark.parametrize("vector", [1, 2, 4])
@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_vectors_through_shared_memory(bits: int, vector: int, device: Device) -> None:
    if bits * vector > 128:
        pytest.skip("an access has at most 16 bytes")
    size, kind = bits // 8 * vector, {8: "h", 16: "h", 32: "r", 64: "d"}[bits]
    names = ", ".join(f"%{kind}{20 + i}" for i in range(vector))
    names, word = (names, "") if vector == 1 else (f"{{{names}}}", f"v{vector}.")
    source = RANDOM.integers(0, 256, 64 * size, dtype=np.uint8)
    out = np.zeros_like(source)
    body = f"""
    {lane_addresses("d", size, 2)}
    ld.global.{word}b{bits} {names}, [%d0];
    mad.lo.u32 %r0, %t, {size}, 1024;
    st.shared.{word}b{bits} [%r0], {names};
    bar.sync 0;
    xor.b32 %r1, %t, 63;
    mad.lo.u32 %r0, %r1, {size}, 1024;
    ld.shared.{word}b{bits} {names}, [%r0];
    st.global.{word}b{bits} [%d1], {names};
    """
    for schedule in SCHEDULES:
        device.emulator.schedule(schedule)
        assert device.run(body, source, out, threads=64, shared=64 * size) == []
        assert (out.reshape(64, size) == source.reshape(64, size)[::-1]).all()


def test_a_parameter_is_loaded_by_its_address(device: Device) -> None:
    """LLVM selects one of two parameters by their addresses."""
    first, second, out = words(32), words(32), np.zeros(32, np.uint32)
    body = """
    mov.b64 %d0, q0;
    mov.b64 %d1, q1;
    setp.lt.u32 %p0, %t, 16;
    selp.b64 %d2, %d0, %d1, %p0;
    ld.param.b64 %d3, [%d2];
    mad.wide.u32 %d3, %t, 4, %d3;
    mad.wide.u32 %d4, %t, 4, %a2;
    ld.global.b32 %r0, [%d3];
    st.global.b32 [%d4], %r0;
    ld.param.b64 %d5, [%d2+-24];
    """
    (report,) = device.run(body, first, second, out)
    assert report.kind == "parameter-out-of-bounds"
    assert (out == np.where(LANES < 16, first, second)).all()


def test_lanes_that_branched_meet_again(device: Device) -> None:
    """A loop of as many rounds as the lane's number, a divergent branch inside it, and a shuffle behind it."""
    out = np.zeros(32, np.uint32)
    body = """
    mov.u32 %r0, 0;
    mov.u32 %r1, 0;
    LOOP:
    setp.ge.u32 %p0, %r0, %t;
    @%p0 bra DONE;
    and.b32 %r2, %r0, 1;
    setp.eq.u32 %p1, %r2, 0;
    @%p1 bra EVEN;
    add.u32 %r1, %r1, 100;
    bra NEXT;
    EVEN:
    add.u32 %r1, %r1, 1;
    NEXT:
    add.u32 %r0, %r0, 1;
    bra LOOP;
    DONE:
    shfl.sync.bfly.b32 %r3, %r1, 31, 31, -1;
    mad.wide.u32 %d0, %t, 4, %a0;
    st.global.b32 [%d0], %r3;
    """
    assert device.run(body, out) == []
    assert (out == ((LANES + 1) // 2 + LANES // 2 * 100)[::-1]).all()


# ---- between lanes ----


@pytest.mark.parametrize("mode", ["bfly", "idx"])
def test_shuffles(mode: str, device: Device) -> None:
    source, out = words(32), np.zeros(32, np.uint32)
    body = f"""
    {lane_addresses("d", 4, 2)}
    ld.global.b32 %r0, [%d0];
    shfl.sync.{mode}.b32 %r1, %r0, 3, 31, -1;
    st.global.b32 [%d1], %r1;
    """
    assert device.run(body, source, out) == []
    assert (out == source[LANES ^ 3 if mode == "bfly" else 3]).all()


def test_reductions_and_the_elected_lane(device: Device) -> None:
    source, out = words(32), np.zeros(3, np.uint32)
    body = """
    mad.wide.u32 %d0, %t, 4, %a0;
    ld.global.b32 %r0, [%d0];
    redux.sync.add.s32 %r1, %r0, -1;
    redux.sync.max.s32 %r2, %r0, -1;
    elect.sync %r3|%p3, -1;
    @%p3 st.global.b32 [%a1], %r1;
    @%p3 st.global.b32 [%a1+4], %r2;
    @%p3 st.global.b32 [%a1+8], %r3;
    """
    assert device.run(body, source, out) == []
    assert out.tolist() == [int(source.sum()) & 0xFFFFFFFF, int(source.view(np.int32).max()) & 0xFFFFFFFF, 0]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_in_shared_memory(count: int, transposed: bool, device: Device) -> None:
    """stmatrix writes what ldmatrix reads; row r of a matrix at the address of its lane, two columns a register."""
    trans = ".trans" if transposed else ""
    source, out = words(32 * count), np.zeros((count, 32), np.uint32)
    stored = np.zeros((8 * count, 8), np.uint16)
    registers = "{" + ", ".join(f"%r{20 + i}" for i in range(count)) + "}"
    loads = "\n".join(f"ld.global.b32 %r{20 + i}, [%d0+{128 * i}];" for i in range(count))
    stores = "\n".join(f"st.global.b32 [%d1+{128 * i}], %r{20 + i};" for i in range(count))
    body = f"""
    {lane_addresses("d", 4, 2)}
    {loads}
    and.b32 %r0, %t, {8 * count - 1};
    mad.lo.u32 %r0, %r0, 16, 1024;
    stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r0], {registers};
    bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x{count}.shared.b16 {registers}, [%r0];
    {stores}
    mad.wide.u32 %d2, %t, 16, %a2;
    ld.shared.v4.b32 {{%r1, %r2, %r3, %r4}}, [%r0];
    setp.lt.u32 %p0, %t, {8 * count};
    @%p0 st.global.v4.b32 [%d2], {{%r1, %r2, %r3, %r4}};
    """
    assert device.run(body, source, out, stored, shared=128 * count) == []
    matrices = source.view(np.uint16).reshape(count, 8, 8)  # of lane l: row l / 4, columns l % 4 * 2 and the next
    expected = matrices.transpose(0, 2, 1) if transposed else matrices
    assert (stored.reshape(count, 8, 8) == expected).all()
    assert (out.view(np.uint16).reshape(count, 8, 8) == expected).all()


# ---- asynchronous copies ----


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_cp_async(schedule: Schedule, device: Device) -> None:
    """Two groups; bytes past the source's size are zero."""
    source, out = words(256), np.full(256, 7, np.uint32)
    body = """
    mad.wide.u32 %d0, %t, 16, %a0;
    mad.wide.u32 %d1, %t, 16, %a1;
    mad.lo.u32 %r0, %t, 16, 1024;
    cp.async.cg.shared.global [%r0], [%d0], 16;
    cp.async.commit_group;
    and.b32 %r1, %t, 12;
    cp.async.cg.shared.global [%r0+512], [%d0+512], 16, %r1;
    cp.async.commit_group;
    cp.async.wait_group 1;
    bar.sync 0;
    ld.shared.v4.b32 {%r2, %r3, %r4, %r5}, [%r0];
    st.global.v4.b32 [%d1], {%r2, %r3, %r4, %r5};
    cp.async.wait_group 0;
    bar.sync 0;
    ld.shared.v4.b32 {%r2, %r3, %r4, %r5}, [%r0+512];
    st.global.v4.b32 [%d1+512], {%r2, %r3, %r4, %r5};
    """
    device.emulator.schedule(schedule)
    assert device.run(body, source, out, shared=1024) == []
    kept = LANES[:, None] & 12  # bytes
    expected = np.where(np.arange(4) * 4 < kept, source[128:].reshape(32, 4), 0)
    assert (out[:128] == source[:128]).all()
    assert (out[128:].reshape(32, 4) == expected).all()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_mbarrier_phases(schedule: Schedule, device: Device) -> None:
    """Two warps count up and meet at an mbarrier, in two phases."""
    out = np.zeros(130, np.uint32)
    phase = """
    atom.global.add.u32 %r1, [%a0], 1;
    mbarrier.arrive.shared.b64 %d0, [%r0];
    WAIT_PHASE:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r0], PHASE;
    @!%p2 bra WAIT_PHASE;
    ld.global.b32 %r2, [%a0];
    mad.wide.u32 %d1, %t, 4, %a0;
    st.global.b32 [%d1+OFFSET], %r2;
    bar.sync 0;
    """
    body = "\n".join((
        "mov.u32 %r0, 1024;\nsetp.eq.u32 %p0, %t, 0;\n@%p0 mbarrier.init.shared.b64 [%r0], 64;\nbar.sync 0;",
        phase.replace("PHASE", "0").replace("OFFSET", "8"), phase.replace("PHASE", "1").replace("OFFSET", "264"),
        "@%p0 mbarrier.inval.shared.b64 [%r0];",
    ))  # fmt: skip
    device.emulator.schedule(schedule)
    assert device.run(body, out, threads=64, shared=16) == []
    assert set(out[2:66]) == {64}
    assert set(out[66:]) == {128}


def tma(rank: int, coordinates: Sequence[int], size: int, store: bool) -> str:
    """Loads a box to shared memory and copies its bytes to %a1; or copies these there and stores the box."""
    place = ", ".join(map(str, reversed(coordinates)))
    copy = """
    mov.u32 %r3, %t;
    COPY:
    setp.ge.u32 %p3, %r3, SIZE;
    @%p3 bra COPIED;
    mad.wide.u32 %d1, %r3, 4, %a1;
    mad.lo.u32 %r4, %r3, 4, 2048;
    MOVE
    add.u32 %r3, %r3, 32;
    bra COPY;
    COPIED:
    """.replace("SIZE", str(size // 4))
    if store:
        send = f"""
        fence.proxy.async.shared::cta;
        bar.sync 0;
        mov.u32 %r0, 2048;
        setp.eq.u32 %p0, %t, 0;
        @%p0 cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group [%a0, {{{place}}}], [%r0];
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 0;
        """
        return copy.replace("MOVE", "ld.global.b32 %r5, [%d1];\nst.shared.b32 [%r4], %r5;") + send
    return f"""
    mov.u32 %r0, 2048;
    mov.u32 %r1, 1024;
    setp.eq.u32 %p0, %t, 0;
    @%p0 mbarrier.init.shared.b64 [%r1], 1;
    bar.sync 0;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {size};
    @%p0 cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%a0, {{{place}}}], [%r1];
    WAIT:
    mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
    @!%p1 bra WAIT;
    """ + copy.replace("MOVE", "ld.shared.b32 %r5, [%r4];\nst.global.b32 [%d1], %r5;")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_tma(rank: int, swizzle: int, schedule: Schedule, device: Device) -> None:
    """A box over the end of the tensor, there and back: zeros outside, and nothing written there."""
    tensor = RANDOM.integers(1, 2**16, (3, 2, 3, 4, 96)[5 - rank :], dtype=np.uint16)
    box = (2, 2, 2, 4, swizzle // 2 or 16)[5 - rank :]
    start = (2, 0, 2, -1, 80)[5 - rank :]
    inside = tuple(slice(max(s, 0), s + b) for s, b in zip(start, box))
    expected = np.zeros(box, np.uint16)
    part = tensor[inside]
    expected[tuple(slice(max(-s, 0), max(-s, 0) + n) for s, n in zip(start, part.shape))] = part
    found = np.zeros(expected.nbytes, np.uint8)
    device.emulator.schedule(schedule)

    def copied(memory: np.ndarray, store: bool) -> list[Report]:
        body = tma(rank, start, expected.nbytes, store)
        return device.run(body, TensorMap(memory, box, swizzle), found, shared=64 * 1024)

    assert copied(tensor, store=False) == []
    assert (found == swizzled(expected, swizzle)).all()
    target = np.zeros_like(tensor)
    assert copied(target, store=True) == []
    only = np.zeros_like(tensor)
    only[inside] = part
    assert (target == only).all()


def test_statistics_of_memory(device: Device) -> None:
    """32 lanes in one bank; 32 sectors of global memory for 128 bytes."""
    source = np.zeros(32 * 32, np.uint32)
    body = """
    mad.wide.u32 %d0, %t, 128, %a0;
    ld.global.b32 %r0, [%d0];
    mad.lo.u32 %r1, %t, 128, 1024;
    st.shared.b32 [%r1], %r0;
    """
    device.emulator.profile()
    assert device.run(body, source, shared=4096) == []
    (profile,) = device.emulator.profile()
    rows = {row.opcode: row for row in profile.rows}
    assert (rows["ld.global.b32"].sectors, rows["ld.global.b32"].bytes) == (32, 128)
    assert (rows["st.shared.b32"].wavefronts, rows["st.shared.b32"].ideal_wavefronts) == (32, 1)
