"""Single operators and blocks as models of the bench: sizes by hand, entrants held to fp64 to the last element."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from bench_support import QUICK, make_task

from vit_fast.benchmarks import operators, runner
from vit_fast.benchmarks.candidates import get_candidate, make
from vit_fast.benchmarks.configuration import make_configuration
from vit_fast.benchmarks.models import resolve
from vit_fast.benchmarks.preparation import TrainingStep, expect, judge_outputs
from vit_fast.errors import UnsupportedInputError
from vit_fast.work import Work

SMALL = ("attention:20x2x16", "mlp:14x32x64", "matmul:14x32x64", "block:vit_test")


def test_work_by_hand() -> None:
    """ViT-B's layer at batch 2: q k^T and p v; two products of 394 rows."""
    rows = 2 * 197
    (attention, mlp, matmul) = (
        resolve(w)(None)[0] for w in ("attention:197x12x64", "mlp:197x768x3072", "matmul:197x768x3072")
    )
    forward = Work(4 * 2 * 12 * 197 * 197 * 64, 4 * rows * 768)
    assert attention.parts(2, False) == {"attention": forward}
    assert attention.parts(2, True) == {"attention": Work(forward.flop * 5 // 2, 8 * rows * 768)}
    flop, weights = 2 * rows * 768 * 3072, 768 * 3072
    assert mlp.parts(2, False) == {"linears": Work(2 * flop, 2 * rows * 768 + 2 * rows * 3072 + 2 * weights)}
    assert mlp.parts(2, True) == {"linears": Work(4 * flop, 3 * rows * 768 + 6 * rows * 3072 + 4 * weights)}
    assert matmul.parts(2, False) == {"linears": Work(flop, rows * 768 + rows * 3072 + weights)}


def test_a_block_is_a_share_of_its_model() -> None:
    (whole,), (block,) = resolve("vit_test")(None), resolve("block:vit_test")(None)
    of_all = whole.parts(3, False)
    depth = whole.config.depth
    assert block.parts(3, False)["linears"] == Work(
        of_all["linears"].flop // depth, of_all["linears"].elements // depth
    )
    assert block.parts(3, True)["attention"].flop == 2 * of_all["attention"].flop // depth
    assert block.shape == (17, 64) and block.data is None


@pytest.mark.usefixtures("small_ceilings")
@pytest.mark.fast_cases("False")
@pytest.mark.parametrize("training", [False, True])
def test_all_that_can_run_here_is_right_and_measured(training: bool) -> None:
    labels = ["eager", "sdpa", "timm", "timm+fused"]
    plan = make_configuration(
        models=SMALL, batch_sizes=[3], dtypes=["fp32"], candidates=labels, device="cpu", train=training, protocol=QUICK
    )
    rows = {(row["model"], row["candidate"]): row for row in runner.run(plan)["rows"]}
    measured = {key for key, row in rows.items() if row["status"] == "measured"}
    assert measured == {
        ("attention:20x2x16", "eager"), ("attention:20x2x16", "sdpa"), ("mlp:14x32x64", "eager"),
        ("mlp:14x32x64", "sdpa"), ("matmul:14x32x64", "eager"), *(("block:vit_test", label) for label in labels),
    }  # fmt: skip
    assert {row["status"] for key, row in rows.items() if key not in measured} == {"unsupported"}
    row = rows["mlp:14x32x64", "eager"]
    assert row["img_size"] == [14, 32] and row["peer"] and row["FLOP"] > 0 < row["bytes"]
    assert not rows["block:vit_test", "sdpa"]["peer"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("word", SMALL)
def test_a_fault_in_the_last_image_is_noticed(word: str, training: bool, dtype: torch.dtype) -> None:
    """Checks the timed size; for a backward, also the gradient of a single parameter."""
    task = make_task(word, dtype, training)
    images = torch.randn(5, *task.model.shape).to(dtype)
    expected, candidate = expect(task, images), get_candidate("sdpa" if word != SMALL[2] else "eager")
    factor = torch.ones(5, *[1] * len(task.model.shape), dtype=dtype)
    right = make(candidate, task)

    def faulty(x: torch.Tensor) -> torch.Tensor:
        out = right(x)
        return out * factor.view(-1, *[1] * (out.ndim - 1))

    def passes() -> bool:
        if training:
            found = TrainingStep(task, right, faulty).gradients(images, range(5), range(5))
            return judge_outputs(candidate, task, expected, found).passed
        with torch.no_grad():
            return judge_outputs(candidate, task, expected, faulty(images)).passed

    if training:  # all rows that the definition was asked for
        step = TrainingStep(task, right, right)
        found = step.gradients(images, expected.rows, range(5))
        assert judge_outputs(candidate, task, expected, found).passed
    else:
        assert passes()
    factor[-1] = 1.1
    assert not passes()


def test_who_cannot_compute_it_says_all_reasons() -> None:
    with pytest.raises(UnsupportedInputError, match=r"(?s)it needs a GPU.*the activation must be gelu_tanh"):
        make(get_candidate("cublaslt"), make_task("mlp:14x32x64"))
    with pytest.raises(UnsupportedInputError, match="has no attention"):
        make(get_candidate("cublaslt"), make_task("attention:20x2x16"))
    with pytest.raises(UnsupportedInputError, match="must be a single operator, got vit_test"):
        make(get_candidate("flex"), make_task("vit_test"))
    with pytest.raises(ValueError, match="the activation of an mlp must be one of gelu"):
        resolve("mlp:14x32x64:tanh")(None)
    with pytest.raises(ValueError, match="must be followed by a name of"):
        resolve("block:timm:test_vit")(None)


def test_a_peer_is_two_lines_and_is_measured_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function into the table, a name: what a package that is not here would add."""
    monkeypatch.setitem(operators._ATTENTION, "mine", lambda qkv: qkv[:, :, 0])
    task = make_task("attention:20x2x16")
    images = torch.randn(5, 20, 3, 2, 16)
    candidate = dataclasses.replace(get_candidate("flex"), base="mine")
    found = judge_outputs(candidate, task, expect(task, images), make(candidate, task)(images))
    assert "error must be at most" in found.reason
