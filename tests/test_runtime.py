"""compile and GraphRunner with an example: graphs without breaks, one for every batch size, and errors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fused_models import SUBJECTS
from graph_tapes import install
from kernel_support import DEVICE
from torch import Tensor, nn
from torch._inductor import config as inductor

import vit_fast
from vit_fast.run.runtime import compile_frozen


@pytest.fixture(autouse=True)
def _forget_compiled_graphs() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces as torch.compile does, but generates no code, because these tests check the graphs."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, *, mode, **rest: compile_(model, backend="aot_eager", **rest))


@pytest.mark.fast_cases("timm-vit")
@pytest.mark.parametrize("name", ["timm-vit", "transformers-vit"])
@pytest.mark.usefixtures("quick_compiler")
def test_one_graph_runs_every_batch_size(name: str) -> None:
    subject = SUBJECTS[name]
    model = subject.build().eval()
    vit_fast.fuse(model, backend="sdpa")
    compiled = vit_fast.compile(model, dynamic_batch=True)
    ((argument, _),) = subject.inputs().items()
    with torch.no_grad():
        for batch in (4, 1):
            compiled(**{argument: torch.randn(batch, 3, 32, 32)})
        with torch.compiler.set_stance("fail_on_recompile"):
            for batch in (2, 3, 7, 1, 16):
                images = {argument: torch.randn(batch, 3, 32, 32)}
                torch.testing.assert_close(subject.run(compiled, images), subject.run(model, images))


@pytest.mark.usefixtures("quick_compiler")
def test_a_graph_break_is_an_error_unless_allowed() -> None:
    class Breaking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        vit_fast.compile(Breaking())(torch.zeros(2, 3))
    assert vit_fast.compile(Breaking(), fullgraph=False)(torch.zeros(2, 3)).sum() == 6


def test_compile_frozen_makes_the_weights_constants() -> None:
    """It does not reuse the graph of a model that was compiled without freezing, and restores all settings."""
    model, x = nn.Linear(8, 8).eval().requires_grad_(False), torch.randn(2, 8)
    plain, run = vit_fast.compile(model), compile_frozen(model)
    with torch.no_grad():
        plain(x)
    before = run(x)
    torch.testing.assert_close(before, model(x))
    model.weight.mul_(2)
    assert torch.equal(run(x), before)
    torch.testing.assert_close(plain(x), model(x))
    assert not inductor.freezing and torch.is_grad_enabled()


def test_the_first_axis_of_outputs_must_be_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(vit_fast.UnsupportedInputError, match=r"first axis of each output .*4 images"):
        vit_fast.GraphRunner(nn.Flatten(0, 1), torch.zeros(1, 3, 8), batch_sizes=(4,))


def test_refresh_reads_changes_that_torch_does_not_track() -> None:
    model = vit_fast.create_model("vit_test", backend="triton", depth=1, device=DEVICE)
    vit_fast.freeze(model)
    x = torch.randn(2, 3, 32, 32, device=DEVICE)
    runner = vit_fast.GraphRunner(model, x, batch_sizes=(2,), fallback="eager")
    before = runner(x)
    model.blocks[0].attn.qkv.weight.data.normal_()
    runner.refresh()
    expected = copy.deepcopy(model)(x)
    torch.testing.assert_close(runner(x), expected, rtol=1e-2, atol=1e-2)
    assert not torch.allclose(before, expected, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["timm-vit", "torchvision-vit", "vit-fast"])
def test_captured_graphs_match_the_model(name: str) -> None:
    """Also from several threads and streams; later calls do not overwrite earlier outputs."""
    model = SUBJECTS[name].build().eval().cuda().half()
    vit_fast.fuse(model)
    runner = vit_fast.GraphRunner(model, torch.zeros(1, 3, 32, 32, device="cuda").half(), batch_sizes=(1, 4))
    assert runner.captured
    batches = [torch.randn(batch, 3, 32, 32, device="cuda").half() for batch in (1, 2, 4, 5, 11) * 4]

    def run(images: Tensor) -> Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            result: Tensor = runner(images)
            torch.cuda.current_stream().synchronize()
            return result

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as threads:
        results = [*map(runner, batches), *threads.map(run, batches)]
    with torch.no_grad():
        for images, result in zip(batches * 2, results, strict=True):
            expected = model(images)
            torch.testing.assert_close(result, expected, rtol=0, atol=0.02 * expected.abs().max().item())


@pytest.mark.gpu
def test_graphs_follow_the_weights() -> None:
    model = vit_fast.create_model("vit_test", backend="triton", dtype=torch.bfloat16, device="cuda")
    x = torch.randn(2, 3, 32, 32, device="cuda", dtype=torch.bfloat16)
    runner = vit_fast.GraphRunner(model, x, batch_sizes=(2,))
    model.train().eval()  # unfreezes the model, but not the graphs
    weight = model.blocks[0].attn.qkv.weight

    def step() -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        with torch.enable_grad():
            model(x).sum().backward()
        optimizer.step()

    with torch.no_grad():
        for change in (lambda: weight.mul_(2), lambda: (weight.data.mul_(0.5), runner.refresh()), step):
            change()
            torch.testing.assert_close(runner(x), model(x), rtol=2e-2, atol=2e-2)
    model.blocks[0].norm1.weight = nn.Parameter(model.blocks[0].norm1.weight.clone())
    with pytest.raises(RuntimeError, match="must stay in evaluation mode with the same tensors"):
        runner.refresh()
