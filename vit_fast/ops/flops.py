"""FLOP formulas of our operators for torch.utils.flop_counter, registered when that module is first imported.

torch.utils.flop_counter imports triton, which would triple what `import vit_fast` costs; nobody can count FLOPs without
importing it first.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

_COUNTER = "torch.utils.flop_counter"
_waiting: list[tuple[Any, Callable[..., int]]] = []

Formula = TypeVar("Formula", bound=Callable[..., int])


def register_flop_formula(operators: Any) -> Callable[[Formula], Formula]:
    """torch's decorator of the same name, applied now or as soon as torch.utils.flop_counter is there."""

    def decorate(formula: Formula) -> Formula:
        if _COUNTER in sys.modules:
            _register(operators, formula)
        else:
            _waiting.append((operators, formula))
        return formula

    return decorate


def _register(operators: Any, formula: Callable[..., int]) -> None:
    sys.modules[_COUNTER].register_flop_formula(operators)(formula)


class _WhenImported(importlib.abc.MetaPathFinder):
    """Finds torch.utils.flop_counter once, as it would have been found, and registers behind its execution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                while _waiting:
                    _register(*_waiting.pop())

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]  # this one loader object
        return spec


if _COUNTER not in sys.modules:
    sys.meta_path.insert(0, _WhenImported())
