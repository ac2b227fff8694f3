"""Training steps: learning rates, weight decay, and each option compared with its formula."""

from __future__ import annotations

import pytest
import torch

from vit_fast import VisionTransformer, create_model
from vit_fast.apps.data import load_images, sample_image
from vit_fast.apps.trainer import TrainConfig, Trainer, TrainingError, learning_rate_factor, parameter_groups


def _model(**overrides: object) -> VisionTransformer:
    torch.manual_seed(0)
    return create_model("vit_test", **{"num_classes": 2, **overrides})


INVALID = {
    "epochs": 0, "batch_size": 1.5, "accumulation": 0, "layer_decay": 1.5, "label_smoothing": 1.0, "ema_decay": 1.0,
    "mixup": -0.1, "max_grad_norm": float("inf"), "patience": -1, "schedule": "linear", "lr": 0.0,
    "warmup_epochs": float("nan"), "dtype": "int8", "augment": "maybe", "seed": 2**63,
}  # fmt: skip


@pytest.mark.parametrize("field", INVALID)
def test_invalid_settings(field: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"{field} must be"):
        TrainConfig(**{field: INVALID[field]})


def test_learning_rate_warms_up_and_decays() -> None:
    factors = [learning_rate_factor(step, 4, 20) for step in range(21)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[12] == pytest.approx(0.5) and factors[20] == pytest.approx(0.0)
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert learning_rate_factor(0, 0, 1) == 1.0
    assert [learning_rate_factor(step, 2, 20, "constant") for step in (0, 1, 2, 20)] == [0.5, 1.0, 1.0, 1.0]


def test_learning_rate_and_weight_decay_of_parameters() -> None:
    model = _model(init_values=0.1, reg_tokens=2)
    named = dict(model.named_parameters())
    for layer_decay in (1.0, 0.5):
        groups = parameter_groups(model, TrainConfig(lr=1.0, layer_decay=layer_decay, weight_decay=0.05))
        rates = {p: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
        assert len(rates) == len(named)
        for name, lr, weight_decay in (
            ("patch_embed.proj.weight", 0.125, 0.05), ("cls_token", 0.125, 0.0), ("pos_embed", 0.125, 0.0),
            ("reg_token", 0.125, 0.0), ("blocks.0.mlp.fc1.weight", 0.25, 0.05), ("blocks.0.ls1.gamma", 0.25, 0.0),
            ("blocks.1.norm1.bias", 0.5, 0.0), ("norm.weight", 1.0, 0.0), ("head.weight", 1.0, 0.05),
        ):  # fmt: skip
            assert rates[named[name]] == (1.0 if layer_decay == 1 else lr, weight_decay), name


def _step(images: torch.Tensor, **options: object) -> tuple[float, Trainer]:
    trainer = Trainer(_model(), TrainConfig(lr=1e-3, **options), 10, 0)
    torch.manual_seed(1)
    return trainer.step(images, torch.arange(len(images)) % 2).loss, trainer


def test_each_option_follows_its_formula() -> None:
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8) % 2
    model = _model()
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


def test_gradients_are_clipped_if_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim.AdamW, "zero_grad", lambda self, **how: None)  # to read the gradients afterwards
    images, norms = 100 * torch.randn(8, 3, 32, 32), []
    for limit in (0.0, 0.1):
        _, trainer = _step(images, max_grad_norm=limit)
        norms.append(torch.nn.utils.get_total_norm([parameter.grad for parameter in trainer.parameters]).item())
    assert norms[0] > 0.2 and norms[1] == pytest.approx(0.1, rel=1e-3)


def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    trainer = Trainer(_model(), TrainConfig(), 4, 0)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.raises(TrainingError, match="loss must be finite, got nan"):
        trainer.step(torch.full((2, 3, 32, 32), float("nan")), torch.zeros(2, dtype=torch.int64))
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def _losses_of_32_steps(backend: str = "eager", **options: object) -> torch.Tensor:
    """Trains on crops of a photo, labeled by their location, and returns the losses."""
    photo = load_images([sample_image()], create_model("vit_test", img_size=128))[0]
    crops = photo.unfold(1, 32, 32).unfold(2, 32, 32).permute(1, 2, 0, 3, 4).reshape(16, 3, 32, 32)
    trainer = Trainer(_model(backend=backend), TrainConfig(lr=1e-3, **options), 32, 4)
    return torch.tensor([trainer.step(crops, torch.arange(16) // 4 % 2).loss for _ in range(32)])


def test_losses_of_32_steps_match_eager() -> None:
    eager = _losses_of_32_steps()
    assert eager[-1] < 0.5 * eager[0]
    other = _losses_of_32_steps("sdpa", grad_checkpointing=True, accumulation=4)
    assert (other - eager).abs().max() <= 2e-5
    difference = (_losses_of_32_steps(dtype="bf16") - eager).abs()
    # the loss jumps from step 10 on; rounding decides when, by torch's version
    assert 0 < difference[:9].max() <= 5e-3 and difference[-8:].max() <= 5e-2


@pytest.mark.parametrize("steps", [4, pytest.param(50, marks=pytest.mark.slow(minutes=True))])
def test_losses_of_the_kernels_match_eager(steps: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, labels = torch.randn(4, 3, 16, 16), torch.arange(4) % 2
    losses = {}
    for backend in ("eager", "triton"):
        model = _model(img_size=16, embed_dim=16, depth=1, num_heads=1, backend=backend)
        trainer = Trainer(model.to(device), TrainConfig(lr=1e-3, ema_decay=0.9), 50, 4)
        losses[backend] = torch.tensor([trainer.step(images, labels).loss for _ in range(steps)])
    assert losses["eager"][-1] < losses["eager"][0]
    assert (losses["triton"] - losses["eager"]).abs().max() <= (2e-5 if device == "cpu" else 1e-2)  # there TF32
