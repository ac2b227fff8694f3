"""Writes the operators as a Hugging Face Hub kernel, a folder that the `kernels` library loads.

    build/torch-universal/__init__.py      public functions of vit_fast.ops
    build/torch-universal/{ops,kernels}/   copies of these folders, beside the modules that they import
    build/torch-universal/metadata.json    name, version, license, dependencies
    README.md                              model card

Each build registers its operators in a separate namespace, because a process may load several builds and vit_fast.
Layout: https://huggingface.co/docs/kernels/kernel-requirements; tested with `kernels` 0.17.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from ..files import check_new_folder, folder_aside

PACKAGE = Path(__file__).resolve().parents[1]
MODULES = ("accuracy", "config", "errors", "layers", "positions")  # that these folders import
NAME = "vit-fast-kernels"
VERSION = 1  # of the interface; the Hub has one branch per version
VARIANT = Path("build") / "torch-universal"
NAMESPACES = r'vit_fast::|torch\.ops\.vit_fast|Library\("vit_fast"'  # the operators' namespace in the sources

INIT = '''"""Fused attention and LayerNorm + MLP for Vision Transformers, in Triton, with gradients.

Requires torch 2.11 and triton 3.6 or newer. backend="auto" selects the kernels for fp16 and bf16 on a CUDA device of
compute capability 8.0 or higher.
"""

from .errors import UnsupportedInputError
from .ops import attention, attention_qkvpacked, layer_norm_mlp, scaled_dot_product_attention

__all__ = [
    "UnsupportedInputError", "attention", "attention_qkvpacked", "layer_norm_mlp", "scaled_dot_product_attention",
]
'''

CARD = f"""---
library_name: kernels
license: apache-2.0
tags:
  - kernel
---

# vit-fast kernels

Fused attention and LayerNorm + MLP for Vision Transformers, forward and backward, in Triton.

```python
import torch
from kernels import get_kernel

kernel = get_kernel("OWNER/{NAME}", version={VERSION}, trust_remote_code=True)
qkv = torch.randn(8, 197, 3, 12, 64, device="cuda", dtype=torch.bfloat16)
mixed = kernel.attention_qkvpacked(qkv)  # [8, 197, 12, 64]
```
"""


def build_hf_kernel(folder: str | Path) -> Path:
    """Writes the repository of a Hub kernel, ready to upload, into a new or empty folder."""
    folder = Path(folder)
    check_new_folder(folder)
    patterns = ("ops/*.py", "kernels/**/*.py", "kernels/**/*.json", *(f"{module}.py" for module in MODULES))
    paths = [path for pattern in patterns for path in PACKAGE.glob(pattern) if path.parent.name != "inspect"]
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in paths}
    sources |= {"__init__.py": INIT, "kernels/__init__.py": '"""Device code and launchers."""\n'}
    build = hashlib.sha256(json.dumps(sorted(sources.items())).encode()).hexdigest()[:12]
    metadata = {
        "name": NAME, "id": f"_{NAME.replace('-', '_')}_{build}", "version": VERSION, "license": "Apache-2.0",
        "python-depends": [], "backend": {"type": "cuda"},
    }  # fmt: skip
    with folder_aside(folder) as aside:
        for name, text in (sources | {"metadata.json": json.dumps(metadata, indent=2) + "\n"}).items():
            path = aside / VARIANT / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(re.sub(NAMESPACES, lambda use: use[0].replace("vit_fast", f"vit_fast_{build}"), text))
        (aside / "README.md").write_text(CARD)
    return folder / VARIANT
