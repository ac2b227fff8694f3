"""The training step as a task: forward, cross-entropy, backward, AdamW; and what a subject's gradients are held by."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEARNING_RATE = 1e-6


class TrainingStep:
    """Steps of a model on labels that go with a place in the batch.

    Args:
        model: Whose parameters are trained; dropout is switched off, so that gradients can be compared.
        function: The model, or what it was compiled to.
        amp: Whether the forward runs under autocast in bf16.
    """

    def __init__(self, model: nn.Module, function: Callable[[Tensor], Tensor], *, amp: bool) -> None:
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

    def gradients(self, images: Tensor, rows: list[int], places: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Of the summed loss of some images of a batch.

        Args:
            images: The batch [B, C, H, W].
            rows: Which of it count.
            places: Where in a batch the images stand, which decides their labels; None means as they are.
        Returns:
            Each image's own gradient [B, C, H, W], and the norm of all parameters' gradients [1].
        """
        self.optimizer.zero_grad()
        leaf = images.detach().clone().requires_grad_()
        labels = torch.tensor(range(len(images)) if places is None else places, device=images.device)
        self._loss(leaf, labels)[rows].sum().backward()
        squares = [p.grad.double().square().sum() for p in self.model.parameters() if p.grad is not None]
        self.optimizer.zero_grad()
        assert leaf.grad is not None
        return leaf.grad, torch.stack(squares).sum().sqrt().reshape(1).to(images.dtype)

    def _loss(self, images: Tensor, places: Tensor) -> Tensor:
        """The loss of each image [B], its label being its place."""
        context = torch.autocast(images.device.type, torch.bfloat16) if self.amp else contextlib.nullcontext()
        with context:
            outputs = self.function(images).flatten(1)
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        losses: Tensor = F.cross_entropy(outputs, places % outputs.shape[1], reduction="none")
        return losses
