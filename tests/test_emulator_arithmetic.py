"""The emulator's arithmetic and conversions, against Python's integers, numpy and torch.

Of the opcodes that Triton emits for our kernels; what the emulator does not know it reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from emulator import build
from emulator.snippets import Device

REASON = build.why_unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
THREADS = 128
REGISTERS = {16: "h", 32: "r", 64: "d"}
TORCH = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# Kinds whose name does not end in the bits of a register.
BITS = {"bf16x2": 32, "f16x2": 32, "f32x2": 64, "e4m3x2": 16, "e5m2x2": 16, "pred": 32}


@pytest.fixture(scope="module")
def device() -> Device:
    return Device(build.build())


def _bits(kind: str) -> int:
    return BITS.get(kind) or int(kind.lstrip("bfsu"))


def _random(kind: str, seed: int) -> np.ndarray:
    """Bits of THREADS values, the extreme ones among them."""
    generator, word = np.random.default_rng(seed), f"u{_bits(kind) // 8}"
    if (element := kind.removesuffix("x2")) in TORCH:
        values = generator.normal(size=THREADS * (2 if kind.endswith("x2") else 1)).astype(np.float32)
        if element == "f32":
            values *= np.float32(2.0) ** generator.integers(-20, 20, size=values.shape).astype(np.float32)
            values[:6] = [0, -0.0, 1, -1, 448, 0.5]
        return torch.from_numpy(values).to(TORCH[element]).view(torch.uint8).numpy().view(word)
    bits = _bits(kind)
    integers = generator.integers(0, 2**bits, size=THREADS, dtype=np.uint64, endpoint=False)
    integers[:6] = [0, 1, 2**bits - 1, 2 ** (bits - 1), 2 ** (bits - 1) - 1, 5]
    return integers.astype(word)


def _as_torch(bits: np.ndarray, kind: str) -> torch.Tensor:
    """The values, two a thread of packed operands."""
    return torch.from_numpy(bits.view(np.uint8)).view(TORCH[kind.removesuffix("x2")])


def execute(device: Device, opcode: str, result: str, *sources: np.ndarray, immediate: str = "") -> np.ndarray:
    """The bits of `opcode` on each thread's values; a result "pred" as 0 or 1."""
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


# ---- integers ----


def _signed(value: int, kind: str) -> int:
    bits = _bits(kind)
    return value - 2**bits if kind[0] == "s" and value >> (bits - 1) else value


def _extract(value: int, position: int, length: int, signed: bool) -> int:
    """bfe, from its definition: bits past the end are the sign's or 0."""
    position, length = position & 255, length & 255
    top = min(position + length - 1, 31)
    sign = value >> top & 1 if signed and length else 0
    found = [value >> (position + i) & 1 if i < length and position + i < 32 else sign for i in range(32)]
    return sum(bit << i for i, bit in enumerate(found))


def _divide(a: int, b: int) -> int:
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _permuted(value: int, selector: int) -> int:
    byte = value >> 8 * (selector & 7) & 255
    return (255 if byte & 128 else 0) if selector & 8 else byte


