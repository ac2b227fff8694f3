"""Export of the operators as a kernel of the Hugging Face Hub: the folder that its `kernels` loader reads.

    build/torch-universal/__init__.py      what the kernel offers: vit_fast.ops' public functions
    build/torch-universal/{ops,kernels}/   as they are here, with the modules that they import beside them
    build/torch-universal/metadata.json    name, version, licence, dependencies
    README.md                              the card

Nothing is compiled: Triton does that when a kernel is first launched. The loader may hold several versions at once, and
vit_fast itself may be imported beside them, so the operators are registered under a namespace of this build's own.
Layout: https://huggingface.co/docs/kernels/kernel-requirements; checked with `kernels` 0.17.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from ..files import check_new_folder, folder_aside

PACKAGE = Path(__file__).resolve().parents[1]
NAME = "vit-fast-kernels"
VERSION = 1  # of the interface: the Hub keeps one branch a version
VARIANT = Path("build") / "torch-universal"
NAMESPACES = ("vit_fast::", "torch.ops.vit_fast.")  # how the sources write the operators' namespace

INIT = '''"""Fused attention and LayerNorm + MLP for Vision Transformers, in Triton, with gradients.

Needs torch 2.11 and triton 3.6 or newer. backend="triton" requires the kernels; "auto" selects them on a CUDA device of
compute capability 8.0 or newer.
"""

from .errors import UnsupportedInputError
from .ops import attention, attention_qkvpacked, layer_norm_mlp, scaled_dot_product_attention

__all__ = [
    "UnsupportedInputError",
    "attention",
    "attention_qkvpacked",
    "layer_norm_mlp",
    "scaled_dot_product_attention",
]
'''

CARD = """---
library_name: kernels
license: apache-2.0
tags:
  - kernel
---

# vit-fast kernels

Fused attention and LayerNorm + MLP for Vision Transformers, forward and backward, in Triton alone.

```python
import torch
from kernels import get_kernel

kernel = get_kernel("OWNER/{name}", version={version}, trust_remote_code=True)
qkv = torch.randn(8, 197, 3, 12, 64, device="cuda", dtype=torch.bfloat16)
mixed = kernel.attention_qkvpacked(qkv)  # [8, 197, 12, 64]
```
"""


def build_hf_kernel(folder: str | Path) -> Path:
    """Writes the repository of a Hub kernel into a new or empty folder: upload the folder as it is.

    Returns:
        The folder of the one build variant, which `kernels.get_local_kernel` also takes.
    Raises:
        FileExistsError: the folder is not empty.
    """
    folder = Path(folder)
    check_new_folder(folder)
    with folder_aside(folder) as aside:
        _write(aside)
    return folder / VARIANT


def _write(root: Path) -> None:
    sources = _sources()
    digest = hashlib.sha256()
    for path, text in sources.items():
        digest.update(f"{path}\0{text}\0".encode())
    build = digest.hexdigest()[:12]
    variant = root / VARIANT
    for path, text in sources.items():
        target = variant / path
        target.parent.mkdir(parents=True, exist_ok=True)
        for namespace in NAMESPACES:
            text = text.replace(namespace, namespace.replace("vit_fast", f"vit_fast_{build}"))
        target.write_text(text)
    metadata = {
        "name": NAME,
        "id": f"_{NAME.replace('-', '_')}_{build}",
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda"},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    (root / "README.md").write_text(CARD.format(name=NAME, version=VERSION))


def _sources() -> dict[str, str]:
    """Returns the sources of the kernel, and the modules that they import, by their path in the variant."""
    paths = [path for pattern in ("ops/*.py", "kernels/**/*.py", "kernels/**/*.json") for path in PACKAGE.glob(pattern)]
    files = {}
    while paths:
        path = paths.pop()
        name = path.relative_to(PACKAGE).as_posix()
        if path.parent.name != "inspect" and name not in files:
            files[name] = path.read_text()
            above = "." * len(Path(name).parts)  # from the package
            imported = re.findall(rf"^\s*from {re.escape(above)}(\w+) import", files[name], re.MULTILINE)
            paths += [file for module in imported if (file := PACKAGE / f"{module}.py").is_file()]
    files |= {"__init__.py": INIT, "kernels/__init__.py": '"""Device code and launchers."""\n'}
    return dict(sorted(files.items()))
