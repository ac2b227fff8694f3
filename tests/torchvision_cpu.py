"""Makes torchvision's CUDA wheel importable beside a CPU build of torch.

PyPI has no CPU build of torchvision. Without CUDA, `import torchvision` fails where it registers fake kernels for
operators of its C++ extension. Models and transforms do not use them, so this file declares their two schemas. It has
no effect if torch has CUDA. The Makefile installs the hook into its virtual environment with `--install`.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import sysconfig
from pathlib import Path

_library = []  # torch drops the schemas when the Library object dies


class _BeforeTorchvision:
    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Declares torchvision::nms and ::qnms just before the first import of torchvision."""
        if fullname != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        if importlib.util.find_spec("torchvision") is not None and torch.version.cuda is None:
            _library.append(torch.library.Library("torchvision", "FRAGMENT"))
            for name in ("nms", "qnms"):
                _library[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def install_import_hook() -> None:
    if "torchvision" not in sys.modules and not any(type(f).__name__ == "_BeforeTorchvision" for f in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorchvision())


if __name__ == "__main__":
    if sys.argv[1:] != ["--install"] or sys.prefix == sys.base_prefix:
        sys.exit(f"run {sys.argv[0]} --install in a virtual environment")
    site_packages = Path(sysconfig.get_path("purelib"))
    shutil.copyfile(__file__, site_packages / "_torchvision_cpu.py")
    hook = "import _torchvision_cpu; _torchvision_cpu.install_import_hook()\n"
    (site_packages / "_torchvision_cpu.pth").write_text(hook)
