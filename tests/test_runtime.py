"""compile, and GraphRunner with an example or with budgets: outputs equal those of the model, and errors."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from fused_models import SUBJECTS
from kernel_execution import few
from kernel_support import DEVICE
from packed_towers import BUDGETS, EVERY_CODE, FAMILIES, MIXED, Sizes, Tower, grids
from pretend_gpu import Machine
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch.utils import _pytree as pytree

import vit_fast
from vit_fast.run.graph_runner import pack
from vit_fast.run.runtime import compile_frozen

TOO_LARGE = ((8, 10),)
CALLS: tuple[Sizes, ...] = (
    MIXED,
    ((2, 4),),  # one image
    ((4, 4), (8, 4), (4, 4)),  # a budget hit exactly
    ((4, 4),) * 9,  # many images, more than one graph holds
    tuple(reversed(MIXED)),
    ((2, 4),),
)


BACKEND = "sdpa" if DEVICE.type == "cpu" else "triton"  # sdpa reads lengths on the host: no graph; triton uses TF32
CLOSE = {"rtol": 1e-4, "atol": 2e-5} if DEVICE.type == "cpu" else {"rtol": 3e-2, "atol": 3e-2}


def build(name: str) -> tuple[Tower, nn.Module, nn.Module]:
    """Returns a family, its fused tower, and an unfused copy."""
    pytest.importorskip("transformers.vision_utils")
    family = FAMILIES[name]
    tower = family.build().eval()
    plain = copy.deepcopy(tower)
    vit_fast.fuse(tower, BACKEND)
    return family, tower, plain


def assert_equal(found: Any, expected: Any, **tolerance: float) -> None:
    tolerance = tolerance or CLOSE
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(one, other, **tolerance)
        else:
            assert one == other


def compare(family: Tower, runner: Any, plain: nn.Module, sizes: Sizes, **options: Any) -> None:
    inputs = family.call(sizes) | options
    with torch.no_grad():
        expected = plain(**copy.deepcopy(inputs))
    found = runner(**inputs)
    assert type(found) is type(expected)
    assert_equal(family.real(found, sizes), family.real(expected, sizes))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_runner_returns_what_the_tower_returns(name: str) -> None:
    family, tower, plain = build(name)
    runner = vit_fast.GraphRunner(tower, budgets=BUDGETS, max_images=4)
    for sizes in CALLS:
        compare(family, runner, plain, sizes)
    for option in ({"output_hidden_states": True}, {"return_dict": False}) if "naflexvit" not in name else ():
        compare(family, runner, plain, MIXED, **option)
    stats = runner.stats()
    assert set(stats.hits) == set(BUDGETS) and not stats.fallbacks and 0 < stats.padding_share < 1
    found = pytree.tree_leaves(runner(**family.call(MIXED[:1])))
    before = copy.deepcopy(found)
    runner(**family.call(MIXED[:1]))
    assert_equal(found, before, rtol=0, atol=0)
    found[0] += torch.ones((), device=DEVICE, requires_grad=True)  # outputs may be changed in place


@pytest.mark.parametrize("name", EVERY_CODE)
def test_an_image_that_no_budget_fits_is_an_error_or_runs_eagerly(name: str) -> None:
    family, tower, plain = build(name)
    small = vit_fast.GraphRunner(tower, budgets=(8,))
    with pytest.raises(vit_fast.UnsupportedInputError, match=r"at most 8 tokens, the largest budget, got"):
        small(**family.call(TOO_LARGE))
    eager = vit_fast.GraphRunner(tower, budgets=(8,), fallback="eager")
    compare(family, eager, plain, TOO_LARGE)
    assert eager.stats().fallbacks == 1 and not eager.stats().hits


@pytest.mark.parametrize("name", EVERY_CODE)
def test_padding_does_not_change_outputs(name: str) -> None:
    """Fills unused tokens of the buffers with NaN."""
    family, tower, _ = build(name)
    runner = vit_fast.GraphRunner(tower, budgets=(64,))
    inputs = family.call(MIXED[:2])
    expected = family.real(runner(**inputs), MIXED[:2])
    call = runner._tower.read(**inputs)
    for buffers, _ in runner._graphs.values():
        for buffer in buffers.values():
            if buffer.is_floating_point():
                buffer[(2 if name == "internvl" else sum(call.lengths)) :] = math.nan
    assert_equal(family.real(runner(**inputs), MIXED[:2]), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "pixtral", "siglip2", "naflexvit", "internvl"])
def test_metadata_is_computed_on_the_host_with_another_default_device(name: str) -> None:
    """The device "meta" stands for a GPU: without values, any metadata on it fails."""
    family, tower, _ = build(name)
    runner = vit_fast.GraphRunner(tower, budgets=BUDGETS)
    inputs = family.call(MIXED)
    expected = runner(**inputs)
    with torch.device("meta"):
        found = runner(**inputs)
    assert_equal(family.real(found, MIXED), family.real(expected, MIXED), rtol=0, atol=0)


def test_changes_after_the_capture_are_errors() -> None:
    ran: list[Any] = []

    def use(change: Any, fallback: str = "error") -> Any:
        family, tower, _ = build("qwen2_vl")
        runner = vit_fast.GraphRunner(tower, budgets=BUDGETS, fallback=fallback)
        runner(**family.call(MIXED))
        change(tower)
        return runner(**family.call(MIXED))

    def replace(path: str, name: str, made: Any) -> Any:
        return lambda tower: setattr(tower.get_submodule(path), name, made(tower))

    def hook(tower: Any) -> None:
        tower.blocks[0].mlp.register_forward_hook(lambda *given: None)

    norm = replace("merger", "ln_q", lambda tower: nn.LayerNorm(64, device=DEVICE))
    forward = replace("merger.mlp", "forward", lambda tower: lambda x: x)
    buffer = replace("rotary_pos_emb", "inv_freq", lambda tower: tower.rotary_pos_emb.inv_freq.clone())
    for change in (
        lambda tower: tower.train(),
        lambda tower: tower.double(),
        buffer,
        norm,
        vit_fast.unfuse,
        hook,
        forward,
        replace("", "forward", lambda tower: lambda *given: None),
        replace("blocks.0.norm1", "eps", lambda tower: 1.0),
    ):
        with pytest.raises(vit_fast.UnsupportedInputError, match="must stay in evaluation mode with the same tensors"):
            use(change)
    assert use(hook, "eager").pooler_output.isfinite().all()
    use(lambda tower: tower.register_forward_hook(lambda *given: ran.append(given)), "eager")
    assert len(ran) == 1, "the tower's own hook runs"


@pytest.mark.parametrize("name", ["qwen2_5_vl", "pixtral", "siglip2"])
def test_attention_of_the_library_does_not_run_packed(name: str) -> None:
    """Layers run the library's own attention to return its weights."""
    family, tower, plain = build(name)
    runners = [vit_fast.GraphRunner(tower, budgets=BUDGETS, fallback=fallback) for fallback in ("error", "eager")]

    def check(**options: Any) -> None:
        with pytest.raises(vit_fast.UnsupportedInputError, match="output_attentions must not be set, and attn_impl"):
            runners[0](**family.call(MIXED), **options)
        compare(family, runners[1], plain, MIXED, **options)

    check(output_attentions=True)
    for each in (tower, plain):
        each.set_attn_implementation("eager")  # type: ignore[operator]  # of transformers
    check()


