"""Lets torchvision's CUDA wheel be imported beside a CPU build of torch.

PyPI has no CPU build of torchvision. The CUDA wheel's C++ extension cannot load without CUDA, so `import torchvision`
fails where it registers fake kernels for operators that do not exist. Its models and transforms need none of them:
declaring the two schemas is enough. Where torchvision loads by itself, nothing here has an effect.

`python tests/torchvision_cpu.py --install` (called by the Makefile) makes this automatic in a virtual environment.
"""

from __future__ import annotations

import importlib.util
import sys

_library = []  # torch drops the schemas when the Library object dies


def define_schemas() -> None:
    """Declares torchvision::nms and ::qnms when this torch has no CUDA, once."""
    import torch

    if _library or torch.version.cuda is not None:
        return
    _library.append(torch.library.Library("torchvision", "FRAGMENT"))
    for name in ("nms", "qnms"):
        _library[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class _BeforeTorchvision:
    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            if importlib.util.find_spec("torchvision") is not None:
                define_schemas()


def install_import_hook() -> None:
    """Calls define_schemas just before the first `import torchvision`."""
    if "torchvision" not in sys.modules and not any(type(f).__name__ == "_BeforeTorchvision" for f in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorchvision())


def main() -> None:
    """Copies this file and a .pth that calls the hook into the running environment's site-packages."""
    import shutil
    import sysconfig
    from pathlib import Path

    if sys.argv[1:] != ["--install"]:
        sys.exit(f"usage: {sys.argv[0]} --install")
    if sys.prefix == sys.base_prefix:
        sys.exit("not in a virtual environment: nothing installed")
    site_packages = Path(sysconfig.get_path("purelib"))
    shutil.copyfile(__file__, site_packages / "_torchvision_cpu.py")
    hook = "import _torchvision_cpu; _torchvision_cpu.install_import_hook()\n"
    (site_packages / "_torchvision_cpu.pth").write_text(hook)


if __name__ == "__main__":
    main()
