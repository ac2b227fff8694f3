"""The emulator's instructions against numpy and torch: arithmetic, exchange between lanes, memory, copies.

The kernel tests on the emulator cover matrix products, layouts and the common cases of the other instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from emulator import build
from emulator.binding import Report, Schedule
from emulator.snippets import Device, TensorMap, swizzled

REASON = build.why_unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
THREADS = 128
LANES = np.arange(32)
SCHEDULES = (Schedule(), Schedule(early=1), Schedule(seed=7, early=2, reverse=True))
REGISTERS = {16: "h", 32: "r", 64: "d"}
TORCH = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# Kinds whose name does not end in the bits of a register.
BITS = {"bf16x2": 32, "f16x2": 32, "f32x2": 64, "e4m3x2": 16, "e5m2x2": 16, "pred": 32}


@pytest.fixture
def device() -> Device:
    return Device(build.build())


def _words(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32)


def _bits(kind: str) -> int:
    return BITS.get(kind) or int(kind.lstrip("bfsu"))


def _random(kind: str, seed: int) -> np.ndarray:
    """Returns the bits of THREADS values, which include extreme ones."""
    generator, word = np.random.default_rng(seed), f"u{_bits(kind) // 8}"
    if (element := kind.removesuffix("x2")) in TORCH:
        values = generator.normal(size=THREADS * (2 if kind.endswith("x2") else 1)).astype(np.float32)
        values[:6] = [0, -0.0, 1, -1, 448, 0.5]
        return torch.from_numpy(values).to(TORCH[element]).view(torch.uint8).numpy().view(word)
    bits = _bits(kind)
    integers = generator.integers(0, 2**bits, size=THREADS, dtype=np.uint64, endpoint=False)
    integers[:6] = [0, 1, 2**bits - 1, 2 ** (bits - 1), 2 ** (bits - 1) - 1, 5]
    return integers.astype(word)


def _as_torch(bits: np.ndarray, kind: str) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.uint8)).view(TORCH[kind.removesuffix("x2")])


def execute(device: Device, opcode: str, result: str, *sources: np.ndarray, immediate: str = "") -> np.ndarray:
    """Returns the bits of `opcode` on each thread's values; a result "pred" as 0 or 1."""
    lines = []
    for i, source in enumerate(sources):
        size = source.itemsize
        lines.append(f"mad.wide.u32 %d{40 + i}, %t, {size}, %a{i};")
        lines.append(f"ld.global.b{8 * size} %{REGISTERS[8 * size]}{i}, [%d{40 + i}];")
    names = ", ".join(f"%{REGISTERS[8 * source.itemsize]}{i}" for i, source in enumerate(sources)) + immediate
    bits = _bits(result)
    register = f"%{REGISTERS[bits]}20"
    if result == "pred":
        lines += [f"{opcode} %p1, {names};", f"selp.u32 {register}, 1, 0, %p1;"]
    else:
        lines.append(f"{opcode} {register}, {names};")
    out = np.zeros(THREADS, f"u{bits // 8}")
    lines += [f"mad.wide.u32 %d50, %t, {bits // 8}, %a{len(sources)};", f"st.global.b{bits} [%d50], {register};"]
    assert device.run("\n".join(lines), *sources, out, threads=THREADS) == []
    return out


# ---- arithmetic ----


def _signed(value: int, kind: str) -> int:
    bits = _bits(kind)
    return value - 2**bits if kind[0] == "s" and value >> (bits - 1) else value


def _divide(a: int, b: int) -> int:
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _permuted(value: int, selector: int) -> int:
    byte = value >> 8 * (selector & 7) & 255
    return (255 if byte & 128 else 0) if selector & 8 else byte


INTEGER: dict[str, Callable[..., int]] = {
    "add.s16 add.s64": lambda a, b: a + b,
    "sub.s32 sub.u64": lambda a, b: a - b,
    "mul.lo.s16 mul.lo.s64 mul.wide.s32 mul.wide.u32": lambda a, b: a * b,
    "mul.hi.s32 mul.hi.u32": lambda a, b: a * b >> 32,
    "mul.hi.s64 mul.hi.u64": lambda a, b: a * b >> 64,
    "mad.lo.s32 mad.lo.s64": lambda a, b, c: a * b + c,
    "div.s32 div.u32 div.s64 div.u64": _divide,
    "rem.s32 rem.u32": lambda a, b: a if b == 0 else a - b * _divide(a, b),
    "min.s32 min.u32": lambda a, b: min(a, b),
    "max.s64 max.u64": lambda a, b: max(a, b),
    "not.b16 not.b32 not.b64": lambda a: ~a,
    "xor.b16 xor.b64": lambda a, b: a ^ b,
    "shl.b16 shl.b32 shl.b64": lambda a, b: a << min(b, 64),
    "shr.u16 shr.s32 shr.u32 shr.s64 shr.u64": lambda a, b: a >> min(b, 64),
    "popc.b32": lambda a: a.bit_count(),
    "clz.b32": lambda a: 32 - a.bit_length(),
    "brev.b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "shf.l.wrap.b32": lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32,
    "prmt.b32": lambda a, b, c: sum(_permuted(b << 32 | a, c >> 4 * i & 15) << 8 * i for i in range(4)),
}


