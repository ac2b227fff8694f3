"""fuse reads attention among packed sequences, whose bounds cu_seqlens are an argument of forward."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from spellings import Packed, runs_fused
from torch import Tensor, nn

import vit_fast

BOUNDS = ([0, 5, 20], [0, 20], [0, 1, 4, 5, 31], [0, 9, 18])


def halves_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]


def by_split(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
    """Splits q, k and v like the towers of Qwen."""
    lengths = (cu[1:] - cu[:-1]).tolist()
    parts = [torch.split(each.transpose(0, 1)[None], lengths, dim=2) for each in (q, k, v)]
    return torch.cat([F.scaled_dot_product_attention(*each) for each in zip(*parts)], 2)[0].transpose(0, 1)


def by_loop(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
    bounds, found = cu.tolist(), []
    for start, end in itertools.pairwise(bounds):
        parts = (each[start:end].transpose(0, 1) for each in (q, k, v))
        found.append(F.scaled_dot_product_attention(*parts, scale=0.2).transpose(0, 1))
    return torch.cat(found)


SPELLINGS: dict[str, Callable[..., Tensor]] = {"split": by_split, "loop": by_loop}


class Block(Packed):
    """Heads of 16 channels. Tokens are [total, C] or [1, total, C]."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__(32, 2)
        self.among = attend

    def forward(self, x: Tensor, cu_seqlens: Tensor, rope: Any = None) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(-1, 3, 2, 16).unbind(1)
        if rope is not None:
            q, k = halves_turned(q, *rope), halves_turned(k, *rope)
        x = x + self.out(self.among(q, k, v, cu_seqlens).flatten(1).view_as(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(attend) for _ in range(2))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, x: Tensor, cu_seqlens: Tensor, rope: Any = None) -> Tensor:
        for block in self.blocks:
            x = block(x, cu_seqlens, rope)
        return x


def inputs(bounds: Sequence[int], rotates: bool, dims: int = 2) -> tuple[Any, ...]:
    """Returns tokens, cu_seqlens and tables for some sequences."""
    angles = torch.randn(bounds[-1], 8)
    tables = tuple(torch.cat((each, each), -1) for each in (angles.cos(), angles.sin()))
    x = torch.randn(bounds[-1], 32)
    given = x if dims == 2 else x[None], torch.tensor(bounds, dtype=torch.int32)
    return (*given, tables) if rotates else given


def assert_near(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "rotates", "dims"), [("split", True, 2), ("split", False, 3), ("loop", True, 3)])
def test_packed_sequences(name: str, rotates: bool, dims: int) -> None:
    """Other calls may have any number of sequences and tokens."""
    torch.manual_seed(0)
    original = Model(SPELLINGS[name]).eval()
    model = copy.deepcopy(original)
    report = vit_fast.fuse(model, "eager", example=inputs(BOUNDS[0], rotates, dims)).require_all()
    assert [row.part for row in report.fused] == ["attention, norm + MLP"] * 2
    for bounds in BOUNDS:
        given = inputs(bounds, rotates, dims)
        assert runs_fused(model, functools.partial(model, *given))
        assert_near(model(*given), original(*given))
        for net in (model, original):
            net.zero_grad()
            net(*given).square().sum().backward()
        for a, b in zip(model.parameters(), original.parameters()):
            assert (a.grad is None) is (b.grad is None)
            assert a.grad is None or (a.grad - b.grad).norm() <= 1e-4 * b.grad.norm()
    vit_fast.fuse(model, "sdpa")
    vit_fast.freeze(model)
    with torch.inference_mode():
        for bounds in BOUNDS:
            given = inputs(bounds, rotates, dims)
            for net in (model, copy.deepcopy(model)):
                assert_near(net(*given), original(*given))
    x, bounds, *rope = inputs(BOUNDS[0], rotates, dims)
    assert_near(*(net(x, bounds.long(), *rope) for net in (model, original)))  # another dtype than captured
    for wrong in ([0, 5, 19], [0, 9, 5, 20], [1, 20], [20]):
        with pytest.raises((RuntimeError, ValueError), match=r"split_sizes|is invalid for input|non-empty"):
            model(x, torch.tensor(wrong, dtype=torch.int32), *rope)