def test_errors_of_calls() -> None:
    _, tower, plain = build("qwen2_vl")
    runner = vit_fast.GraphRunner(tower, budgets=(16, 64), max_images=2)
    inputs = grids(MIXED)
    for given, message in (
        (inputs | {"hidden_states": inputs["hidden_states"].clone().requires_grad_()}, "must not require gradients"),
        (inputs | {"cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens must not be given"),
        (grids(((2, 2),), frames=3), "at most max_images=2 steps of its time axis, got 3"),
    ):
        with pytest.raises(vit_fast.UnsupportedInputError, match=message):
            runner(**given)
    for name, pixels in (("qwen2_vl", "hidden_states"), ("siglip2", "pixel_values"), ("pixtral", "pixel_values")):
        given = FAMILIES[name].call(MIXED)
        given[pixels] = given[pixels].narrow(1 if name == "pixtral" else -1, 0, 1)
        with pytest.raises(ValueError, match=r"must have shape \[\d+, .*, got \[\d+, 1"):
            vit_fast.GraphRunner(build(name)[1], budgets=(64,))(**given)  # copy_ would broadcast it
    with torch.autocast(DEVICE.type, torch.bfloat16), pytest.raises(vit_fast.UnsupportedInputError, match="autocast"):
        runner(**inputs)
    for changed in ([[1, 3, 2]], [[1, 4, 4]], [1, 4, 4], [[-1, 4, 4]]):
        with pytest.raises((RuntimeError, TypeError)):
            runner(**inputs | {"grid_thw": torch.tensor(changed)})
    pixtral = vit_fast.GraphRunner(build("pixtral")[1], budgets=(64,))
    given = FAMILIES["pixtral"].call(MIXED)
    for sizes in (given["image_sizes"][:-1], given["image_sizes"] * 0, [(512, 512), *given["image_sizes"][1:]]):
        with pytest.raises(ValueError, match=r"zip\(\) argument|must have shape|at most 64 tokens|at least one token"):
            pixtral(**given | {"image_sizes": sizes})
    naflexvit = vit_fast.GraphRunner(build("naflexvit")[1], budgets=(64,))
    with pytest.raises(vit_fast.UnsupportedInputError, match="patch_coord and patch_valid must be given: for images"):
        naflexvit(torch.zeros(1, 3, 32, 32, device=DEVICE))
    video = grids(((2, 4), (4, 2)), frames=2)
    with torch.no_grad():
        assert_equal(pytree.tree_leaves(runner(**video)), pytree.tree_leaves(plain(**video)))


def test_errors_of_arguments() -> None:
    _, tower, plain = build("qwen2_vl")
    hooked, identity, image = copy.deepcopy(tower), nn.Identity(), torch.zeros(1, 3, 32, 32)
    hooked.get_submodule("merger").register_forward_hook(lambda *given: None)
    for model, options, message in (
        (tower, {}, "optionally max_images: got None for all"),
        (tower, {"example": image, "budgets": (8,)}, r"max_images: got example, budgets=\(8,\)"),
        (tower, {"budgets": (8,), "batch_sizes": (1,)}, r"max_images: got budgets=\(8,\), batch_sizes"),
        (tower, {"budgets": ()}, "budgets must be a list of one or more positive integers"),
        (tower, {"budgets": (8, 10)}, "budgets must be multiples of 4 tokens, got 10"),
        (tower, {"budgets": (8,), "max_images": 0}, "max_images must be an integer >= 1"),
        (plain, {"budgets": (8,)}, r"blocks\.0 must be fused: call vit_fast\.fuse first"),
        (hooked, {"budgets": (8,)}, "merger must have no hooks"),
        (hooked, {"example": image}, "merger must have no hooks"),
        (identity, {"budgets": (8,)}, "must support token budgets .docs/classes.md., got Identity"),
        (identity, {"example": image, "batch_sizes": (0, 4)}, "batch_sizes must be a list of one or more"),
        (identity, {"example": torch.zeros(3)}, r"example must have at least 2 dimensions, got shape \(3,\)"),
        (identity, {"example": image}, "(?s)example must be on a CUDA device, got cpu.*'eager' runs"),
    ):
        with pytest.raises(ValueError, match=message):
            vit_fast.GraphRunner(model, **options)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast must be off"):
        vit_fast.GraphRunner(identity, image)
    with pytest.raises(ValueError, match=r"images must be \[B, 3, 32, 32\] .*, got \(1, 3, 16, 32\) torch.float"):
        vit_fast.GraphRunner(identity, image, fallback="eager")(image[:, :, :16])


def test_images_are_packed_by_first_fit_decreasing() -> None:
    assert pack([8, 60, 8, 30, 34], [1] * 5, (16, 64), 4) == [(64, [1]), (64, [3, 4]), (16, [0, 2])]
    assert pack([4, 4, 4], [1, 2, 1], (16,), 2) == [(16, [0, 2]), (16, [1])]
    bins = pack([1] * 70, [1] * 70, (1, 8, 32), 32)
    assert [size for size, _ in bins] == [32, 32, 8]
    assert [image for _, images in bins for image in images] == list(range(70))


def test_budgets_are_suggested_for_sizes() -> None:
    sizes = [(16, 16)] * 50 + [(32, 32)] * 10 + [(30, 33)] * 10 + [(8, 64, 64)]
    assert vit_fast.budgets_for(sizes, count=3) == (256, 1024, 32768)
    assert vit_fast.budgets_for(sizes, count=1) == (32768,)
    assert vit_fast.budgets_for([(224, 200)], patch_size=14) == (256,)
    for wrong, message in (([], "at least one image"), ([(3,)], "got \\(3,\\)"), ([(0, 3)], "got \\(0, 3\\)")):
        with pytest.raises(ValueError, match=message):
            vit_fast.budgets_for(wrong)


# --- compile, and GraphRunner with an example ------------------------------------------------------------------------


@pytest.fixture
def no_compiled_graphs() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def quick_compiler(no_compiled_graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces as torch.compile does, but generates no code, because these tests check the graphs."""
    compile_ = torch.compile

    def compile_quickly(model: nn.Module, *, fullgraph: bool, dynamic: bool | None, **_: Any) -> Any:
        return compile_(model, backend="aot_eager", fullgraph=fullgraph, dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", compile_quickly)


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


@pytest.mark.usefixtures("no_compiled_graphs")
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


def test_the_first_axis_of_outputs_must_be_the_batch() -> None:
    machine = contextlib.nullcontext() if DEVICE.type == "cuda" else Machine().installed()
    with machine, pytest.raises(vit_fast.UnsupportedInputError, match=r"first axis of each output .*4 images"):
        vit_fast.GraphRunner(nn.Flatten(0, 1), torch.zeros(1, 3, 8, device="cuda"), batch_sizes=(4,))


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
    batches = [torch.randn(n, 3, 32, 32, device="cuda").half() for n in (5, 2, 1, 4, 11)[: few(5, 2)] * few(4, 1)]

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