@pytest.mark.parametrize("opcodes", INTEGER)
def test_integers(opcodes: str, device: Device) -> None:
    function = INTEGER[opcodes]
    for opcode in opcodes.split():
        kind = opcode.split(".")[-1]
        result = f"{kind[0]}64" if "wide" in opcode else kind
        kinds = [kind] * function.__code__.co_argcount
        sources = [_random(kind, seed) for seed in range(len(kinds))]
        if opcode.startswith("sh") and "wrap" not in opcode:  # positions, some past the end
            sources[1], kinds[1] = _random("u32", 1) % np.uint32(80), "u32"
        found = execute(device, opcode, result, *sources)
        for i in range(THREADS):
            values = [_signed(int(source[i]), one) for source, one in zip(sources, kinds)]
            assert int(found[i]) == function(*values) & (2 ** _bits(result) - 1), (opcode, values)


FLOAT: dict[str, Callable[..., torch.Tensor]] = {
    "add.rn": torch.add, "sub.rn": torch.sub, "mul.rn": torch.mul, "fma.rn": lambda a, b, c: a * b + c,
    "min": torch.minimum, "max": torch.maximum,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["f32", "f32x2", "bf16", "bf16x2", "f16", "f16x2"])
@pytest.mark.parametrize("name", FLOAT)
def test_floats(name: str, kind: str, device: Device) -> None:
    if kind == "f32x2" and name in ("min", "max"):
        pytest.skip("PTX has no such opcode")
    sources = [_random(kind, seed) for seed in range(3 if name == "fma.rn" else 2)]
    found = _as_torch(execute(device, f"{name}.{kind}", kind, *sources), kind)
    values = [_as_torch(source, kind).double() for source in sources]
    assert torch.equal(found, FLOAT[name](*values).to(found.dtype))


APPROXIMATE: dict[str, Callable[..., Any]] = {
    "ex2.approx.ftz": np.exp2, "rcp.approx.ftz": lambda a: 1 / a, "rsqrt.approx.ftz": lambda a: 1 / np.sqrt(a),
    "sqrt.rn": np.sqrt, "lg2.approx": np.log2, "tanh.approx": np.tanh, "neg": np.negative, "abs": np.abs,
}  # fmt: skip


def test_functions_of_floats(device: Device) -> None:
    a = np.abs(_random("f32", 5).view(np.float32)).clip(1e-3, 10)
    for name, exact in APPROXIMATE.items():
        found = execute(device, f"{name}.f32", "f32", a).view(np.float32)
        np.testing.assert_allclose(found, exact(a).astype(np.float32), rtol=2e-7, err_msg=name)


def test_denormals_are_flushed_only_if_asked_for_and_nan_wins_or_loses(device: Device) -> None:
    small, one, nan = (np.full(THREADS, value, np.float32) for value in (1e-40, 1.0, np.nan))
    assert (execute(device, "mul.ftz.f32", "f32", small, one) == 0).all()
    assert (execute(device, "mul.f32", "f32", small, one).view(np.float32) == small).all()
    assert (execute(device, "max.f32", "f32", nan, one).view(np.float32) == 1).all()
    assert np.isnan(execute(device, "max.NaN.f32", "f32", nan, one).view(np.float32)).all()


def test_an_unknown_number_of_inputs_is_refused(device: Device) -> None:
    sources = [_random("f32", seed) for seed in range(3)]
    with pytest.raises(AssertionError, match="kind='unsupported'"):
        execute(device, "add.f32", "f32", *sources)


