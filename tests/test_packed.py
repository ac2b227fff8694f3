"""Frozen blocks on the CPU: the same answers from packed weights, wherever these may be used, and nowhere else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from fused_models import SUBJECTS, Subject
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import vit_fast
from vit_fast.accuracy import judge
from vit_fast.blocks import block, packed
from vit_fast.blocks.packed import PackedLinear, pack_reasons

pytestmark = pytest.mark.skipif(bool(pack_reasons(torch.float32)), reason="; ".join(pack_reasons(torch.float32)))

# One of each kind of block: plain, LayerScale, QuickGELU, GELU's tanh form, qk-norm, rotary embeddings with separate
# biases, norms inside, SwiGLU with RMSNorm, separate q, k and v, packed sequences, own.
FAST = (
    "timm-vit", "timm-dinov2-registers", "timm-clip-quickgelu", "timm-siglip", "timm-qk-norm", "timm-eva02",
    "timm-gated", "timm-deepseek", "transformers-vit", "transformers-dinov3-gated", "torchvision-vit", "vit-fast",
)  # fmt: skip

NOT_IN_OLDEST = {
    "timm-rope-mixed": "timm 1.0.20 gives these positions in a form that blocks run as modules with",
    "transformers-siglip2": "transformers 4.53 masks these images in fp32 alone",
}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Grows by the number of blocks whenever some run packed."""
    counts: list[int] = []
    run = block.run_packed

    def counted(blocks: list[object], *args: object) -> object:
        counts.append(len(blocks))
        return run(blocks, *args)  # type: ignore[arg-type]  # handed on

    monkeypatch.setattr(block, "run_packed", counted)
    yield counts


def fused(subject: Subject, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, Tensor]]:
    model = subject.build().eval().to(dtype)
    vit_fast.fuse(model, "sdpa")
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in subject.inputs().items()}
    return model, inputs


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SUBJECTS]
)
def test_every_kind_of_block(name: str, dtype: torch.dtype, runs: list[int], request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--oldest") and name in NOT_IN_OLDEST:
        pytest.skip(NOT_IN_OLDEST[name])
    if reasons := pack_reasons(dtype):
        pytest.skip(reasons[0])
    subject = SUBJECTS[name]
    model, inputs = fused(subject, dtype)
    plain, blocks = copy.deepcopy(model), len(vit_fast.freeze(model))
    assert blocks or name not in FAST, "nothing to pack"
    with torch.no_grad():
        found, eager = subject.run(model, inputs), subject.run(plain, inputs)
        assert sum(runs) >= blocks
        exact = subject.run(plain.double(), {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()})
    accuracy = judge(found, eager, exact, measure="rms")
    assert accuracy.passed, accuracy


@pytest.mark.pairwise
@pytest.mark.parametrize("outputs", [32, 384])
@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "relu", "silu", "quick_gelu"])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "as on a CPU that is not from Intel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_packed_layer_serves_any_number_of_rows(
    dtype: torch.dtype, elsewhere: bool, activation: str | None, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reasons := pack_reasons(dtype):
        pytest.skip(reasons[0])
    if elsewhere:
        monkeypatch.setattr(packed, "mkl_is_faster", lambda: False)
    torch.manual_seed(0)
    weight, bias, scale = torch.randn(outputs, 48) / 7, torch.randn(outputs), torch.randn(outputs)
    layer = PackedLinear(weight.to(dtype), bias.to(dtype), scale.to(dtype), activation)
    activate = vit_fast.ops.reference.ACTIVATIONS.get(str(activation), lambda y: y)
    for rows in (1, 5, 197, 800):
        x = torch.randn(1, rows, 48).to(dtype)
        read = [tensor.to(dtype).double() for tensor in (weight, bias, scale)]
        exact = activate((x.double() @ read[0].T + read[1]) * read[2])
        eager = activate((x @ weight.to(dtype).T + bias.to(dtype)) * scale.to(dtype))
        accuracy = judge(layer(x), eager, exact, measure="rms")
        assert accuracy.passed, (rows, accuracy)
        if activation is None:
            residual = torch.randn_like(exact).to(dtype)
            kept = residual.clone()
            torch.testing.assert_close(layer(x, residual), layer(x) + residual, rtol=2e-2, atol=2e-2)
            assert torch.equal(residual, kept)


