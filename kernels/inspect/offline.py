"""Compiles kernels without a GPU, and reads statistics of their machine code.

`builds(arch)` yields the shipped configurations from the modules in `PROVIDERS`. `compile_build` compiles one, and
reads registers, spills, shared memory, occupancy and instructions. This requires ptxas and cuobjdump from triton's
wheel. `TRITON_INTERPRET` must be unset.

To add kernels, add a module with a function `offline_builds(arch)` to `PROVIDERS`.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch.torch_version import TorchVersion
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from ..launch import Launch, is_interpreted

_SM_103 = () if TorchVersion(triton.__version__) < "3.7" else ("sm_103",)  # unknown to older cuobjdumps
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", *_SM_103, "sm_120")
# Modules in this folder that provide builds.
PROVIDERS: tuple[str, ...] = ("attention_offline", "matmul_offline", "rotary_offline")

_TYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.bool: "i1",
    torch.uint8: "u8",
}


@dataclass(frozen=True)
class Limits:
    """Limits of a multiprocessor. Source: CUDA C++ Programming Guide, technical specifications; cuda_occupancy.h."""

    shared_bytes: int
    shared_bytes_per_block: int
    threads: int
    blocks: int


_KIB = 1024
LIMITS = {
    "sm_80": Limits(164 * _KIB, 163 * _KIB, 2048, 32),
    "sm_86": Limits(100 * _KIB, 99 * _KIB, 1536, 16),
    "sm_89": Limits(100 * _KIB, 99 * _KIB, 1536, 24),
    "sm_90": Limits(228 * _KIB, 227 * _KIB, 2048, 32),
    "sm_100": Limits(228 * _KIB, 227 * _KIB, 2048, 32),
    "sm_103": Limits(228 * _KIB, 227 * _KIB, 2048, 32),
    "sm_120": Limits(100 * _KIB, 99 * _KIB, 1536, 24),
}


@dataclass(frozen=True)
class Build:
    """A kernel in a shipped configuration.

    Args:
        kernel: Name of the kernel, e.g. "attention_fwd_row".
        case: Description of the configuration, unique per kernel, e.g. "bf16 N197 D64".
        launch: The launch, with meta tensors.
        core: True if the static tests compile this build; `vit-fast kernels` compiles all builds.
        needs: Required instructions, named as in `Stats.has`, e.g. ("HGMMA", "UTMALDG").
    """

    kernel: str
    case: str
    launch: Launch
    core: bool = False
    needs: tuple[str, ...] = ()

    def key(self, arch: str) -> str:
        return f"{arch}/{self.kernel}/{self.case}"


@dataclass(frozen=True)
class Stats:
    """Resources and instruction counts of a compiled build, and the seconds to compile it.

    If SASS has more `wgmma_waits` than PTX, ptxas has serialized wgmma (warnings C75xx). `early_accesses` are accesses
    to global memory before the wait for the previous kernel (ptx.py).
    """

    registers: int
    stack_bytes: int
    spill_loads: int
    spill_stores: int
    shared_bytes: int
    ctas_per_sm: int
    warps: int
    instructions: int
    hgmma: int
    hmma: int
    tcgen05: int
    tma_loads: int
    tma_stores: int
    async_copies: int
    seconds: float
    e4m3: int = 0
    wgmma_waits: int = 0
    wgmma_waits_in_ptx: int = 0
    grid_waits: int = 0
    grid_starts: int = 0
    early_accesses: int = 0

    @property
    def spills(self) -> int:
        """Number of instructions that move registers to or from local memory."""
        return self.spill_loads + self.spill_stores

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def has(self, instruction: str) -> bool:
        """True if SASS contains an instruction; TCGEN05 and E4M3 stand for all tcgen05 and e4m3 MMA instructions."""
        fields = {
            "HGMMA": self.hgmma,
            "HMMA": self.hmma,
            "TCGEN05": self.tcgen05,
            "UTMALDG": self.tma_loads,
            "UTMASTG": self.tma_stores,
            "E4M3": self.e4m3,
            "ACQBULK": self.grid_waits,
            "PREEXIT": self.grid_starts,
        }
        return fields[instruction] > 0


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def builds(arch: str) -> Iterator[Build]:
    """Yields the shipped builds for an architecture.

    Raises:
        ValueError: the architecture is unknown.
    """
    if arch not in LIMITS:
        raise ValueError(f"arch must be one of {', '.join(ARCHS)}, got {arch!r}")
    for name in PROVIDERS:
        yield from importlib.import_module(f".{name}", __package__).offline_builds(arch)


def compile_launch(launch: Launch, arch: str) -> Any:
    """Compiles a launch for an architecture; returns triton's CompiledKernel.

    Raises:
        RuntimeError: triton's interpreter is active.
    """
    if is_interpreted():
        raise RuntimeError(
            "kernels cannot be compiled: triton was imported with TRITON_INTERPRET=1; unset it and restart the process"
        )
    signature, constants, attributes = _specialise(launch)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    return triton.compile(source, target=target, options=launch.options())


def specialisation(launch: Launch) -> str:
    """Returns the inputs of the compiler as text; launches with equal text share one binary."""
    return repr((launch.kernel.__name__, _specialise(launch), launch.options()))


def compile_build(build: Build, arch: str) -> Stats:
    start = time.perf_counter()
    compiled = compile_launch(build.launch, arch)
    return read_stats(compiled, arch, time.perf_counter() - start)


def problems(build: Build, stats: Stats, arch: str) -> list[str]:
    """Lists reasons not to ship a build."""
    found = []
    if stats.spills:
        found.append(f"spills: {stats.spill_loads} loads, {stats.spill_stores} stores")
    if stats.wgmma_waits > stats.wgmma_waits_in_ptx:
        found.append(f"wgmma is serialized: {stats.wgmma_waits} waits, {stats.wgmma_waits_in_ptx} in PTX")
    needs = (*build.needs, "ACQBULK", "PREEXIT") if build.launch.constants.get("DEPENDENT") else build.needs
    found += [f"no {name} in the machine code" for name in needs if not stats.has(name)]
    if stats.early_accesses:
        found.append(f"{stats.early_accesses} accesses to global memory before ACQBULK")
    if stats.shared_bytes > LIMITS[arch].shared_bytes_per_block:
        found.append(
            f"{stats.shared_bytes} bytes of shared memory, {arch} has {LIMITS[arch].shared_bytes_per_block} per block"
        )
    if stats.ctas_per_sm < 1:
        found.append("does not fit on a multiprocessor")
    return found


def _specialise(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], Any]]:
    """Returns types, constants and divisibility of the arguments, as triton derives them at a launch."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(launch.constants)
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
            continue
        value = launch.args[name]
        if value is None or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
            signature[name] = "constexpr"
            constants[name] = value
            continue
        signature[name], divisible = _type_of(value)
        if divisible and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _type_of(value: Any) -> tuple[str, bool]:
    """Returns triton's type of an argument, and True if the value or address is divisible by 16."""
    if isinstance(value, TensorDescriptor):
        block = ",".join(str(size) for size in value.block_shape)
        return f"tensordesc<{_TYPE_NAMES[value.base.dtype]}[{block}]>", False
    if isinstance(value, torch.Tensor):
        # a meta tensor has no address: assume that its storage is aligned
        return f"*{_TYPE_NAMES[value.dtype]}", value.storage_offset() * value.element_size() % 16 == 0
    if isinstance(value, bool):
        return "i1", False
    if isinstance(value, int):
        return ("i32" if -(2**31) <= value < 2**31 else "i64"), value % 16 == 0
    if isinstance(value, float):
        return "fp32", False
    raise TypeError(f"no triton type for an argument of type {type(value).__name__}")


