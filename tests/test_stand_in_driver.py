"""Triton's launch path with the stand-in driver: all launches and tensor maps are legal; launches per block.

The stand-in needs separate processes, which share one cache of compiled kernels.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import children
import pytest
import torch
from children import run_python
from pretend_gpu import Machine

pytest.importorskip("triton", reason="the kernels need triton")

from vit_fast.commands import block_times
from vit_fast.kernels import plan_steps
from vit_fast.kernels.inspect import stand_in_driver

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in driver is for machines without a GPU")

TESTS = Path(__file__).parent
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns the environment of a child that compiles kernels, with a Triton cache that all children share."""
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    return children.environment(str(shared / "triton-cache")) | {"VIT_FAST_EXECUTE": "sm_90"}


_LIBRARY_COUNTS = """
import json
import pytest
import torch
import vit_fast
from fused_models import SUBJECTS, timm_subject
from packed_towers import NAFLEX, TOWERS
from vit_fast.kernels import plan
from vit_fast.kernels.inspect import stand_in_driver
from vit_fast.kernels.plan_steps import TorchCall
driver = stand_in_driver.install("sm_90")
subjects = SUBJECTS | TOWERS | NAFLEX | {
    "timm-eva02-base": timm_subject("eva02_base_patch14_224", size=28),
    "timm-dinov3-qk-norm": timm_subject("vit_small_patch16_dinov3", qk_norm=True, embed_dim=128),
}
counts = {}
for name in NAMES:
    made, known = [], len(plan.plans())
    for depth in (1, 3):
        subject = subjects[name]
        try:
            model = subject.build(depth).bfloat16().eval()
        except pytest.skip.Exception:  # of a later release than the installed one
            break
        inputs = {
            name: tensor.bfloat16() if tensor.is_floating_point() else tensor
            for name, tensor in subject.inputs().items()
        }
        vit_fast.fuse(model, "triton").require_all()
        for _ in range(2):
            before = driver.counters().launches
            subject.run(model.train(), inputs).sum().backward()
        made.append([driver.counters().launches - before])
        model.eval()
        for frozen in (False, True):
            if frozen:
                assert len(vit_fast.freeze(model)) == depth, name
            with torch.no_grad():
                subject.run(model, inputs)
                before = driver.counters().launches
                subject.run(model, inputs)
            made[-1].append(driver.counters().launches - before)
    else:
        by_torch = [step for each in plan.plans()[known:] for step, _ in each.steps if isinstance(step, TorchCall)]
        counts[name] = [*made, len(by_torch)]
print(json.dumps(counts))
"""


# Launches per block of a training step. LayerScale multiplies weights, gradients of q and k are rotated in place,
# norms of q and k have gradients, and an inner norm needs three launches.
TRAINING: dict[str, int] = {
    **dict.fromkeys(("timm-vit", "transformers-vit", "torchvision-vit", "vit-fast"), 17),
    **dict.fromkeys(("timm-dinov3", "transformers-dinov3", "transformers-dinov3-gated", "vit-fast-dinov3"), 19),
    "timm-eva02": 18, "timm-eva02-base": 22, "timm-qk-norm": 19, "timm-dinov3-qk-norm": 20,
    "qwen2_5_vl": 18, "pixtral": 18, "siglip2": 17, "averaged": 18, "rotary, a table an image": 19,
}  # fmt: skip


@pytest.mark.slow
def test_launches_per_block(environment: dict[str, str]) -> None:
    """Five launches per block (qkv, attention, proj, fc1, fc2), and a sixth that folds weights unless frozen.

    One launch per model computes LayerNorm statistics. Training adds eleven: input gradients of fc2, fc1 (folded
    again), proj, attention (two), qkv and the first LayerNorm, one for weight gradients, and two for other parameters.
    """
    counts = json.loads(run_python(["-c", f"NAMES = {list(TRAINING)}\n{_LIBRARY_COUNTS}"], environment))
    assert {"timm-vit", "vit-fast"} <= counts.keys()
    for name, (shallow, deep, by_torch) in counts.items():
        inside = name == "timm-eva02-base"
        assert [(b - a) / 2 for a, b in zip(shallow, deep)] == [TRAINING[name], 6 + inside, 5], name
        assert by_torch == 0 or "qk-norm" in name
        if TRAINING[name] == 17 and name != "siglip2":
            assert [a - (b - a) / 2 for a, b in zip(shallow, deep)] == [1, 1, 1], "of a model"


