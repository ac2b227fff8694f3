"""Training steps (class Trainer), their settings, and the processes of distributed training."""

from __future__ import annotations

import contextlib
import gc
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ..blocks.fused import resolve_again
from ..config import check_fields
from ..errors import MAX_SIZE, VitFastError, as_device, check_choice
from ..model import Block, VisionTransformer


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Training settings. An invalid field raises ValueError or TypeError.

    0 disables weight decay, warm-up, mixup and other optional settings.
    """

    epochs: int = 10
    batch_size: int = 64  # images per step, summed over all processes; the last batch of an epoch may be smaller
    lr: float = 5e-4  # learning rate at the end of the warm-up
    weight_decay: float = 0.05  # of AdamW; biases, norms, LayerScale, tokens and positions have none
    warmup_epochs: float = 1.0  # epochs of linear warm-up
    schedule: Literal["cosine", "constant"] = "cosine"  # after the warm-up, lr decays to 0 or is constant
    # Multiplies the learning rate of each block relative to the next one (BEiT, arXiv 2106.08254). The head has the
    # learning rate lr, the patch embedding the smallest one.
    layer_decay: float = 1.0
    label_smoothing: float = 0.0
    mixup: float = 0.0  # alpha of the Beta distribution (arXiv 1710.09412)
    max_grad_norm: float = 1.0  # gradients with a larger norm are clipped
    # Decay of the exponential moving average of the weights, at most (1 + step) / (10 + step). The averaged weights are
    # evaluated and saved.
    ema_decay: float = 0.0
    accumulation: int = 1  # parts of a batch, whose gradients are accumulated to reduce memory
    # Stops after this number of epochs without a better validation accuracy. The weights of the best epoch are saved.
    patience: int = 0
    dtype: Literal["fp32", "bf16"] = "fp32"  # autocast dtype of the forward pass; "fp32" means no autocast
    grad_checkpointing: bool = False  # recomputes blocks in the backward pass instead of storing their activations
    augment: bool = True  # augments the images; False applies the evaluation transform
    seed: int = 0  # of shuffling, augmentation, mixup, dropout and drop path

    def __post_init__(self) -> None:
        check_fields(self, {"patience": 0, "seed": -MAX_SIZE}, ("lr", "layer_decay"))
        if self.layer_decay > 1:
            raise ValueError(f"layer_decay must be at most 1, got {self.layer_decay!r}")
        for name in ("weight_decay", "warmup_epochs", "mixup", "max_grad_norm", "label_smoothing", "ema_decay"):
            value, below_one = getattr(self, name), name in ("label_smoothing", "ema_decay")
            if value < 0 or (below_one and value >= 1):
                raise ValueError(f"{name} must be {'in [0, 1)' if below_one else 'non-negative'}, got {value!r}")


class TrainingError(VitFastError, RuntimeError):
    """Training cannot continue or be resumed."""


class Processes(NamedTuple):
    """Processes of distributed training: "ddp" replicates the parameters, "fsdp" shards them (FSDP2)."""

    rank: int = 0
    world: int = 1
    strategy: str = "ddp"
    mesh: DeviceMesh | None = None

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        found = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(found, value)
        return found


ALONE = Processes()


@contextlib.contextmanager
def joined(strategy: str, device: str = "auto") -> Iterator[Processes]:
    """Initializes the process group under torchrun. Free all wrapped models before the context ends.

    Under torchrun, `device` is "auto", "cpu" or "cuda"; LOCAL_RANK selects the GPU.
    """
    check_choice("--parallel", strategy, ("ddp", "fsdp"))
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield ALONE
        return
    check_choice("--device under torchrun", device, ("auto", "cpu", "cuda"))
    kind = as_device(device).type
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh(kind, (world,))
    try:
        yield Processes(dist.get_rank(), world, strategy, mesh)
    finally:
        # The threads of the process group stop when its last reference is freed. If they still run when the
        # interpreter exits, the process crashes. Models and the mesh (cached by DTensor) refer to the group in cycles.
        gc.collect()
        getattr(mesh, "_pg_registry", {}).clear()
        dist.destroy_process_group()


class Measure(NamedTuple):
    """Mean cross entropy over `seen` images, and the number of correctly classified images."""

    loss: float
    correct: int
    seen: int


class Trainer:
    """Trains a model in place on its device: optimizer, learning rate schedule and averaged weights.

    With several processes, every process creates a Trainer and calls the same methods.
    """

    def __init__(
        self, model: VisionTransformer, config: TrainConfig, total_steps: int, warmup_steps: int,
        processes: Processes = ALONE,
    ) -> None:  # fmt: skip
        self.model, self.config, self.processes = model, config, processes
        model.set_grad_checkpointing(config.grad_checkpointing)
        self.forward: Any = model
        if processes.world > 1 and processes.strategy == "ddp":
            self.forward = nn.parallel.DistributedDataParallel(model)
        elif processes.world > 1:
            for module in [*(module for module in model.modules() if isinstance(module, Block)), model]:
                fully_shard(module, mesh=processes.mesh)
        self.optimizer = torch.optim.AdamW(parameter_groups(model, config), lr=config.lr)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_factor(step, warmup_steps, total_steps, config.schedule)
        )
        self.parameters = list(model.parameters())
        self.averages = [p.detach().clone() for p in self.parameters] if config.ema_decay else []
        self.step_count = 0
        self._mode: bool | None = None

    def set_mode(self, training: bool) -> None:
        """Sets the mode of the model. For fp32 weights, "auto" may select triton only under autocast."""
        if self._mode is not training:
            self._mode = training
            self.model.train(training)
            with self._autocast(training):
                resolve_again(self.model)

    def _autocast(self, enabled: bool = True) -> torch.autocast:
        kind = self.parameters[0].device.type
        return torch.autocast(kind, torch.bfloat16, enabled=enabled and self.config.dtype == "bf16")

    def step(self, images: Tensor, labels: Tensor) -> Measure:
        """Updates the parameters with a batch [B, C, H, W] per process."""
        config, device = self.config, self.parameters[0].device
        self.set_mode(training=True)
        images, labels = images.to(device), labels.to(device)
        targets = labels
        if config.mixup:  # mixes the batch with the reversed batch
            share = torch.distributions.Beta(config.mixup, config.mixup).sample().item()
            share = max(share, 1 - share)  # for the accuracy, the label is that of the larger share
            targets = F.one_hot(labels, self.model.num_classes).float()
            images, targets = (share * each + (1 - share) * each.flip(0) for each in (images, targets))
        found = torch.zeros(3, dtype=torch.float64, device=device)
        parts = list(zip(*(tensor.chunk(config.accumulation) for tensor in (images, labels, targets))))
        for i, (part, own, target) in enumerate(parts):
            if self.processes.world > 1:  # only the last part synchronizes gradients in its backward pass
                if self.processes.strategy == "fsdp":
                    self.forward.set_requires_gradient_sync(i == len(parts) - 1)
                else:
                    self.forward.require_backward_grad_sync = i == len(parts) - 1  # like no_sync()
            with self._autocast():
                logits = self.forward(part)
            loss = F.cross_entropy(logits.float(), target, label_smoothing=config.label_smoothing)
            (loss * (len(part) / len(images))).backward()
            found += _counts(loss.detach() * len(part), logits, own)
        measure = self._sum(found)
        if not math.isfinite(measure.loss):
            self.optimizer.zero_grad(set_to_none=True)
            advice = f"got {measure.loss} in step {self.step_count}: try a smaller lr"
            raise TrainingError(f"the loss must be finite, {advice}")
        if config.max_grad_norm:
            nn.utils.clip_grad_norm_(self.parameters, config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        self.step_count += 1
        if self.averages:
            decay = min(config.ema_decay, (1 + self.step_count) / (10 + self.step_count))
            get_ema_multi_avg_fn(decay)(self.averages, [p.detach() for p in self.parameters], None)
        return measure

    @torch.no_grad()
    def measure(self, batches: Iterable[tuple[Tensor, Tensor]], own: int) -> Measure:
        """Measures loss and accuracy on the first `own` images, with the averaged weights if ema_decay is set."""
        self.set_mode(training=False)
        device = self.parameters[0].device
        found = torch.zeros(3, dtype=torch.float64, device=device)
        with self.averaged():
            for images, labels in batches:
                labels = labels[: max(0, own)].to(device)
                logits = self.forward(images.to(device))[: len(labels)].float()
                own -= len(images)
                found += _counts(F.cross_entropy(logits, labels, reduction="sum"), logits, labels)
        return self._sum(found)

    def _sum(self, found: Tensor) -> Measure:
        if self.processes.world > 1:
            dist.all_reduce(found)
        total, correct, count = found.tolist()
        return Measure(total / count, int(correct), int(count))

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Temporarily replaces the weights by their moving average if ema_decay is set."""
        own = [parameter.detach().clone() for parameter in self.parameters] if self.averages else []
        parameters = [parameter.detach() for parameter in self.parameters]
        try:
            for parameter, average in zip(parameters, self.averages):
                parameter.copy_(average)
            yield
        finally:
            for parameter, before in zip(parameters, own):
                parameter.copy_(before)