INTEGER: dict[str, Callable[..., int]] = {
    "add.s16 add.u16 add.s32 add.s64 add.u64": lambda a, b: a + b,
    "sub.s16 sub.u16 sub.s32 sub.s64 sub.u64": lambda a, b: a - b,
    "mul.lo.s16 mul.lo.u16 mul.lo.s32 mul.lo.s64 mul.wide.s32 mul.wide.u32": lambda a, b: a * b,
    "mul.hi.s32 mul.hi.u32": lambda a, b: a * b >> 32,
    "mul.hi.s64 mul.hi.u64": lambda a, b: a * b >> 64,
    "mad.lo.s32 mad.lo.s64 mad.wide.s32": lambda a, b, c: a * b + c,
    "div.s32 div.u32 div.s64 div.u64": _divide,
    "rem.s32 rem.u32 rem.s64 rem.u64": lambda a, b: a if b == 0 else a - b * _divide(a, b),
    "min.s32 min.u32 min.s64 min.u64": lambda a, b: min(a, b),
    "max.s32 max.u32 max.s64 max.u64": lambda a, b: max(a, b),
    "neg.s32": lambda a: -a,
    "abs.s64": lambda a: abs(a),
    "and.b16 and.b32 and.b64": lambda a, b: a & b,
    "or.b16 or.b32 or.b64": lambda a, b: a | b,
    "xor.b16 xor.b32 xor.b64": lambda a, b: a ^ b,
    "not.b16 not.b32 not.b64": lambda a: ~a,
    "shl.b16 shl.b32 shl.b64": lambda a, b: a << min(b, 64),
    "shr.u16 shr.s32 shr.u32 shr.s64 shr.u64": lambda a, b: a >> min(b, 64),
    "bfe.s32": lambda a, b, c: _extract(a, b, c, signed=True),
    "bfe.u32": lambda a, b, c: _extract(a, b, c, signed=False),
    "popc.b32": lambda a: a.bit_count(),
    "clz.b32": lambda a: 32 - a.bit_length(),
    "brev.b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "shf.l.wrap.b32": lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32,
    "shf.r.wrap.b32": lambda a, b, c: (b << 32 | a) >> (c & 31),
    "prmt.b32": lambda a, b, c: sum(_permuted(b << 32 | a, c >> 4 * i & 15) << 8 * i for i in range(4)),
}


@pytest.mark.parametrize("opcodes", INTEGER)
def test_integers(opcodes: str, device: Device) -> None:
    function = INTEGER[opcodes]
    for opcode in opcodes.split():
        kind = opcode.split(".")[-1]
        result = f"{kind[0]}64" if "wide" in opcode else kind
        kinds = [kind] * function.__code__.co_argcount
        if opcode == "mad.wide.s32":
            kinds[2] = "s64"
        sources = [_random(one, seed) for seed, one in enumerate(kinds)]
        if opcode.startswith(("shl", "shr", "bfe")):  # positions and lengths, some past the end
            sources[1:] = [_random("u32", seed) % np.uint32(80) for seed in range(1, len(kinds))]
            kinds[1:] = ["u32"] * (len(kinds) - 1)
        found = execute(device, opcode, result, *sources)
        for i in range(THREADS):
            values = [_signed(int(source[i]), one) for source, one in zip(sources, kinds)]
            assert int(found[i]) == function(*values) & (2 ** _bits(result) - 1), (opcode, values)


def test_bits_by_a_table_and_inserted(device: Device) -> None:
    a, b, c = (_random("b32", seed) for seed in (1, 2, 3))
    assert (execute(device, "lop3.b32", "b32", a, b, c, immediate=", 0xCA") == (a & b) | (~a & c)).all()
    inserted = execute(device, "bfi.b32", "b32", a, b, immediate=", 5, 9")
    assert (inserted == (b & ~np.uint32(0x3FE0) | (a << np.uint32(5)) & np.uint32(0x3FE0))).all()


# ---- floats ----

