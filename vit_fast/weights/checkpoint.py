"""Finds the weights of a model in a checkpoint, which may contain several models in nested dicts or under prefixes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import ViTConfig
from ..libraries import known

StateDicts = dict[str, dict[str, Tensor]]
"""State dicts of a file. Nested keys are joined by dots; the key of the outermost mapping is ""."""

# Keys and prefixes, the preferred ones first. Averaged weights come first, as in timm. The authors of DINO evaluate the
# teacher, those of I-JEPA the target encoder, and those of MoCo v3 the base encoder.
_ORDER = ("state_dict_ema", "model_ema", r"(.+_)?(ema|swa|avg|averaged?)(_.+)?", "teacher|target_encoder",
          "base_encoder", "state_dict", "model")  # fmt: skip
_AVERAGED = 4  # the first patterns of _ORDER describe averaged weights
_WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")  # of torch
_LISTED = 12  # names in a list before "and N more"


class Part(NamedTuple):
    """The tensors of a state dict whose names begin with a prefix."""

    key: str
    prefix: str
    tensors: dict[str, Tensor]  # without the prefix
    fitting: int  # number of tensors that fit the model by name and shape; -1 if no library has these names
    ranks: tuple[int, ...]  # positions of the key and prefix in _ORDER; smaller tuples are preferred

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.key, self.prefix and f"prefix {self.prefix}")))

    def is_inside(self, other: Part) -> bool:
        return self.key == other.key and self.prefix.startswith(other.prefix)

    def same_values(self, other: Part) -> bool:
        pairs = [(tensor, other.tensors.get(name)) for name, tensor in self.tensors.items()]
        return all(b is not None and a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def state_dicts(content: Mapping[Any, Any], key: str = "", depth: int = 8) -> StateDicts:
    """Returns the tensors of all nested mappings. Removes wrappers of torch.compile and FSDP from their names."""
    own = {_WRAPPERS.sub("", str(name)): value.detach() for name, value in content.items() if isinstance(value, Tensor)}
    found = {key: own} if own else {}
    for name, value in content.items() if depth else ():
        value = dict(enumerate(value)) if isinstance(value, list) else value  # e.g. the averages of torch_ema
        if isinstance(value, Mapping):
            found |= state_dicts(value, f"{key}.{name}" if key else str(name), depth - 1)
    return found


def choose(
    found: StateDicts, wanted: Mapping[str, Tensor], config: ViTConfig, key: str | None, prefix: str | None, ema: bool
) -> tuple[Part, list[Part], list[str]] | None:
    """Selects the part of a checkpoint in which most tensors fit the state dict `wanted`.

    `key` and `prefix` restrict the parts. `ema=False` excludes averaged weights, unless `key` is given.

    Returns:
        The part; other parts that fit equally well and differ in values, if no rule prefers one of them; names of what
        is not used, first of the parts that fit equally well. None if no part has the names of a known library.
    """
    parts = []
    for path, tensors in found.items():
        if key is not None and f".{key}." not in f".{path}.":
            continue
        owners: dict[str, set[str]] = {} if prefix is None else {prefix: set()}  # by prefix, the names that show it
        for name in tensors if prefix is None else ():
            for place in known.starts(name):
                owners.setdefault(name[:place], set()).add(name)
        for start, own in owners.items():
            copies = tuple(other for other in owners if other.startswith(start) and own - owners[other])
            names = (name for name in tensors if name.startswith(start) and not name.startswith(copies))
            inside = {name.removeprefix(start): tensors[name] for name in names}  # without other copies of the model
            parts.append(Part(path, start, inside, _fitting(inside, wanted, config), _ranks(f"{path}.{start}")))
    parts = [part for part in parts if part.fitting >= 0 and (ema or key is not None or min(part.ranks) >= _AVERAGED)]
    if not parts:
        return None
    best, *others = sorted(parts, key=lambda part: (-part.fitting, part.ranks, len(part.prefix)))
    rivals = [part for part in others if part.fitting == best.fitting and not part.is_inside(best)]
    undecided = [part for part in rivals if part.ranks == best.ranks and not part.same_values(best)]
    named = {part.prefix + name for part in (best, *rivals) if part.key == best.key for name in part.tensors}
    unused = [(part.prefix or "names without prefix") if part.key == best.key else part.key for part in rivals]
    unused += _prefixes([name for name in found[best.key] if name not in named], best.prefix)
    return best, undecided, list(dict.fromkeys([*unused, *(_short(path) for path in found if path != best.key)]))


def _fitting(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], config: ViTConfig) -> int:
    converted = known.convert({name: tensor.to("meta") for name, tensor in tensors.items()}, config)
    if converted is None:
        return -1
    return sum(name in wanted and wanted[name].shape == tensor.shape for name, tensor in converted.tensors.items())


def _ranks(path: str) -> tuple[int, ...]:
    found = ([i for i, each in enumerate(_ORDER) if re.fullmatch(each, name)] for name in path.split("."))
    return (*(places[0] for places in found if places), len(_ORDER))


def contents(found: StateDicts) -> str:
    """Lists the keys of a file, and the prefixes of their names."""
    by_key = {_short(key): listed(_prefixes(tensors)) for key, tensors in reversed(found.items())}
    return listed([f"{key} ({names})" if key else names for key, names in reversed(by_key.items())])


def _short(key: str) -> str:
    return ".".join(key.split(".")[:2])


def _prefixes(names: Iterable[str], inside: str = "module.") -> list[str]:
    """Returns the first parts of names with their dots, such as "blocks."; two parts if `inside` begins with one."""
    heads: dict[str, list[str]] = {}
    for name in names:
        ends = (dot.end() for dot in re.finditer(r"\.", name))
        heads.setdefault(next((name[:i] for i in ends if not inside.startswith(name[:i])), name), []).append(name)
    return [head if len(group) > 1 else group[0] for head, group in heads.items()]


def listed(names: list[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"
