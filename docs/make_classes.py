"""Prints classes.md, a table of the Vision Transformers of timm and transformers. `make classes` runs this file.

All models are built on the meta device, where weights take no memory. Of models that are not fused by their class, the
smallest of each class is built again on the CPU, where `fuse` reads what it computes.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import vit_fast
from vit_fast.blocks.fusion_report import UNKNOWN
from vit_fast.libraries.known import packed_tower

LIBRARIES = ("timm", "transformers")
HEADER = """# Supported classes

These tables list what `vit_fast.fuse` does with each Vision Transformer class, tested with
{versions}. The column "outcome" contains:

- **fused**: `fuse` replaces all attention and all norm + MLP modules.
- **fused; only attention cores in X**: Of X, `fuse` replaces softmax(scale * q k^T) v, and keeps the other operators.
- **partly**: `fuse` replaces some of these modules. The table contains the reasons for skipping the rest.
- **skipped**: `fuse` replaces none of these modules. The table contains the reasons.
- **not checked**: The class needs a package that was not installed, or reading it was stopped.
- **token budgets**: `GraphRunner(tower, budgets=...)` runs CUDA graphs for [images of any size](howto/towers.md).
- **token budgets, one size**: `GraphRunner(tower, budgets=...)` runs CUDA graphs for images of one size.

For most other fused classes, `GraphRunner(model, example)` runs CUDA graphs for images of one size.

`fuse` gets no example; it makes one for models that state the size of their images, patches or clips. Each timm class
is tested with the named model, each transformers class with its default configuration. If possible, models have at most
two blocks per stage, and images at most {most} pixels per side; timm's keep up to 512. Models of transformers with a
task head are not tested. `make classes` writes this page.
"""
MOST = 256  # pixels
CONVOLUTIONAL = {"byobnet", "byoanet", "resnest", "sknet", "cpubone", "lowformer", "mobilenetv5"}  # modules of timm
# classes of transformers: parts of models, heads, and models that contain a tower; TOWERS are towers in spite of this
NO_TOWER = re.compile(
    r"For[A-Z]|PreTrained(Model)?$|Backbone$|Text|Decoder|Encoder(Model)?$|Processor|WithProjection|Stack$"
)
ATTENTION = re.compile(r"Attention|Attn[A-Z]|softmax|vision_transformer")  # in the source of a module of timm
SIZES = (
    "test", "atto", "femto", "pico", "nano", "xxs", "xs", "tiny", "small", "medium", "base", "large", "xlarge", "huge",
    "giant", "gigantic", "enormous",
)  # fmt: skip
TOWERS = {"DPTModel", "LwDetrViTBackbone", "RfDetrDinov2Backbone", "VitPoseBackbone"}


def row(where: str, name: str, tested: str, found: str) -> str:
    return f"| {where} | {name} | {tested} | {found} |"


def outcome(model: nn.Module) -> str | None:
    """Returns the result of `fuse` for a model; None if it contains no attention."""
    report = vit_fast.fuse(model, backend="sdpa")
    if not any("attention" in module.part or "Block" in module.class_name for module in report.modules):
        return None
    reasons = dict.fromkeys(reason for module in report.skipped for reason in module.reasons)
    unknown = [reason.removesuffix(f" {UNKNOWN}") for reason in reasons if reason.endswith(UNKNOWN)]
    texts = [" ".join(reason.split()).replace("|", "/") for reason in reasons if not reason.endswith(UNKNOWN)]
    texts += dict.fromkeys(f"fused if called {module.condition}" for module in report.conditional)
    texts += [f"unknown classes: {', '.join(unknown)}"] if unknown else []
    if texts:
        return f"{'partly' if report.fused else 'skipped'}: {'; '.join(texts)}"
    tower = packed_tower(model)
    cores = dict.fromkeys(module.class_name for module in report.fused if module.part == "attention core")
    texts = ["fused", *([f"only attention cores in {', '.join(cores)}"] if cores else [])]
    texts += [] if tower is None else [f"token budgets{'' if tower.needs_fused else ', one size'}"]
    return "; ".join(texts)


def outcome_of(build: Callable[[], nn.Module], on_meta: str | None) -> str | None:
    """Returns the result of `fuse` on the CPU, unless the classes in the model decide it on the meta device."""
    return on_meta if on_meta is None or on_meta.startswith("fused") else outcome(build()) or on_meta


def timm_model(name: str) -> nn.Module:
    """Builds a model with one block if it has equal blocks; most models with stages do not accept `depth`."""
    import timm

    options: dict[str, Any] = {}
    stated = timm.get_pretrained_cfg(name)
    if stated is not None and stated.input_size[-1] > 512:
        options["pretrained_cfg_overlay"] = {"input_size": (3, MOST, MOST)}
    for tried in ({"img_size": MOST, "depth": 1}, {"img_size": MOST}) if options else ():
        with contextlib.suppress(Exception):
            return timm.create_model(name, **tried, **options)
    with contextlib.suppress(Exception):
        return timm.create_model(name, depth=1, **options)
    return timm.create_model(name, **options)


def timm_outcome(name: str) -> tuple[str, str | None]:
    """Returns the class of one of timm's models, and the result of `fuse`."""
    with torch.device("meta"):
        model = timm_model(name)
    return type(model).__name__, outcome_of(lambda: timm_model(name), outcome(model))


