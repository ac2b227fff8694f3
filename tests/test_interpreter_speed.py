"""The patches that speed up Triton's interpreter must not change its results, bit for bit, also with a new triton."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import children
import numpy as np
import pytest

_TYPES = (
    *("int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16"),
    *("float32", "float64", "float8e4nv", "float8e5", "pi32_t"),
)
_SHAPES = (((), ()), ((4,), ()), ((), (4,)), ((4,), (4,)), ((4, 1), (1, 8)), ((2, 4), (4,)), ((4,), (8,)))
_BINARY = {
    **dict.fromkeys(("add", "sub", "mul"), (True,)),
    **dict.fromkeys(("truediv", "floordiv", "mod", "and_", "or_", "xor_", "logical_and", "shl", "ashr", "lshr"), ()),
    **dict.fromkeys(("less_than", "greater_equal", "equal", "not_equal"), ()),
    "fdiv": (False,),
}
_BLOCKS = ([4], [2, 8], [1, 1], [], [3], [0], [1.5], ["4"], [2**21], (4,), 4)
_ULPS = 1  # erf alone is another library's


@pytest.mark.slow
def test_answers_are_those_of_the_interpreter_as_it_comes() -> None:
    """Compares every pair of types in a fresh process, before and after patching."""
    children.run_python([__file__], children.environment() | {"TRITON_INTERPRET": "1"})


def _answer(compute: Callable[..., Any], *given: Any) -> tuple[Any, ...]:
    """All that is seen of a tensor, or of the refusal."""
    try:
        found = compute(*given)
    except Exception as error:
        return type(error), str(error)
    data, sizes = found.handle.data, tuple(map(int, found.shape))
    return data.dtype, data.tobytes(), str(found.type), str(found.dtype), int(found.numel), sizes


def _answers() -> dict[tuple[Any, ...], tuple[Any, ...]]:
    import triton.language as tl
    from triton.language import core
    from triton.runtime import interpreter

    semantic = interpreter.interpreter_semantic
    generator = np.random.default_rng(0)

    def tensor(name: str, shape: tuple[int, ...]) -> Any:
        scalar = getattr(core, name)
        bits = 64 if scalar.is_ptr() else scalar.primitive_bitwidth
        raw = generator.integers(0, 2 if bits == 1 else 256, (math.prod(shape), max(bits // 8, 1)), dtype=np.uint8)
        data = raw.view(interpreter._get_np_dtype(scalar)).reshape(shape or (1,))
        return tl.tensor(interpreter.TensorHandle(data, scalar), core.block_type(scalar, [*shape]) if shape else scalar)

    def block(shape: Any) -> Any:
        sizes = [core.constexpr(size) for size in shape] if isinstance(shape, list) else shape
        return tl.tensor(interpreter.TensorHandle(np.zeros(1, np.int32), tl.int32), core.block_type(tl.int32, sizes))

    found = {("block", str(shape)): _answer(block, shape) for shape in _BLOCKS}
    for left, right in itertools.product(_TYPES, repeat=2):
        for shapes in _SHAPES:
            x, y, condition = tensor(left, shapes[0]), tensor(right, shapes[1]), tensor("int1", shapes[0])
            for name, how in _BINARY.items():
                found[name, left, right, shapes] = _answer(getattr(semantic, name), x, y, *how)
            found["where", left, right, shapes] = _answer(semantic.where, condition, x, y)
        found["cast", left, right] = _answer(semantic.cast, tensor(left, (4,)), getattr(core, right))
    for name, number in itertools.product(_TYPES, (3, -3, 0.5, True)):
        found["number", name, number] = _answer(semantic.mul, tensor(name, (4,)), number, True)
    return found


def _main() -> None:
    import interpreter_speed
    from triton.runtime import interpreter

    warnings.simplefilter("ignore")  # of numbers that are drawn by their bits
    values = np.concatenate([np.linspace(-7, 7, 20001), [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40]]).astype(np.float32)
    before, erf = _answers(), interpreter.np_erf_fp32(values)
    interpreter_speed.search_once()
    after, fast_erf = _answers(), interpreter.np_erf_fp32(values)
    assert len(before) > 10_000 and sum(len(answer) > 2 for answer in before.values()) > 5_000
    different = {key: (answer, after[key]) for key, answer in before.items() if after[key] != answer}
    assert not different, f"{len(different)} differ, the first: {next(iter(different.items()))}"
    np.testing.assert_array_max_ulp(erf[:-2], fast_erf[:-2], _ULPS)
    assert np.array_equal(erf[-2:], fast_erf[-2:], equal_nan=True)


if __name__ == "__main__":
    _main()
