"""Keeps constants that fp16 would make infinite, and the operators that read them, in fp32.

Constants are parameters, buffers, tensors of the code, and numbers such as 3e5 in `x + 3e5`. What depends on constants
only stays in fp32. Other operators that read them compute in fp32, and their outputs are cast to fp16; `half.py`
measures these. Changes a program of torch.export, because ONNX's graph contains infinities instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.export import ExportedProgram

from vit_fast.errors import UnsupportedInputError

FP16_MAX = torch.finfo(torch.float16).max  # 65504
FILLS = (torch.ops.aten.full_like.default, torch.ops.aten.new_full.default)  # do not depend on values of their input


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


def _constants(exported: ExportedProgram, state: Mapping[str, Tensor]) -> dict[str, tuple[Any, str, Tensor]]:
    """Returns constants by the names of their nodes: where the program stores them, and their values in fp32."""
    signature = exported.graph_signature
    names = signature.inputs_to_parameters | signature.inputs_to_buffers | signature.inputs_to_lifted_tensor_constants
    found = {}
    for name, target in names.items():
        stored: Any = exported.state_dict if target in exported.state_dict else exported.constants
        found[name] = stored, target, state.get(target, stored[target])
    return found


def has_large_constants(exported: ExportedProgram, state: Mapping[str, Tensor]) -> bool:
    """Returns True if fp16 cannot represent a constant. `state` contains parameters and buffers in fp32, by name."""
    found = _constants(exported, state).values()
    return any(map(_has_large_number, exported.graph.nodes)) or any(_exceeds(x) for _, _, x in found)


def widen_constants(exported: ExportedProgram, state: Mapping[str, Tensor]) -> None:
    """Makes a functional program in fp16 store and read large constants in fp32, in place.

    Raises UnsupportedInputError for a large parameter that is part of a concatenated weight.
    """
    graph, found = exported.graph, _constants(exported, state)
    constant, wide = set[fx.Node](), set[fx.Node]()  # `wide`: constants in fp32, and nodes with several outputs

    def cast(x: fx.Node, dtype: torch.dtype, near: fx.Node) -> fx.Node:
        made = graph.call_function(torch.ops.aten._to_copy.default, (x,), {"dtype": dtype})
        made.meta = dict(near.meta)  # scope and, of an output, the type
        return made

    for node in list(graph.nodes):
        if node.name in found:
            constant.add(node)
            stored, target, value = found[node.name]
            if _exceeds(value):
                if not node.users:
                    name = target.removeprefix("model.")
                    reason = f"{name} must not exceed {FP16_MAX:g}, got {float(value.abs().max()):g}"
                    raise UnsupportedInputError("fp16", [reason, "export with precision bf16 or fp32"])
                stored[target] = value
                node.meta["val"] = node.meta["val"].float()
                wide.add(node)
        if node.op != "call_function":
            continue
        if node.target == torch.ops.aten._assert_tensor_metadata.default:  # of types that this function changes
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
                    node.replace_input_with(each, cast(each, torch.float32, node))
        if node.kwargs.get("dtype") == torch.float16:
            node.update_kwarg("dtype", torch.float32)
        if is_constant or len(outputs) > 1:
            wide.add(node)
        elif any(getattr(y, "dtype", None) == torch.float16 for y in outputs):
            with graph.inserting_after(node):
                half = cast(node, torch.float16, node)
            node.replace_all_uses_with(half, lambda user, half=half: user is not half)
    exported.graph_module.recompile()

