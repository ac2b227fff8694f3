"""Frozen blocks on the CPU: packed weights give the same outputs, and run only in calls that support them."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from children import environment, run_python
from fused_models import SUBJECTS, Subject, double_inputs, is_older_than_pinned
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import vit_fast
from vit_fast.accuracy import judge
from vit_fast.blocks import block, packed
from vit_fast.ops import packed_linear
from vit_fast.ops.packed_linear import PackedLinear, can_pack, implementations

pytestmark = pytest.mark.skipif(not can_pack(torch.float32), reason="torch without oneDNN or MKL")
DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(not can_pack(dtype), reason="not supported by this CPU"))
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16", "float16"])

# One of each kind of block: plain, LayerScale, QuickGELU, GELU's tanh form, qk-norm, rotary embeddings with separate
# biases, norms inside, SwiGLU with RMSNorm, separate q, k and v, packed sequences, vit-fast, ReLU.
FAST = (
    "timm-vit", "timm-dinov2-registers", "timm-clip-quickgelu", "timm-siglip", "timm-qk-norm", "timm-eva02",
    "timm-gated", "timm-deepseek", "transformers-vit", "transformers-dinov3-gated", "torchvision-vit", "vit-fast",
    "vit-fast-dinov3",
)  # fmt: skip
NOT_IN_OLDEST = {
    "timm-rope-mixed": ("timm", "with timm 1.0.20, blocks with these positions run as modules"),
    "transformers-siglip2": ("transformers", "transformers 4.53 supports masks in fp32 only"),
}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Returns a list that gets the number of blocks of each packed run."""
    counts: list[int] = []
    run: Any = block.run_packed
    monkeypatch.setattr(block, "run_packed", lambda blocks, *rest: counts.append(len(blocks)) or run(blocks, *rest))
    yield counts


def fused(subject: Subject, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Tensor]]:
    model = subject.build().eval().to(dtype)
    vit_fast.fuse(model, "sdpa")
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in subject.inputs().items()}
    return model, inputs


