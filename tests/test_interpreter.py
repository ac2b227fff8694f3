"""The patches that accelerate Triton's interpreter must not change its results, also with a new triton."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import children
import numpy as np
import pytest

TYPES = (
    *("int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16"),
    *("float32", "float64", "float8e4nv", "float8e5", "pi32_t"),
)
SHAPES = (((), ()), ((4,), ()), ((4,), (4,)), ((4, 1), (1, 8)), ((2, 4), (4,)), ((4,), (8,)))
BLOCKS = ([4], [2, 8], [1, 1], [], [3], [0], [1.5], ["4"], [2**21], (4,), 4)


@pytest.mark.slow
def test_results_are_those_of_the_interpreter_without_patches() -> None:
    """Compares every pair of types in a fresh process, before and after patching."""
    children.run_python([__file__], children.environment() | {"TRITON_INTERPRET": "1"})


def _result(compute: Any, *given: Any) -> tuple[Any, ...]:
    """Everything that a kernel sees of a tensor, or the error."""
    try:
        found = compute(*given)
    except Exception as error:
        return type(error), str(error)
    data, sizes = found.handle.data, tuple(map(int, found.shape))
    return data.dtype, data.tobytes(), str(found.type), str(found.dtype), int(found.numel), sizes


def _results() -> dict[tuple[Any, ...], tuple[Any, ...]]:
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

    found = {("block", str(shape)): _result(block, shape) for shape in BLOCKS}
    for left, right, shapes in itertools.product(TYPES, TYPES, SHAPES):
        x, y = tensor(left, shapes[0]), tensor(right, shapes[1])
        found["add", left, right, shapes] = _result(semantic.add, x, y, True)
        found["less_than", left, right, shapes] = _result(semantic.less_than, x, y)
        found["cast", left, right, shapes] = _result(semantic.cast, x, getattr(core, right))
    return found


def _main() -> None:
    import interpreter as patches
    from triton.runtime import interpreter

    warnings.simplefilter("ignore")  # random bits are no sensible numbers
    values = np.concatenate([np.linspace(-7, 7, 20001), [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40]]).astype(np.float32)
    before, erf = _results(), interpreter.np_erf_fp32(values)
    patches.accelerate()
    after, fast_erf = _results(), interpreter.np_erf_fp32(values)
    assert sum(len(result) > 2 for result in before.values()) > len(before) / 2 > 2000
    different = {key: (result, after[key]) for key, result in before.items() if after[key] != result}
    assert not different, f"{len(different)} differ, the first: {next(iter(different.items()))}"
    np.testing.assert_array_max_ulp(erf[:-2], fast_erf[:-2], maxulp=1)
    assert np.array_equal(erf[-2:], fast_erf[-2:], equal_nan=True)


if __name__ == "__main__":
    _main()