def timm_models() -> dict[tuple[str, str, str], str]:
    """Returns one of the smallest models of each class and result of `fuse` on the meta device, by module and both.

    Of models whose names differ only in sizes, only the smallest is built.
    """
    import timm

    def size_of(name: str) -> tuple[int, str]:
        return min((SIZES.index(word) for word in name.split("_") if word in SIZES), default=len(SIZES)), name

    alike: dict[str, str] = {}
    for name in sorted(timm.list_models(), key=size_of):
        alike.setdefault(re.sub(rf"\d+|{'|'.join(SIZES)}", "", name), name)
    models: dict[tuple[str, str, str], str] = {}
    for name in alike.values():
        home = timm.model_entrypoint(name).__module__
        where = home.removeprefix("timm.models.")
        if where in CONVOLUTIONAL or not ATTENTION.search(inspect.getsource(sys.modules[home])):
            continue
        with torch.device("meta"):
            model = timm_model(name)
        if (found := outcome(model)) is not None:
            models.setdefault((where, type(model).__name__, found), name)
    return models


def timm_rows() -> Iterator[str]:
    for (where, cls, _), name in sorted(timm_models().items()):
        if (found := timm_outcome(name)[1]) is not None:
            yield row(where, cls, name, found)


def transformers_outcome(cls: Any) -> str | None:
    """Returns the result of `fuse` for a model of a class, with two layers per stage if their number can be set."""
    config = cls.config_class()
    patch = getattr(config, "patch_size", 1)
    size = MOST - MOST % (patch if isinstance(patch, int) else 1)
    for name, most in (("num_hidden_layers", 2), ("depth", 2), ("depths", 2), ("image_size", size)):
        value = getattr(config, name, None)
        if isinstance(value, int | list):
            with contextlib.suppress(NotImplementedError):  # a name that stands for a list of depths
                setattr(
                    config, name, min(value, most) if isinstance(value, int) else [min(each, most) for each in value]
                )

    def build() -> nn.Module:
        return cls(copy.deepcopy(config))

    with torch.device("meta"):
        on_meta = outcome(build())
    return outcome_of(build, on_meta)


def transformers_rows() -> Iterator[str]:
    """Yields the rows of all transformers models that take nothing but images."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    for file in sorted(Path(transformers.models.__path__[0]).glob("*/modeling_*.py")):
        if "pixel_values" not in file.read_text():
            continue
        folder = file.parent.name
        module = importlib.import_module(f"transformers.models.{folder}.{file.stem}")
        for name, cls in vars(module).items():
            own = isinstance(cls, type) and cls.__module__ == module.__name__
            if not own or not issubclass(cls, transformers.PreTrainedModel):
                continue
            if name not in TOWERS and (NO_TOWER.search(name) or not _is_tower(cls)):
                continue
            try:
                found = transformers_outcome(cls)
            except ImportError as error:  # of a library that it needs
                missing = re.search(r"requires the (\w+)|named '(\w+)'", str(error))
                found = f"not checked: needs {next(filter(None, missing.groups())) if missing else 'more libraries'}"
            if found is not None:
                yield row(folder, name, "default", found)


def _is_tower(cls: Any) -> bool:
    config = getattr(cls, "config_class", None)
    if config is None or getattr(config, "sub_configs", None):
        return False
    return re.search("pixel_values|patches|grid_thw", str(inspect.signature(cls.forward))) is not None


def versions() -> str:
    return ", ".join(f"{name} {importlib.import_module(name).__version__}" for name in LIBRARIES)


def table() -> str:
    lines = [HEADER.format(versions=versions(), most=MOST)]
    for library, rows in (("timm", timm_rows), ("transformers", transformers_rows)):
        found = []
        for line in rows():
            sys.stderr.write(f"{line}\n")  # progress
            found.append(line)
        fused = sum("| fused" in line for line in found)
        header = ["| module | class | tested with | outcome |", "|---|---|---|---|"]
        lines += [f"\n## {library}: {fused} of {len(found)} fused\n", *header, *found]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.stdout.write(table())
