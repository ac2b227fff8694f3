"""The emulator's arithmetic and conversions, against Python's integers, numpy and torch."""

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


@pytest.fixture(scope="module")
def device() -> Device:
    return Device(build.build())


def _bits(kind: str) -> int:
    return (
        16
        if kind in ("bf16", "f16", "e4m3x2", "e5m2x2")
        else 32
        if kind.endswith("16x2")
        else 64
        if kind == "f32x2"
        else int(kind[1:])
    )


def _store_bits(kind: str) -> int:
    return max(_bits(kind), 16)


def _random(kind: str, seed: int) -> np.ndarray:
    """Bits of THREADS values, the extreme ones among them."""
    generator = np.random.default_rng(seed)
    bits = _store_bits(kind)
    if kind in ("f32", "f64", "f32x2"):
        of_type = np.float64 if kind == "f64" else np.float32
        values = generator.normal(size=THREADS * (2 if kind == "f32x2" else 1)).astype(of_type)
        values *= of_type(2.0) ** generator.integers(-20, 20, size=values.shape).astype(of_type)
        values[:6] = [0, -0.0, 1, -1, 448, 0.5]
        return values.view(f"u{bits // 8}")
    if kind in ("f16", "f16x2"):
        return generator.normal(size=THREADS * bits // 16).astype(np.float16).view(f"u{bits // 8}")
    if kind in ("bf16", "bf16x2"):
        return (
            (generator.normal(size=THREADS * bits // 16).astype(np.float32).view(np.uint32) >> 16)
            .astype(np.uint16)
            .view(f"u{bits // 8}")
        )
    values = generator.integers(0, 2 ** _bits(kind), size=THREADS, dtype=np.uint64, endpoint=False)
    edges = [0, 1, 2 ** _bits(kind) - 1, 2 ** (_bits(kind) - 1), 2 ** (_bits(kind) - 1) - 1, 5]
    values[: len(edges)] = edges
    return values.astype(f"u{bits // 8}")


def execute(device: Device, opcode: str, result: str, *sources: np.ndarray) -> np.ndarray:
    """The bits of `opcode` on each thread's values; a result "pred" as 0 or 1, one of several words by their names."""
    lines = []
    for i, source in enumerate(sources):
        size = source.itemsize
        lines.append(f"mad.wide.u32 %d{40 + i}, %t, {size}, %a{i};")
        lines.append(f"ld.global.b{8 * size} %{REGISTERS[8 * size]}{i}, [%d{40 + i}];")
    names = ", ".join(f"%{REGISTERS[8 * source.itemsize]}{i}" for i, source in enumerate(sources))
    bits = 32 if result == "pred" else _store_bits(result)
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


def _extract(value: int, position: int, length: int, kind: str) -> int:
    """bfe, from its definition: bits past the end are the sign's or 0."""
    bits, position, length = _bits(kind), position & 255, length & 255
    top = min(position + length - 1, bits - 1)
    sign = 0 if kind[0] == "u" or length == 0 else value >> top & 1
    found = [value >> (position + i) & 1 if i < length and position + i < bits else sign for i in range(bits)]
    return sum(bit << i for i, bit in enumerate(found))


def _divide(a: int, b: int) -> int:
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


INTEGER: dict[str, tuple[str, Callable[..., int]]] = {}
for _kind in ("s16", "u16", "s32", "u32", "s64", "u64"):
    INTEGER |= {
        f"add.{_kind}": (_kind, lambda a, b: a + b), f"sub.{_kind}": (_kind, lambda a, b: a - b),
        f"mul.lo.{_kind}": (_kind, lambda a, b: a * b),
    }  # fmt: skip
for _kind in ("s32", "u32", "s64", "u64"):
    INTEGER |= {
        f"mul.hi.{_kind}": (_kind, lambda a, b, k=_kind: a * b >> _bits(k)), f"mad.lo.{_kind}": (_kind, lambda a, b, c: a * b + c),
        f"div.{_kind}": (_kind, _divide), f"rem.{_kind}": (_kind, lambda a, b: a if b == 0 else a - b * _divide(a, b)),
        f"min.{_kind}": (_kind, min), f"max.{_kind}": (_kind, max),
        f"bfe.{_kind}": (_kind, lambda a, b, c, k=_kind: _extract(a, b, c, k)),
        f"shr.{_kind}": (_kind, lambda a, b: a >> min(b, 64)),
    }  # fmt: skip
for _kind in ("b16", "b32", "b64"):
    INTEGER |= {
        f"and.{_kind}": (_kind, lambda a, b: a & b), f"or.{_kind}": (_kind, lambda a, b: a | b),
        f"xor.{_kind}": (_kind, lambda a, b: a ^ b), f"not.{_kind}": (_kind, lambda a: ~a),
        f"shl.{_kind}": (_kind, lambda a, b: a << min(b, 64)),
    }  # fmt: skip
INTEGER |= {
    "neg.s32": ("s32", lambda a: -a), "abs.s64": ("s64", abs), "popc.b32": ("b32", lambda a: a.bit_count()),
    "clz.b32": ("b32", lambda a: 32 - a.bit_length()), "brev.b32": ("b32", lambda a: int(f"{a:032b}"[::-1], 2)),
    "shf.l.wrap.b32": ("b32", lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32),
    "shf.r.wrap.b32": ("b32", lambda a, b, c: (b << 32 | a) >> (c & 31)),
    "prmt.b32": ("b32", lambda a, b, c: sum(_permuted(b << 32 | a, c >> 4 * i & 15) << 8 * i for i in range(4))),
}  # fmt: skip


def _permuted(value: int, selector: int) -> int:
    byte = value >> 8 * (selector & 7) & 255
    return (255 if byte & 128 else 0) if selector & 8 else byte


@pytest.mark.parametrize("opcode", INTEGER)
def test_integers(opcode: str, device: Device) -> None:
    kind, function = INTEGER[opcode]
    count = (
        function.__code__.co_argcount - len(function.__defaults__ or ())
        if hasattr(function, "__code__")
        else 1
        if function is abs
        else 2
    )
    kinds = [kind] * count
    if opcode.startswith(("shl", "shr", "bfe")):  # positions and lengths, some past the end
        kinds[1:] = ["u32"] * (count - 1)
    sources = [_random(one, seed) for seed, one in enumerate(kinds)]
    for i, one in enumerate(kinds[1:], 1):
        if one != kind or opcode.startswith(("shl", "shr", "bfe")):
            sources[i] = sources[i] % np.uint32(80)
    found = execute(device, opcode, kind, *sources)
    mask = 2 ** _bits(kind) - 1
    for i in range(THREADS):
        values = [_signed(int(source[i]), one) for source, one in zip(sources, kinds)]
        assert int(found[i]) == function(*values) & mask, (opcode, values)


def test_wide_products_and_lop3(device: Device) -> None:
    a, b, c = (_random("s32", seed) for seed in (1, 2, 3))
    wide = execute(device, "mad.wide.s32", "s64", a, b, _random("s64", 4)).view(np.int64)
    with np.errstate(over="ignore"):
        assert (wide == a.view(np.int32).astype(np.int64) * b.view(np.int32) + _random("s64", 4).view(np.int64)).all()
    out = np.zeros(THREADS, np.uint32)
    load = "".join(f"mad.wide.u32 %d{i}, %t, 4, %a{i};\nld.global.b32 %r{i}, [%d{i}];\n" for i in range(3))
    body = (
        load
        + "lop3.b32 %r4, %r0, %r1, %r2, 0xCA;\nbfi.b32 %r5, %r4, %r1, 5, 9;\nmad.wide.u32 %d3, %t, 4, %a3;\nst.global.b32 [%d3], %r5;"
    )
    assert device.run(body, a, b, c, out, threads=THREADS) == []
    chosen = (a & b) | (~a & c)
    assert (out == (b & ~np.uint32(0x3FE0) | (chosen << np.uint32(5)) & np.uint32(0x3FE0))).all()


# ---- floats ----

FLOAT: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "min": np.minimum, "max": np.maximum, "fma": lambda a, b, c: (a.astype(np.float64) * b + c).astype(a.dtype),
}  # fmt: skip
APPROXIMATE: dict[str, Callable[..., Any]] = {
    "ex2.approx.ftz": np.exp2, "rcp.approx.ftz": lambda a: 1 / a, "rsqrt.approx.ftz": lambda a: 1 / np.sqrt(a), "sqrt.rn": np.sqrt,
    "lg2.approx": np.log2, "tanh.approx": np.tanh, "sin.approx": np.sin, "cos.approx": np.cos, "neg": np.negative, "abs": np.abs,
}  # fmt: skip


@pytest.mark.parametrize("suffix", ["f32", "rn.f32x2", "f64"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_floats(name: str, suffix: str, device: Device) -> None:
    kind, of_type = suffix.removeprefix("rn."), np.float64 if suffix == "f64" else np.float32
    if (name, kind) == ("fma", "f64"):
        pytest.skip("numpy has no fused product of doubles")
    sources = [_random(kind, seed) for seed in range(3 if name == "fma" else 2)]
    found = execute(device, f"{name}.{suffix}", kind, *sources).view(of_type)
    expected = FLOAT[name](*(source.view(of_type) for source in sources))
    assert (found == expected).all()


@pytest.mark.parametrize("name", ["min.f32", "max.f32", "div.full.f32", *(f"{name}.f32" for name in APPROXIMATE)])
def test_functions_of_floats(name: str, device: Device) -> None:
    a, b = (_random("f32", seed).view(np.float32) for seed in (5, 6))
    a = np.abs(a).clip(1e-3, 10) if name.removesuffix(".f32") in APPROXIMATE else a
    word = name.removesuffix(".f32")
    exact = APPROXIMATE.get(word) or {"min": np.minimum, "max": np.maximum, "div.full": lambda a, b: a / b}[word]
    b[b == 0] = 1
    found = execute(device, name, "f32", *((a,) if word in APPROXIMATE else (a, b))).view(np.float32)
    np.testing.assert_allclose(found, exact(*((a,) if word in APPROXIMATE else (a, b))).astype(np.float32), rtol=2e-7)


def test_denormals_are_flushed_only_if_asked_for(device: Device) -> None:
    small, one = np.full(THREADS, 1e-40, np.float32), np.ones(THREADS, np.float32)
    assert (execute(device, "mul.ftz.f32", "f32", small, one) == 0).all()
    assert (execute(device, "mul.f32", "f32", small, one).view(np.float32) == small).all()


def test_nan_wins_or_loses(device: Device) -> None:
    nan, one = np.full(THREADS, np.nan, np.float32), np.ones(THREADS, np.float32)
    assert (execute(device, "max.f32", "f32", nan, one).view(np.float32) == 1).all()
    assert np.isnan(execute(device, "max.NaN.f32", "f32", nan, one).view(np.float32)).all()


def _torch(bits: np.ndarray, kind: str) -> torch.Tensor:
    """Packed operands: two values a thread."""
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[kind.removesuffix("x2")]
    return torch.from_numpy(bits.view(np.int16)).view(dtype)


@pytest.mark.parametrize("kind", ["bf16", "bf16x2", "f16", "f16x2"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "min", "max", "fma"])
def test_halves(name: str, kind: str, device: Device) -> None:
    sources = [_random(kind, seed) for seed in range(3 if name == "fma" else 2)]
    found = execute(device, f"{name}{'' if name in ('min', 'max') else '.rn'}.{kind}", kind, *sources)
    values = [_torch(source, kind).double() for source in sources]
    functions = {"min": torch.minimum, "max": torch.maximum, "fma": lambda a, b, c: a * b + c}
    expected = functions.get(name, FLOAT[name])(*values).to(_torch(found, kind).dtype)
    assert torch.equal(_torch(found, kind), expected)


def test_mixed_precision(device: Device) -> None:
    a, b, c = _random("bf16", 1), _random("bf16", 2), _random("f32", 3)
    found = execute(device, "fma.rn.f32.bf16", "f32", a, b, c).view(np.float32)
    expected = _torch(a, "bf16").double() * _torch(b, "bf16").double() + torch.from_numpy(c.view(np.float32)).double()
    assert torch.equal(torch.from_numpy(found), expected.float())


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
    found = torch.from_numpy(execute(device, opcode, kind, *sources).view(f"i{_store_bits(kind) // 8}"))
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
        torch.testing.assert_close(found, _torch(every, kind).float(), rtol=0, atol=0, equal_nan=True)


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


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
def test_comparisons_of_pairs(kind: str, device: Device) -> None:
    """A predicate for each half."""
    a, b = _random(kind, 1), _random(kind, 2)
    out = np.zeros(2 * THREADS, np.uint32)
    body = f"""
    mad.wide.u32 %d0, %t, 4, %a0;
    mad.wide.u32 %d1, %t, 4, %a1;
    mad.wide.u32 %d2, %t, 8, %a2;
    ld.global.b32 %r0, [%d0];
    ld.global.b32 %r1, [%d1];
    setp.lt.{kind} %p0|%p1, %r0, %r1;
    selp.u32 %r2, 1, 0, %p0;
    selp.u32 %r3, 1, 0, %p1;
    st.global.v2.b32 [%d2], {{%r2, %r3}};
    """
    assert device.run(body, a, b, out, threads=THREADS) == []
    assert (out == (_torch(a, kind) < _torch(b, kind)).numpy()).all()


def test_what_is_not_known_is_reported(device: Device) -> None:
    (found,) = device.run("tcgen05.wait.ld.sync.aligned;", np.zeros(1))
    assert found.kind == "unsupported"
    assert "tcgen05.wait" in found.text
