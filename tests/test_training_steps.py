"""A training step: its learning rate, what decays, and each option by its formula."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from train_support import settings, small_model

from vit_fast.apps.trainer import learning_rate_factor, parameter_groups
from vit_fast.apps.training import TrainConfig, Trainer


def test_learning_rate_warms_up_and_decays() -> None:
    factors = [learning_rate_factor(step, 4, 20) for step in range(21)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0 and factors[12] == pytest.approx(0.5) and factors[20] == pytest.approx(0.0)
    assert all(later < earlier for earlier, later in pairwise(factors[4:]))
    assert learning_rate_factor(0, 0, 1) == 1.0
    assert [learning_rate_factor(step, 2, 20, "constant") for step in (0, 1, 2, 20)] == [0.5, 1.0, 1.0, 1.0]


def test_only_matrices_decay() -> None:
    model = small_model(init_values=0.1, reg_tokens=2)
    names = {parameter: name for name, parameter in model.named_parameters()}
    decayed, plain = ([names[p] for p in group["params"]] for group in parameter_groups(model, TrainConfig()))
    assert {"patch_embed.proj.weight", "head.weight", "blocks.0.attn.qkv.weight"} <= set(decayed)
    assert {"pos_embed", "cls_token", "reg_token", "norm.weight", "head.bias", "blocks.0.ls1.gamma"} <= set(plain)
    assert sorted(decayed + plain) == sorted(names.values())


def test_layers_have_rates_of_their_own() -> None:
    model = small_model()
    groups = parameter_groups(model, TrainConfig(lr=1.0, layer_decay=0.5, weight_decay=0.05))
    rates = {p: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert len(rates) == len(list(model.parameters()))
    named = dict(model.named_parameters())
    for name, expected in {
        "patch_embed.proj.weight": (0.125, 0.05), "cls_token": (0.125, 0.0), "pos_embed": (0.125, 0.0),
        "blocks.0.mlp.fc1.weight": (0.25, 0.05), "blocks.1.norm1.bias": (0.5, 0.0),
        "norm.weight": (1.0, 0.0), "head.weight": (1.0, 0.05),
    }.items():  # fmt: skip
        assert rates[named[name]] == expected, name


def _step(images: torch.Tensor, **options: object) -> tuple[float, Trainer]:
    trainer = Trainer(small_model(drop_path_rate=0.0), settings(warmup_epochs=0.0, **options), 10, 0)
    torch.manual_seed(1)
    return trainer.step(images, torch.arange(len(images)) % 2).loss, trainer


def test_each_option_does_what_its_formula_says() -> None:
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8) % 2
    model = small_model(drop_path_rate=0.0)
    log_p = model(images).log_softmax(1)
    plain = -log_p[range(8), labels].mean()
    assert _step(images)[0] == pytest.approx(plain.item(), rel=1e-5)
    smoothed = 0.8 * plain - 0.2 * log_p.mean()
    assert _step(images, label_smoothing=0.2)[0] == pytest.approx(smoothed.item(), rel=1e-5)

    torch.manual_seed(1)
    share = torch.distributions.Beta(0.4, 0.4).sample().item()
    share = max(share, 1 - share)
    log_p = model(share * images + (1 - share) * images.flip(0)).log_softmax(1)
    mixed = -(share * log_p[range(8), labels] + (1 - share) * log_p[range(8), labels.flip(0)]).mean()
    assert 0.5 <= share < 0.999
    assert _step(images, mixup=0.4)[0] == pytest.approx(mixed.item(), rel=1e-5)

    before = [p.detach().clone() for p in model.parameters()]
    _, trainer = _step(images, ema_decay=0.5)  # (1 + 1) / (10 + 1) is less
    for old, new, average in zip(before, trainer.model.parameters(), trainer.averages, strict=True):
        torch.testing.assert_close(average, 2 / 11 * old + 9 / 11 * new, rtol=1e-5, atol=1e-6)
    with trainer.averaged():
        assert all(map(torch.equal, trainer.model.parameters(), trainer.averages))
    assert not all(map(torch.equal, trainer.model.parameters(), trainer.averages))


def test_gradients_are_clipped_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = []
    step = torch.optim.AdamW.step

    def seen(self: torch.optim.AdamW, *args: object) -> object:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", seen)
    images = 100 * torch.randn(8, 3, 32, 32)
    for limit in (0.0, 0.1):
        _step(images, max_grad_norm=limit)
    assert norms[0] > 0.2 and norms[1] == pytest.approx(0.1, rel=1e-3)