@pytest.mark.parametrize(
    ("opcode", "dtype", "largest"),
    [("cvt.rn.bf16.f32", torch.bfloat16, np.inf), ("cvt.rn.f16x2.f32", torch.float16, np.inf),
     ("cvt.rn.satfinite.e4m3x2.f32", torch.float8_e4m3fn, 448), ("cvt.rn.satfinite.e5m2x2.f32", torch.float8_e5m2, 57344)],
)  # fmt: skip
def test_rounding_to_narrow_floats(opcode: str, dtype: torch.dtype, largest: float, device: Device) -> None:
    """torch also rounds to nearest even, but does not saturate. The first value of a pair is in the upper half."""
    kind, values = opcode.split(".")[-2], _random("f32", 9).view(np.float32).copy()
    values[10:15] = [1e6, -1e6, np.nan, 1e-8, 464]
    sources = [values, values[::-1].copy()] if kind.endswith("x2") else [values]
    found = torch.from_numpy(execute(device, opcode, kind, *sources).view(f"i{_bits(kind) // 8}"))
    both = torch.stack([torch.from_numpy(source) for source in reversed(sources)], 1).clamp(-largest, largest)
    torch.testing.assert_close(
        found.view(dtype).float(), both.to(dtype).flatten().float(), rtol=0, atol=0, equal_nan=True
    )


# ---- lanes and memory ----


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


def test_a_parameter_is_loaded_by_its_address(device: Device) -> None:
    """LLVM selects one of two parameters by their addresses."""
    first, second, out = _words(32), _words(32) + 1, np.zeros(32, np.uint32)
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


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_cp_async(schedule: Schedule, device: Device) -> None:
    """Bytes past the source's size are zero."""
    source, out = _words(128), np.full(128, 7, np.uint32)
    body = """
    mad.wide.u32 %d0, %t, 16, %a0;
    mad.wide.u32 %d1, %t, 16, %a1;
    mad.lo.u32 %r0, %t, 16, 1024;
    and.b32 %r1, %t, 12;
    cp.async.cg.shared.global [%r0], [%d0], 16, %r1;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    ld.shared.v4.b32 {%r2, %r3, %r4, %r5}, [%r0];
    st.global.v4.b32 [%d1], {%r2, %r3, %r4, %r5};
    """
    device.emulator.schedule(schedule)
    assert device.run(body, source, out, shared=512) == []
    kept = LANES[:, None] & 12  # bytes
    assert (out.reshape(32, 4) == np.where(np.arange(4) * 4 < kept, source.reshape(32, 4), 0)).all()


_COPY = """
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
"""
_STORE_BOX = """
    fence.proxy.async.shared::cta;
    bar.sync 0;
    mov.u32 %r0, 2048;
    setp.eq.u32 %p0, %t, 0;
    @%p0 cp.async.bulk.tensor.RANKd.global.shared::cta.bulk_group [%a0, {PLACE}], [%r0];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
"""
_LOAD_BOX = """
    mov.u32 %r0, 2048;
    mov.u32 %r1, 1024;
    setp.eq.u32 %p0, %t, 0;
    @%p0 mbarrier.init.shared.b64 [%r1], 1;
    bar.sync 0;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], BYTES;
    @%p0 cp.async.bulk.tensor.RANKd.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%a0, {PLACE}], [%r1];
    WAIT:
    mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
    @!%p1 bra WAIT;
"""


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_tma(rank: int, swizzle: int, schedule: Schedule, device: Device) -> None:
    """Loads and stores a box that ends outside the tensor: zeros are loaded there, and nothing is written."""
    tensor = np.random.default_rng(0).integers(1, 2**16, (3, 2, 3, 4, 96)[5 - rank :], dtype=np.uint16)
    box = (2, 2, 2, 4, swizzle // 2 or 16)[5 - rank :]
    start = (2, 0, 2, -1, 80)[5 - rank :]
    inside = tuple(slice(max(s, 0), s + b) for s, b in zip(start, box))
    expected = np.zeros(box, np.uint16)
    part = tensor[inside]
    expected[tuple(slice(max(-s, 0), max(-s, 0) + n) for s, n in zip(start, part.shape))] = part
    found = np.zeros(expected.nbytes, np.uint8)
    words = {
        "RANK": rank,
        "PLACE": ", ".join(map(str, reversed(start))),
        "BYTES": found.nbytes,
        "SIZE": found.nbytes // 4,
    }
    device.emulator.schedule(schedule)

    def run(memory: np.ndarray, body: str, move: str) -> list[Report]:
        for word, value in (words | {"MOVE": move}).items():
            body = body.replace(word, str(value))
        return device.run(body, TensorMap(memory, box, swizzle), found, shared=64 * 1024)

    assert run(tensor, _LOAD_BOX + _COPY, "ld.shared.b32 %r5, [%r4];\nst.global.b32 [%d1], %r5;") == []
    assert (found == swizzled(expected, swizzle)).all()
    target = np.zeros_like(tensor)
    assert run(target, _COPY + _STORE_BOX, "ld.global.b32 %r5, [%d1];\nst.shared.b32 [%r4], %r5;") == []
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
