"""Training as a task: the step of a model, or the backward of a part, and the gradients that are checked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch import config as functorch_config

LEARNING_RATE = 1e-6
Function = Callable[[Tensor], Tensor]


class TrainingStep:
    """Forward, cross-entropy, backward and AdamW of a model, on labels that go with a place in the batch.

    Args:
        model: Whose parameters are trained; dropout is switched off, so that gradients can be compared.
        function: The model, or what it was compiled to.
        amp: Whether the forward runs under autocast in bf16.
    """

    def __init__(self, model: nn.Module, function: Function, *, amp: bool) -> None:
        self.model, self.function, self.amp = model.train().requires_grad_(True), function, amp
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        parameters = list(model.parameters())
        fused = parameters[0].device.type == "cuda"
        self.optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=fused)

    def __call__(self, images: Tensor) -> None:
        """One step over the batch."""
        self.optimizer.zero_grad()
        self._loss(images, torch.arange(len(images), device=images.device)).mean().backward()
        self.optimizer.step()

    def gradients(self, images: Tensor, rows: Sequence[int], places: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Computes gradients of the summed loss of some images of a batch.

        Args:
            images: The batch [B, C, H, W].
            rows: Which of it count.
            places: Where in a batch each of the images stands, which decides its label.
        Returns:
            Each image's own gradient [B, C, H, W], and the norm of all parameters' gradients [1].
        """
        self.optimizer.zero_grad()
        leaf = images.detach().clone().requires_grad_()
        self._loss(leaf, torch.tensor(places, device=images.device))[rows].sum().backward()
        squares = [p.grad.double().square().sum() for p in self.model.parameters() if p.grad is not None]
        self.optimizer.zero_grad()
        assert leaf.grad is not None
        return leaf.grad, [torch.stack(squares).sum().sqrt().reshape(1).to(images.dtype)]

    def _loss(self, images: Tensor, places: Tensor) -> Tensor:
        """The loss of each image [B], its label being its place."""
        context = torch.autocast(images.device.type, torch.bfloat16) if self.amp else contextlib.nullcontext()
        with context:
            outputs = self.function(images).flatten(1)
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        losses: Tensor = F.cross_entropy(outputs, places % outputs.shape[1], reduction="none")
        return losses


class Backward:
    """The backward alone of a part of a model; its forward is done once for each batch, and kept.

    Args:
        model: Whose parameters' gradients are taken, with that of its input.
        function: The model, or what it was compiled to.
    """

    def __init__(self, model: nn.Module, function: Function) -> None:
        # what is run again and again must not reuse the memory of what it reads; decided when it is compiled
        functorch_config.donated_buffer = False
        self.function, self.parameters = function, list(model.train().requires_grad_(True).parameters())
        self._kept: dict[int, tuple[Tensor, list[Tensor], Tensor]] = {}

    def __call__(self, x: Tensor) -> object:
        """The backward of one batch [B, ...]."""
        if id(x) not in self._kept:
            leaf = x.detach().requires_grad_()
            out = self.function(leaf)
            self._kept[id(x)] = out, [leaf, *self.parameters], self._gradient_of(out)
        out, leaves, gradient = self._kept[id(x)]
        return torch.autograd.grad(out, leaves, gradient, retain_graph=True)

    def gradients(self, x: Tensor, rows: Sequence[int], places: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Computes gradients of some images of a batch [B, ...]: the input's, the parameters'."""
        leaf = x.detach().clone().requires_grad_()
        out = self.function(leaf)
        gradient = torch.zeros_like(out)
        gradient[rows] = self._gradient_of(out)[rows]
        own, *others = torch.autograd.grad(out, [leaf, *self.parameters], gradient)
        return own, others

    @staticmethod
    def _gradient_of(out: Tensor) -> Tensor:
        one = torch.randn(out[:1].shape, generator=torch.Generator().manual_seed(1))
        return one.to(out).repeat(len(out), *[1] * (out.ndim - 1))
