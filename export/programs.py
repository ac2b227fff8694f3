"""Programs of torch.export: decompositions, and fp32 for constants that fp16 would make infinite.

Constants are parameters, buffers, tensors of the code, and numbers such as 3e5 in `x + 3e5`. What depends on constants
only stays in fp32. Other operators that read them compute in fp32, and their outputs are cast to fp16; `half.py`
measures these. ONNX's graph cannot be repaired instead, because it contains infinities.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from .call import Call, cast

aten = torch.ops.aten
FP16_MAX = torch.finfo(torch.float16).max  # 65504
FILLS = (aten.full_like.default, aten.new_full.default)  # do not depend on the values of their input

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# torch.export would lose the casts of torch.autocast around these
CAST: dict[Any, Callable[..., Tensor]] = {
    aten.linear.default: lambda x, weight, bias=None: x @ weight.T if bias is None else x @ weight.T + bias,
    aten.conv2d.default: lambda x, weight, bias=None, stride=(1,), padding=(0,), dilation=(1,), groups=1: (
        aten.convolution(x, weight, bias, stride, padding, dilation, False, (0,), groups)
    ),
}


class Exported(nn.Module):
    """Runs the model in its dtype, with inputs and outputs in fp32."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.model, self._call = call.vit.model, call
        self.mixes_dtypes = False  # the model's code fixes dtypes, e.g. by x.float()
        self.outputs = SimpleNamespace(names=[])  # torch.export would restore an attribute that is a list

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        dtype = DTYPES[self._call.options.dtype]
        with torch.autocast("cpu", dtype) if self.mixes_dtypes else contextlib.nullcontext():
            found = self._call(cast(inputs, dtype))
        self.outputs.names = list(found)
        return tuple(cast(list(found.values()), torch.float32))


def decomposed(
    exported: ExportedProgram, table: Mapping[Any, Callable[..., Any]], original: nn.Module | None
) -> ExportedProgram:
    """Replaces operators by their decompositions.

    `original` is the program's `model` in fp32, if it is in fp16. Then, large constants and their readers are in fp32.
    """
    graphs = [part.graph for part in exported.graph_module.modules() if isinstance(part, fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes]
    has_large = original is not None and (
        any(map(_has_large_number, nodes)) or any(_exceeds(x) for *_, x in _constants(exported, original))
    )
    if has_large or any(node.target in table for node in nodes):
        exported = exported.run_decompositions(dict(table))  # torch.onnx.export would repeat the work
    if has_large and original is not None:
        _widen_constants(exported, original)
    return exported


def _exceeds(x: Tensor) -> bool:
    """Returns True if fp16 makes finite elements infinite."""
    x = x.detach()
    if not (x.is_floating_point() and x.numel()) or max(map(abs, x.aminmax())) <= FP16_MAX:
        return False
    return bool((x.half().isinf() & x.isfinite()).any())


def _has_large_number(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    arguments = node.target._schema.arguments
    given = [*zip(arguments, node.args), *((a, node.kwargs[a.name]) for a in arguments if a.name in node.kwargs)]
    numbers = [x for a, x in given if isinstance(x, int | float) and "int" not in str(a.type).lower()]  # no sizes
    return any(FP16_MAX < abs(x) < math.inf for x in numbers)


def _constants(exported: ExportedProgram, original: nn.Module) -> list[tuple[str, dict[str, Any], str, Tensor]]:
    """Returns for each constant: the name of its node, where the program stores it, and its value, if known in fp32."""
    both = (original.named_parameters(remove_duplicate=False), original.named_buffers(remove_duplicate=False))
    in_fp32, signature = {f"model.{name}": x for name, x in chain(*both)}, exported.graph_signature
    names = signature.inputs_to_parameters | signature.inputs_to_buffers | signature.inputs_to_lifted_tensor_constants
    found = []
    for name, target in names.items():
        stored: Any = exported.state_dict if target in exported.state_dict else exported.constants
        found.append((name, stored, target, in_fp32.get(target, stored[target])))
    return found


def _widen_constants(exported: ExportedProgram, original: nn.Module) -> None:
    """Makes a functional program store and read large constants in fp32, in place."""
    graph, placeholders = exported.graph, {node.name: node for node in exported.graph.nodes}
    constant, wide = set[fx.Node](), set[fx.Node]()  # `wide`: constants in fp32, and nodes with several outputs
    for name, stored, target, value in _constants(exported, original):
        constant.add(node := placeholders[name])
        if _exceeds(value):
            wide.add(node)
            stored[target], node.meta["val"] = value, node.meta["val"].float()

    def cast_node(x: fx.Node, dtype: torch.dtype, near: fx.Node) -> fx.Node:
        made = graph.call_function(aten._to_copy.default, (x,), {"dtype": dtype})
        made.meta = dict(near.meta)  # scope and, of an output, the type
        return made

    for node in [node for node in graph.nodes if node.op == "call_function"]:
        if node.target == aten._assert_tensor_metadata.default:  # of types that this function changes
            graph.erase_node(node)
            continue
        inputs, outputs = node.all_input_nodes, pytree.tree_leaves(node.meta.get("val"))
        if is_constant := node.target in FILLS or all(each in constant for each in inputs):
            constant.add(node)
        if not _has_large_number(node) and wide.isdisjoint(inputs):
            continue
        for each in set(inputs) - wide:
            if getattr(each.meta.get("val"), "dtype", None) == torch.float16:
                with graph.inserting_before(node):
                    node.replace_input_with(each, cast_node(each, torch.float32, node))
        if node.kwargs.get("dtype") == torch.float16:
            node.update_kwarg("dtype", torch.float32)
        if is_constant or len(outputs) > 1:
            wide.add(node)
        elif any(getattr(y, "dtype", None) == torch.float16 for y in outputs):
            with graph.inserting_after(node):
                half = cast_node(node, torch.float16, node)
            node.replace_all_uses_with(half, lambda user, half=half: user is not half)
    exported.graph_module.recompile()
