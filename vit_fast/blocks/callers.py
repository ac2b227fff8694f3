"""Reads in the source of a model how its modules call one of their children."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from .plain import forward_is_replaced

Path = tuple[str, ...]
UNKNOWN = object()
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Call:
    """A call of a child or a method in a method of a module, the owner.

    Local variables that are assigned once stand for their values.
    """

    def __init__(
        self, model: nn.Module, place: str, function: FunctionType, tree: ast.FunctionDef, given: dict[str, ast.expr]
    ) -> None:
        self.method, self._model, self._place = function.__qualname__, model, place
        self._owner, self._function, self._self = model.get_submodule(place), function, _self(tree)
        self._parameters = {each.arg for each in ast.walk(tree.args) if isinstance(each, ast.arg)}
        self._stored = [each.id for each in _names(tree) if isinstance(each.ctx, ast.Store)] + [*self._parameters]
        self._values: dict[str, list[ast.expr]] = {}
        for node in (each for each in ast.walk(tree) if isinstance(each, ast.Assign)):
            for target in (each for each in node.targets if isinstance(each, ast.Name)):
                self._values.setdefault(target.id, []).append(node.value)
        self.arguments = {name: self._resolved(value) for name, value in given.items()}

    def _resolved(self, node: ast.expr) -> ast.expr:
        while isinstance(node, ast.Name) and node.id in self._values and self._stored.count(node.id) == 1:
            (node,) = self._values[node.id]
        return node

    def value(self, name: str, default: Any = None) -> Any:
        """Returns the value of an argument if it is a constant or an attribute of the owner, else UNKNOWN."""
        return self._value(self.arguments[name]) if name in self.arguments else default

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        found: Any = next((functools.reduce(_child, path, self._owner) for path in _paths(node, self._self)), UNKNOWN)
        return found if found is None or isinstance(found, bool | Tensor) else UNKNOWN

    def is_given(self, name: str) -> bool | None:
        """Returns True if an argument is never None or False, and None if the source does not show this.

        A parameter of the method counts as optional, unless all callers of the method give it.
        """
        return self._is_given(self.arguments[name]) if name in self.arguments else False

    def _is_given(self, node: ast.expr) -> bool | None:
        if (value := self._value(node)) is not UNKNOWN:
            return value is not None and value is not False
        if isinstance(node, ast.Name):
            if node.id in self._parameters:
                given = [call.is_given(node.id) for call in self._callers()]
                return False if not given or False in given else all(given) or None
            values = self._values.pop(node.id, [])  # each of them is read once
            branches = {self._is_given(value) for value in values}
            self._values[node.id] = values
            return branches.pop() if len(branches) == 1 else None
        if isinstance(node, ast.Subscript):
            return self._is_given(self._resolved(node.value)) or None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            root = self._function.__globals__.get(ast.unparse(node.func).partition(".")[0])
            of_torch = getattr(root, "__name__", "").partition(".")[0] == "torch"
            return True if of_torch or hasattr(Tensor, node.func.attr) else None
        return True if _is_new(node) else None

    def _callers(self) -> list[Call]:
        """Returns the calls of the method; of another method than forward, only calls in forward."""
        if self._function.__name__ == "forward":
            return calls_of(self._model, self._place)
        calls = _calls_in(self._model, self._place, (self._function.__name__,), self._function)
        return [call for call in calls if call._function.__name__ == "forward"]

    def are_same(self, first: str, second: str) -> bool | None:
        """Returns True if two arguments are one object, and None if the source does not show this."""
        a, b = self.arguments.get(first), self.arguments.get(second)
        if a is None or b is None:
            return None
        if a is b or (isinstance(a, ast.Name | ast.Attribute) and ast.dump(a) == ast.dump(b)):
            return True
        shown = all(_is_new(each) or isinstance(each, ast.Name) for each in (a, b))
        return False if shown and (_is_new(a) or _is_new(b)) else None


def calls_of(model: nn.Module, name: str) -> list[Call]:
    """Returns the calls of a submodule in the innermost module whose forward has any; the list may be empty."""
    parts = name.split(".") if name else []
    cls: Any = type(model.get_submodule(name))
    for depth in reversed(range(len(parts))):
        place = ".".join(parts[:depth])
        found = list(_calls_in(model, place, tuple(parts[depth:]), getattr(cls, "original", cls).forward))
        if found and not forward_is_replaced(model.get_submodule(place)):
            return found
    return []


def _calls_in(model: nn.Module, place: str, path: Path, called: Any) -> Iterator[Call]:
    """Yields the calls of the child or method `path` of the module `place`; `called` is the function that they run."""
    cls: Any = type(model.get_submodule(place))
    parameters = list(inspect.signature(called).parameters.values())[1:]
    required = {each.name for each in parameters if each.default is each.empty and each.kind not in _VARIADIC}
    for function, tree in _methods(getattr(cls, "original", cls), "forward", set()):
        bound = _self(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.For | ast.comprehension):  # over a list of modules, perhaps within zip
                of_list = [found for each in ast.walk(node.iter) for found in _paths(each, _self(tree)) if found]
                bound |= {each.id: [(*found, "*") for found in of_list] for each in _names(node.target)}
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                bound[node.targets[0].id] = _paths(node.value, bound)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not any(_fits(each, path) for each in _paths(node.func, bound)):
                continue
            given = {each.name: value for each, value in zip(parameters, node.args)}
            given |= {str(each.arg): each.value for each in node.keywords}
            unpacks = "None" in given or any(isinstance(each, ast.Starred) for each in node.args)
            if required <= given.keys() and not unpacks:
                yield Call(model, place, function, tree, given)


def _methods(cls: type, name: str, seen: set[str]) -> Iterator[tuple[FunctionType, ast.FunctionDef]]:
    """Yields a method of a class, and the methods that it mentions."""
    function = inspect.unwrap(getattr(cls, name, None))  # type: ignore[arg-type]  # also of other objects
    if name in seen or not isinstance(function, FunctionType):
        return
    seen.add(name)
    if (tree := _tree(function)) is not None:
        yield function, tree
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                yield from _methods(cls, node.attr, seen)


@functools.cache
def _tree(function: FunctionType) -> ast.FunctionDef | None:
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError, ValueError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


def _paths(node: ast.AST | None, bound: dict[str, list[Path]]) -> list[Path]:
    """Returns the paths below the module that an expression may stand for; "*" is any item."""
    if isinstance(node, ast.Name):
        return bound.get(node.id, [])
    if isinstance(node, ast.Attribute):
        return [(*path, node.attr) for path in _paths(node.value, bound)]
    if isinstance(node, ast.Subscript):
        key = str(node.slice.value) if isinstance(node.slice, ast.Constant) else "*"
        return [(*path, key) for path in _paths(node.value, bound)]
    return []


def _self(tree: ast.FunctionDef) -> dict[str, list[Path]]:
    return {each.arg: [()] for each in (*tree.args.posonlyargs, *tree.args.args)[:1]}


def _fits(written: Path, path: Path) -> bool:
    return len(written) == len(path) and all(own in ("*", part) for own, part in zip(written, path))


def _names(node: ast.AST) -> list[ast.Name]:
    return [each for each in ast.walk(node) if isinstance(each, ast.Name)]


def _child(owner: Any, name: str) -> Any:
    is_computed = isinstance(getattr(type(owner), name, None), property)
    return UNKNOWN if is_computed else getattr(owner, name, UNKNOWN)


def _is_new(node: ast.AST | None) -> bool:
    """Returns True for the result of an arithmetic operator, which is a new tensor."""
    return isinstance(node, ast.BinOp | ast.UnaryOp | ast.Compare)
