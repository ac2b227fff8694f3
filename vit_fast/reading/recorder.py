"""Makes an example, runs a model on it, and records the calls of its modules and what attends in them."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from ..ops.attention import as_attention
from .calls import Call
from .capture import UnreadableError
from .elements import is_matrix
from .forms import Recipe, hidden_name
from .scores import SDPA, Follower

TEXT_LENGTH = 8  # tokens, for models that get text and images
_SOFTMAX = {"_softmax", "_safe_softmax"}  # their inputs may be no scores, e.g. of a router
_ACTIVATIONS = {
    "gelu", "relu", "silu", "sigmoid", "tanh", "erf", "mish", "hardswish", "hardsigmoid", "hardtanh", "leaky_relu",
    "elu", "softplus",
}  # fmt: skip
_PRODUCTS = {"bmm", "baddbmm", "mm", "addmm"}
_KINDS = ("", "parameter", "activation", "scores", "attention")  # "scores" is any product of two activations
_NOTHING: tuple[str, list[nn.Module]] = ("", [])


@dataclass
class Record:
    """A call of a module in the forward of the example."""

    call: Call | None
    problem: str  # why there is no `call`
    tensors: Sequence[Tensor] = ()  # the tokens, then other tensors
    y: Any = None
    computed: int = 0  # elements of all tensors that the module computed

    @property
    def x(self) -> Tensor | None:
        return self.tensors[0] if self.tensors else None

    def equals(self, other: Record) -> bool:
        """Returns True if tokens and output are equal."""
        pairs = (self.x, other.x), (self.y, other.y)
        return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


@dataclass
class Found:
    """The modules of a model that were read, or the reasons why not."""

    is_read: bool = False  # False without an example
    recipes: dict[nn.Module, Recipe] = field(default_factory=dict)
    reasons: dict[nn.Module, str] = field(default_factory=dict)
    problems: dict[nn.Module, str] = field(default_factory=dict)  # of the call of each module that ran; "" if none
    cores: Counter[nn.Module] = field(default_factory=Counter)  # softmax attention computed in a module
    own: Counter[nn.Module] = field(default_factory=Counter)  # of these, not in one of its submodules
    mlps: Counter[nn.Module] = field(default_factory=Counter)  # linear layers of activations, not in a submodule
    # head_dim of the cores of a module that `attention` can compute
    widths: dict[nn.Module, list[int]] = field(default_factory=dict)
    spelled: set[nn.Module] = field(default_factory=set)  # with cores that do not call torch's function

    def width_of_cores(self, module: nn.Module) -> int | None:
        """Returns the largest head_dim if `attention` can compute all attention cores of a module."""
        widths = self.widths.get(module, [])
        fits = len(widths) == self.own[module] > 0 and hidden_name(module) is None
        return max(widths) if fits else None


class _Recorder(TorchDispatchMode):
    """Records the first call of each module, and counts the attention cores and MLPs in it."""

    supports_higher_order_operators = True  # e.g. FlexAttention, which compiles itself

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, model: nn.Module, found: Found) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.stack: list[nn.Module] = []  # modules whose forward runs
        self.records: dict[nn.Module, Record] = {}
        self.found, self.model = found, model
        self.computed: Counter[nn.Module] = Counter()  # elements, by module whose forward runs
        self.follower = Follower()
        self.origins: Any = WeakTensorKeyDictionary()  # of tensors; see `_origin`
        for tensor in (*model.parameters(), *model.buffers()):
            self.origins[tensor] = "parameter", []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "overloadpacket", func).__name__.rstrip("_")
        origin = self._origin(name, [each for each in tree_leaves(args) if isinstance(each, Tensor)])
        for each in tree_leaves(output):
            if isinstance(each, Tensor):
                self.computed.update(dict.fromkeys(self.stack, each.numel()))
                if origin[0] or each in self.origins:
                    self.origins[each] = origin
        return output

    def _origin(self, name: str, tensors: Sequence[Tensor]) -> tuple[str, list[nn.Module]]:
        """Returns what an operator computes, one of _KINDS, and the modules in which this began."""
        given: list[tuple[str, list[nn.Module]]] = [self.origins.get(each, _NOTHING) for each in tensors]
        kind, began = strongest = max(given, key=lambda each: _KINDS.index(each[0]), default=_NOTHING)
        kinds, now = {each for each, _ in given}, list(self.stack)
        if "scaled_dot_product" in name or "flex_attention" in name:
            return "attention", self._count(now)
        if name in _PRODUCTS or (name == "convolution" and _is_linear(*tensors[:2])):
            inside = [part for part, other in zip(began, now) if part is other]  # e.g. the softmax may be a module
            if "parameter" not in kinds:
                return ("attention", self._count(inside)) if kind == "scores" else ("scores", now)
            if kind == "activation":
                self.found.mlps.update(inside[-1:])
            return strongest if kind == "scores" else _NOTHING  # a linear layer may mix the scores of heads
        if name in _SOFTMAX:
            return "scores", now
        if name in _ACTIVATIONS and kind in ("", "activation"):
            return "activation", now
        is_sum = name == "add" and sum(each.dim() > 0 for each in tensors) > 1
        ends = is_sum if kind in ("activation", "attention") else kind == "parameter" and len(kinds) > 1
        return _NOTHING if ends else strongest

    def _count(self, stack: list[nn.Module]) -> list[nn.Module]:
        self.found.cores.update(set(stack))
        self.found.own.update(stack[-1:])
        return list(stack)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.stack.append(module)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.stack.pop()
        computed = self.computed.pop(module, 0)
        self.follower.use(output, "returned", only=True)
        if module not in self.records:
            with torch._C.DisableTorchFunction():
                self._record(module, args, kwargs, output, computed)

    def _record(self, module: nn.Module, args: Any, kwargs: Any, output: Any, computed: int) -> None:
        try:
            call, tensors = Call.of(args, kwargs, output)
        except UnreadableError as error:
            self.records[module] = Record(None, str(error))
            return
        x, y = tensors[0], call.computed(output, call.arguments(*tensors)[0])
        self.records[module] = Record(call, call.problem)
        is_usual = 3 <= x.dim() <= 5 or (x.dim() == 2 and self.found.cores[module] > 0)  # not the MLP of a head
        if is_usual and y.shape == x.shape and x.is_floating_point():
            copies = [each.detach().clone() for each in (*tensors, y)]
            self.records[module] = Record(call, call.problem, copies[:-1], copies[-1], computed)


def _is_linear(x: Tensor, weight: Tensor) -> bool:
    """Returns True for a convolution of single positions, more than one of which exist."""
    return is_matrix(weight) and x.shape[2:].numel() > 1


class _Functions(TorchFunctionMode):
    """Records the attention cores that `attention` can compute."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stack, output = self.recorder.stack, func(*args, **(kwargs or {}))
        if func is SDPA and stack and as_attention(*args, **(kwargs or {})) is not None:
            widths = self.recorder.found.widths.setdefault(stack[-1], [])
            widths.append((args[0] if args else kwargs["query"]).shape[-1])
        elif stack and not torch.compiler.is_compiling():  # e.g. FlexAttention, which compiles itself
            self.recorder.follower.see(stack[-1], func, args, kwargs or {}, output)
        return output