def _tracing(model: nn.Module, x: Tensor) -> Tensor:
    return torch.jit.trace(model, x, check_trace=False)(x)  # type: ignore[no-any-return]  # a scripted module's


def _exported(model: nn.Module, x: Tensor) -> Tensor:
    program = torch.export.export(model, (x,))
    assert not any("mkl" in str(node.target) for node in program.graph.nodes)
    return program.module()(x)  # type: ignore[no-any-return]  # likewise


UNPACKED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "compiled": lambda model, x: torch.compile(model, backend="aot_eager", fullgraph=True)(x),
    "exported": _exported,
    "traced": _tracing,
    "counted": lambda model, x: _counted(model, x),
    "vmapped": lambda model, x: torch.vmap(lambda image: model(image[None])[0])(x),
    "double": lambda model, x: copy.deepcopy(model).double()(x.double()).float(),
}


def _counted(model: nn.Module, x: Tensor) -> Tensor:
    with FlopCounterMode(display=False) as counter:
        y: Tensor = model(x)
    with FlopCounterMode(display=False) as plain:
        SUBJECTS["timm-vit"].build().eval()(x)
    assert counter.get_total_flops() == plain.get_total_flops()
    return y


@pytest.mark.parametrize(("outputs", "scale"), [(None, None), (None, 0.3), (1, 0.3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_by_onednn_graph(
    dtype: torch.dtype, outputs: int | None, scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reasons := pack_reasons(dtype):
        pytest.skip(reasons[0])
    qkv = torch.randn(2, 50, 3, 4, 32).to(dtype)
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    q = q[:, :, :outputs]
    alpha = 32**-0.5 if scale is None else scale
    eager = torch.softmax(q @ k.mT * alpha, -1) @ v
    exact = torch.softmax(q.double() @ k.double().mT * alpha, -1) @ v.double()
    for flash in (True, False):
        monkeypatch.setattr(packed, "mkl_is_faster", lambda flash=flash: flash)
        for strided in (qkv, qkv.movedim(2, 0).contiguous().movedim(0, 2)):
            found = packed._attend(strided, scale, outputs)
            verdict = judge(found.view(2, -1, 4, 32).transpose(1, 2), eager, exact, 2)
            assert verdict.passed, verdict


def _graph_of(qkv: Tensor, threads: int = 1) -> Callable[[Tensor], Tensor] | None:
    return packed._attention_graph(qkv.shape, qkv.stride(), qkv.dtype, 0.125, threads)


def test_onednn_graph_is_used_by_our_function_only() -> None:
    """Checks that attention becomes one operator of oneDNN, and that other TorchScript functions stay as they were."""
    qkv = torch.randn(1, 53, 3, 2, 64)
    graph = _graph_of(qkv)
    assert graph is not None
    graph(qkv)
    assert "oneDNNFusionGroup" in str(torch.jit.last_executed_optimized_graph())
    assert not torch.jit.onednn_fusion_enabled()
    users = torch.jit.CompilationUnit("def f(x):\n    return torch.softmax(torch.matmul(x, x), -1)\n").f
    for _ in range(3):
        users(torch.randn(8, 8))
    assert "oneDNNFusionGroup" not in str(torch.jit.last_executed_optimized_graph())


def test_flash_attention_replaces_a_missing_onednn_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.jit, "enable_onednn_fusion", lambda enabled: None)
    assert _graph_of(torch.randn(1, 51, 3, 2, 64), threads=101) is None  # TorchScript runs the function unfused
    monkeypatch.delattr(torch.jit, "enable_onednn_fusion")
    assert _graph_of(torch.randn(1, 51, 3, 2, 64), threads=102) is None
    packed._attention_graph.cache_clear()


@pytest.mark.parametrize("name", ["timm-vit", "timm-eva02", "transformers-vit"])
def test_images_in_groups_give_the_same_outputs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = fused(SUBJECTS[name])
    inputs = {key: torch.cat([value, value.flip(0), value[:1]]) for key, value in inputs.items()}
    vit_fast.freeze(model)
    with torch.no_grad():
        expected = pytree.tree_leaves(model(**inputs))
        monkeypatch.setattr(packed, "HIDDEN_BYTES", 1)  # one image per group
        torch.testing.assert_close(pytree.tree_leaves(model(**inputs)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", UNPACKED)
def test_what_looks_into_a_block_finds_its_modules(way: str, runs: list[int]) -> None:
    model, inputs = fused(SUBJECTS["timm-vit"])
    with torch.no_grad():
        expected = model(inputs["x"])
        assert vit_fast.freeze(model)
        found = UNPACKED[way](model, inputs["x"])
        with torch.autocast("cpu", torch.bfloat16):
            model(inputs["x"])
        assert not runs
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model(inputs["x"]), expected, rtol=1e-4, atol=1e-4)
    assert runs == [2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_of_any_layout_and_number(dtype: torch.dtype) -> None:
    if reasons := pack_reasons(dtype):
        pytest.skip(reasons[0])
    model, _ = fused(SUBJECTS["timm-vit"], dtype)
    plain = copy.deepcopy(model)
    vit_fast.freeze(model)
    tokens = torch.randn(7, 3, 64).to(dtype)
    for x in (tokens.transpose(0, 1), tokens[:1].expand(4, -1, -1), tokens[:, ::2], tokens[:0], tokens[:, :0]):
        kept = x.clone()
        with torch.no_grad():
            found, expected = (each.get_submodule("blocks.0")(x) for each in (model, plain))
        tolerance = 1e-4 if dtype == torch.float32 else 0.05  # a few roundings to bf16 apart
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(x, kept)


def test_threads(runs: list[int]) -> None:
    model, inputs = fused(SUBJECTS["timm-vit"])
    vit_fast.freeze(model)

    def serve(_: int) -> list[Tensor]:
        with torch.inference_mode():
            return [model(**inputs) for _ in range(5)]

    with ThreadPoolExecutor(4) as pool:
        outputs = [output for each in pool.map(serve, range(4)) for output in each]
    assert len(runs) == 20 and all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("path", ["attn.qkv", "norm1", "drop_path2"])
def test_hooks_run_and_packing_comes_back(path: str, runs: list[int]) -> None:
    model, inputs = fused(SUBJECTS["timm-vit"])
    vit_fast.freeze(model)
    called: list[int] = []
    with torch.no_grad():
        model(**inputs)
        handle = model.get_submodule(f"blocks.1.{path}").register_forward_hook(lambda *_: called.append(1))
        model(**inputs)
        assert called and runs == [2, 1], "the other block runs packed by itself"
        handle.remove()
        model(**inputs)
        assert runs == [2, 1, 2]
        vit_fast.fuse(model, "eager")
        model(**inputs)
        assert runs == [2, 1, 2]


@pytest.mark.parametrize("path", ["attn.proj_drop", "drop_path2"])
def test_what_drops_runs_as_modules(path: str, runs: list[int]) -> None:
    model, inputs = fused(SUBJECTS["vit-fast"])
    vit_fast.freeze(model)
    part: Any = model.get_submodule(f"blocks.1.{path}")
    setattr(part, "drop_prob" if path.startswith("drop_path") else "p", 0.5)
    part.train()
    with torch.no_grad():
        model(**inputs)
    assert runs == [1]


@pytest.mark.parametrize("name", ["timm-vit", "timm-eva02", "transformers-vit"])
def test_on_a_cpu_fuse_alone_changes_no_bit(name: str) -> None:
    subject = SUBJECTS[name]
    model, inputs = subject.build().eval(), subject.inputs()
    with torch.no_grad():
        expected = subject.run(model, inputs)
        vit_fast.fuse(model)
        assert torch.equal(subject.run(model, inputs), expected)
