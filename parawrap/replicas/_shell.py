"""A replica is a tree of shells: modules of the same classes with dictionaries of their own.

A lane that runs a shell may set attributes, write buffers and call itself without any other lane seeing it. Parameters
are the originals or their copies, as the replica's :class:`Tensors` says; hooks and all other attributes are shared.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from parawrap.errors import ReplicaError
from parawrap.replicas._ledger import lasting
from parawrap.replicas._script import fill_script, replicate_script
from parawrap.replicas._stand_in import without_stand_ins
from parawrap.replicas._tensors import Tensors
from parawrap.replicas._watch import may_be_written_unseen, module_tree

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
        self._asked: dict[torch.nn.Module, set[int]] = {}
        self._given: dict[torch.nn.Module, tuple[torch.nn.Module, set[str]]] = {}
        self._pairs: dict[torch.nn.Module, list[tuple[torch.nn.Module, torch.nn.Module]]] = {}
        for module, name in reversed(names.items()):  # children first: a compiled parent is built around its child
            with self._named(name, module):
                self._pairs[module] = self._paired(module)
            self.shells[module] = self._pairs[module][0][1]
        for module, name in names.items():
            self.fill(module, name)

    def fill(self, module: torch.nn.Module, name: str) -> None:
        """Bring a shell into line with its module: attributes, tensors and children."""
        asked: set[int] = set()
        self.tensors.asked = asked
        with self._named(name, module):
            for original, shell in self._pairs[module]:
                if isinstance(original, torch.jit.ScriptModule):
                    fill_script(shell, original, self.tensors)
                elif not _is_compiled(original):
                    self._fill_plain(shell, original)
        self._asked[module] = asked
        self._buffered = [pair for pairs in self._pairs.values() for pair in pairs if len(pair[0]._buffers)]

    def given(self) -> list[Any]:
        """The dictionaries of submodules and parameters of every shell."""
        return [own for shell, _ in self._given.values() for own in (shell._modules, shell._parameters)]

    def grown(self) -> tuple[torch.nn.Module, str] | None:
        """A module, and the name of a submodule or parameter that its shell made and had not been given."""
        for original, (shell, names) in self._given.items():
            for name in (*shell._modules, *shell._parameters):
                if name not in names:
                    return original, name
        return None

    def tensors_in_use(self) -> set[int]:
        """The ids of the originals that the shells have, or have copies of."""
        return set().union(*self._asked.values())

    def may_be_touched(self) -> bool:
        """Whether the lane has anything of its own that `touched` looks at."""
        return bool(self._buffered) or self.tensors.has_containers()

    def touched(self) -> bool:
        """Whether the lane wrote its buffers, or a container that its tensors came from holds others."""
        return bool(self.wrote()) or self.tensors.containers_changed()

    def wrote(self) -> list[torch.Tensor]:
        """The buffers that the lane wrote or replaced, of which it must be given new copies."""
        if not self._buffered:
            return []
        replaced = [
            buffer
            for original, shell in self._buffered
            for name, buffer in original._buffers.items()
            if buffer is not None and _buffer(shell, name) is not self.tensors.buffer(buffer)
        ]
        return replaced + self.tensors.written()

    def refresh_buffers(self, changed: Sequence[torch.Tensor]) -> int:
        """Give the lane new copies of those buffers; the bytes copied."""
        copied = self.tensors.renew_buffers(changed)
        keys = {id(buffer) for buffer in changed}
        for original, shell in self._buffered:
            for name, buffer in original._buffers.items():
                if buffer is not None and id(buffer) in keys:
                    _set_buffer(shell, name, self.tensors.buffer(buffer))
        return copied

    def write_back_buffers(self) -> Callable[[], None] | None:
        """`write_back`, or None for a module without buffers."""
        return self.write_back if self._buffered else None

    def write_back(self) -> None:
        """Give the buffers that the lane wrote, or replaced, to the original."""
        for original, shell in self._buffered:
            for name, buffer in original._buffers.items():
                now = _buffer(shell, name)
                if buffer is None or now is None or now is buffer:
                    continue
                if not (self.tensors.written_by_lane(buffer, now) or may_be_written_unseen(original, buffer)):
                    continue
                with lasting():
                    if now.shape == buffer.shape:
                        buffer.copy_(now)
                    else:
                        _set_buffer(original, name, now.detach().to(buffer.device))

    def _paired(self, module: torch.nn.Module) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
        """The module beside its new shell; a scripted one is followed by what is in it."""
        if isinstance(module, torch.jit.ScriptModule):
            return replicate_script(module)
        if _is_compiled(module):
            return [(module, _recompiled(module, self.shells))]
        return [(module, module._replicate_for_data_parallel())]

    @contextmanager
    def _named(self, name: str, module: torch.nn.Module) -> Iterator[None]:
        """What goes wrong inside the block is told of that submodule."""
        try:
            yield
        except Exception as error:
            place = f"submodule {name!r}" if name else "the module"
            msg = (
                f"no replica of {place} ({type(module).__name__}) can be made on {self.tensors.device}: "
                f"{type(error).__name__}: {error}"
            )
            raise ReplicaError(msg) from error

    def _fill_plain(self, shell: torch.nn.Module, module: torch.nn.Module) -> None:
        own = vars(shell)
        own.clear()
        own.update(without_stand_ins(module._replicate_for_data_parallel().__dict__))
        own["_parameters"] = {n: p if p is None else self.tensors.parameter(p) for n, p in module._parameters.items()}
        own["_buffers"] = {n: b if b is None else self.tensors.buffer(b) for n, b in module._buffers.items()}
        own["_modules"] = {n: c if c is None else self.shells[c] for n, c in module._modules.items()}
        self._given[module] = shell, {*own["_modules"], *own["_parameters"]}
        for name, value in own.items():
            if name not in _STRUCTURE:
                own[name] = self._attribute(name, value)

    def _attribute(self, name: str, value: Any) -> Any:
        if name == "_compiled_call_impl":
            return None  # compiled for the original; the shell runs the same code uncompiled
        if isinstance(value, types.MethodType) and (owner := self._shell_of(value.__self__)) is not None:
            return types.MethodType(value.__func__, owner)
        return self.tensors.attribute(value)

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


def _buffer(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    return module._buffers[name] if name in module._buffers else None  # noqa: SIM401  # a scripted module's has no `get`


def _set_buffer(module: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        setattr(module, name, value)
    else:
        module._buffers[name] = value
