"""Explains why torch cannot capture a model or convert it to ONNX, with the line of the model's code."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path

import onnxscript
import torch

import vit_fast

OWN = tuple({str(Path(__file__).parent), str(Path(__file__).resolve().parent), str(Path(vit_fast.__file__).parent)})


def reasons_of(
    error: BaseException, exported: torch.export.ExportedProgram | None, with_other_batch: Callable[[], object]
) -> list[str]:
    """Returns why torch cannot export a model, the line of the model's code, and what to change."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    text = "\n".join(map(str, chain))
    fixes_batch = "specialized" in text or "Constraints violated" in text
    if fixes_batch:  # torch does not name the line, unlike a call with another batch that fails
        try:
            with_other_batch()
        except Exception as failure:
            chain.append(failure)
    frames = [frame for each in chain for frame in traceback.extract_tb(each.__traceback__)]
    if exported is not None:  # an operator without a translation
        frames = []
        for graph in (part.graph for part in exported.graph_module.modules() if isinstance(part, torch.fx.GraphModule)):
            for node in graph.nodes:
                if node.op == "call_function" and str(node.target).removesuffix(".default") in text:
                    lines = re.findall(r'File "(.+)", line (\d+), in (.+)\n', node.meta.get("stack_trace") or "")
                    frames += [traceback.FrameSummary(file, int(number), name) for file, number, name in lines]
    others = tuple(str(Path(package.__file__ or "").parent) for package in (torch, onnxscript)) + OWN
    frames = [frame for frame in frames if not frame.filename.startswith((*others, "<")) and frame.line]
    message = str(chain[-1]).strip().splitlines() or [""]
    reasons = [f"torch cannot export the model: {type(chain[-1]).__name__}: {message[0][:300]}"]
    if frames:
        reasons.append(f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}")
    if "data-dependent" in text or "data dependent" in text:
        reasons.append("do not branch on values of tensors: use torch.where, or torch.cond")
    elif fixes_batch:
        reasons.append("the model fixes the batch: compute sizes from x.shape, or pass dynamic_batch=False")
    elif exported is not None:
        reasons.append("ONNX has no such operator: compute it from others")
    elif frames:
        reasons.append("compute it with operators of torch, on tensors")
    return reasons
