"""Faults that parawrap once had, each put back by a small patch. The fuzzer must find them."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from parawrap import GatherError
from parawrap.engine import Session
from parawrap.lanes import Turns
from parawrap.replicas import _survey
from parawrap.replicas._copies import Copies
from parawrap.replicas._lane_tensors import LaneTensors
from parawrap.replicas._ledger import Ledger
from parawrap.replicas._method_stand_ins import PlainView
from parawrap.replicas._parts import Kind, kind_of
from parawrap.replicas._replica import Replica
from parawrap.replicas._snapshot import Snapshot
from parawrap.shards import balanced
from parawrap.shards._join_outputs import _Join


def sharing(is_shared: Callable[[Any], bool]) -> AbstractContextManager[Any]:
    """Share some objects, with all that they hold: those that `is_shared` returns True for."""
    kind_in_survey = _survey._kind_of
    return mock.patch.object(_survey, "_kind_of", lambda value: Kind.ATOM if is_shared(value) else kind_in_survey(value))


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


def copies_by_equality() -> AbstractContextManager[Any]:
    """Find the copy of a module by ``==``."""
    copy_one = Copies._copy

    def patched(self: Copies, value: Any) -> Any:
        if isinstance(value, torch.nn.Module):
            first = next(node.value for node in reversed(self.survey.modules) if node.value == value)
            self._memo[id(value)] = copy_one(self, first)
        return copy_one(self, value)

    return mock.patch.object(Copies, "_copy", patched)


def deep_train_modes_unseen() -> AbstractContextManager[Any]:
    """See the train mode of the whole model alone."""
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


@contextmanager
def one_row_count_proves() -> Iterator[None]:
    """Take equal sizes of shards for proof that an output follows the rows."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys.modules["parawrap.api.parallel"], "uneven", balanced))
        stack.enter_context(mock.patch.object(_Join, "_check_proof", return_value=None))
        yield


def equal_values_prove() -> AbstractContextManager[Any]:
    """Return an output once if it is equal in all lanes."""
    return mock.patch.object(_Join, "_take_declared_equal", lambda self, column, declared: self._take_equal(column))


def first_call_refused() -> AbstractContextManager[Any]:
    """Refuse the first call of each session that is cut, as if it had to learn from it."""
    gather, has_learned = Session.gather, set()

    def patched(self: Session, *args: Any, **kwargs: Any) -> Any:
        if self not in has_learned:
            has_learned.add(self)
            msg = "nothing is known of this call yet"
            raise GatherError(msg)
        return gather(self, *args, **kwargs)

    return mock.patch.object(Session, "gather", patched)


def lanes_draw_at_once() -> AbstractContextManager[Any]:
    """Run lanes that draw random numbers at the same time."""
    return mock.patch.object(Turns, "decide", return_value=None)


def warnings_repeat() -> AbstractContextManager[Any]:
    """Warn of a large shard at each call."""
    never = property(lambda self: False, lambda self, value: None)
    return mock.patch.object(Session, "_has_warned_of_plan", never, create=True)


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
    "copies_by_equality": copies_by_equality,
    "objects_shared": lambda: sharing(_is_plain_object),
    "deep_train_modes_unseen": deep_train_modes_unseen,
    "parameters_shared": parameters_shared,
    "moved_memory_unseen": moved_memory_unseen,
    "unfreezing_unseen": unfreezing_unseen,
    "buffers_not_renewed": buffers_not_renewed,
    "buffers_stay_in_lane_0": buffers_stay_in_lane_0,
    "one_row_count_proves": one_row_count_proves,
    "equal_values_prove": equal_values_prove,
    "first_call_refused": first_call_refused,
    "warnings_repeat": warnings_repeat,
    "lanes_draw_at_once": lanes_draw_at_once,
    "clones_keep_stand_ins": clones_keep_stand_ins,
}