def recorded(model: nn.Module, example: Any, found: Found) -> dict[nn.Module, Record]:
    """Runs the model in evaluation mode; the attributes of its modules stay the same."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example, dict):
        kwargs = example
    else:
        args = example if isinstance(example, tuple) else (example,)
    _load_dynamo()
    recorder = _Recorder(model, found)
    with ExitStack() as undo:
        scripted = torch.jit.ScriptModule  # supports no hooks
        for part in [each for each in model.modules() if not isinstance(each, scripted)]:
            undo.callback(restore, vars(part), copy.copy(vars(part)))
            for held in vars(part).values():
                if type(held) in (dict, list, set):  # e.g. a cache of biases that forward computes
                    undo.callback(restore, held, copy.copy(held))
            part.training = False
            undo.callback(part.register_forward_pre_hook(recorder.enter, with_kwargs=True).remove)
            undo.callback(part.register_forward_hook(recorder.leave, with_kwargs=True).remove)
        undo.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            recorder,
            _Functions(recorder),
        ):
            model(*args, **kwargs)
    for part, scores, width in recorder.follower.cores:
        if not scores.others:
            found.widths.setdefault(part, []).append(width)
            found.spelled.add(part)
    return recorder.records


def _load_dynamo() -> None:
    """Loads torch._dynamo, which torch's modes and captures use: outside of a mode and without gc, in half the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("torch._dynamo")
    finally:
        if was_enabled:
            gc.enable()


def restore(held: Any, before: Any) -> None:
    held.clear()
    (held.extend if isinstance(held, list) else held.update)(before)