@pytest.mark.each_value
@every_dtype
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SUBJECTS]
)
def test_every_kind_of_block(
    name: str,
    dtype: torch.dtype,
    runs: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With each implementation of the linear layers; attention runs by flash, and in one case by oneDNN Graph."""
    library, reason = NOT_IN_OLDEST.get(name, ("", ""))
    if library and is_older_than_pinned(library):
        pytest.skip(reason)
    subject = SUBJECTS[name]
    model, inputs = fused(subject, dtype)
    plain = copy.deepcopy(model)
    with torch.no_grad():
        eager = subject.run(plain, inputs)
        exact = subject.run(plain.double(), double_inputs(inputs))
        for implementation in implementations(dtype):

            def select(layers: dict[str, list[str]], *_: Any, preferred: str = implementation) -> dict[str, str]:
                last = -1 if preferred == "aten" else 0
                return {key: preferred if preferred in names else names[last] for key, names in layers.items()}

            monkeypatch.setattr(packed, "fastest", select)
            vit_fast.unfreeze(model)
            runs.clear()
            blocks = len(vit_fast.freeze(model))
            assert blocks or name not in FAST, "nothing to pack"
            accuracy = judge(subject.run(model, inputs), eager, exact, measure="rms")
            assert sum(runs) >= blocks
            assert accuracy.passed, accuracy


def test_a_convolution_is_packed_for_one_layout() -> None:
    """oneDNN takes 100 times as long if the layout of the weight is another one than that for the pixels."""
    weight, bias = torch.randn(1024, 256), torch.randn(1024)
    linear = PackedLinear(weight, bias, implementation="conv")
    same = packed_linear._layout(weight.shape, torch.Size((3, 256, 1, 50)), torch.get_num_threads())
    same_layout = same == packed_linear._layout(weight.shape, torch.Size((1, 256, 1, 50)), torch.get_num_threads())
    for shape, packs in (((1, 1), False), ((1, 50), True), ((3, 50), same_layout), ((2, 1), False), ((1, 50), False)):
        x = torch.randn(*shape, 256)
        torch.testing.assert_close(linear(x), nn.functional.linear(x, weight, bias), atol=1e-3, rtol=1e-4)
        assert linear._weight[0].is_mkldnn == packs


def _exported(model: nn.Module, x: Tensor) -> Any:
    program = torch.export.export(model, (x,))
    assert not any("mkl" in str(node.target) for node in program.graph.nodes)
    return program.module()(x)


def _counted(model: nn.Module, x: Tensor) -> Tensor:
    with FlopCounterMode(display=False) as counter:
        y: Tensor = model(x)
    with FlopCounterMode(display=False) as plain:
        SUBJECTS["timm-vit"].build().eval()(x)
    assert counter.get_total_flops() == plain.get_total_flops()
    return y


UNPACKED: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "compiled": lambda model, x: torch.compile(model, backend="aot_eager", fullgraph=True)(x),
    "exported": _exported,
    "traced": lambda model, x: torch.jit.trace(model, x, check_trace=False)(x),
    "counted": _counted,
    "vmapped": lambda model, x: torch.vmap(lambda image: model(image[None])[0])(x),
    "double": lambda model, x: copy.deepcopy(model).double()(x.double()).float(),
}


@pytest.mark.parametrize("way", UNPACKED)
def test_tracers_and_other_calls_run_the_modules(way: str, runs: list[int]) -> None:
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


def test_onednn_graph_changes_no_other_torchscript(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention becomes one operator of oneDNN. Without oneDNN Graph, there is no graph, and flash attention runs."""

    def graph_of(*inputs: Tensor, threads: int = 1) -> Any:
        layouts = tuple((tensor.shape, tensor.stride()) for tensor in inputs)
        return packed._attention_graph(layouts, torch.float32, 0.125, threads)

    qkv, mask = torch.randn(1, 53, 3, 2, 64), torch.randn(1, 2, 53, 53)
    for inputs in ((qkv,), (qkv, mask)):
        graph_of(*inputs)(*inputs)
        assert "oneDNNFusionGroup" in str(torch.jit.last_executed_optimized_graph())
    assert not torch.jit.onednn_fusion_enabled()
    function = torch.jit.CompilationUnit("def f(x):\n    return torch.softmax(torch.matmul(x, x), -1)\n").f
    for _ in range(3):
        function(torch.randn(8, 8))
    assert "oneDNNFusionGroup" not in str(torch.jit.last_executed_optimized_graph())
    monkeypatch.delattr(torch.jit, "enable_onednn_fusion")
    assert graph_of(qkv, threads=102) is None
    packed._attention_graph.cache_clear()


@pytest.mark.parametrize("name", ["timm-vit", "timm-eva02", "transformers-vit"])
def test_images_in_groups_and_threads_give_the_same_outputs(
    name: str, monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    """`fuse` alone changes no bit on a CPU; packed, each thread and group of images gives the same outputs."""
    plain = SUBJECTS[name].build().eval()
    model, inputs = fused(SUBJECTS[name])
    inputs = {key: torch.cat([value, value.flip(0), value[:1]]) for key, value in inputs.items()}

    def run(_: int = 0) -> list[Tensor]:
        with torch.inference_mode():
            return pytree.tree_leaves(model(**inputs))

    with torch.inference_mode():
        assert all(map(torch.equal, run(), pytree.tree_leaves(plain(**inputs))))
    vit_fast.freeze(model)
    expected = run()
    with ThreadPoolExecutor(4) as pool:
        assert all(all(map(torch.equal, found, expected)) for found in pool.map(run, range(8)))
    for limit in ("GROUP_BYTES", "THREAD_BYTES"):  # one image per group
        monkeypatch.setattr(packed, limit, 1)
    torch.testing.assert_close(run(), expected, rtol=1e-5, atol=1e-5)
    assert sum(runs) == 20


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=["float32", "bfloat16"])
def test_tokens_of_any_layout_and_number(dtype: torch.dtype) -> None:
    model, _ = fused(SUBJECTS["timm-vit"], dtype)
    plain = copy.deepcopy(model)
    vit_fast.freeze(model)
    tokens = torch.randn(7, 3, 64).to(dtype)
    for x in (tokens.transpose(0, 1), tokens[:1].expand(4, -1, -1), tokens[:, ::2], tokens[:0], tokens[:, :0]):
        before = x.clone()
        with torch.no_grad():
            found, expected = (each.blocks[0](x) for each in (model, plain))
        tolerance = 1e-4 if dtype == torch.float32 else 0.05  # a few roundings to bf16
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(x, before)


MALLOC = """
import ctypes, torch
from vit_fast.blocks import packed

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = type("", (ctypes.Structure,), {"_fields_": [(f"_{i}", ctypes.c_size_t) for i in range(10)]})
held = []
for prepare in (lambda: None, packed._reuse_freed_buffers):
    prepare()
    before = mallinfo()._3  # number of mapped blocks
    held.append(torch.empty(20 * 2**20, dtype=torch.uint8))
    print(mallinfo()._3 - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_buffers_of_20_mib_are_reused_after_freeze() -> None:
    """malloc maps the first buffer, which the system would clear for every call, and takes the second from its heap."""
    assert run_python(["-c", MALLOC], environment()).split() == ["1", "0"]


@pytest.mark.parametrize(("path", "rate"), [("attn.proj_drop", "p"), ("drop_path2", "drop_prob")])
def test_a_block_with_active_dropout_runs_as_modules(path: str, rate: str, runs: list[int]) -> None:
    model, inputs = fused(SUBJECTS["vit-fast"])
    vit_fast.freeze(model)
    changed = model.blocks[1].get_submodule(path)
    setattr(changed, rate, 0.5)
    with torch.no_grad():
        for training in (False, True, False):
            changed.train(training)
            model(**inputs)
        vit_fast.fuse(model, "eager")
        model(**inputs)
    assert runs == [2, 1, 2], "the other block runs packed"
