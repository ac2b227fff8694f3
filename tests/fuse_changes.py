"""What can be done to a block so that it is no longer what fuse reads, and what fuse then says."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

SETTINGS: dict[str, Any] = {"img_size": 32, "depth": 1, "embed_dim": 64, "num_heads": 2, "num_classes": 5}


def tiny_timm(name: str = "vit_tiny_patch16_224", **settings: Any) -> nn.Module:
    return pytest.importorskip("timm").create_model(name, **(SETTINGS | settings))


class LoraLinear(nn.Module):
    """What peft does to a linear: it passes the weight on, and adds to the output."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def wrap_fc1(block: nn.Module) -> None:
    block.mlp.fc1 = LoraLinear(block.mlp.fc1)


def parametrize_fc1(block: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(block.mlp.fc1)


def prune_fc2(block: nn.Module) -> None:
    prune.l1_unstructured(block.mlp.fc2, "weight", amount=0.5)


def hook_norm2(block: nn.Module) -> None:
    block.norm2.register_forward_hook(lambda module, args, output: output * 2)


def pre_hook_activation(block: nn.Module) -> None:
    block.mlp.act.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def replace_mlp_forward(block: nn.Module) -> None:
    mlp = block.mlp
    mlp.forward = lambda x: mlp.fc2(mlp.act(mlp.fc1(x))) * 3


def hook_attention_dropout(block: nn.Module) -> None:
    block.attn.fused_attn = False  # timm calls the module only then
    block.attn.attn_drop.register_forward_hook(lambda module, args, output: output * 2)


def replace_attention_dropout(block: nn.Module) -> None:
    block.attn.fused_attn = False
    block.attn.attn_drop = nn.Tanh()


def change_activation(block: nn.Module) -> None:
    block.mlp.act = nn.Tanh()


def quantize(block: nn.Module) -> None:
    torch.backends.quantized.engine = torch.backends.quantized.supported_engines[-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao announces its successor
        torch.ao.quantization.quantize_dynamic(block, {nn.Linear}, dtype=torch.qint8, inplace=True)


CHANGES: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "LoRA": (wrap_fc1, "must be torch.nn.Linear itself, got "),
    "parametrization": (parametrize_fc1, "must be torch.nn.Linear itself, got "),
    "pruning": (prune_fc2, "mlp.fc2 carries hooks, which would no longer run"),
    "forward hook": (hook_norm2, "norm2 carries hooks, which would no longer run"),
    "forward pre-hook": (pre_hook_activation, "mlp.act carries hooks, which would no longer run"),
    "replaced forward": (replace_mlp_forward, "mlp.forward was replaced on the instance"),
    "unknown activation": (change_activation, "mlp.act must be one of gelu"),
    "quantised linears": (quantize, "got torch.ao.nn.quantized.dynamic.modules.linear.Linear"),
}


AFTERWARDS = {name: apply for name, (apply, _) in CHANGES.items()} | {
    "hook on attention dropout": hook_attention_dropout,
    "other attention dropout": replace_attention_dropout,
}