def disassemble(compiled: Any) -> tuple[str, str]:
    """Returns the output of cuobjdump for a compiled kernel: resource usage, and machine code (SASS)."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        printed = [
            subprocess.run([cuobjdump, flag, path], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        ]
    return printed[0], printed[1]


_GLOBAL_ACCESSES = {"ATOM", "ATOMG", "LD", "LDG", "LDGSTS", "RED", "REDG", "ST", "STG", "UBLKCP", "UTMALDG", "UTMASTG"}
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)


def early_accesses(sass: str) -> int:
    """Returns the number of global memory accesses before ACQBULK (griddepcontrol.wait), excluding prefetches."""
    names = _INSTRUCTION.findall(sass)
    before = names[: names.index("ACQBULK")] if "ACQBULK" in names else []
    return sum(name in _GLOBAL_ACCESSES for name in before)


def read_stats(compiled: Any, arch: str, seconds: float) -> Stats:
    """Returns the statistics of a compiled kernel.

    Raises:
        RuntimeError: cuobjdump printed no resource line.
    """
    usage, sass = disassemble(compiled)
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if match is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {usage[:200]!r}")
    registers, stack = int(match[1]), int(match[2])
    mix = Counter(_INSTRUCTION.findall(sass))
    shared = int(compiled.metadata.shared)
    warps = int(getattr(compiled.metadata, "total_num_warps", None) or compiled.metadata.num_warps)
    tensor_columns = int(getattr(compiled.metadata, "tmem_size", None) or 0)
    return Stats(
        registers=registers,
        stack_bytes=stack,
        spill_loads=mix["LDL"],
        spill_stores=mix["STL"],
        shared_bytes=shared,
        ctas_per_sm=_occupancy(LIMITS[arch], registers, shared, warps, tensor_columns),
        warps=warps,
        instructions=sum(mix.values()) - mix["NOP"],
        hgmma=mix["HGMMA"] + mix["QGMMA"] + mix["IGMMA"],
        hmma=mix["HMMA"],
        tcgen05=sum(count for name, count in mix.items() if name.startswith("UTC") and name.endswith("MMA")),
        tma_loads=mix["UTMALDG"],
        tma_stores=mix["UTMASTG"],
        async_copies=mix["LDGSTS"],
        seconds=round(seconds, 3),
        e4m3=mix["QGMMA"] + mix["QMMA"] + mix["UTCQMMA"],
        grid_waits=mix["ACQBULK"],
        grid_starts=mix["PREEXIT"],
        early_accesses=early_accesses(sass),
        wgmma_waits=sass.count("WARPGROUP.DEPBAR"),
        wgmma_waits_in_ptx=compiled.asm["ptx"].count("wgmma.wait_group"),
    )


def _occupancy(limits: Limits, registers: int, shared_bytes: int, warps: int, tensor_columns: int) -> int:
    """Returns blocks per multiprocessor; CUDA reserves 1 KiB of shared memory per block."""
    registers_per_warp = (max(registers, 1) + 7) // 8 * 8 * 32
    by_registers = 65_536 // registers_per_warp // warps
    by_shared = limits.shared_bytes // (shared_bytes + _KIB)
    by_tensor_memory = 512 // tensor_columns if tensor_columns else limits.blocks
    return min(by_registers, by_shared, by_tensor_memory, limits.threads // (32 * warps), limits.blocks)
