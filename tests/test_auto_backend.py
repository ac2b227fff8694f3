"""Backend "auto": triton only if a small kernel ran and matched the reference; otherwise sdpa, with the reason."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import children
import kernel_support  # sets the interpreter up, as every kernel test does
import pytest
import torch
from fused_models import SUBJECTS
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import vit_fast
from vit_fast import ops
from vit_fast.blocks import fused as common
from vit_fast.commands import info
from vit_fast.errors import UnsupportedInputError
from vit_fast.fusion import fuse as fusion
from vit_fast.fusion import walk
from vit_fast.ops import backends

pytest.importorskip("triton", reason="the kernels need triton")

GPU = torch.device("cuda", 0)
FP32 = torch.float32


@contextmanager
def fp32_matmuls(precision: str) -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _model() -> torch.nn.Module:
    return SUBJECTS["timm-vit"].build()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """Pretends that there is an H200 where the test kernel passes; lists the devices where it was run."""
    probed: list[torch.device] = []

    def probe(device: torch.device) -> tuple[str, ...]:
        probed.append(device)
        return ()

    for name, value in {
        "is_available": True, "current_device": 0, "device_count": 1, "get_device_capability": (9, 0),
        "get_device_name": "a stand-in", "is_current_stream_capturing": False,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    for module in (fusion, walk, common):
        monkeypatch.setattr(module, "device_of", lambda module: GPU)
    monkeypatch.setattr(backends, "_run_and_compare", probe)
    monkeypatch.setattr(backends, "_probed", {})
    clear = backends._static_reasons.cache_clear  # a test may replace the function
    clear()
    yield probed
    clear()


@pytest.mark.parametrize("factor", [1.0, 1.01, float("nan")])
def test_an_incorrect_test_kernel_is_a_reason(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from vit_fast.kernels.attention import attention

    forward = attention.attention_forward

    def scaled(call: Any, out: Any) -> None:
        forward(call, out)
        out.mul_(factor)

    monkeypatch.setattr(attention, "attention_forward", scaled)
    reasons = backends._run_and_compare(kernel_support.DEVICE)
    assert reasons == () if factor == 1 else "does not match the reference" in reasons[0]


def test_the_test_kernel_ignores_the_callers_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = []

    def probe(x: Tensor) -> Tensor:
        monkeypatch.setattr(backends, "_probed", {})
        reasons.append(backends.probe_reasons(torch.device(kernel_support.DEVICE.type, 0)))
        return x.sum()

    for mode in (FakeTensorMode(), torch.device("meta"), torch.inference_mode()):
        with mode:
            probe(torch.ones(2))
    x = torch.ones(2)
    torch.vmap(probe)(x)
    torch.func.jvp(torch.func.grad(probe), (x,), (x,))
    assert reasons == [()] * 5


def test_the_backend_is_a_constant_for_the_compiler(gpu: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_static_reasons", lambda device: ())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the compiler would look for the device itself

    def function(x: Tensor) -> Tensor:
        return x + 1 if backends.resolve_backend("auto", GPU, FP32) == "sdpa" else x

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.zeros(2)), torch.ones(2)) and gpu == [GPU]
    with fp32_matmuls("tf32"):
        assert torch.equal(compiled(torch.zeros(2)), torch.zeros(2))


def _broken(device: torch.device) -> tuple[str, ...]:
    raise RuntimeError("the compiler\n  gave up")


# names that a broken machine changes, with their values; the reason
BROKEN: dict[str, tuple[tuple[tuple[object, str, object], ...], str]] = {
    "ROCm": (
        ((torch.version, "hip", "6.4"), (torch.cuda, "get_device_capability", lambda *_: (9, 4))), "got ROCm 6.4",
    ),
    "no device": (((torch.cuda, "is_available", lambda: False),), "torch found no CUDA device"),
    "old device": (((torch.cuda, "get_device_capability", lambda *_: (7, 5)),), "7.5"),
    "compiler": (
        ((backends, "_run_and_compare", _broken),),
        "vit-fast's test kernel failed on cuda:0: RuntimeError: the compiler gave up",
    ),
    "incorrect output": (((backends, "_run_and_compare", lambda device: ("it does not match",)),), "it does not match"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_auto_is_sdpa_where_triton_does_not_run(
    case: str, gpu: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, reason = BROKEN[case]
    for owner, name, value in changes:
        monkeypatch.setattr(owner, name, value)
    report = vit_fast.fuse(_model()).require_all()
    assert report.backend == "sdpa" and all(module.notes == () for module in report.modules)
    line = str(report).splitlines()[1]
    assert line.startswith("backend sdpa: triton cannot run here: ") and reason in line
    with pytest.raises(UnsupportedInputError, match="fuse with backend='triton'") as caught:
        vit_fast.fuse(_model(), backend="triton")
    assert reason in str(caught.value)
    rows = {row["backend"]: row for row in info._backend_rows(GPU)}
    assert rows["sdpa"]["reasons"] == ["selected by backend='auto'"]
    assert not rows["triton"]["available"] and reason in rows["triton"]["reasons"][0]


def test_auto_runs_fp64_with_sdpa_and_fp32_unless_tf32_or_autocast_is_enabled(
    gpu: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes = (torch.float64, FP32, torch.bfloat16, torch.float16)
    resolved = [backends.resolve_backend("auto", GPU, dtype) for dtype in dtypes]
    assert resolved == ["sdpa", "sdpa", "triton", "triton"]
    assert backends.resolve_backend("triton", GPU, FP32) == "triton"
    with fp32_matmuls("tf32"):
        assert backends.resolve_backend("auto", GPU, FP32) == "triton"
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: device_type == "cuda")
    assert backends.resolve_backend("auto", GPU, FP32) == "triton"


def test_kernels_refuse_fp32_without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_static_reasons", lambda device: ())
    monkeypatch.setattr(backends, "interpreter_is_active", lambda: False)
    q, x, weight, ones = torch.randn(1, 2, 5, 16), torch.randn(5, 16), torch.randn(16, 16), torch.ones(16)
    calls: tuple[Callable[[], object], ...] = (
        lambda: ops.attention(q, q, q, backend="triton"),
        lambda: ops.layer_norm_mlp(x, ones, ones, weight, ones, weight, ones, backend="triton"),
    )
    for call in calls:
        with pytest.raises(UnsupportedInputError, match="set_float32_matmul_precision"):
            call()
        with fp32_matmuls("tf32"):
            call()


def test_converting_a_model_resolves_auto_again(gpu: list[torch.device]) -> None:
    model = _model()
    report = vit_fast.fuse(model)
    assert "backend sdpa: triton computes fp32 in TF32, which is disabled" in str(report)
    attention = model.blocks[0].attn
    assert attention.vit_fast_backend == "sdpa"
    assert model.half() is model and attention.vit_fast_backend == "triton"
    assert vit_fast.fuse(model).backend == "triton"
    attention.float()
    notes = {module.name: module.notes for module in vit_fast.fuse(model).modules}
    assert "it runs with backend sdpa: triton computes fp32 in TF32" in "; ".join(notes["blocks.0.attn"])
    assert notes["blocks.1.attn"] == ("already fused",)
    assert vit_fast.fuse(model, backend="triton").backend == attention.vit_fast_backend == "triton"
    rows = {row["backend"]: row["reasons"] for row in info._backend_rows(GPU)}
    assert rows["triton"][0] == "selected by backend='auto'" and "triton computes fp32 in TF32" in rows["triton"][1]


def test_auto_is_sdpa_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    report = vit_fast.fuse(_model())
    assert "backend sdpa: triton cannot run here: tensors must be on a CUDA device, got the CPU" in str(report)
    assert vit_fast.fuse(_model(), backend="sdpa").backend_reasons == ()
    assert ops.attention(*torch.randn(3, 1, 2, 5, 16)).shape == (1, 2, 5, 16)
    monkeypatch.setattr(backends, "interpreter_is_active", lambda: False)
    assert "set TRITON_INTERPRET=1" in backends._static_reasons.__wrapped__(torch.device("cpu"))[0]


FORK = """
import os, threading, time
from vit_fast.kernels import launch
from vit_fast.ops import backends

def hold(lock):
    with lock:
        held.set()
        time.sleep(0.5)

for owner, name in ((launch, "compiling"), (backends, "_probe_lock")):
    held = threading.Event()
    thread = threading.Thread(target=hold, args=[getattr(owner, name)])
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if getattr(owner, name).acquire(timeout=5) else 1)
    thread.join()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), getattr(owner, name).acquire(timeout=5))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_a_fork_during_a_compilation_leaves_no_lock_held():
    assert children.run_python(["-W", "ignore", "-c", FORK], children.environment()).split() == ["0", "True"] * 2
