"""A tape that replaces a CUDA graph: records operators and kernel launches, and repeats them in the same memory.

Like the capture of a graph, recording fails if an operator waits for the device or copies from the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

REFUSED = ("aten::_local_scalar_dense", "aten::lift_fresh", "aten::nonzero", "aten::unique_consecutive")


class NoHost(TorchDispatchMode):
    """Raises an error for operators that wait for the device or copy from the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in REFUSED:
            raise AssertionError(f"{func.name()}: a read or a copy of the host")
        return func(*args, **(kwargs or {}))


class Tape(NoHost):
    def __init__(self, steps: list[Callable[[], object]] | None = None) -> None:
        super().__init__()
        self.steps: list[Callable[[], object]] = [] if steps is None else steps
        self.launches = self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        given = {leaf.untyped_storage()._cdata for leaf in leaves((args, kwargs))}
        fresh = [leaf for leaf in leaves(result) if leaf.untyped_storage()._cdata not in given]
        if func.namespace == "aten" and (fresh or func._schema.is_mutable):
            # a view needs no step, and a later step writes empty memory

            def again() -> None:
                new = func(*args, **(kwargs or {}))
                for before, now in zip(leaves(result), leaves(new)):
                    before.copy_(now)

            self.steps.append(again if "empty" not in func.name() else lambda kept=result: kept)
        return result


def leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def install(monkeypatch: Any) -> list[Tape]:
    """Lets `GraphRunner` capture on any device; returns the list of its tapes."""
    from vit_fast.kernels.launch import Launch
    from vit_fast.ops import registration
    from vit_fast.run import graph_runner

    tapes: list[Tape] = []
    launch_now = Launch.run

    def capture(run: Callable[[], Any], stream: Any, pool: Any) -> Callable[[], Any]:
        tape = Tape()
        tapes.append(tape)

        def launch(self: Any) -> None:
            tape.launches += 1
            tape.steps.append(lambda: launch_now(self))
            with _disable_current_modes():  # Triton's interpreter uses torch
                launch_now(self)

        def unplanned(function: Callable[..., Any], arguments: Any) -> Any:
            with Tape(tape.steps):  # record what an operator of vit-fast does
                return function(*arguments)

        with monkeypatch.context() as patch:
            run()
            patch.setattr(registration, "_run_by_plan", lambda: unplanned)
            patch.setattr(Launch, "run", launch)
            with tape:
                output = run()

        @torch.no_grad()
        def replay() -> Any:
            tape.replays += 1
            for step in tape.steps:
                step()
            return output

        return replay

    monkeypatch.setattr(graph_runner, "capture", capture)
    monkeypatch.setattr(graph_runner, "_no_graph_reasons", lambda model, like: [])
    return tapes
