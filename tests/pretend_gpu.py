"""A pretend machine with GPUs: a tensor on "cuda:i" is a CPU tensor whose storage is marked as memory of GPU i.

    machine = Machine(2)
    with machine.installed():
        model = vit_fast.create_model("vit_test", backend="triton", device="cuda:1")
    machine.launches, machine.host_ms, machine.peak

A function mode answers `.device` and executes device arguments. A dispatch mode marks new tensors, refuses what CUDA
refuses (tensors on several devices, waiting during a capture), and advances a clock: each operator takes host time and
device time, and each stream runs its work in order. `torch.cuda.graph`, `stream` and `device` are torch's own classes.
Kernels run in Triton's interpreter. torch.compile traces, and runs the graphs eagerly. `pretend_modes.py` contains the
modes, and `pretend_cuda.py` the functions of torch.cuda and a way to run Python commands on a pretend machine.

It finds no races between streams, and has neither Inductor, real memory pools nor real durations.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

HOST_MS = 0.004  # host time of a call
DEVICE_MS, BYTES_PER_MS = 0.002, 3e9  # device time of an operator: a constant, and its outputs at this rate
DEFAULT_POOL = (0, 0)
HOST = -1  # marks pinned host memory
Place = tuple[int, int]  # a device and the number of one of its streams


class CudaError(RuntimeError):
    """An error of the CUDA driver."""

    def __init__(self, message: str) -> None:
        super().__init__(f"CUDA error: {message}")


@dataclass
class Owned:
    """Memory of a GPU."""

    storage: StorageWeakRef
    device: int
    bytes: int
    pool: tuple[int, int]


@dataclass
class Capture:
    """A capture of a CUDA graph that is underway."""

    at: Place
    pool: tuple[int, int]
    mode: str
    thread: int = field(default_factory=threading.get_ident)
    steps: list[Callable[[], object]] = field(default_factory=list)
    made: list[Tensor] = field(default_factory=list)  # tensors that the steps write
    ms: float = 0.0
    outside: int = 0  # operators and launches of this thread on other streams
    broken: str = ""


class Here(threading.local):
    """The current device and streams of a thread."""

    def __init__(self) -> None:
        self.device, self.streams = 0, Counter[int]()
        self.allocating: int | None = None  # device of tensors that C++ allocates without a tensor argument


class Memory:
    """The memory of GPUs: storages in use, and memory that torch keeps for the default pool and for graphs."""

    here: Here
    memory: int  # bytes of each GPU
    count: int
    call: Callable[..., None]
    own_capture: Callable[[], Capture | None]
    is_capturing: Callable[[int], bool]

    def __init__(self) -> None:
        self.owned: dict[int, Owned] = {}
        self.pools: dict[tuple[int, int], weakref.WeakSet[Any]] = {}  # graphs of each pool
        self.reserved: Counter[tuple[int, tuple[int, int]]] = Counter()  # bytes by device and pool
        self.bound, self.peak, self.foreign = Counter[int](), Counter[int](), Counter[int]()

    def device_of(self, tensor: Tensor) -> int | None:
        """Returns the number of the GPU of a tensor; None on the host."""
        try:
            found = self.owned.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # e.g. a fake or sparse tensor
            return None
        return None if found is None or found.device == HOST or found.storage.expired() else found.device

    def is_pinned(self, tensor: Tensor) -> bool:
        found = self.owned.get(tensor.untyped_storage()._cdata)
        return found is not None and found.device == HOST and not found.storage.expired()

    def own(self, tensor: Tensor, device: int) -> Tensor:
        """Marks the storage of a new tensor as memory of a GPU; raises torch.OutOfMemoryError."""
        storage = tensor.untyped_storage()
        if (known := self.owned.get(storage._cdata)) is None or known.storage.expired():
            capture = self.own_capture() if device >= 0 and self.is_capturing(device) else None
            pool = DEFAULT_POOL if capture is None else capture.pool
            if device >= 0:
                self._allocate(device, pool, storage.nbytes())
            self.owned[storage._cdata] = Owned(StorageWeakRef(storage), device, storage.nbytes(), pool)
        return tensor

    def _allocate(self, device: int, pool: tuple[int, int], size: int) -> None:
        self.bound[device] += size  # an upper bound of the allocated bytes, because it ignores freed storages
        if self.bound[device] > self.peak[device] or pool != DEFAULT_POOL:
            self.bound[device] = self.allocated(device) + size
            self.peak[device] = max(self.peak[device], self.bound[device])
        if self.bound[device] > self.reserved[device, pool] or pool != DEFAULT_POOL:
            grown = self.allocated(device, pool) + size
            if grown > self.reserved[device, pool]:
                self.call("cudaMalloc", unsafe=True)
                free = self.memory - self.used(device)
                if grown - self.reserved[device, pool] > free:
                    self.bound[device] -= size
                    needed, left = (f"{part / 2**20:.2f} MiB" for part in (size, free))
                    text = f"CUDA out of memory. Tried to allocate {needed}. GPU {device} has {left} free."
                    raise torch.OutOfMemoryError(text)
                self.reserved[device, pool] = grown

    def allocated(self, device: int, pool: tuple[int, int] | None = None) -> int:
        """Returns the bytes of live tensors on a GPU."""
        for key in [key for key, one in self.owned.items() if one.storage.expired()]:
            del self.owned[key]
        return sum(o.bytes for o in self.owned.values() if o.device == device and pool in (None, o.pool))

    def used(self, device: int) -> int:
        """Returns the bytes of a GPU that are not free: cached by torch, in pools of live graphs, and of others."""
        for on, pool in list(self.reserved):
            if pool != DEFAULT_POOL and not self.pools.get(pool):
                del self.reserved[on, pool]
        return self.foreign[device] + sum(size for (on, _), size in self.reserved.items() if on == device)

    def empty_cache(self) -> None:
        for device in range(self.count):
            self.reserved[device, DEFAULT_POOL] = self.allocated(device, DEFAULT_POOL)

    def reset_peak(self, device: int) -> None:
        self.peak[device] = self.bound[device] = self.allocated(device)

    def snapshot(self) -> list[dict[str, Any]]:
        """Returns one segment per device and pool, like torch.cuda.memory_snapshot."""
        self.used(0)
        return [
            {
                "device": device, "segment_pool_id": pool, "total_size": size,
                "allocated_size": self.allocated(device, pool),
            }
            for (device, pool), size in self.reserved.items()
        ]  # fmt: skip


class Machine(Memory):
    """GPUs of one kind, their memory and clock.

    Attributes:
        fault: A kernel or operator whose name contains this text breaks its GPU: every later CUDA call raises.
        kill_after: Kills the process at this CUDA call.
        compile_s: Seconds that torch.compile takes per graph.
        foreign: Bytes that other libraries allocated, by device.
        counts: Number of CUDA calls by name: functions of torch.cuda, operators, kernels.
        launches: Number of kernel launches by (kernel, device, stream).
        compiled: Shapes, dtypes and requires_grad of the inputs of each graph that torch.compile compiled.
        captures: Finished captures.
    """

    def __init__(
        self, count: int = 1, *, name: str = "NVIDIA H100 80GB HBM3", capability: tuple[int, int] = (9, 0),
        memory: int = 80 * 2**30, L2_cache_size: int = 2**20, fault: str = "", kill_after: int = 0,
        compile_s: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.count, self.memory = count, memory
        self.fault, self.kill_after, self.compile_s = fault, kill_after, compile_s
        self.properties = SimpleNamespace(
            name=name, major=capability[0], minor=capability[1], multi_processor_count=132, total_memory=memory,
            L2_cache_size=L2_cache_size, pci_domain_id=0, pci_bus_id=1, pci_device_id=0, warp_size=32,
            shared_memory_per_block_optin=232448,
        )  # fmt: skip
        self.here, self.host_ms = Here(), 0.0
        self.idle_ms: dict[Place, float] = {}  # when the queue of a stream will be empty
        self.counts, self.broken = Counter[str](), ""
        self.launches: Counter[tuple[str, int, int]] = Counter()
        self.captures: list[Capture] = []
        self.capture: Capture | None = None
        self.compiled: list[list[tuple[Any, ...]]] = []
        self.trace: list[tuple[str, float]] | None = None  # (name, ms) of device work while a profiler runs
        self.numbers = iter(range(1, 2**62))  # of streams and pools
        self.seeds = [torch.Generator().manual_seed(0).get_state() for _ in range(count)]

    # --- devices

    def index(self, device: Any = None) -> int:
        """Returns the number of a GPU given as torch's functions accept it; raises CudaError if it does not exist."""
        if device is None or (not isinstance(device, int) and torch.device(device).index is None):
            return self.here.device
        index = device if isinstance(device, int) else torch.device(device).index
        if not 0 <= index < self.count:
            raise CudaError("invalid device ordinal")
        return index

    def exchange(self, index: int) -> int:
        before, self.here.device = self.here.device, self.here.device if index < 0 else self.index(index)
        return before

    def stream(self, device: int) -> Place:
        return device, self.here.streams[device]

    # --- time

    def call(self, what: str, *, waits: bool = False, unsafe: bool = False) -> None:
        """Accounts for a CUDA call. `unsafe` calls also break captures of other threads in mode "global"."""
        self.counts[what] += 1
        if self.kill_after and self.counts.total() == self.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.broken:
            raise CudaError(self.broken)
        if (capture := self.capture) is None:
            return
        own = capture.thread == threading.get_ident()
        if (waits and own) or (unsafe and not own and capture.mode == "global"):
            capture.broken = f"operation failed due to a previous error during capture ({what})"
            raise CudaError(f"operation not permitted when stream is capturing ({what})")

    def work(self, device: int, ms: float, name: str, step: Callable[[], object] | None = None) -> None:
        """Queues work on the current stream of a GPU, or records it as a step of the graph that is captured."""
        self.call(name)
        self.host_ms += HOST_MS
        at, capture = self.stream(device), self.own_capture()
        if capture is not None and at == capture.at:
            capture.ms += ms
            capture.steps += [] if step is None else [step]
            return
        if capture is not None:
            capture.outside += 1
        self.idle_ms[at] = max(self.idle_ms.get(at, 0.0), self.host_ms) + ms
        if self.trace is not None:
            self.trace.append((name, ms))
        if self.fault and self.fault in name:
            self.broken = "an illegal memory access was encountered"  # CUDA reports it at a later call

    def wait(self, device: int | None, what: str) -> None:
        """Waits for all streams of a GPU."""
        self.call(what, waits=True)
        self.host_ms = max([self.host_ms, *(end for (on, _), end in self.idle_ms.items() if on == device)])

    def own_capture(self) -> Capture | None:
        capture = self.capture
        return capture if capture is not None and capture.thread == threading.get_ident() else None

    def is_capturing(self, device: int) -> bool:
        capture = self.own_capture()
        return capture is not None and capture.at == self.stream(device)

    # --- modes

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        from pretend_modes import Functions, Operators

        with Functions(self), Operators(self):
            yield

    def copying(self, before: int | None, after: int | None, pinned: bool, non_blocking: bool, size: int) -> None:
        """Accounts for a copy between devices. Copies from pageable memory, and blocking copies, wait."""
        on = before if after is None else after
        if on is None:
            return
        self.work(on, DEVICE_MS + size / BYTES_PER_MS, "copy")
        if (after is None and not non_blocking) or (before is None and not (pinned and non_blocking)):
            self.wait(on, "copy from or to pageable memory")

    @contextlib.contextmanager
    def allocating(self, device: int | None) -> Iterator[None]:
        """Marks tensors that C++ allocates without a tensor argument, e.g. in a backward."""
        before, self.here.allocating = self.here.allocating, device
        try:
            yield
        finally:
            self.here.allocating = before

    @contextlib.contextmanager
    def drawing(self, device: int) -> Iterator[None]:
        """Draws random numbers from the generator of a GPU."""
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(self.seeds[device])
        try:
            yield
        finally:
            self.seeds[device] = torch.default_generator.get_state()
            torch.default_generator.set_state(before)

    def installed(self) -> contextlib.AbstractContextManager[Machine]:
        """Makes this machine that of the process, also for threads that start later."""
        import pretend_cuda

        return pretend_cuda.installed(self)


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
