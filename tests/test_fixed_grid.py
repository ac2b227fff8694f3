"""FixedGrid: outputs match those of the library, and forward reads nothing on the host."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from graph_tapes import NoHost
from kernel_support import DEVICE
from packed_towers import FAMILIES, TOWERS
from torch import Tensor

import vit_fast
from vit_fast.errors import UnsupportedInputError
from vit_fast.export import OnnxRunner, export_onnx

transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("transformers.vision_utils")

IMAGE = (24, 40)  # 6 x 10 patches of 4 x 4 pixels; windows of 4 x 4 patches, some of them smaller


def qwen(tower: torch.nn.Module, images: Tensor) -> Tensor:
    """Returns the tower's output for the patches and grids of transformers' processor."""
    plain = dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), False)
    processor = transformers.Qwen2VLImageProcessor(patch_size=4, temporal_patch_size=2, merge_size=2, **plain)
    made = processor(list(images.cpu()), return_tensors="pt").to(DEVICE)
    out: Tensor = tower(made["pixel_values"], made["image_grid_thw"]).pooler_output
    return out.unflatten(0, (len(images), -1))


def padded(tower: torch.nn.Module, images: Tensor) -> Tensor:
    """Returns the output of SigLIP 2 or NaFlexViT for patches with the channels last."""
    batch, _, height, width = images.shape
    cells = images.reshape(batch, 3, height // 4, 4, width // 4, 4).permute(0, 2, 4, 3, 5, 1)
    patches = cells.reshape(batch, -1, 3 * 4 * 4)
    mask = torch.ones(patches.shape[:2], dtype=torch.bool, device=DEVICE)
    if "Siglip2" in type(tower).__name__:
        shapes = torch.tensor([[height // 4, width // 4]] * batch, device=DEVICE)
        return tower(patches, mask.long(), shapes).pooler_output  # type: ignore[no-any-return]  # of transformers
    grid = torch.cartesian_prod(*(torch.arange(side // 4, device=DEVICE) for side in (height, width)))
    return tower(patches, grid.expand(batch, -1, -1), mask)  # type: ignore[no-any-return]  # of timm


CALLS = {"qwen2_vl": qwen, "qwen2_5_vl": qwen}
CALLS |= dict.fromkeys(("siglip2", "naflexvit", "naflexvit, axial, registers", "naflexvit, pooling head"), padded)


@pytest.mark.each_value
@pytest.mark.parametrize("backend", ["", "sdpa", "triton"])
@pytest.mark.parametrize("name", CALLS)
def test_outputs_match_those_of_the_tower(name: str, backend: str) -> None:
    tower, images = FAMILIES[name].build().eval(), torch.rand(3, 3, *IMAGE, device=DEVICE)
    with torch.no_grad():
        expected = CALLS[name](copy.deepcopy(tower), images)
        if backend:
            vit_fast.fuse(tower, backend).require_all()
        model = vit_fast.FixedGrid(tower, IMAGE)
        for batch in (3, 1):
            torch.testing.assert_close(model(images[:batch]), expected[:batch], rtol=1e-3, atol=1e-4)


def test_cuda_graphs_and_compile_capture_it() -> None:
    """Runs frozen in half precision. NoHost raises an error for reads on the host, like the capture of a CUDA graph."""
    model = vit_fast.FixedGrid(TOWERS["qwen2_5_vl"].build().eval().half(), IMAGE)
    vit_fast.fuse(model, "triton").require_all()
    vit_fast.freeze(model)
    images = torch.rand(2, 3, *IMAGE, device=DEVICE).half()
    runner = vit_fast.GraphRunner(model, images, batch_sizes=(1, 2), fallback="eager")
    with torch.no_grad():
        expected = model(images)
        with NoHost():
            found = model(images)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(images), expected, rtol=1e-2, atol=1e-2)
    assert torch.equal(found, expected)
    assert runner.captured is torch.cuda.is_available()
    torch.testing.assert_close(runner(images), expected)
    assert all(buffer.device.type == "meta" for buffer in model.to("meta").buffers())
    assert all(name.startswith("tower.") for name in model.state_dict())


@pytest.mark.fast_cases("naflexvit")
@pytest.mark.parametrize("name", ["qwen2_5_vl", "siglip2", "naflexvit"])
def test_it_is_exported(name: str, tmp_path: Path) -> None:
    model = vit_fast.FixedGrid(FAMILIES[name].build().eval(), IMAGE)
    if "qwen" in name:
        with pytest.raises(UnsupportedInputError, match=r"blocks\.0\.attn must be fused: call vit_fast.fuse"):
            export_onnx(model, tmp_path / "m.onnx")
    vit_fast.fuse(model, "sdpa")
    assert export_onnx(model, tmp_path / "m.onnx").verified
    runner, images = OnnxRunner(tmp_path / "m.onnx", "cpu"), torch.rand(3, 3, *IMAGE, device=DEVICE)
    for batch in (1, 3):
        with torch.no_grad():
            expected = model(images[:batch]).cpu()
        torch.testing.assert_close(runner(images[:batch].cpu()), expected, rtol=1e-3, atol=1e-4)


def test_errors() -> None:
    tower = TOWERS["qwen2_vl"].build()
    with pytest.raises(ValueError, match=r"image_hw must be multiples of \(8, 8\) pixels, got \(20, 16\)"):
        vit_fast.FixedGrid(tower, (20, 16))
    for shape in ((1, 3, 16, 16), (3, 1, *IMAGE), (3, *IMAGE)):
        given = re.escape(str(shape))
        with pytest.raises(ValueError, match=rf"images must have shape \[B, 3, 24, 40\], got {given}"):
            vit_fast.FixedGrid(tower, IMAGE)(torch.zeros(shape, device=DEVICE))
    with pytest.raises(UnsupportedInputError, match=r"tower must be one of Qwen2Vision.*, got a Qwen3VLVisionModel"):
        vit_fast.FixedGrid(TOWERS["qwen3_vl"].build(), IMAGE)
