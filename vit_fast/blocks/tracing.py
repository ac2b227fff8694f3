"""Shows torch.fx and torch.jit.script the original forward of a fused class.

They cannot trace the fused forward, which inspects its children and calls custom operators. torch.fx calls forward with
Proxies and gets the original; torch.jit.script reads source and annotations, and gets those of the original.
"""

from __future__ import annotations

import functools
import inspect
from types import FunctionType
from typing import Any

from torch import nn
from torch.fx import Proxy

_LEAVES = ("torch.nn.", "torch.ao.nn.")  # prefixes of classes that torch.fx never traces into


def show_original_to_tracers(cls: type[Any], original: type[nn.Module], equivalent: bool) -> None:
    """Wraps the forward of a fused class `cls`, so that tracers see that of `original`.

    If the two are not equivalent, torch.fx keeps the module whole, and torch.jit.script fails on the fused forward. A
    forward that a user bound while the module was fused runs that of `original` after unfuse. A forward that a user
    sets on `original` also runs in fused modules.
    """
    if original.__module__.startswith("transformers."):
        return  # transformers' own wrapper must stay the outermost; no tracer supports its models anyway
    fused_forward, original_forward = cls.forward, original.forward
    leaf = original.__module__.startswith(_LEAVES) and not issubclass(original, nn.Sequential)
    proxies, stays_whole = Proxy, not equivalent or leaf

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, cls) or original.forward is not original_forward:
            return original.forward(self, *args, **kwargs)
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, proxies):
                break
        else:
            run: Any = original_forward if self.is_idle() else fused_forward
            return run(self, *args, **kwargs)
        tracer: Any = argument.tracer
        if stays_whole and self is not tracer.root:
            # not a leaf for torch.fx: the graph calls the module, which is still fused
            return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)
        return original_forward(self, *args, **kwargs)

    if not equivalent:
        cls.forward = functools.update_wrapper(forward, fused_forward)
        return
    # torch.jit.script unwraps to the original's source, and resolves the names there in the globals of this function
    shown = FunctionType(forward.__code__, original_forward.__globals__, "forward", None, forward.__closure__)
    cls.forward = functools.update_wrapper(shown, original_forward)
    # the first class that has any is where it looks for the types of attributes: nn.Module at the latest
    cls.__annotations__ = dict(next(filter(None, map(inspect.get_annotations, original.__mro__))))


def show_original_to_unfused(cls: type[Any], original: type[nn.Module]) -> None:
    """Wraps the forward of a fused class of transformers, before transformers wraps it for gradient checkpointing.

    A forward that a user bound while the module was fused runs that of `original` after unfuse.
    """
    fused_forward, original_forward = cls.forward, original.forward

    @functools.wraps(fused_forward)
    def bound(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_fused = isinstance(self, cls) and original.forward is original_forward and not self.is_idle()
        return (fused_forward if is_fused else original.forward)(self, *args, **kwargs)

    cls.forward = bound
