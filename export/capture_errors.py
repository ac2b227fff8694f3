"""Explains why torch cannot capture a model or convert it to ONNX, with the line of the model's code."""

from __future__ import annotations

import contextlib
import logging
import re
import traceback
from collections.abc import Callable
from pathlib import Path

import onnxscript
import torch

import vit_fast

OWN = tuple({str(Path(__file__).parent), str(Path(__file__).resolve().parent), str(Path(vit_fast.__file__).parent)})


def _where_sizes_are_fixed(run: Callable[[], object]) -> list[traceback.FrameSummary]:
    """Returns the stack, from this package on, where torch last fixes a dynamic size; torch only logs it."""
    stack: list[traceback.FrameSummary] = []

    def look(record: logging.LogRecord) -> bool:
        if re.search(r"Eq\(s\d+, \d+\) \[guard added\]", record.getMessage()):
            stack[:] = traceback.extract_stack()[:-1]
        return False

    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = log.level
    log.addFilter(look)
    log.setLevel(logging.INFO)
    try:
        with contextlib.suppress(Exception):
            run()
    finally:
        log.setLevel(level)
        log.removeFilter(look)
    own = [i for i, frame in enumerate(stack) if frame.filename.startswith(OWN)]
    return stack[own[-1] :] if own else []


def reasons_of(
    error: BaseException, exported: torch.export.ExportedProgram | None, again: Callable[[], object]
) -> list[str]:
    """Returns why torch cannot export a model, the line of the model's code, and what to change.

    Captures the model `again` to find code that fixes the batch.
    """
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    text = "\n".join(map(str, chain))
    fixes_batch = "specialized" in text or "Constraints violated" in text
    frames = [frame for each in chain for frame in traceback.extract_tb(each.__traceback__)]
    if fixes_batch:
        frames += _where_sizes_are_fixed(again)
    if exported is not None:  # an operator without a translation
        frames = []
        for graph in (part.graph for part in exported.graph_module.modules() if isinstance(part, torch.fx.GraphModule)):
            for node in graph.nodes:
                if node.op == "call_function" and str(node.target).removesuffix(".default") in text:
                    lines = re.findall(r'File "(.+)", line (\d+), in (.+)\n', node.meta.get("stack_trace") or "")
                    frames += [traceback.FrameSummary(file, int(number), name) for file, number, name in lines]
    others = tuple(str(Path(package.__file__ or "").parent) for package in (torch, onnxscript, logging)) + OWN
    frames = [frame for frame in frames if not frame.filename.startswith((*others, "<")) and frame.line]
    message = str(chain[-1]).strip().splitlines() or [""]
    reasons = [f"torch cannot export the model: {type(chain[-1]).__name__}: {message[0][:300]}"]
    if frames:
        reasons.append(f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}")
    if "data-dependent" in text or "data dependent" in text:
        reasons.append("do not branch on values of tensors: use torch.where, or torch.cond")
    elif fixes_batch:
        reasons.append(
            "the model fixes the batch: compute sizes from x.shape instead of len(x), or pass dynamic_batch=False"
        )
    elif re.search(r"the same dtype|scalar type|should be the same", text):
        reasons.append("use one dtype, that of the weights: x.to(weight.dtype)")
    elif exported is not None:
        reasons.append("ONNX has no such operator: compute it from others")
    elif frames:
        reasons.append("compute it with operators of torch, on tensors")
    return reasons
