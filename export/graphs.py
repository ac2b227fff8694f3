"""ONNX graphs: captures models with torch.export, optimizes the graphs for their target, runs and saves them.

Encoder blocks of all libraries run from BlockParts (vit_fast/blocks/parts.py), with q, k and v as one linear layer.
Attention becomes the operators that are fastest on the target:

    ONNX Runtime     com.microsoft's MultiHeadAttention on tokens [B, N, C]
    opset 23         ONNX's Attention, on tokens, or for TensorRT on heads [B, H, N, D]
    older opsets     MatMul, Softmax, MatMul
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import io
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import torch
import torch.nn.functional as F
from onnxscript.rewriter import rewrite
from onnxscript.rewriter.ort_fusions.bias_gelu import fuse_bias_gelu
from onnxscript.rewriter.ort_fusions.skip_normalization import fuse_skip_layer_normalization
from onnxscript.rewriter.rules.common import no_op_transpose_rule, transpose_transpose_rule
from torch import Tensor, nn
from torch.onnx.ops import symbolic

from vit_fast.blocks.block import run_mlp, runs_whole
from vit_fast.blocks.fused import FusedNormMlp
from vit_fast.blocks.parts import BlockParts, tensors_of
from vit_fast.errors import UnsupportedInputError
from vit_fast.fusion.fuse import sharing_copy
from vit_fast.ops import qk_norm_rope, reference
from vit_fast.ops.attention import attention_among, softmax_scale
from vit_fast.ops.descriptions import Keys, Rope

from .call import Batch, Call
from .capture_errors import reasons_of
from .options import ATTENTION_OPSET, GELU_OPSET, MICROSOFT, ExportOptions
from .programs import CAST, DTYPES, Exported, decomposed
from .report import Fusion
from .runtime.runner import open_session

BATCH = "batch"
PROTOBUF_LIMIT = 2 * 2**30 - 32 * 2**20  # bytes of weights in one file: protobuf's 2 GiB, minus room for the graph
SMALL = 256  # bytes of a constant that is stored in the file of the graph in any case
SCOPES = "pkg.torch.onnx.name_scopes"  # metadata of nodes: names of the modules around them, until `optimize`


class ExportedBlock(nn.Module):
    """Runs a block from its parts."""

    def __init__(self, parts: BlockParts, options: ExportOptions) -> None:
        super().__init__()
        self._attention, self._mlp = parts.halves
        self._options = options
        self.qkv = None
        qkv = self._attention.qkv
        both = qkv.tensors()
        is_split = not len(qkv.weights) == len(qkv.biases) == 1
        if is_split and all(x is None or x.isfinite().all() for x in both):  # in fp16, see programs.py
            self.qkv = nn.Module()  # concatenates q, k and v once, as constants
            for name, tensor in zip(("weight", "bias"), both, strict=True):
                self.qkv.register_buffer(name, None if tensor is None else tensor.detach().contiguous())

    def forward(self, x: Tensor, rope: Rope | None = None) -> Tensor:
        """Maps [B, N, C] to [B, N, C], with rotary embeddings if the model has them."""
        attention, mlp, options = self._attention, self._mlp, self._options
        weight, bias = attention.qkv.tensors() if self.qkv is None else tensors_of(self.qkv)
        qkv = F.linear(reference.normalize(x, attention.norm.now()), weight, bias)
        heads = qkv.unflatten(-1, (3, attention.num_heads, -1))
        is_packed = rope is None and attention.qk_norm is None
        if not is_packed:
            norm = attention.qk_norm and attention.qk_norm.now()
            heads = qk_norm_rope(heads, qk_norm=norm, rope=rope, backend="sdpa")
        scale = softmax_scale(heads, attention.scale)
        if attention.terms is not None:
            terms = attention.terms.now(x.device)
            mixed = attention_among(heads, None, scale=scale, terms=terms, backend="sdpa").flatten(2)
        elif options.attention and options.target != "tensorrt":
            q, k, v = qkv.chunk(3, -1) if is_packed else (heads[:, :, i].flatten(2) for i in range(3))
            mixed = _on_tokens(q, k, v, attention.num_heads, scale, options)
        else:
            by_head = heads.permute(2, 0, 3, 1, 4)
            mixed = _on_heads(by_head[0], by_head[1], by_head[2], scale, options).transpose(1, 2).flatten(2)
        x = _add_linear(x, mixed, *attention.with_scale(attention.proj))
        if mlp.fc1.chunk is None:
            return run_mlp(mlp, x, "sdpa")
        # fc1 packs the gate: keep it one MatMul
        gate, fc1 = mlp.gate, dataclasses.replace(mlp.fc1, chunk=None)
        assert gate is not None and gate.chunk is not None
        halves = F.linear(reference.normalize(x, mlp.norm.now()), *fc1.tensors()).chunk(2, -1)
        hidden = reference.ACTIVATIONS[mlp.activation](halves[gate.chunk]) * halves[mlp.fc1.chunk]
        if mlp.inner_norm is not None:
            hidden = reference.normalize(hidden, mlp.inner_norm.now())
        return _add_linear(x, hidden, *mlp.with_scale(mlp.fc2))

    def run_as_block(
        self, parts: Any, x: Tensor, attend: Callable[[Tensor], Tensor], ordinary: bool = True,
        rope: Rope | None = None, keys: Keys | None = None,
    ) -> Tensor:  # fmt: skip
        """Replaces FusedNormMlp.run_as_block."""
        return self(x, rope) if ordinary and keys is None else run_mlp(parts.mlp, attend(x), "sdpa")


def _add_linear(x: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    branch = F.linear(hidden, weight, bias)
    return x + (branch if scale is None else branch * scale)


def _on_tokens(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float, options: ExportOptions) -> Tensor:
    """Attention of tokens [B, N, H * D], as one operator of the target."""
    name, version, attributes = "Attention", ATTENTION_OPSET, {"q_num_heads": heads, "kv_num_heads": heads}
    if options.targets_ort:
        name, version, attributes = f"{MICROSOFT}::MultiHeadAttention", 1, {"num_heads": heads}
    shape = (*q.shape[:-1], v.shape[-1])
    return symbolic(name, (q, k, v), {"scale": scale, **attributes}, dtype=q.dtype, shape=shape, version=version)


def _on_heads(
    q: Tensor, k: Tensor, v: Tensor, scale: float, options: ExportOptions, mask: Tensor | None = None
) -> Tensor:
    """Attention of heads [B, H, N, D], as one operator of ONNX if possible."""
    is_plain = mask is None and q.ndim == 4 and q.shape[:2] == k.shape[:2] == v.shape[:2]
    if is_plain and options.targets_ort:
        heads = q.shape[1]
        q, k, v = (each.transpose(1, 2).flatten(2) for each in (q, k, v))
        return _on_tokens(q, k, v, heads, scale, options).unflatten(2, (heads, -1)).transpose(1, 2)
    if is_plain and options.attention:  # torch would add three outputs, which TensorRT does not support
        shape = (*q.shape[:-1], v.shape[-1])
        return symbolic("Attention", (q, k, v), {"scale": scale}, dtype=q.dtype, shape=shape, version=ATTENTION_OPSET)
    # scale q before the matmul: in fp16, unscaled scores can exceed 65504
    scores = (q * scale) @ k.transpose(-1, -2)
    if mask is None or mask.dtype != torch.bool:  # no runtime fuses attention with a mask
        return (scores if mask is None else scores + mask).softmax(-1) @ v
    # like torch, 0 for queries without keys
    return torch.where(mask, scores, float("-inf")).softmax(-1).where(mask.any(-1, keepdim=True), 0.0) @ v


def decompositions(options: ExportOptions) -> dict[Any, Callable[..., Any]]:
    """Returns decompositions of attention outside of ExportedBlock, and of GELU, into operators of the target."""

    def sdpa(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if dropout_p:
            raise NotImplementedError("scaled_dot_product_attention must not use dropout_p")
        if is_causal:
            attn_mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        if enable_gqa:
            k, v = (each.repeat_interleave(q.shape[-3] // each.shape[-3], -3) for each in (k, v))
        return _on_heads(q, k, v, softmax_scale(q, scale), options, attn_mask)

    def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
        if approximate != "none":
            return NotImplemented
        return symbolic(f"{MICROSOFT}::Gelu", (x,), dtype=x.dtype, shape=x.shape, version=1)

    table: dict[Any, Callable[..., Any]] = {torch.ops.aten.scaled_dot_product_attention.default: sdpa}
    if options.targets_ort and options.opset < GELU_OPSET:  # torch would write GELU as five nodes
        table[torch.ops.aten.gelu.default] = gelu
    return table


def capture(call: Call) -> ir.Model:
    """Captures a call as an ONNX graph, whose floating-point inputs are fp32."""
    options, dtype = call.options, DTYPES[call.options.dtype]
    args, kwargs = call.arguments(call.example())
    original = call.vit.model
    vit = dataclasses.replace(call.vit, model=sharing_copy(original, kwargs or args))
    if options.dtype != "fp32":
        vit = vit.copy_in(dtype)
    call = dataclasses.replace(call, vit=vit)
    blocks: list[Any] = [module for module in vit.model.modules() if isinstance(module, FusedNormMlp)]
    for block in blocks:
        parts = block.read()
        if runs_whole(parts):  # the block's forward computes positions and masks, and calls run_as_block
            block.vit_fast_exported = ExportedBlock(parts, options)
            block.ready, block.is_idle = lambda parts=parts: parts, lambda: False
            block.run_as_block = block.vit_fast_exported.run_as_block
    with (
        vit.exporting("sdpa", options.dynamic_size),
        torch.no_grad(),
        contextlib.redirect_stdout(io.StringIO()) as printed,  # torch prints traced graphs
        contextlib.redirect_stderr(printed),
        warnings.catch_warnings(action="ignore"),
    ):
        model = _to_onnx(Exported(call).eval(), call, original)
    if (written := model.opset_imports.get("")) != options.opset:  # torch cannot always lower the opset
        raise UnsupportedInputError(f"opset {options.opset}", [f"torch wrote opset {written} instead: pass {written}"])
    for node in model.graph.all_nodes():
        if node.op_type == "Resize":  # before onnxscript 0.7.2, these attributes do not match torch
            if node.attributes.get_int("antialias", 0):
                node.attributes.add(ir.AttrFloat32("cubic_coeff_a", -0.5))
                node.attributes.add(ir.AttrInt64("exclude_outside", 1))
            if node.attributes.get_string("coordinate_transformation_mode") == "pytorch_half_pixel":
                node.attributes.add(ir.AttrString("coordinate_transformation_mode", "half_pixel"))
    batch = shape_of(first := model.graph.inputs[call.batched.index(True)])[0]  # torch's name, like s34
    sides = {2: f"{vit.patch_hw[0]}*rows", 3: f"{vit.patch_hw[1]}*columns"} if options.dynamic_size else {}
    for value in (*model.graph.inputs, *model.graph.outputs):
        inner = sides if value is first else {}
        dims = [dim if isinstance(dim, int) else re.sub(rf"\b{batch}\b", BATCH, dim) for dim in shape_of(value)]
        names = [n if re.fullmatch(rf"({BATCH}|\W|\d)+", str(n)) else f"{value.name}_{i}" for i, n in enumerate(dims)]
        value.shape = ir.Shape([inner.get(i, name) for i, name in enumerate(names)])
    _name_linears(model, vit.model)
    return model


def _to_onnx(module: Exported, call: Call, original: nn.Module) -> ir.Model:
    options, (height, width), (patch_h, patch_w) = call.options, call.vit.image_hw, call.vit.patch_hw
    inputs, exported = call.example(), None
    dimensions: dict[int, Any] = {0: torch.export.Dim(BATCH)} if options.dynamic_batch else {}
    if options.dynamic_size:  # torch would specialize a square, or the model's own size
        dimensions |= {2: patch_h * torch.export.Dim("rows"), 3: patch_w * torch.export.Dim("columns")}
        inputs = (torch.randn(len(inputs[0]), call.vit.in_chans, height + patch_h, width + 2 * patch_w, device="cpu"),)
    shapes = tuple(dimensions if batched else {} for batched in call.batched)

    def export() -> torch.export.ExportedProgram:
        return torch.export.export(module, inputs, dynamic_shapes=(shapes,), strict=False)

    try:
        try:
            exported = export()
        except RuntimeError:
            module.mixes_dtypes = options.dtype != "fp32"
            exported = export()
        table = decompositions(options) | (CAST if module.mixes_dtypes else {})
        exported = decomposed(exported, table, original if options.dtype == "fp16" else None)
        program: Any = torch.onnx.export(
            exported, dynamo=True, opset_version=options.opset, input_names=list(call.names.values()),
            output_names=module.outputs.names, verbose=False,
        )  # fmt: skip
    except UnsupportedInputError:
        raise
    except Exception as error:
        reasons = reasons_of(error, exported, export)
        raise UnsupportedInputError(f"export of {call.vit.name}", reasons) from error
    return program.model


def optimize(model: ir.Model, options: ExportOptions) -> list[Fusion]:
    """Removes inverse transposes and fuses operators for the target, in place; returns the fusions."""
    rewrite(model, [transpose_transpose_rule, no_op_transpose_rule])  # libraries transpose twice around attention
    if options.targets_ort:
        fuse_bias_gelu(model)
        model.opset_imports[MICROSOFT] = 1
    # On a CPU, ONNX Runtime 1.31 does not vectorize SkipLayerNormalization, unlike Add and LayerNormalization.
    if options.target == "ort-cuda":
        fuse_skip_layer_normalization(model)
    common_passes.RemoveUnusedNodesPass()(model)
    common_passes.ClearMetadataAndDocStringPass()(model)
    counts = count_nodes(model)
    normed: list[Any] = [node.inputs[0] for node in model.graph if node.op_type == "LayerNormalization"]
    sums = [x.producer() for x in normed if x.producer() and x.producer().op_type == "Add"]
    skips = [node for node in sums if all(x.const_value is None for x in node.inputs)]  # not of position embeddings
    softmax = [node for node in model.graph if node.op_type == "Softmax" and not node.outputs[0].is_graph_output()]
    unfused = [
        (options.attention, len(softmax), "only scaled_dot_product_attention without a mask is fused"),
        ("BiasGelu" if options.targets_ort else None, counts["Gelu"], "only exact GELU after a bias is fused"),
        ("SkipLayerNormalization" if options.target == "ort-cuda" else None, len(skips), "an addition is not fused"),
    ]
    found = [(name, counts[name], counts[name] + n, note if n else "") for name, n, note in unfused if name]
    return [Fusion(*each) for each in found if each[2]]


def shape_of(value: ir.Value) -> list[int | str]:
    return [dim if isinstance(dim, int) else str(dim) for dim in value.shape or ()]


def scope_of(node: ir.Node) -> str:
    """Returns the name of the innermost module of the model around a node, e.g. "blocks.0"; before `optimize`."""
    scopes = ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))
    inside = [scope for scope in scopes if scope.startswith("model")] or [""]
    return str(inside[-1]).removesuffix(".vit_fast_exported").removeprefix("model").strip(".")


def _name_linears(model: ir.Model, module: nn.Module) -> None:
    """Names each MatMul after its linear layer: in its scope, the next one with the same weight, or with its shape."""
    free = {name.removesuffix(".weight"): p.detach() for name, p in module.named_parameters() if p.dim() == 2}
    for node in model.graph:
        if (weight := linear_weight(node)) is not None:
            scope, shape = scope_of(node), weight.shape[::-1]
            names = [name for name in free if f"{name}.".startswith(f"{scope}.") or not scope]
            names = [name for name in names if tuple(free[name].shape) == shape]
            same = (name for name in names if np.array_equal(free[name].float().numpy().astype(weight.dtype).T, weight))
            only = iter(names if scope and len(names) == 1 else same)
            node.name = next(only, names[0] if names and scope else f"{scope}.{node.name}".strip("."))
            free.pop(str(node.name), None)


def count_nodes(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def forget_inner_shapes(model: ir.Model) -> None:
    """Removes shapes and types of inner values: the runtime infers them, and outdated shapes break quantizers."""
    for node in model.graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape, value.type = None, None


def constant_of(value: ir.Value | None) -> np.ndarray | None:
    """Returns the array of an initializer or constant; None if the value depends on the input."""
    tensor = None if value is None else copy.copy(value.const_value)  # external weights are mapped while arrays exist
    return None if tensor is None else tensor.numpy()


def linear_weight(node: ir.Node) -> np.ndarray | None:
    """Returns the constant weight [C, F] of a linear layer; None for other nodes."""
    return constant_of(node.inputs[1]) if node.op_type == "MatMul" else None


def append(graph: ir.Graph, operator: str, *inputs: ir.Value | np.ndarray | np.generic, **attributes: Any) -> ir.Value:
    """Appends a node and returns its output. Arrays among the inputs become initializers."""
    values = [value if isinstance(value, ir.Value) else add_constant(graph, np.asarray(value)) for value in inputs]
    graph.append(node := ir.node(operator, values, attributes))
    return node.outputs[0]


def add_constant(graph: ir.Graph, array: np.ndarray | ir.TensorProtocol, name: str | None = None) -> ir.Value:
    value = ir.val(name or f"vit_fast.{len(graph.initializers)}", const_value=ir.tensor(array))
    graph.register_initializer(value)
    return value


def move_weights(model: ir.Model, file: Path) -> None:
    """Appends weights that are not in the file yet, in place, so that graphs with the same weights can share it."""
    with file.open("ab") as out:
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if tensor is not None and tensor.nbytes > SMALL and getattr(tensor, "path", None) != str(file):
                place: Any = {"shape": tensor.shape, "name": value.name, "base_dir": file.parent}
                value.const_value = ir.ExternalTensor(file.name, out.tell(), tensor.nbytes, tensor.dtype, **place)
                out.write(tensor.tobytes())


def save(model: ir.Model, path: Path, external: bool | None = None) -> str | None:
    """Writes a model; returns the name of the file for the weights, if they are external or exceed protobuf's limit."""
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    if size > PROTOBUF_LIMIT and external is False:
        exceed = "exceed protobuf's limit of 2 GB per file: use external_data=True"
        raise ValueError(f"{size / 1e9:.1f} GB of weights {exceed}")
    if beside := f"{path.name}.data" if external or size > PROTOBUF_LIMIT else None:
        move_weights(model, path.with_name(beside))
    else:
        ir.external_data.load_to_model(model)
    ir.save(model, path)
    return beside


def run_graph(
    model: ir.Model, batches: Iterable[Batch], values: Sequence[ir.Value] | None = None, optimize: bool = True,
    weights: Path | None = None,
) -> Iterator[list[np.ndarray]]:  # fmt: skip
    """Runs a graph in ONNX Runtime on the CPU, and yields its outputs, or `values`; a batch may be a dict of inputs.

    Without `optimize`, ONNX Runtime does not store the results of operators on constants. `weights` is a file to which
    `move_weights` has moved the weights; otherwise this function writes them.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = weights or Path(folder) / "weights"
        made = model.clone()
        if values is not None:
            own = [*made.graph.inputs, *(value for node in made.graph for value in node.outputs)]
            by_name = {value.name: value for value in own}
            made.graph.outputs[:] = [by_name[value.name] for value in values]
        move_weights(made, file)  # external weights are not copied into protobuf
        ir.save(made, path := file.with_suffix(".onnx"))
        session = open_session(path, fp8=True, prepack=False, optimize=optimize)
    name = session.get_inputs()[0].name
    for batch in batches:
        yield session.run(None, batch if isinstance(batch, dict) else {name: batch})
