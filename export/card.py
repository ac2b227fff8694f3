"""A model card beside an exported file: what it is, how to feed it, how it was checked, and its hashes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from vit_fast.files import file_aside
from vit_fast.version import __version__

from .deployment import trtexec_line
from .metadata import OnnxInfo, describe
from .model_files import external_tensors, read_proto

CHUNK = 1 << 20


def write_card(path: str | Path, license_name: str | None = None) -> Path:
    """Writes FILE.md beside FILE.onnx, of nothing but what the file says of itself.

    Args:
        path: The .onnx file.
        license_name: Of the weights; None leaves the field to be filled in.
    Returns:
        The card.
    Raises:
        ModelFileError: the file is missing, damaged or unsafe.
    """
    path = Path(path)
    proto = read_proto(path)
    info = describe(proto, path)
    beside = sorted({e.value for t in external_tensors(proto) for e in t.external_data if e.key == "location"})
    card = path.with_suffix(".md")
    text = _text(info, [path, *(path.parent / name for name in beside)], license_name)
    with file_aside(card) as aside:
        aside.write_text(text, encoding="utf-8")
    return card


def _text(info: OnnxInfo, files: list[Path], license_name: str | None) -> str:
    facts, name = info.metadata, files[0].name
    said: dict[str, Any] = {
        "model": facts.get("model"),
        "source": facts.get("source"),
        "license": license_name or "not said: ask where the weights come from",
        "precision": facts.get("precision"),
        "target": facts.get("target"),
        "opset": info.opsets.get(""),
        "input": ", ".join(f"`{i['name']}` {i['dtype']} {i['shape']}" for i in info.inputs),
        "output": ", ".join(f"`{o['name']}` {o['dtype']} {o['shape']}, {info.output}" for o in info.outputs),
        "preprocessing": "in the file, of uint8 pixels" if info.preprocess else "before the file",
        "images are prepared by": json.dumps(info.data_config.to_dict()) if info.data_config else None,
        "classes": len(info.class_names) if info.class_names else None,
        "written by": f"vit-fast {__version__}, with {_versions(facts)}",
    }
    lines = ["---", f"license: {license_name or 'unknown'}", "library_name: onnx", "---", "", f"# {name}", ""]
    lines += ["| what | value |", "|---|---|"]
    lines += [f"| {what} | {'not said' if value is None else value} |" for what, value in said.items()]
    lines += ["", "## Checked", "", *_checks(facts)]
    lines += ["", "## Run", "", "    from vit_fast.export import OnnxRunner", ""]
    lines += [f'    runner = OnnxRunner("{name}")', "    probabilities = runner.probabilities([image])"]
    if facts.get("target") == "tensorrt":
        lines += ["", "As a TensorRT engine:", "", f"    {trtexec_line(replace(info, path=name))}"]
    lines += ["", "## Files", "", "| file | bytes | sha256 |", "|---|---|---|"]
    lines += [f"| {file.name} | {file.stat().st_size} | {_sha256(file)} |" for file in files]
    return "\n".join(lines) + "\n"


def _checks(facts: dict[str, Any]) -> list[str]:
    verification, lines = facts.get("verification"), []
    if isinstance(verification, dict):
        lines.append(f"Compared with {verification['reference']}; must be {verification['budget']}.")
        lines += ["", "| images | size | max error | rms error | same top class |", "|---|---|---|---|---|"]
        for check in verification["checks"]:
            same = "" if check["top1_agreement"] is None else f"{check['top1_agreement']:.1%}"
            size = "x".join(map(str, check["image_hw"]))
            row = (check["images"], size, f"{check['max_error']:.1e}", f"{check['rms_error']:.1e}", same)
            lines.append(f"| {' | '.join(map(str, row))} |")
    else:
        lines.append("Not verified.")
    if accuracy := facts.get("accuracy"):
        lines += ["", f"Top-1 accuracy on {accuracy['images']} labelled images: {accuracy['file']:.2%}, the model's"]
        lines[-1] += f" {accuracy['model']:.2%}."
    if eight_bit := facts.get("eight_bit"):
        kept = ", ".join(eight_bit["kept"]) or "none"
        lines += ["", f"{eight_bit['products']} products in eight bits; left float for accuracy's sake: {kept}."]
    return lines


def _versions(facts: dict[str, Any]) -> str:
    return ", ".join(f"{package} {version}" for package, version in dict(facts.get("versions") or {}).items())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
