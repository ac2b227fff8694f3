"""Rules for launch plans: planned calls and bypassed plans, checked in a process with the stand-in driver."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
from launch_tapes import BF16, FP32, Address, described, listen, taped, zeros
from torch import Tensor

import vit_fast
from vit_fast.errors import UnsupportedInputError
from vit_fast.kernels import plan
from vit_fast.kernels.inspect import stand_in_driver
from vit_fast.kernels.launch import Launch
from vit_fast.ops import attention, layer_norm_mlp


def steady_state() -> None:
    """A model's third step builds no launch: forward, backward and inference."""
    model = vit_fast.create_model("vit_test", backend="triton", depth=3).bfloat16()
    images = torch.zeros(2, 3, 32, 32, dtype=BF16)

    def step() -> None:
        model(images).sum().backward()
        with torch.no_grad():
            model(images)

    step()
    step()
    build, built = Launch.__init__, []
    Launch.__init__ = lambda self, *args, **kwargs: built.append(build(self, *args, **kwargs))  # type: ignore[method-assign]  # a spy
    step()
    Launch.__init__ = build  # type: ignore[method-assign]  # a spy
    assert built == []
    assert None not in plan.plans()


def one_plan_serves_one_tensor_thrice_and_three() -> None:
    """A plan that was recorded with one tensor as q, k and v reads three tensors if it gets three."""
    plan.forget()
    one, others = zeros(1, 2, 17, 64), [zeros(1, 2, 17, 64) for _ in range(3)]
    for _ in range(2):
        attention(one, one, one, backend="triton")
    replayed, _ = taped(lambda: attention(*others, backend="triton"))
    assert len(plan.plans()) == 1
    addresses = {value for call in replayed for value in call if isinstance(value, Address)}
    assert {tensor.data_ptr() for tensor in others} <= addresses
    assert one.data_ptr() not in addresses


def precision() -> None:
    """A plan of fp32 products in TF32 is not replayed once torch no longer allows TF32."""
    plan.forget()
    x, fc1, fc2 = (zeros(*shape, dtype=FP32) for shape in ((16, 64), (128, 64), (64, 128)))
    for setting in ("tf32", "tf32", "ieee", "tf32"):
        torch.backends.cuda.matmul.fp32_precision = setting
        try:
            layer_norm_mlp(x, None, None, fc1, None, fc2, None, backend="triton")
        except UnsupportedInputError as error:
            assert setting == "ieee" and "fp32_precision='ieee'" in str(error)
        else:
            assert setting == "tf32"
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert len(plan.plans()) == 1


@triton.jit
def copy_kernel(source, target, n, SIZE: triton.language.constexpr):
    lane = triton.language.arange(0, SIZE)
    triton.language.store(target + lane, triton.language.load(source + lane, mask=lane < n), mask=lane < n)


