"""Faults that parawrap once had, each put back by a small patch. The fuzzer must find them."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from parawrap.engine._call_history import Kind as KindOfCall
from parawrap.replicas import _survey
from parawrap.replicas._copies import Copies
from parawrap.replicas._lane_tensors import LaneTensors
from parawrap.replicas._ledger import Ledger
from parawrap.replicas._method_stand_ins import PlainView
from parawrap.replicas._parts import Kind, kind_of
from parawrap.replicas._replica import Replica
from parawrap.replicas._snapshot import Snapshot
from parawrap.shards._join_outputs import _Join


def sharing(is_shared: Callable[[Any], bool]) -> AbstractContextManager[Any]:
    """Share some objects, with all that they hold: those that `is_shared` returns True for."""
    find = _survey._kind_of

    def patched(value: Any) -> Kind:
        return Kind.ATOM if is_shared(value) else find(value)

    return mock.patch.object(_survey, "_kind_of", patched)


def _is_list_of_modules(value: Any) -> bool:
    return type(value) is list and any(isinstance(item, torch.nn.Module) for item in value)


def _is_dict_of_dicts(value: Any) -> bool:
    return type(value) is dict and any(type(item) is dict for item in value.values())


def _is_method_or_partial(value: Any) -> bool:
    return isinstance(value, types.MethodType | functools.partial)


def _is_closure(value: Any) -> bool:
    return type(value) is types.FunctionType and bool(value.__closure__ or value.__defaults__)


def _is_plain_object(value: Any) -> bool:
    return kind_of(type(value)) is Kind.INSTANCE


def deep_train_modes_unseen() -> AbstractContextManager[Any]:
    """Watch the train mode of the whole model alone."""
    all_changes = Snapshot.changes

    def changes(self: Snapshot) -> Any:
        found = all_changes(self)
        return found and [change for change in found if change.key != "training" or change.node.parent is None]

    return mock.patch.multiple(Snapshot, changes=changes, intact=lambda self: changes(self) == [])


@contextmanager
def parameters_shared() -> Iterator[None]:
    """Give lanes the parameters themselves, in modules that are not marked as replicas."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Copies, "_mark_modules", return_value=None))
        stack.enter_context(mock.patch.object(LaneTensors, "_view", lambda self, original: original))
        yield


@contextmanager
def moved_memory_unseen() -> Iterator[None]:
    """Keep views of parameters after ``parameter.data = ...``."""

    def same_form(self: Ledger) -> bool:
        return [tensor.requires_grad for tensor in self._tensors] == self._grads

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Ledger, "same_form", same_form))
        stack.enter_context(mock.patch.object(Ledger, "moved", return_value=[]))
        yield


def unfreezing_unseen() -> AbstractContextManager[Any]:
    """Compare the memory of parameters, and not their `requires_grad`."""
    return mock.patch.object(
        Ledger, "same_form", lambda self: all(map(torch.Tensor.is_set_to, self._strided, self._aliases))
    )


def buffers_not_renewed() -> AbstractContextManager[Any]:
    """Leave the lane's copies of buffers as they are before a task."""
    return mock.patch.object(LaneTensors, "renew_in_lane", return_value=None)


def buffers_stay_in_lane_0() -> AbstractContextManager[Any]:
    """Drop the buffers that lane 0 wrote."""
    return mock.patch.object(Replica, "write_back", lambda self: setattr(self, "is_pending", False))


def one_row_count_proves() -> AbstractContextManager[Any]:
    """Take one row count for evidence that an output follows the rows."""

    def learned(self: _Join, place: Any, shown: str, *, is_empty: bool = False) -> str:
        return shown

    @contextmanager
    def both() -> Iterator[None]:
        from parawrap.engine._session import Session

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(_Join, "_learned", learned))
            stack.enter_context(
                mock.patch.object(Session, "_telling_plan", lambda self, kind, plan, flat, cutter: (plan, None))
            )
            yield

    return both()


def lanes_draw_at_once() -> AbstractContextManager[Any]:
    """Run lanes that draw random numbers at the same time."""
    return mock.patch.object(KindOfCall, "in_turns", property(lambda self: False, lambda self, value: None))


@contextmanager
def clones_keep_stand_ins() -> Iterator[None]:
    """Show the stand-ins to ``dict.update(vars(model))``."""
    with mock.patch.multiple(PlainView, keys=dict.keys, __getitem__=dict.__getitem__):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "lists_shared": lambda: sharing(_is_list_of_modules),
    "dicts_of_dicts_shared": lambda: sharing(_is_dict_of_dicts),
    "methods_shared": lambda: sharing(_is_method_or_partial),
    "closures_shared": lambda: sharing(_is_closure),
    "objects_shared": lambda: sharing(_is_plain_object),
    "deep_train_modes_unseen": deep_train_modes_unseen,
    "parameters_shared": parameters_shared,
    "moved_memory_unseen": moved_memory_unseen,
    "unfreezing_unseen": unfreezing_unseen,
    "buffers_not_renewed": buffers_not_renewed,
    "buffers_stay_in_lane_0": buffers_stay_in_lane_0,
    "one_row_count_proves": one_row_count_proves,
    "lanes_draw_at_once": lanes_draw_at_once,
    "clones_keep_stand_ins": clones_keep_stand_ins,
}
