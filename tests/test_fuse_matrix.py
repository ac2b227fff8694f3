"""A fused model of each library in all supported uses: training, copies, pickles, export, compile and others.

DDP and FSDP2 are in test_fuse_distributed.py, CUDA graphs and streams in test_runtime.py.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from children import environment, run_python
from fused_models import IMAGE, LIBRARIES, SUBJECTS, Subject, assert_same_results, classes_of, gradients
from kernel_support import DEVICE
from our_operators import OurOperators
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

import vit_fast

every_library = pytest.mark.parametrize("library", LIBRARIES)


def fused(library: str, backend: str = "sdpa") -> tuple[Subject, nn.Module, dict[str, Tensor], Tensor]:
    """Returns a fused model in evaluation mode, its inputs, and its output before fuse."""
    subject = SUBJECTS[library]
    model, inputs = subject.build().eval(), subject.inputs()
    with torch.no_grad():
        expected = subject.run(model, inputs)
    if backend == "triton":
        model, inputs = model.to(DEVICE), {name: tensor.to(DEVICE) for name, tensor in inputs.items()}
    vit_fast.fuse(model, backend).require_all()
    return subject, model, inputs, expected


@pytest.mark.fast_cases("torchvision-vit-sdpa", "vit-fast-auto")
@pytest.mark.parametrize("backend", ["eager", "sdpa", "auto"])
@every_library
def test_compile_without_a_graph_break(library: str, backend: str) -> None:
    """Forward and backward; a compiled model can be fused again."""
    subject, model, inputs, _ = fused(library, backend)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = gradients(subject, model, inputs)
    assert_same_results(gradients(subject, compiled, inputs), expected)
    vit_fast.unfuse(model)
    vit_fast.fuse(compiled, backend).require_all()
    assert_same_results(gradients(subject, compiled, inputs), expected)


@pytest.mark.fast_cases("transformers-vit")
@every_library
def test_the_kernels_compile_without_a_graph_break(library: str) -> None:
    """A block runs as one operator, also when frozen; then the compiled model follows changes of the weights."""
    subject, model, inputs, expected = fused(library, "triton")
    torch.compiler.reset()  # other tests count towards the limit of recompilations
    for frozen in (False, True):
        if frozen:
            assert len(vit_fast.freeze(model)) == 2
        seen = OurOperators()
        compiled = torch.compile(model, backend=seen, fullgraph=True)
        with torch.no_grad():
            torch.testing.assert_close(subject.run(compiled, inputs).cpu(), expected, rtol=1e-3, atol=1e-3)
        assert (seen, seen.graphs) == (["block"] * 2, 1)
    with torch.no_grad():
        for change in (lambda: [parameter.mul_(0.7) for parameter in model.parameters()], model.train):
            change()
            model.eval()
            current = subject.run(copy.deepcopy(model), inputs)
            torch.testing.assert_close(subject.run(compiled, inputs), current, rtol=1e-4, atol=1e-4)


@pytest.mark.fast_cases(
    "timm-vit-triton-False", "transformers-vit-sdpa-False", "torchvision-vit-sdpa-False", "vit-fast-sdpa-False"
)  # fmt: skip
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("backend", ["sdpa", "triton"])
@every_library
def test_export_without_kernels_and_with_a_dynamic_batch(library: str, backend: str, strict: bool) -> None:
    subject, model, inputs, expected = fused(library, backend)
    ((name, _),) = inputs.items()
    batch = {name: {0: torch.export.Dim("batch", min=1, max=64)}}
    program = torch.export.export(model, (), inputs, dynamic_shapes=batch, strict=strict)
    assert "vit_fast" not in str(program.graph)
    torch.testing.assert_close(subject.output(program.module()(**inputs)).cpu(), expected, rtol=1e-3, atol=1e-3)
    more = {name: torch.randn(5, 3, IMAGE, IMAGE, device=inputs[name].device)}
    found = subject.output(program.module()(**more))
    torch.testing.assert_close(found, subject.run(model, more), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, torch.jit.script])
@pytest.mark.parametrize("library", ["timm-vit", "torchvision-vit"])
def test_torch_fx_and_torchscript_get_the_original_forward(library: str, trace: Callable[..., nn.Module]) -> None:
    _, model, inputs, expected = fused(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        traced = trace(model)
    with torch.no_grad():
        torch.testing.assert_close(traced(*inputs.values()), expected, rtol=2e-5, atol=2e-5)


COMPILED: dict[str, Callable[[Any], object]] = {
    "epsilon": lambda block: setattr(block.norm2, "eps", 0.5),
    "heads": lambda block: setattr(block.attn, "num_heads", 1),
    "layer": lambda block: setattr(block.mlp, "fc2", nn.Linear(256, 64)),
    "parameter": lambda block: setattr(block.norm1, "weight", nn.Parameter(torch.randn(64))),
    "activation": lambda block: setattr(block, "activation", torch.relu),
}
CASES = [(library, change) for library in ("timm-vit", "vit-fast") for change in list(COMPILED)[:-1]]


@pytest.mark.fast_cases("vit-fast-epsilon")
@pytest.mark.parametrize(("library", "change"), [*CASES, ("torch-encoder", "activation")])
def test_a_compiled_block_follows_changes(library: str, change: str) -> None:
    model, inputs = SUBJECTS[library].build().eval(), SUBJECTS[library].inputs()
    vit_fast.fuse(model, "eager")
    blocks = model.layers if library == "torch-encoder" else model.blocks
    if library != "torch-encoder":
        blocks[0].attn.q_norm.register_forward_hook(lambda module, args, output: output * 1.5)
    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        before = compiled(**inputs)
        torch.testing.assert_close(before, model(**inputs))
        COMPILED[change](blocks[1])
        after = compiled(**inputs)
        torch.testing.assert_close(after, model(**inputs))
    assert not torch.allclose(before, after, rtol=1e-3, atol=1e-3)


@every_library
def test_gradient_checkpointing_of_the_library(library: str) -> None:
    subject, model, inputs, _ = fused(library)
    model.train()
    output, grads = gradients(subject, model, inputs)
    calls: list[int] = []
    norm = next(module for module in model.modules() if isinstance(module, nn.LayerNorm))
    norm.register_forward_hook(lambda *_: calls.append(1))
    if (
        library == "torchvision-vit"
    ):  # it has no option: torch's checkpoint_sequential does not checkpoint the last segment
        blocks = model.encoder.layers
        model.encoder.layers.forward = lambda x: checkpoint_sequential(blocks, 2, x, use_reentrant=False)
    elif library == "transformers-vit":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.set_grad_checkpointing(True)
    again, grads_again = gradients(subject, model, inputs)
    assert len(calls) == 2, "the first block runs once forward and once more in the backward pass"
    torch.testing.assert_close(again, output)
    torch.testing.assert_close(grads_again, grads)


@pytest.mark.each_value
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@every_library
def test_a_copy_is_fused_and_independent(library: str, copied: Callable[[nn.Module], nn.Module]) -> None:
    subject, model, inputs, expected = fused(library)
    twin = copied(model)
    assert classes_of(twin) == classes_of(model)
    with torch.no_grad():
        next(iter(model.parameters())).zero_()
        torch.testing.assert_close(subject.run(twin, inputs), expected)
    vit_fast.unfuse(twin)
    assert vit_fast.fuse(model).require_all()


@pytest.mark.slow
def test_a_saved_model_loads_in_a_new_process(tmp_path: Path) -> None:
    """Fused classes of transformers are created on demand, so unpickling must find them by name."""
    subject, model, inputs, _ = fused("transformers-vit")
    torch.save({"model": model, "inputs": inputs, "expected": subject.output(model(**inputs))}, tmp_path / "saved.pt")
    load = (
        "import sys, torchvision_cpu; torchvision_cpu.install_import_hook(); import torch; "
        "saved = torch.load(sys.argv[1], weights_only=False); found = saved['model'](**saved['inputs']).logits; "
        "torch.testing.assert_close(found, saved['expected'])"
    )
    run_python(["-c", load, str(tmp_path / "saved.pt")], environment())


# --- LoRA adapters of peft: trained, merged and unmerged after fuse, and fused again --------------------------------

# Linear layers of attention and MLP, by library.
TARGETS = {
    "timm-vit": ".*blocks.*(qkv|proj|fc1|fc2)",
    "transformers-vit": "(?!.*embeddings).*(q_proj|query|v_proj|value|fc1|fc2|intermediate.dense|output.dense)",
}


def with_lora(name: str, model: nn.Module) -> nn.Module:
    """Returns the model with an adapter that changes the output; peft initializes adapters to zero."""
    peft = pytest.importorskip("peft")  # imported here, because that takes seconds
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=TARGETS[name]))
    with torch.no_grad():
        for key, parameter in wrapped.named_parameters():
            if "lora_B" in key:
                parameter.normal_(0, 0.3)
    return wrapped.eval()


def assert_alike(name: str, model: nn.Module, twin: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        found, expected = (SUBJECTS[name].run(each, inputs) for each in (model, twin))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    return expected


@pytest.mark.fast_cases("transformers-vit-triton", "timm-vit-sdpa")
@pytest.mark.parametrize("backend", ["sdpa", "triton"])
@pytest.mark.parametrize("name", TARGETS)
def test_an_adapter_on_a_fused_model_is_trained_and_merged(name: str, backend: str) -> None:
    model, inputs = SUBJECTS[name].build().to(DEVICE).eval(), SUBJECTS[name].inputs()
    inputs = {key: value.to(DEVICE) for key, value in inputs.items()}
    twin = copy.deepcopy(model)
    vit_fast.fuse(model, backend).require_all()
    plain = assert_alike(name, model, twin, inputs)
    model, twin = with_lora(name, model), with_lora(name, twin)
    adapted = assert_alike(name, model, twin, inputs)
    assert (adapted - plain).abs().max() > 0.1
    if backend == "sdpa":
        found, expected = (gradients(SUBJECTS[name], each, inputs) for each in (model, twin))
        assert all("lora" in key for key in found[1])
        assert_same_results(found, expected)
    for step in ("merge_adapter", "unmerge_adapter", "merge_and_unload"):
        model, twin = (getattr(each, step)() or each for each in (model, twin))
        assert_alike(name, model, twin, inputs)
        if step == "unmerge_adapter":
            report = vit_fast.fuse(model, backend)
            assert {row.part for row in report.fused} == {"attention"}
            assert all("must be torch.nn.Linear itself, got " in row.reasons[0] for row in report.skipped)
            assert_alike(name, model, twin, inputs)
    assert vit_fast.fuse(model, backend).require_all()
    torch.testing.assert_close(assert_alike(name, model, twin, inputs), adapted, rtol=1e-4, atol=1e-4)