def _counts(loss: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """Returns summed loss, number of correct images, and number of images, in fp64."""
    correct = (logits.detach().argmax(1) == labels).sum()
    return torch.stack([loss.double(), correct, torch.full_like(correct, len(labels))])


def parameter_groups(model: VisionTransformer, config: TrainConfig) -> list[dict[str, Any]]:
    """Returns the optimizer's parameter groups. Vectors and model.no_weight_decay() have no weight decay.

    With layer_decay, the embedding is layer 0, block i is layer i + 1, and the rest is the last layer.
    """
    exempt, last = model.no_weight_decay(), len(model.blocks) + 1
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            first, *rest = name.split(".")
            before = first in ("patch_embed", "cls_token", "dist_token", "reg_token", "pos_embed", "norm_pre")
            layer = int(rest[0]) + 1 if first == "blocks" else 0 if before else last
            plain = parameter.dim() < 2 or name in exempt
            groups.setdefault((layer if config.layer_decay != 1 else last, plain), []).append(parameter)
    decays, lrs = (config.weight_decay, 0.0), [config.lr * config.layer_decay ** (last - i) for i in range(last + 1)]
    return [
        {"params": groups[layer, plain], "weight_decay": decays[plain], "lr": lrs[layer]}
        for layer, plain in sorted(groups)
    ]


def learning_rate_factor(step: int, warmup_steps: int, total_steps: int, schedule: str = "cosine") -> float:
    """Returns the factor of lr: linear warm-up from 1/warmup_steps to 1, then cosine decay to 0 or constant 1."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
