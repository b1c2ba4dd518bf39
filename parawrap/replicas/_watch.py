"""The modules of a tree, and whether any of them changed since it was looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch

from parawrap.replicas._script import ScriptedState

__all__ = ["Watch", "may_be_written_unseen", "module_tree"]

_C: Any = torch._C
# A number that is another one after each change of a dictionary: what torch's compiler guards modules by. It has no public
# name; where a release of torch has none, all items are looked at each time.
_version: Callable[[dict[Any, Any]], int] | None = getattr(getattr(_C._dynamo, "guards", None), "dict_version", None)


def module_tree(root: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str]]:
    """Every module once, parents first, with its name; a scripted module is one piece."""
    seen: set[torch.nn.Module] = set()
    stack = [(root, "")]
    while stack:
        module, name = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        yield module, name
        if not isinstance(module, torch.jit.ScriptModule):
            children = [(child, f"{name}.{key}".lstrip(".")) for key, child in module._modules.items() if child is not None]
            stack += reversed(children)


def may_be_written_unseen(module: torch.nn.Module, buffer: torch.Tensor) -> bool:
    """Whether a forward pass may write the buffer without its version counter telling.

    The kernels of batch and instance norm do so, in train mode, to their running statistics, and a norm of the user's own
    calls the same kernels: vectors of floats, one value a channel.
    """
    return module.training and buffer.ndim == 1 and buffer.is_floating_point()


class Watch:
    """What the modules of a tree looked like at one moment: the very objects in their dictionaries.

    Asked before every call, so `intact` asks the dictionaries for their versions, in C, and looks into them only where one
    is another; which module changed is looked up only then.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = list(modules)
        self._classes = [*map(type, modules)]
        self._scripted = {m: ScriptedState(m) for m in modules if isinstance(m, torch.jit.ScriptModule)}
        self._dicts = [(module, own) for module in modules if module not in self._scripted for own in _dicts(module)]
        self._lively = [own for _, own in self._dicts]
        self._lengths = [len(own) for own in self._lively]
        self._all_plain = {dict}.issuperset(map(type, self._lively))
        self._versions = self._versions_now()  # before what they are the versions of
        self._kept = list(self._now())

    def intact(self) -> bool:
        """Whether every module still has the same attributes, parameters, buffers and children."""
        if [*map(type, self._modules)] != self._classes:
            return False
        versions = [*map(_version, self._lively)] if _version is not None and self._all_plain else None
        if (versions is None or versions != self._versions) and not self._dicts_are_intact():
            return False
        return not self._scripted or all(state.intact() for state in self._scripted.values())

    def changed(self) -> list[torch.nn.Module]:
        """The modules that changed since they were looked at."""
        found = [module for module, cls in zip(self._modules, self._classes, strict=True) if type(module) is not cls]
        found += [module for module, state in self._scripted.items() if not state.intact()]
        end = 0
        for (module, own), length in zip(self._dicts, self._lengths, strict=True):
            start, end = end, end + length
            if len(own) != length or not all(map(is_, own.values(), self._kept[start:end])):
                found.append(module)
        return list(dict.fromkeys(found))

    def took_another_form(self) -> bool:
        """True if an attribute, a submodule, or a class changed; train modes and tensors for tensors do not count."""
        if [*map(type, self._modules)] != self._classes or not all(state.intact() for state in self._scripted.values()):
            return True
        end = 0
        for (_, own), length in zip(self._dicts, self._lengths, strict=True):
            start, end = end, end + length
            pairs = zip(own.items(), self._kept[start:end], strict=False)
            if len(own) != length or any(_is_another_form(*item, before) for item, before in pairs):
                return True
        return False

    def _dicts_are_intact(self) -> bool:
        versions = self._versions_now()
        intact = [*map(len, self._lively)] == self._lengths and all(map(is_, self._now(), self._kept))
        if intact:
            self._versions = versions  # something was changed, and changed back
        return intact

    def _versions_now(self) -> list[int] | None:
        """None where a version does not tell all: an OrderedDict keeps to itself that its order was changed."""
        if _version is None or not self._all_plain:
            return None
        return [*map(_version, self._lively)]

    def _now(self) -> Iterator[Any]:
        return chain.from_iterable(own.values() for own in self._lively)


def _is_another_form(name: str, now: Any, before: Any) -> bool:
    both_tensors = isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor)
    return now is not before and name != "training" and not both_tensors


def _dicts(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    own = vars(module)
    return own, own["_parameters"], own["_buffers"], own["_modules"]
