"""compile and GraphRunner: graphs without breaks, one for every batch, and what happens without CUDA."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fused_models import SUBJECTS
from graph_tapes import install
from kernel_support import DEVICE
from packed_towers import TOWERS
from torch import nn
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
    """Traces as torch.compile does, without generating code: what is tested is the graphs, not Inductor."""
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda model, *, mode, **options: compile_(model, backend="aot_eager", **options)
    )


@pytest.mark.fast_cases("timm-vit")
@pytest.mark.parametrize("name", ["timm-vit", "transformers-vit"])
@pytest.mark.usefixtures("quick_compiler")
def test_one_graph_serves_every_batch_size(name: str) -> None:
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
                images = torch.randn(batch, 3, 32, 32)
                found = subject.run(compiled, {argument: images})
                torch.testing.assert_close(found, subject.run(model, {argument: images}))


@pytest.mark.usefixtures("quick_compiler")
def test_a_graph_break_is_an_error_unless_allowed() -> None:
    class Breaking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        vit_fast.compile(Breaking())(torch.zeros(2, 3))
    assert vit_fast.compile(Breaking(), fullgraph=False)(torch.zeros(2, 3)).sum() == 6


def test_freezing_makes_constants_of_the_weights_during_a_call_alone() -> None:
    """The graph is also not that of a model that was compiled without freezing before."""
    model, x = torch.nn.Linear(8, 8).eval().requires_grad_(False), torch.randn(2, 8)
    plain, run = vit_fast.compile(model), compile_frozen(model)
    with torch.no_grad():
        plain(x)
    before = run(x)
    torch.testing.assert_close(before, model(x))
    model.weight.mul_(2)
    assert torch.equal(run(x), before), "the graph still reads the weights"
    torch.testing.assert_close(plain(x), model(x))
    assert not inductor.freezing and torch.is_grad_enabled()


IMAGES = torch.zeros(1, 3, 32, 32)
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: vit_fast.compile(nn.Identity(), mode="fast"), "mode must be one of 'default', 'reduce-overhead'"),
    (lambda: runner(batch_sizes=()), "batch_sizes must be one or more positive integers"),
    (lambda: runner(batch_sizes=(0, 4)), "batch_sizes must be one or more positive integers"),
    (lambda: runner(fallback="cpu"), "fallback must be one of 'error', 'eager', got 'cpu'"),
    (lambda: runner(torch.zeros(3)), r"example must have shape .*, got \(3,\)"),
    (lambda: runner()(IMAGES[:, :, :16]), r"images must be \[B, 3, 32, 32\] .*, got \(1, 3, 16, 32\) torch.float32"),
    (lambda: runner(fallback="error"), "(?s)no CUDA device.*example must be on a CUDA device, got cpu.*'eager' runs"),
]


def runner(example: torch.Tensor = IMAGES, fallback: str = "eager", **options: object) -> vit_fast.GraphRunner:
    return vit_fast.GraphRunner(nn.Identity(), example, fallback=fallback, **options)


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_errors(case: int) -> None:
    call, message = REFUSED[case]
    if "no CUDA" in message and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ValueError, match=message):
        call()


def test_a_runner_without_graphs_runs_the_model() -> None:
    model = SUBJECTS["timm-vit"].build()
    eager, images = vit_fast.GraphRunner(model, IMAGES, fallback="eager"), torch.randn(5, 3, 32, 32)
    assert not eager.captured
    torch.testing.assert_close(eager(images), model(images))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["timm-vit", "transformers-vit", "vit-fast"])
def test_captured_graphs_compute_what_the_model_does(name: str) -> None:
    model = SUBJECTS[name].build().eval().cuda().half()
    if name == "transformers-vit":
        model = Logits(model)
    vit_fast.fuse(model)
    runner = vit_fast.GraphRunner(model, torch.randn(1, 3, 32, 32, device="cuda").half(), batch_sizes=(1, 4))
    assert runner.captured
    for batch in (1, 2, 4, 5, 11):
        images = torch.randn(batch, 3, 32, 32, device="cuda").half()
        first = runner(images)
        runner(torch.randn_like(images))  # must not write over what the first call returned
        with torch.no_grad():
            expected = model(images)
        torch.testing.assert_close(first, expected, rtol=0, atol=0.02 * expected.abs().max().item())


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values=images).logits


def test_outputs_that_are_not_cut_by_image_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    for join in (lambda images: images.flatten(0, 1), torch.mean):
        with pytest.raises(vit_fast.UnsupportedInputError, match=r"first axis of each output .*4 images"):
            vit_fast.GraphRunner(_AlsoReturns(join), torch.zeros(1, 3, 8), batch_sizes=(4,))


def test_a_graph_of_images_is_refused_where_it_would_differ_from_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast, which the capture did not see, and after a forward was replaced."""
    install(monkeypatch)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    runner = vit_fast.GraphRunner(model, torch.zeros(1, 4), batch_sizes=(2,))
    images = torch.randn(3, 4)
    torch.testing.assert_close(runner(images), model(images))
    with torch.autocast("cpu", torch.bfloat16):
        for call in (lambda: runner(images), lambda: vit_fast.GraphRunner(model, images)):
            with pytest.raises(vit_fast.UnsupportedInputError, match="autocast must be off"):
                call()
        eager = vit_fast.GraphRunner(model, images, fallback="eager")
        assert eager(images).dtype is torch.bfloat16
    model[1].forward = lambda x: -x  # type: ignore[method-assign]  # as users do
    with pytest.raises(vit_fast.UnsupportedInputError, match=r"1\.forward was replaced on the instance"):
        runner(images)