def examples_of(model: nn.Module) -> Iterator[Any]:
    """Yields inputs, one of which the model may accept, in its dtype; none if it does not state the size of an image.

    The inputs are a random image [1, channels, height, width], for a model whose forward gets text the image with token
    ids and boxes; a clip [1, frames, ...], or frames as a batch; and flattened patches [1, patches, values]. Models
    whose forward gets `grid_thw` get the packed patches of two images.
    """
    yield from _packed_patches(model)
    sizes, config = _image_size(model), getattr(model, "config", None)
    convs = (each for each in model.modules() if isinstance(each, nn.Conv2d | nn.Conv3d))
    weight = getattr(next(convs, None), "weight", next(iter(model.parameters()), None))
    if sizes is None or weight is None or weight.is_meta or not weight.is_floating_point():
        return
    stated = getattr(config, "num_channels", 3) if weight.dim() < 4 else weight.shape[1]
    channels = (_timm_size(model) or (stated,))[0]
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, channels, *sizes, generator=generator, device="cpu").to(weight.device, weight.dtype)
    names = _arguments_of(model)
    if "input_ids" in names and "pixel_values" in names:
        ids = torch.ones(1, TEXT_LENGTH, dtype=torch.long, device=weight.device)
        text = {"input_ids": ids, "bbox": ids[..., None].expand(-1, -1, 4)}
        yield {"pixel_values": image} | {name: value for name, value in text.items() if name in names}
        return
    yield image
    frames, patch = (getattr(config, name, None) for name in ("num_frames", "patch_size"))
    frames = getattr(config, "tubelet_size", None) if frames is None else frames  # V-JEPA 2 accepts any number
    if isinstance(frames, int):
        yield image[:, None].expand(-1, frames, -1, -1, -1)
        yield image.expand(frames, -1, -1, -1)
    if isinstance(patch, int) and all(size % patch == 0 for size in sizes):
        yield _patches(image, patch)


def _arguments_of(model: nn.Module) -> list[str]:
    """Returns the names of the arguments of forward; none for a scripted module or a builtin function."""
    try:
        return list(inspect.signature(model.forward).parameters)
    except (AttributeError, TypeError, ValueError):
        return []


def _packed_patches(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yields patches [total, values], [total, ...] or [1, total, ...] of two images, and their sizes in patches."""
    names = _arguments_of(model)
    grid = next((name for name in names if name.endswith("grid_thw")), None)
    embeds = (each for each in model.modules() if isinstance(each, nn.Conv2d | nn.Conv3d | nn.Linear))
    weight = getattr(next(embeds, None), "weight", None)
    if grid is None or weight is None or weight.is_meta or not weight.is_floating_point():
        return
    sizes = torch.tensor([[1, 4, 4], [1, 8, 4]], device=weight.device)
    others = {"merge_sizes": torch.ones(2, dtype=torch.long, device=weight.device)} if "merge_sizes" in names else {}
    patches = torch.randn(48, *weight.shape[1:], generator=torch.Generator().manual_seed(0), device="cpu").to(weight)
    for shaped in (patches.flatten(1), patches, patches[None]):
        yield {names[0]: shaped, grid: sizes} | others


def _image_size(model: nn.Module) -> tuple[int, int] | None:
    """Returns the size that a model states.

    It is an attribute of the model, its patch embedding or its configuration, or timm's `pretrained_cfg["input_size"]`.
    """
    owners = (getattr(model, "patch_embed", None), model, getattr(model, "config", None))
    names = "img_size", "image_size", "input_size", "crop_size"
    stated = [getattr(owner, name, None) for owner in owners for name in names]
    size: Any = next((each for each in stated if each), None)
    if size is None:
        size = (_timm_size(model) or (None,))[-1]
    sizes = tuple(size) if isinstance(size, list | tuple) else (size, size)
    return sizes if len(sizes) == 2 and all(type(each) is int for each in sizes) else None


def _timm_size(model: nn.Module) -> Any:
    """Returns channels, height and width in timm's configuration; None if there are none."""
    cfg = getattr(model, "pretrained_cfg", None)
    return cfg.get("input_size") if isinstance(cfg, dict) else None


def _patches(image: Tensor, size: int) -> Tensor:
    """Returns patches [1, patches, size * size * channels] of an image."""
    cut = image.unfold(2, size, size).unfold(3, size, size)
    return cut.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)
