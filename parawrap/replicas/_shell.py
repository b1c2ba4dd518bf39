"""A replica is a tree of shells: modules of the same classes with dictionaries of their own.

A lane that runs a shell may set attributes, write buffers and call itself without any other lane seeing it. Parameters
are the originals or their copies, as the replica's :class:`Tensors` says; hooks and all other attributes are shared.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from typing import Any

import torch

from parawrap.errors import ReplicaError
from parawrap.replicas._ledger import lasting
from parawrap.replicas._script import fill_script, replicate_script
from parawrap.replicas._stand_in import StandIn, original_method
from parawrap.replicas._tensors import Tensors
from parawrap.replicas._watch import module_tree

__all__ = ["Replica"]

_STRUCTURE = ("_parameters", "_buffers", "_modules")


class Replica:
    """One module for one lane. Built and refreshed only while the lane is idle; run only in the lane."""

    def __init__(self, original: torch.nn.Module, tensors: Tensors) -> None:
        self.original = original
        self.tensors = tensors
        self.shells: dict[torch.nn.Module, torch.nn.Module] = {}
        self.build()

    @property
    def module(self) -> torch.nn.Module:
        return self.shells[self.original]

    def build(self) -> None:
        """Make a shell of every module, keeping the tensors that are there already."""
        names = dict(module_tree(self.original))
        self.shells = {}
        for module, name in reversed(names.items()):  # children first: a compiled parent is built around its child
            try:
                self.shells[module] = self._shell(module)
            except ReplicaError:
                raise
            except Exception as error:
                msg = _cannot(name, module, self.tensors.device, f"{type(error).__name__}: {error}")
                raise ReplicaError(msg) from error
        for module, name in names.items():
            self.fill(module, name)

    def fill(self, module: torch.nn.Module, name: str) -> None:
        """Bring a shell into line with its module: attributes, tensors and children."""
        shell = self.shells[module]
        try:
            if isinstance(module, torch.jit.ScriptModule):
                fill_script(shell, module, self.tensors)
            elif not _is_compiled(module):
                self._fill_plain(shell, module)
        except Exception as error:
            msg = _cannot(name, module, self.tensors.device, f"{type(error).__name__}: {error}")
            raise ReplicaError(msg) from error

    def write_back(self) -> None:
        """Give the buffers that the lane wrote, or replaced, to the original."""
        for module, shell in self.shells.items():
            for name, buffer in module._buffers.items():
                now = shell._buffers.get(name)
                if buffer is None or now is None or not self.tensors.written_by_lane(buffer, now):
                    continue
                with lasting():
                    if now.shape == buffer.shape:
                        buffer.copy_(now)
                    else:
                        module._buffers[name] = now.detach().to(buffer.device)

    def _shell(self, module: torch.nn.Module) -> torch.nn.Module:
        if isinstance(module, torch.jit.ScriptModule):
            return replicate_script(module)
        if _is_compiled(module):
            return _recompiled(module, self.shells)
        shell = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        assert isinstance(shell, torch.nn.Module)
        return shell

    def _fill_plain(self, shell: torch.nn.Module, module: torch.nn.Module) -> None:
        own = vars(shell)
        own.update(vars(module._replicate_for_data_parallel()))  # type: ignore[no-untyped-call]
        for name in set(own) - set(vars(module)) - {"_is_replica"}:
            del own[name]
        tensors = self.tensors
        own["_parameters"] = {n: None if p is None else tensors.parameter(p) for n, p in module._parameters.items()}
        own["_buffers"] = {n: None if b is None else tensors.buffer(b) for n, b in module._buffers.items()}
        own["_modules"] = {n: None if c is None else self.shells[c] for n, c in module._modules.items()}
        for name, value in list(own.items()):
            if name not in _STRUCTURE:
                self._fill_attribute(own, name, value, module)

    def _fill_attribute(self, own: dict[str, Any], name: str, value: Any, module: torch.nn.Module) -> None:
        if isinstance(value, StandIn):
            value = original_method(value)
            if getattr(value, "__func__", None) is getattr(type(module), name, None):
                del own[name]  # the class has it
                return
            own[name] = value
        if name == "_compiled_call_impl":
            own[name] = None  # compiled for the original; the shell runs the same code uncompiled
        elif isinstance(value, types.MethodType) and (owner := self._shell_of(value.__self__)) is not None:
            own[name] = types.MethodType(value.__func__, owner)
        else:
            own[name] = self.tensors.attribute(value)

    def _shell_of(self, owner: Any) -> torch.nn.Module | None:
        return self.shells.get(owner) if isinstance(owner, torch.nn.Module) else None


def _is_compiled(module: torch.nn.Module) -> bool:
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")  # loaded by whoever compiled something
    return eval_frame is not None and isinstance(module, eval_frame.OptimizedModule)


def _recompiled(module: Any, shells: Mapping[torch.nn.Module, torch.nn.Module]) -> torch.nn.Module:
    """The shell of what was compiled, compiled the same way."""
    shell = type(module)(shells[module._orig_mod], module.dynamo_ctx)
    hooks = {name: value for name, value in vars(module).items() if name.endswith("_hooks")}
    vars(shell).update(hooks)
    assert isinstance(shell, torch.nn.Module)
    return shell


def _cannot(name: str, module: torch.nn.Module, device: torch.device, why: str) -> str:
    place = f"submodule {name!r}" if name else "the module"
    return f"no replica of {place} ({type(module).__name__}) can be made on {device}: {why}"