_HALVES = """
import json
import torch
import vit_fast
from spellings import Net, NormedResidual, Parallel, PostNorm
from vit_fast.kernels import plan
from vit_fast.kernels.inspect import stand_in_driver
driver = stand_in_driver.install("sm_90")
counts = {}
for block in (PostNorm, NormedResidual, Parallel):
    model, images = Net(block, depth=1, width=64, heads=2).bfloat16().eval(), torch.randn(2, 3, 16, 16).bfloat16()
    vit_fast.fuse(model, "triton", example=images).require_all()
    made = counts[block.__name__] = []
    for frozen in (False, True):
        assert not frozen or len(vit_fast.freeze(model)) == 1
        for _ in range(2):
            before = driver.counters().launches
            with torch.no_grad():
                model(images)
        made.append(driver.counters().launches - before)
assert driver.violations() == [] and None not in plan.plans()
print(json.dumps(counts))
"""


@pytest.mark.slow
def test_launches_of_halves_that_run_apart(environment: dict[str, str]) -> None:
    """Frozen: three launches for attention, two for the MLP, and one for the statistics of each folded norm.

    Otherwise, each half folds its weights. Attention without a norm is one launch, and its linear layers are torch's.
    """
    counts = json.loads(run_python(["-c", _HALVES], environment))
    assert counts == {"PostNorm": [4, 5], "NormedResidual": [8, 6], "Parallel": [9, 7]}


def test_a_plan_launches_on_the_gpu_of_its_tensors(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(get_current_device=torch.cuda.current_device, get_current_stream=lambda index: index)
    monkeypatch.setattr(plan_steps.triton.runtime, "driver", SimpleNamespace(active=driver))
    x, step = torch.ones(2, device="cuda:1"), Mock()
    plan = plan_steps.LaunchPlan(x.device, ((x.shape, x.stride(), x.dtype),), [(step, [0])], ((1, None),), True, ())
    out = plan.replay([x], [x.data_ptr()])
    assert (out.device, torch.cuda.current_device()) == (x.device, 0)
    step.assert_called_once_with(1, [None, out], [x.data_ptr(), out.data_ptr()])


@pytest.mark.slow
def test_rules_for_launches_and_plans(environment: dict[str, str]) -> None:
    assert run_python([str(TESTS / "planned_launches.py"), "0"], environment) == "ok"


@pytest.mark.parametrize(
    ("arch", "every"),
    [
        pytest.param("sm_90", 5, marks=pytest.mark.slow),
        *(pytest.param(arch, 1, marks=pytest.mark.slow(minutes=True)) for arch in ARCHS),
    ],
)
def test_planned_launches_are_legal(environment: dict[str, str], arch: str, every: int) -> None:
    command = [str(TESTS / "planned_launches.py"), str(every)]
    assert run_python(command, environment | {"VIT_FAST_EXECUTE": arch}) == "ok"


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET must be unset"):
        stand_in_driver.install("sm_90")
    monkeypatch.setattr(stand_in_driver, "is_interpreted", lambda: False)
    monkeypatch.setattr(stand_in_driver.device, "stand_in", True)
    with pytest.raises(RuntimeError, match="already installed in this process"):
        stand_in_driver.install("sm_90")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="a machine without a GPU"):
        stand_in_driver.install("sm_90")


@pytest.mark.slow(minutes=True)
def test_command_reports_host_time(environment: dict[str, str]) -> None:
    report = json.loads(run_python(["-m", "vit_fast.cli", "kernels", "--host", "--json"], environment))
    assert report["violations"] == [] and report["kernels"] > 0
    rows = {row["name"]: row for row in report["rows"]}
    assert set(rows) >= {"attention", "block, inference", "block, forward + backward"}
    assert all(row["ours_us"]["median"] > 0 and row["launches"] >= 1 for row in rows.values())
    text = block_times.host_time_text(report)
    assert "No GPU time is measured" in text and all(name in text for name in rows)
