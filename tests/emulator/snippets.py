"""Runs hand-written PTX on the emulator, with numpy arrays as memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .binding import Emulator, Report, Schedule

SHARED_BYTES = 227 * 1024
_TENSOR_MAP = 128  # bytes
_FIND = ctypes.CFUNCTYPE(
    ctypes.c_bool, ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint64)
)
# CUtensorMapDataType by bytes per element
_MAP_TYPES = {1: 0, 2: 1, 4: 2, 8: 4}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}

# Registers of every kind; %a0, %a1, ... point to the arrays, %t is the thread index.
_KERNEL = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry snippet({parameters})
{{
  .reg .pred %p<8>;
  .reg .b16 %h<64>;
  .reg .b32 %r<300>;
  .reg .b32 %t;
  .reg .b64 %d<64>;
  .reg .b64 %a<16>;
  mov.u32 %t, %tid.x;
{loads}
{body}
  ret;
}}
"""


class _LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


_DEPENDENT = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        *((f"{what}{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


@dataclass(frozen=True)
class TensorMap:
    """A tensor map of an array in global memory.

    Args:
        array: Row-major; its last dimension is the first one of the map.
        box: Sizes of the box, in the order of the array's dimensions.
        swizzle: Bytes: 0, 32, 64 or 128.
    """

    array: np.ndarray
    box: Sequence[int]
    swizzle: int = 0


class Device:
    """The emulator as an sm_90, with numpy arrays as global memory."""

    def __init__(self, folder: Path) -> None:
        self.emulator = Emulator(folder / "emulator.so")
        self.emulator.schedule(Schedule())
        self._driver = self.emulator.binding
        self._driver.stand_in_configure(90, 132, SHARED_BYTES, SHARED_BYTES + 1024)
        self._spans: list[tuple[int, int]] = []
        self._find = _FIND(self._find_allocation)
        self._driver.emulator_set_allocations(self._find)

    def _find_allocation(self, address: int, first: ctypes._Pointer, end: ctypes._Pointer) -> bool:
        for start, stop in self._spans:
            if start <= address < stop:
                first[0], end[0] = start, stop
                return True
        return False

    def run(
        self, body: str, *arguments: np.ndarray | TensorMap, threads: int = 32, grid: int = 1,
        shared: int = 0, dependent: bool = False,
    ) -> list[Report]:  # fmt: skip
        """Executes `body` and returns the reports. %a0, %a1, ... point to the arrays or tensor maps.

        A `dependent` launch is a programmatic dependent launch.
        """
        arrays = [argument.array if isinstance(argument, TensorMap) else argument for argument in arguments]
        self._spans = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays]
        declared, loads, values = [], [], []
        for i, argument in enumerate(arguments):
            if isinstance(argument, TensorMap):
                declared.append(f".param .align 64 .b8 q{i}[{_TENSOR_MAP}]")
                loads.append(f"  mov.b64 %a{i}, q{i};\n  cvta.param.u64 %a{i}, %a{i};")
                values.append(self._encode(argument))
            else:
                declared.append(f".param .u64 q{i}")
                loads.append(f"  ld.param.u64 %a{i}, [q{i}];")
                values.append(ctypes.c_uint64(argument.ctypes.data))
        text = _KERNEL.format(parameters=", ".join(declared), loads="\n".join(loads), body=body)
        module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), b"\x7fELFPTX" + text.encode() + b"\0")
        function = ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(function), module, b"snippet")
        self._call("cuFuncSetAttribute", function, 8, ctypes.c_int(shared))
        attribute = ctypes.pointer(_LaunchAttribute(_DEPENDENT, 0, int(dependent)))
        config = _LaunchConfig(grid, 1, 1, threads, 1, 1, shared, None, ctypes.cast(attribute, ctypes.c_void_p), 1)
        pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in values)
        )
        self._call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)
        return self.emulator.reports()

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._driver, name)(*arguments)
        assert status == 0, f"{name}: {status}"

    def _encode(self, tensor: TensorMap) -> ctypes.Array[ctypes.c_char]:
        memory = ctypes.create_string_buffer(_TENSOR_MAP + 64)
        start = -ctypes.addressof(memory) % 64
        packed = (ctypes.c_char * _TENSOR_MAP).from_buffer(memory, start)
        rank, array = tensor.array.ndim, tensor.array
        sizes = (ctypes.c_uint64 * 5)(*reversed(array.shape))
        strides = (ctypes.c_uint64 * 5)(*reversed(array.strides[:-1]))
        box, steps = (ctypes.c_uint32 * 5)(*reversed(tensor.box)), (ctypes.c_uint32 * 5)(*([1] * 5))
        self._call(
            "cuTensorMapEncodeTiled", packed, _MAP_TYPES[array.itemsize], rank, ctypes.c_void_p(array.ctypes.data),
            sizes, strides, box, steps, 0, _SWIZZLES[tensor.swizzle], 0, 0,
        )  # fmt: skip
        return packed


def swizzled(box: np.ndarray, swizzle: int) -> np.ndarray:
    """Returns the bytes of a box in swizzled order: XORs chunk indices (16 bytes) with row indices (128 bytes)."""
    flat = box.reshape(-1).view(np.uint8)
    placed = np.zeros_like(flat)
    for start in range(0, flat.size, 16):
        place = start ^ (start >> 7) % (swizzle // 16 or 1) * 16
        placed[place : place + 16] = flat[start : start + 16]
    return placed