@pytest.mark.slow
def test_kernels_run_packed_sequences() -> None:
    torch.manual_seed(0)
    original = Model(by_split).eval()
    model = copy.deepcopy(original)
    vit_fast.fuse(model, "triton", example=inputs(BOUNDS[0], True)).require_all()
    given = inputs(BOUNDS[0], True)
    for net in (model, original):
        net(*given).square().sum().backward()
    for a, b in zip(model.parameters(), original.parameters()):
        assert (a.grad is None) is (b.grad is None)
        assert a.grad is None or (a.grad - b.grad).norm() <= 1e-4 * b.grad.norm()
    assert len(vit_fast.freeze(model)) == 2
    with torch.inference_mode():
        assert_near(model(*given), original(*given))


def joined(cu: Tensor, *keep: int) -> Tensor:
    return torch.stack([each for i, each in enumerate(cu) if i in keep or i == len(cu) - 1])


HOSTILE: dict[str, Callable[..., Tensor]] = {
    "all tokens": lambda q, k, v, cu: by_split(q, k, v, cu[[0, -1]]),
    "first two sequences are one": lambda q, k, v, cu: by_split(q, k, v, torch.cat((cu[:1], cu[2:]))),
    "at most three sequences": lambda q, k, v, cu: by_split(q, k, v, joined(cu, 0, 1, 2)),
    "reversed lengths": lambda q, k, v, cu: by_split(q, k, v, cu[-1] - cu.flip(0)),
    "values of other sequences": lambda q, k, v, cu: by_split(q, k, v.flip(0), cu),
    "temperature of the first length": lambda q, k, v, cu: by_split(q * cu[1], k, v, cu),
    "fixed lengths": lambda q, k, v, cu: by_split(q, k, v, torch.tensor([0, 5, len(q)])),
    "long sequences apart": lambda q, k, v, cu: by_split(q, k, v, cu) * (1 if (cu[1:] - cu[:-1]).max() < 25 else 2),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_other_uses_of_bounds_are_read_or_refused(name: str) -> None:
    torch.manual_seed(0)
    original = Model(HOSTILE[name]).eval()
    model = copy.deepcopy(original)
    vit_fast.fuse(model, "eager", example=inputs(BOUNDS[0], True))
    for bounds in ([0, 5, 20], [0, 5, 7, 20], [0, 5, 9, 12, 15, 20], [0, 5, 7, 9, 18]):
        given = inputs(bounds, True)
        assert_near(model(*given), original(*given))


TOWERS: dict[str, dict[str, int]] = {
    "glm4v_moe.Glm4vMoeVision": {"depth": 2, "num_heads": 4, "out_hidden_size": 96},
    "video_llama_3.VideoLlama3Vision": {"num_hidden_layers": 2, "num_attention_heads": 4},
    "paddleocr_vl.PaddleOCRVision": {"num_hidden_layers": 2, "num_attention_heads": 4},
}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "image_size": 56, "patch_size": 14}


@pytest.mark.fast_cases("video_llama_3.VideoLlama3Vision")
@pytest.mark.parametrize("name", TOWERS)
def test_towers_of_transformers_need_no_example(name: str) -> None:
    """No class of these models has code of its own."""
    folder, prefix = name.split(".")
    pytest.importorskip("transformers")
    home: Any = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}", exc_type=ImportError)
    cls = getattr(home, f"{prefix}Model")
    torch.manual_seed(0)
    original = cls(cls.config_class(**SIZES | TOWERS[name])).eval()
    for parameter in original.parameters():
        nn.init.normal_(parameter, std=0.1)
    model = copy.deepcopy(original)
    report = vit_fast.fuse(model, "eager").require_all()
    assert [row.part for row in report.fused] == ["attention, norm + MLP"] * 2
    for grids in ([[1, 4, 4]], [[1, 8, 8], [1, 4, 8], [1, 4, 4]]):
        patches = torch.randn(sum(rows * columns for _, rows, columns in grids), 3, 14, 14)
        given: dict[str, Tensor] = {"grid_thw": torch.tensor(grids)}
        if folder == "glm4v_moe":
            given["hidden_states"] = patches[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1)
        else:
            given["pixel_values"] = patches.flatten(1) if folder == "video_llama_3" else patches[None]
            given |= {"merge_sizes": torch.ones(len(grids), dtype=torch.long)} if folder == "video_llama_3" else {}
        assert runs_fused(model, functools.partial(model, **given))
        with torch.no_grad():
            assert_near(*(net(**given)[0] for net in (model, original)))
