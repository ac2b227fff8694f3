"""No answer is stale: whatever changes the weights after a forward, seen by torch or not, is followed."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from mlp_support import DEVICE
from torch import Tensor, nn

from vit_fast.accuracy import FORWARD_FACTOR, judge
from vit_fast.ops import layer_norm_mlp

C, F = 32, 48


class Mlp(nn.Module):
    """LayerNorm, fc1 and fc2 as a model holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(C), nn.Linear(C, F), nn.Linear(F, C)
        self.to(DEVICE)

    def forward(self, x: Tensor, backend: str = "triton") -> Tensor:
        norm, fc1, fc2 = self.norm, self.fc1, self.fc2
        return layer_norm_mlp(x, norm.weight, norm.bias, fc1.weight, fc1.bias, fc2.weight, fc2.bias, backend=backend)


@pytest.fixture
def mlp() -> Mlp:
    return Mlp()


def _agrees(mlp: Mlp, x: Tensor) -> bool:
    """Compares by the accuracy rule: RMSprop's first step gives outputs of 100, which no fixed tolerance fits."""
    with torch.no_grad():
        exact = copy.deepcopy(mlp).double()(x.double(), "eager")
        return judge(mlp(x), mlp(x, "eager"), exact, FORWARD_FACTOR).passed


def _replace_parameter(mlp: Mlp) -> None:
    """A new parameter, likely where the old one lay, with the same version."""
    old = mlp.norm.weight.data_ptr()
    for _ in range(50):
        mlp.norm.weight = nn.Parameter(torch.randn(C, device=DEVICE))
        if mlp.norm.weight.data_ptr() == old:
            break


def _swap_data(mlp: Mlp) -> None:
    """Gives the same parameters other storages, as FSDP and .to() do."""
    shapes = [parameter.shape for parameter in mlp.parameters()]
    for parameter in mlp.parameters():
        parameter.data = torch.empty(0, device=DEVICE)
    gc.collect()
    for parameter, shape in zip(mlp.parameters(), shapes):
        parameter.data = torch.randn(shape, device=DEVICE)


def _unversioned_write(mlp: Mlp) -> None:
    with torch.autograd._unsafe_preserve_version_counter(mlp.fc1.weight), torch.no_grad():
        mlp.fc1.weight.mul_(2)


def _write_data(mlp: Mlp) -> None:
    """Writes as peft and many loaders do: torch counts no new version."""
    for parameter in mlp.parameters():
        parameter.data.add_(torch.randn_like(parameter))


def test_the_operator_caches_nothing_of_its_weights(mlp: Mlp) -> None:
    x = torch.randn(6, C, device=DEVICE)
    assert _agrees(mlp, x)
    for change in (_write_data, _unversioned_write, _replace_parameter, _swap_data):
        before = mlp(x).detach()
        change(mlp)
        assert _agrees(mlp, x), change
        assert not torch.allclose(mlp(x), before, atol=1e-3), change


def test_tied_weights_with_different_norms(mlp: Mlp) -> None:
    """Two layers may share fc1's weight and differ in what is folded into it."""
    other, x = Mlp(), torch.randn(4, C, device=DEVICE)
    other.fc1.weight = mlp.fc1.weight
    with torch.no_grad():
        other.norm.weight.mul_(2)
    for _ in range(2):
        assert _agrees(mlp, x)
        assert _agrees(other, x)


@pytest.mark.fast_cases("aot_eager")
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_inference_follows_changes(mlp: Mlp, compiler: str) -> None:
    compiled = torch.compile(mlp, fullgraph=True, backend=compiler)
    x = torch.randn(4, C, device=DEVICE)
    for _ in range(2):
        with torch.no_grad():
            assert torch.allclose(compiled(x), mlp(x, "eager"), atol=1e-5)
            mlp.fc1.weight.add_(torch.randn_like(mlp.fc1.weight))


@pytest.mark.gpu
def test_compiled_with_cuda_graphs(mlp: Mlp) -> None:
    compiled = torch.compile(mlp, mode="reduce-overhead")
    x = torch.randn(128, C, device=DEVICE)
    for _ in range(5):
        with torch.no_grad():
            y = compiled(x).clone()
            torch.testing.assert_close(y, mlp(x, "eager"), atol=2e-2, rtol=2e-2)
            mlp.fc1.weight.normal_()


@pytest.mark.gpu
def test_streams_do_not_share(mlp: Mlp) -> None:
    x = torch.randn(512, C, device=DEVICE)
    torch.cuda.synchronize()
    with torch.no_grad():
        for _ in range(10):
            mlp.fc1.weight.normal_()
            torch.cuda.synchronize()
            streams = [torch.cuda.Stream() for _ in range(3)]
            results = []
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(mlp(x))
            torch.cuda.synchronize()
            expected = mlp(x, "eager")
            for result in results:
                torch.testing.assert_close(result, expected, atol=2e-2, rtol=2e-2)
