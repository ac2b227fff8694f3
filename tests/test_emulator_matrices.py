"""The emulator's matrix products, mma.sync and wgmma, against numpy: layouts, types, accumulators."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from emulator import build
from emulator.snippets import Device, swizzled

REASON = build.why_unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
LANE = np.arange(32)
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32, "e4m3": torch.float8_e4m3fn}
A, B = 2048, 2048 + 64 * 1024  # shared addresses of wgmma's operands


@pytest.fixture
def device() -> Device:
    return Device(build.build())


class Operand(NamedTuple):
    """A matrix [rows, k] as bits and as values."""

    bits: np.ndarray
    values: np.ndarray

    @classmethod
    def random(cls, rows: int, k: int, kind: str, seed: int) -> Operand:
        values = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)).to(DTYPES[kind])
        raw = values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.element_size()]).numpy()
        bits = raw.view(f"u{values.element_size()}")
        if kind == "tf32":
            bits = bits & np.uint32(0xFFFFE000)
            return cls(bits, bits.view(np.float32))
        return cls(bits, values.float().numpy())


def fragment_a(bits: np.ndarray) -> np.ndarray:
    """[16, k] in registers [k / (4 * together) * 2, 32]: rows g and g + 8, then the next columns (PTX ISA, mma)."""
    k, together = bits.shape[1], 4 // bits.itemsize
    registers = []
    for i in range(k // (4 * together) * 2):
        row, first = LANE // 4 + 8 * (i % 2), i // 2 * 4 * together + LANE % 4 * together
        registers.append(np.stack([bits[row, first + j] for j in range(together)], 1).copy().view(np.uint32)[:, 0])
    return np.stack(registers)


def fragment_b(bits: np.ndarray) -> np.ndarray:
    """[8, k], of which a lane holds consecutive k of one row."""
    k, together = bits.shape[1], 4 // bits.itemsize
    registers = []
    for i in range(k // (4 * together)):
        first = i * 4 * together + LANE % 4 * together
        words = np.stack([bits[LANE // 4, first + j] for j in range(together)], 1)
        registers.append(words.copy().view(np.uint32)[:, 0])
    return np.stack(registers)


def accumulators(values: np.ndarray) -> np.ndarray:
    """[16, n] in registers [n / 2, 32]."""
    i = np.arange(values.shape[1] // 2)[:, None]
    return values[LANE // 4 + 8 * (i // 2 % 2), i // 4 * 8 + LANE % 4 * 2 + i % 2]


def registers(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


@pytest.mark.parametrize(
    ("kind", "k"),
    [("bf16", 16), ("f16", 16), ("tf32", 8), ("e4m3", 32)],
)
def test_mma(kind: str, k: int, device: Device) -> None:
    a, b = Operand.random(16, k, kind, 1), Operand.random(8, k, kind, 2)
    c = np.random.default_rng(3).normal(size=(16, 8)).astype(np.float32)
    sources = np.concatenate((fragment_a(a.bits), fragment_b(b.bits), accumulators(c).view(np.uint32)))
    count_a, count_b = len(fragment_a(a.bits)), len(fragment_b(b.bits))
    out = np.zeros((4, 32), np.float32)
    loads = "\n".join(f"ld.global.b32 %r{i}, [%d0+{128 * i}];" for i in range(len(sources)))
    stores = "\n".join(f"st.global.b32 [%d1+{128 * i}], %r{40 + i};" for i in range(4))
    body = f"""
    mad.wide.u32 %d0, %t, 4, %a0;
    mad.wide.u32 %d1, %t, 4, %a1;
    {loads}
    mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 {registers(40, 4)}, {registers(0, count_a)},
      {registers(count_a, count_b)}, {registers(count_a + count_b, 4)};
    {stores}
    """
    assert device.run(body, sources, out) == []
    expected = accumulators(a.values @ b.values.T + c)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


# ---- wgmma ----


class Layout(NamedTuple):
    """An operand's bytes in shared memory, and its matrix descriptor without the address."""

    image: np.ndarray
    leading: int
    stride: int
    swizzle: int
    step: int  # bytes from one k of 32 bytes to the next

    def descriptor(self, address: int) -> int:
        mode = {0: 0, 128: 1, 64: 2, 32: 3}[self.swizzle]
        return address >> 4 | self.leading >> 4 << 16 | self.stride >> 4 << 32 | mode << 62