def test_a_mask_that_is_read_on_the_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idefics 2 and 3 and SmolVLM, fused or not."""
    install(monkeypatch)
    tower = TOWERS["idefics3"].build().eval()
    for _ in range(2):
        with pytest.raises(vit_fast.UnsupportedInputError, match="copies its patch mask to the host"):
            vit_fast.GraphRunner(tower, torch.zeros(1, 3, 16, 16, device=DEVICE))
        vit_fast.fuse(tower)


class _AlsoReturns(nn.Module):
    def __init__(self, join: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.join, self.scale = join, nn.Parameter(torch.ones(()))

    def forward(self, images: torch.Tensor) -> object:
        return images * self.scale, self.join(images * self.scale)


@pytest.mark.gpu
def test_threads_and_streams_take_turns() -> None:
    model = SUBJECTS["timm-vit"].build().eval().cuda()
    vit_fast.fuse(model)
    runner = vit_fast.GraphRunner(model, torch.randn(1, 3, 32, 32, device="cuda"), batch_sizes=(4,))
    batches = [torch.randn(4, 3, 32, 32, device="cuda") for _ in range(16)]

    def run(images: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            result = runner(images)
            torch.cuda.current_stream().synchronize()
            return result

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(run, batches))
    with torch.no_grad():
        for images, result in zip(batches, results, strict=True):
            torch.testing.assert_close(result, model(images), rtol=1e-2, atol=1e-2)


def test_refresh_takes_over_what_torch_cannot_see() -> None:
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
def test_graphs_follow_the_weights_and_fold_none() -> None:
    model = vit_fast.create_model("vit_test", backend="triton", dtype=torch.bfloat16, device="cuda")
    x = torch.randn(2, 3, 32, 32, device="cuda", dtype=torch.bfloat16)
    runner = vit_fast.GraphRunner(model, x, batch_sizes=(2,))
    model.train().eval()  # gives up its own, and the graphs' memory stays
    for change in (lambda p: p.mul_(2), lambda p: p.data.mul_(0.5)):
        with torch.no_grad():
            change(model.blocks[0].attn.qkv.weight)
        runner.refresh()
        with torch.no_grad():
            torch.testing.assert_close(runner(x), model(x), rtol=2e-2, atol=2e-2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(x).sum().backward()
    optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(runner(x), model(x), rtol=2e-2, atol=2e-2)
    model.blocks[0].norm1.weight = nn.Parameter(model.blocks[0].norm1.weight.clone())
    with pytest.raises(RuntimeError, match="must not be replaced or moved"):
        runner.refresh()