def launched_copy(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    Launch(copy_kernel, (1,), {"source": x, "target": out, "n": x.numel()}, {"SIZE": 64}).run()
    return out


def with_torch(x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Torch operators of every kind around a launch: views, results, into a buffer, of a list."""
    room = torch.empty(2, 4)
    torch.mul(x, factor, out=room[1])
    room[0].copy_(y)
    launched_copy(x)
    joined = torch.cat([room[1], y[None, :].expand(2, 4).sum(0)])
    return joined, room[1:], (x + y).to(BF16).view(2, 2).t()


def torch_operators() -> None:
    plan.forget()
    for start in (0.0, 1.0, 7.0, 8.0):
        x, y = torch.arange(start, start + 4), torch.randn(4)
        for found, expected in zip(plan.run(with_torch, (x, y, 3.0)), with_torch(x, y, 3.0), strict=True):
            assert torch.equal(found, expected)
            assert described(found) == described(expected)
    one = torch.ones(4)
    for factor in (3.0, 5.0, 5.0, 5.0):  # one tensor twice, another constant
        assert torch.equal(plan.run(with_torch, (one, one, factor))[1], factor * one[None])
    assert len(plan.plans()) == 2 and None not in plan.plans()


FOREIGN = torch.ones(4)


def unplannable() -> None:
    """Calls that a replay cannot repeat run each time, and follow changes of what they read."""

    def foreign(x: Tensor) -> Tensor:
        return x + FOREIGN

    def by_value(x: Tensor) -> Tensor:
        return x + float(x.sum())

    def itself(x: Tensor) -> Tensor:
        return x.view(-1)

    def as_bits(x: Tensor) -> Tensor:
        return (x + 0).view(torch.int32)

    def no_tensor(x: Tensor) -> tuple[Tensor, int]:
        return x + 1, 3

    x = torch.ones(4)
    for function in (foreign, by_value, itself, as_bits, no_tensor):
        plan.forget()
        plan.run(function, (x,))
        plan.run(function, (x,))
        assert plan.plans() == [None], function
    for value in (1.0, 5.0, 6.0):
        FOREIGN.fill_(value)
        assert torch.equal(plan.run(foreign, (x,)), x + value)
        assert torch.equal(plan.run(by_value, (value * x,)), 5 * value * x)


def hooks(driver: stand_in_driver.StandInDriver) -> None:
    """Whoever listens hears every launch, of planned operators too."""
    plan.forget()
    x, heard = torch.ones(32), []
    for _ in range(3):
        plan.run(launched_copy, (x,))
    triton.knobs.runtime.launch_enter_hook.add(heard.append)
    plan.run(launched_copy, (x,))
    plan.run(launched_copy, (x[:16],))  # has no plan: nothing is recorded
    triton.knobs.runtime.launch_enter_hook.remove(heard.append)
    copy_kernel.add_pre_run_hook(lambda *args, **kwargs: heard.append(None))
    plan.run(launched_copy, (x,))
    plan.run(launched_copy, (x[:16],))
    copy_kernel.pre_run_hooks.clear()
    assert len(heard) == 4
    assert len(plan.plans()) == 1
    before = driver.counters().launches
    plan.run(launched_copy, (x,))
    assert driver.counters().launches == before + 1


def threads() -> None:
    """Several threads replay one plan, each with its own tensors, while plans are forgotten."""
    plan.forget()
    fc1, fc2 = zeros(128, 64), zeros(64, 128)

    def work(_: int) -> None:
        for _ in range(30):
            x = zeros(17, 64)
            calls, result = taped(lambda x=x: layer_norm_mlp(x, None, None, fc1, None, fc2, None, backend="triton"))
            addresses = {value for call in calls for value in call if isinstance(value, int)}
            assert {x.data_ptr(), fc1.data_ptr(), fc2.data_ptr(), result.data_ptr()} <= addresses
            if torch.randint(10, ()) == 0:
                plan.forget()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def what_is_recorded() -> None:
    """A plan is recorded at the second call, also after a call that fails, and the number of plans is bounded."""

    def failing(x: Tensor) -> Tensor:
        raise ValueError("no")

    plan.forget()
    for _ in range(3):
        try:
            plan.run(failing, (torch.ones(4),))
        except ValueError:
            continue
        raise AssertionError("it did not fail")
    recorded = []
    for _ in range(3):
        plan.run(launched_copy, (torch.ones(32),))
        recorded.append(len(plan.plans()))
    assert recorded == [0, 1, 1]
    plan.MAX_PLANS = plan.MAX_SEEN = 4
    for n in range(1, 20):
        plan.run(launched_copy, (torch.ones(n),))
        plan.run(launched_copy, (torch.ones(n),))
        assert 1 <= len(plan.plans()) <= 4 and len(plan._seen) <= 4


def buffers_share() -> None:
    """Buffers overlap only where they are needed at different times."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        sizes, starts, lengths = torch.randint(0, 9, (3, 12), generator=generator).tolist()
        needs = {i: (1000 * sizes[i] + i, starts[i], starts[i] + lengths[i]) for i in range(12)}
        offsets, total = plan._overlay(needs)
        for a in needs:
            assert offsets[a] % 256 == 0 and offsets[a] + needs[a][0] <= total
            for b in range(a):
                meet = needs[a][1] <= needs[b][2] and needs[b][1] <= needs[a][2]
                disjoint = offsets[a] + needs[a][0] <= offsets[b] or offsets[b] + needs[b][0] <= offsets[a]
                assert disjoint or not meet or 0 in (needs[a][0], needs[b][0])
    assert plan._overlay({0: (512, 0, 1), 1: (512, 2, 3)})[1] == 512


def main() -> None:
    torch.set_num_threads(1)
    listen()
    driver = stand_in_driver.install("sm_90")
    one_plan_serves_one_tensor_thrice_and_three()
    precision()
    steady_state()
    torch_operators()
    unplannable()
    hooks(driver)
    threads()
    buffers_share()
    what_is_recorded()
    assert driver.violations() == []
    sys.stdout.write("ok")


if __name__ == "__main__":
    main()