def k_major(bits: np.ndarray, swizzle: int) -> Layout:
    """Rows of one swizzle's width; without a swizzle, matrices of 8 rows by 16 bytes, those along k side by side."""
    rows, size = bits.shape[0], bits.itemsize
    if swizzle:
        return Layout(swizzled(bits, swizzle), 0, 8 * swizzle, swizzle, 32)
    cores = bits.reshape(rows // 8, 8, -1, 16 // size).transpose(0, 2, 1, 3)
    return Layout(np.ascontiguousarray(cores).reshape(-1).view(np.uint8), 128, 128 * cores.shape[1], 0, 256)


def mn_major(bits: np.ndarray, swizzle: int) -> Layout:
    """Returns for each k one swizzle's width of rows, in groups of 8 k."""
    rows, k = bits.shape
    width = (swizzle or 16) // bits.itemsize
    groups = bits.T.reshape(k // 8, 8, rows // width, width).transpose(2, 0, 1, 3)  # [blocks of rows, k / 8, 8, width]
    image = np.ascontiguousarray(groups).reshape(-1)
    group, block = 8 * width * bits.itemsize, k * width * bits.itemsize
    if swizzle:
        return Layout(swizzled(image, swizzle), block, group, swizzle, 2 * group)
    return Layout(image.view(np.uint8), group, block, 0, 2 * group)


Place = Callable[[np.ndarray, int], Layout]


def run_wgmma(device: Device, kind: str, n: int, k: int, a: Layout | Operand, b: Layout, flags: str) -> np.ndarray:
    """D [64, n] = A B over k in steps of 32 bytes, A in registers if it is an operand."""
    bytes_ = 4 if kind == "tf32" else 2 if kind in ("bf16", "f16") else 1
    step = 32 // bytes_
    d = registers(0, n // 2)
    lines = []
    for i in range(k // step):
        if isinstance(a, Layout):
            lines.append(f"mov.b64 %d10, {a.descriptor(A + i * a.step)};")
            operand = "%d10"
        else:
            lines += [f"ld.global.b32 %r{200 + 4 * i + j}, [%d3+{128 * (4 * i + j)}];" for j in range(4)]
            operand = registers(200 + 4 * i, 4)
        lines.append(f"mov.b64 %d11, {b.descriptor(B + i * b.step)};")
        lines.append("wgmma.fence.sync.aligned;")
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{n}k{step}.f32.{kind}.{kind} {d}, {operand}, %d11, {int(i > 0)}, 1, 1{flags};"
        )
    if isinstance(a, Layout):
        memory, fragments = a.image, np.zeros(1, np.uint32)
    else:
        steps = [
            np.stack([fragment_a(a.bits[16 * w : 16 * w + 16, i * step : (i + 1) * step]) for w in range(4)])
            for i in range(k // step)
        ]
        memory, fragments = np.zeros(4, np.uint8), np.ascontiguousarray(np.concatenate(steps, 1))  # [4, registers, 32]
    out = np.zeros((4, n // 2, 32), np.float32)
    products = "\n".join(lines)
    stores = "\n".join(f"st.global.b32 [%d2+{128 * i}], %r{i};" for i in range(n // 2))
    copies = "\n".join(
        f"""
    mov.u32 %r250, %t;
    COPY{i}:
    mad.wide.u32 %d0, %r250, 4, %a{i};
    ld.global.b32 %r251, [%d0];
    mad.lo.u32 %r252, %r250, 4, {to};
    st.shared.b32 [%r252], %r251;
    add.u32 %r250, %r250, 128;
    setp.lt.u32 %p0, %r250, {size // 4};
    @%p0 bra COPY{i};"""
        for i, (to, size) in enumerate(((A, memory.nbytes), (B, b.image.nbytes)))
        if size >= 512
    )
    body = f"""
    {copies}
    shr.u32 %r253, %t, 5;
    and.b32 %r254, %t, 31;
    mad.wide.u32 %d3, %r253, {fragments.nbytes // 4}, %a2;
    mad.wide.u32 %d3, %r254, 4, %d3;
    mad.wide.u32 %d2, %r253, {n // 2 * 128}, %a3;
    mad.wide.u32 %d2, %r254, 4, %d2;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    {products}
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    {stores}
    """
    assert device.run(body, memory, b.image, fragments, out, threads=128, shared=128 * 1024) == []
    found = np.zeros((64, n), np.float32)
    i = np.arange(n // 2)[:, None]
    for warp in range(4):
        found[16 * warp + LANE // 4 + 8 * (i // 2 % 2), i // 4 * 8 + LANE % 4 * 2 + i % 2] = out[warp]
    return found


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize(
    ("kind", "n", "of_a", "of_b"),
    [
        ("bf16", 24, k_major, k_major),
        ("tf32", 24, k_major, k_major),
        ("e4m3", 24, k_major, k_major),
        ("bf16", 128, mn_major, k_major),
        ("bf16", 128, k_major, mn_major),
        ("bf16", 128, mn_major, mn_major),
        ("f16", 64, None, k_major),  # A in registers
        ("tf32", 64, None, k_major),
        ("e4m3", 64, None, k_major),
    ],
)
def test_wgmma(kind: str, n: int, of_a: Place | None, of_b: Place, swizzle: int, device: Device) -> None:
    k = (swizzle or 64) // DTYPES[kind].itemsize
    a, b = Operand.random(64, k, kind, 1), Operand.random(n, k, kind, 2)
    majors = ([] if of_a is None else [int(of_a is mn_major)]) + [int(of_b is mn_major)]
    flags = "".join(f", {major}" for major in majors) if DTYPES[kind].itemsize == 2 else ""
    placed = a if of_a is None else of_a(a.bits, swizzle)
    found = run_wgmma(device, kind, n, k, placed, of_b(b.bits, swizzle), flags)
    np.testing.assert_allclose(found, a.values @ b.values.T, rtol=1e-4, atol=1e-4)


def test_short_sums_of_fp8(device: Device) -> None:
    """With 14 bits, 1 is lost beside 2^14 in one instruction; in fp32 it is not."""
    a, b = Operand.random(64, 32, "e4m3", 1), Operand.random(16, 32, "e4m3", 2)
    one, large = (torch.tensor(value).to(torch.float8_e4m3fn).view(torch.uint8).item() for value in (1.0, 128.0))
    a.bits[:], b.bits[:] = 0, 0
    a.bits[:, 0] = b.bits[:, 0] = large
    a.bits[:, 1] = b.bits[:, 1] = one
    layouts = k_major(a.bits, 32), k_major(b.bits, 32)
    assert (run_wgmma(device, "e4m3", 16, 32, *layouts, "") == 2**14 + 1).all()
    device.emulator.shorten_fp8_sums(14)
    try:
        assert (run_wgmma(device, "e4m3", 16, 32, *layouts, "") == 2**14).all()
    finally:
        device.emulator.shorten_fp8_sums(0)