FLOAT: dict[str, Callable[..., torch.Tensor]] = {
    "add.rn": torch.add, "sub.rn": torch.sub, "mul.rn": torch.mul, "fma.rn": lambda a, b, c: a * b + c,
    "min": torch.minimum, "max": torch.maximum,
}  # fmt: skip
APPROXIMATE: dict[str, Callable[..., Any]] = {
    "ex2.approx.ftz": np.exp2, "rcp.approx.ftz": lambda a: 1 / a, "rsqrt.approx.ftz": lambda a: 1 / np.sqrt(a),
    "sqrt.rn": np.sqrt, "lg2.approx": np.log2, "tanh.approx": np.tanh, "neg": np.negative, "abs": np.abs,
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


def test_functions_of_floats(device: Device) -> None:
    a, b = (_random("f32", seed).view(np.float32) for seed in (5, 6))
    b[b == 0] = 1
    quotient = execute(device, "div.full.f32", "f32", a, b).view(np.float32)
    np.testing.assert_allclose(quotient, a / b, rtol=2e-7)
    a = np.abs(a).clip(1e-3, 10)
    for name, exact in APPROXIMATE.items():
        found = execute(device, f"{name}.f32", "f32", a).view(np.float32)
        np.testing.assert_allclose(found, exact(a).astype(np.float32), rtol=2e-7, err_msg=name)


def test_denormals_are_flushed_only_if_asked_for_and_nan_wins_or_loses(device: Device) -> None:
    small, one, nan = (np.full(THREADS, value, np.float32) for value in (1e-40, 1.0, np.nan))
    assert (execute(device, "mul.ftz.f32", "f32", small, one) == 0).all()
    assert (execute(device, "mul.f32", "f32", small, one).view(np.float32) == small).all()
    assert (execute(device, "max.f32", "f32", nan, one).view(np.float32) == 1).all()
    assert np.isnan(execute(device, "max.NaN.f32", "f32", nan, one).view(np.float32)).all()


def test_the_largest_and_the_smallest_of_three(device: Device) -> None:
    """From sm_100 on, LLVM merges two max instructions into one with three inputs."""
    sources = [_random("f32", seed) for seed in range(3)]
    values = np.stack([source.view(np.float32) for source in sources])
    for name, function in (("min", np.min), ("max", np.max), ("min.NaN", np.min), ("max.NaN", np.max)):
        found = execute(device, f"{name}.f32", "f32", *sources).view(np.float32)
        np.testing.assert_array_equal(found, function(values, axis=0))


def test_an_unknown_number_of_inputs_is_refused(device: Device) -> None:
    sources = [_random("f32", seed) for seed in range(3)]
    with pytest.raises(AssertionError, match="kind='unsupported'"):
        execute(device, "add.f32", "f32", *sources)


def test_mixed_precision(device: Device) -> None:
    a, b, c = _random("bf16", 1), _random("bf16", 2), _random("f32", 3)
    found = _as_torch(execute(device, "fma.rn.f32.bf16", "f32", a, b, c), "f32")
    expected = _as_torch(a, "bf16").double() * _as_torch(b, "bf16").double() + _as_torch(c, "f32").double()
    assert torch.equal(found, expected.float())


# ---- conversions ----


def _floats() -> np.ndarray:
    values = _random("f32", 9).view(np.float32).copy()
    values[10:15] = [1e6, -1e6, np.nan, 1e-8, 464]
    return values


@pytest.mark.parametrize(
    ("opcode", "dtype", "largest"),
    [("cvt.rn.bf16.f32", torch.bfloat16, math.inf), ("cvt.rn.f16.f32", torch.float16, math.inf),
     ("cvt.rn.bf16x2.f32", torch.bfloat16, math.inf), ("cvt.rn.f16x2.f32", torch.float16, math.inf),
     ("cvt.rn.satfinite.e4m3x2.f32", torch.float8_e4m3fn, 448), ("cvt.rn.satfinite.e5m2x2.f32", torch.float8_e5m2, 57344)],
)  # fmt: skip
def test_rounding_to_narrow_floats(opcode: str, dtype: torch.dtype, largest: float, device: Device) -> None:
    """Against torch, which rounds to nearest even too but does not saturate; of a pair the first lies above."""
    kind, values = opcode.split(".")[-2], _floats()
    sources = [values, values[::-1].copy()] if kind.endswith("x2") else [values]
    found = torch.from_numpy(execute(device, opcode, kind, *sources).view(f"i{_bits(kind) // 8}"))
    both = torch.stack([torch.from_numpy(source) for source in reversed(sources)], 1).clamp(-largest, largest)
    torch.testing.assert_close(
        found.view(dtype).float(), both.to(dtype).flatten().float(), rtol=0, atol=0, equal_nan=True
    )


def test_widening_narrow_floats(device: Device) -> None:
    every = np.arange(2**16, dtype=np.uint16)[: THREADS * 512 : 512].copy()
    for kind, dtype in (("e4m3x2", torch.float8_e4m3fn), ("e5m2x2", torch.float8_e5m2)):
        found = torch.from_numpy(execute(device, f"cvt.rn.f16x2.{kind}", "f16x2", every).view(np.int32)).view(
            torch.float16
        )
        expected = torch.from_numpy(every.view(np.uint8)).view(dtype).to(torch.float16)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    for kind in ("f16", "bf16"):
        found = torch.from_numpy(execute(device, f"cvt.f32.{kind}", "f32", every).view(np.float32))
        torch.testing.assert_close(found, _as_torch(every, kind).float(), rtol=0, atol=0, equal_nan=True)


def test_tf32(device: Device) -> None:
    values = _floats()[15:]
    values = np.resize(values, THREADS)
    fraction, exponent = np.frexp(values.astype(np.float64))
    away = np.ldexp(np.sign(fraction) * np.floor(np.abs(fraction) * 2**11 + 0.5), exponent - 11)
    assert (execute(device, "cvt.rna.tf32.f32", "b32", values).view(np.float32) == away.astype(np.float32)).all()
    even = np.ldexp(np.rint(fraction * 2**11), exponent - 11)
    assert (execute(device, "cvt.rn.tf32.f32", "b32", values).view(np.float32) == even.astype(np.float32)).all()


@pytest.mark.parametrize(
    ("rounding", "function"), [("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)]
)
def test_floats_to_integers_and_back(rounding: str, function: Callable[..., Any], device: Device) -> None:
    values = _floats()
    values[12] = 2.5
    for kind, of_type in (("s32", np.int32), ("u32", np.uint32), ("s64", np.int64)):
        limits = np.iinfo(of_type)
        found = execute(device, f"cvt.{rounding}.{kind}.f32", kind, values).view(of_type)
        assert found.tolist() == [min(max(int(function(float(v))), limits.min), limits.max) for v in values]
        back = execute(device, f"cvt.rn.f32.{kind}", "f32", found).view(np.float32)
        assert (back == found.astype(np.float32)).all()
    whole = execute(device, f"cvt.{rounding}.f32.f32", "f32", values).view(np.float32)
    assert (whole == function(values)).all()


@pytest.mark.parametrize(
    ("to", "source"), [("s64", "s32"), ("u64", "u32"), ("u16", "u32"), ("s32", "s16"), ("u32", "u64")]
)
def test_integers_of_other_widths(to: str, source: str, device: Device) -> None:
    values = _random(source, 3)
    found = execute(device, f"cvt.{to}.{source}", to, values)
    assert [int(v) for v in found] == [_signed(int(v), source) & (2 ** _bits(to) - 1) for v in values]


# ---- predicates ----

ORDERED = {
    "eq": np.equal,
    "ne": lambda a, b: (a != b) & ~np.isnan(a + b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@pytest.mark.parametrize("word", ORDERED)
def test_comparisons(word: str, device: Device) -> None:
    a, b = (_random("s32", seed).view(np.int32) for seed in (1, 2))
    b[::3] = a[::3]
    signed, unsigned = (execute(device, f"setp.{word}.{kind}", "pred", a, b) for kind in ("s32", "u32"))
    assert (signed == ORDERED[word](a, b)).all()
    assert (unsigned == ORDERED[word](a.view(np.uint32), b.view(np.uint32))).all()
    x, y = a.astype(np.float32), b.astype(np.float32)
    x[5:8] = np.nan
    assert (execute(device, f"setp.{word}.f32", "pred", x, y) == ORDERED[word](x, y)).all()
    unordered = execute(device, f"setp.{word}u.f32", "pred", x, y)
    assert (unordered == ORDERED[word](x, y) | np.isnan(x)).all()


def test_what_is_not_known_is_reported(device: Device) -> None:
    (found,) = device.run("tcgen05.wait.ld.sync.aligned;", np.zeros(1))
    assert found.kind == "unsupported"
    assert "tcgen05.wait" in found.text
