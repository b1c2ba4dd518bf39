"""The evidence of calls of one kind: the outputs that follow the rows, and the use of random numbers.

A kind is the method, the structure of the arguments without sizes, the dtypes of tensors, the non-tensor arguments, and the
train, grad, and autocast modes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from parawrap.backends import backend_of, warn_caller
from parawrap.lanes import Modes
from parawrap.shards import Evidence, FlatCall, ShardPlan
from parawrap.tree import Opaque, flatten, unflatten

__all__ = ["Generators", "Kind", "Kinds"]

_MOST_KINDS = 4096
_TENSOR = frozenset({torch.Tensor})
_form_of = attrgetter("ndim", "dtype")


class Kind:
    """The calls of one kind.

    `draws` is True if a call drew random numbers, and `in_turns` if it drew from a generator that lanes share; the first
    call runs in turns to show both. Its shards differ in size. A kind that draws is cut like that forever: the numbers
    depend on the cut.
    """

    __slots__ = ("_witness", "draws", "evidence", "in_turns", "is_new", "structure", "verified")

    def __init__(self) -> None:
        self.is_new = self.in_turns = True
        self.draws = self.verified = False
        self.evidence = Evidence()
        self.structure = 0
        self._witness: tuple[Any, int, Any] | None = None

    def follow(self, structure: int) -> None:
        """Learn again what outputs are like after the structure of the module changed."""
        self.evidence, self._witness = Evidence(), None
        self.structure = structure  # last: a thread that reads it may use the evidence

    def note(self, *, drew: bool, drew_shared: bool, ran_in_turns: bool) -> None:
        """Note whether a call drew random numbers. Lanes that did not run in turns drew them in no fixed order."""
        if drew_shared and not ran_in_turns:
            warn_caller(
                "random numbers were drawn in a call, and earlier calls of its kind drew none: its lanes, or another "
                "thread, drew them in no fixed order, so a seed does not reproduce this call. From now on the lanes of "
                "such calls run in turns"
            )
        self.draws = self.draws or drew
        self.in_turns = drew_shared or (self.in_turns and not self.is_new)
        self.is_new = False

    def keep_witness(self, output: Any, plan: ShardPlan, flat: FlatCall) -> None:
        """Keep the output of a whole call as one of two row counts, for calls with the same other sizes."""
        leaves, spec = flatten(output)
        leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._witness = unflatten(spec, leaves), plan.rows, _other_sizes(plan, flat)

    def witness(self, plan: ShardPlan, flat: FlatCall) -> tuple[Any, int] | None:
        """Return the output of a whole call with another row count than this plan's shards, and the same other sizes."""
        kept = self._witness
        if kept is None or self.draws:
            return None
        output, rows, sizes = kept
        return (output, rows) if rows != plan.sizes[0] and sizes == _other_sizes(plan, flat) else None


class Kinds:
    """The kinds of one session. Safe to share between threads: at worst a kind is learned twice."""

    def __init__(self) -> None:
        self._kinds: dict[Any, Kind] = {}

    def of(self, method: str | None, flat: FlatCall, modes: Modes, training: object) -> Kind:
        """Return the kind of a call."""
        only_tensors = _TENSOR.issuperset(map(type, flat.leaves))
        values = tuple(map(_form_of, flat.leaves)) if only_tensors else _values(flat.leaves)
        key = method, flat.spec, values, modes.grad, modes.inference, modes.autocast, training
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= _MOST_KINDS:
                self._kinds.clear()
            kind = self._kinds[key] = Kind()
        return kind


class Generators:
    """The random generators that lanes may draw from: the CPU's, those of devices, and those of modules and arguments."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        lanes = Counter(device for device in devices if device.type != "cpu")
        self._shared = [device for device, count in lanes.items() if count > 1]
        self._own = [device for device, count in lanes.items() if count == 1]

    def state(self, leaves: Sequence[Any], held: Sequence[torch.Generator] = ()) -> list[bytes]:
        """Return the state of each generator that several lanes draw from; `held` are those of modules."""
        states = [_bytes_of(torch.default_generator.get_state())]
        if held or not _TENSOR.issuperset(map(type, leaves)):
            states += [_bytes_of(leaf.get_state()) for leaf in (*held, *leaves) if type(leaf) is torch.Generator]
        return states + _states_of(self._shared) if self._shared else states

    def own_state(self) -> list[bytes]:
        """Return the state of the generator of each device with one lane."""
        return _states_of(self._own) if self._own else []


def _states_of(devices: Sequence[torch.device]) -> list[bytes]:
    found = (backend_of(device.type).rng_state(device) for device in devices)
    return [_bytes_of(state) for state in found if state is not None]


def _bytes_of(state: torch.Tensor) -> bytes:
    """The bytes of a state: comparing them takes a tenth of the time of torch.equal."""
    try:
        return state.numpy().tobytes()
    except RuntimeError:  # numpy is not installed
        return bytes(state.untyped_storage())


def _values(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """The values that make another kind: dims and dtypes of tensors, other values, or their classes without a hash."""
    return tuple(map(_value_of, leaves))


def _value_of(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _form_of(leaf)
    if isinstance(leaf, Opaque):
        return type(leaf.value)
    try:
        hash(leaf)
    except TypeError:
        return type(leaf)
    return type(leaf), leaf


def _other_sizes(plan: ShardPlan, flat: FlatCall) -> list[list[int]]:
    """The sizes of all tensors on the dims that do not hold the rows."""
    return [
        [size for each, size in enumerate(leaf.shape) if dim is None or each != dim % leaf.ndim]
        for leaf, dim in zip(flat.leaves, plan.dims, strict=True)
        if isinstance(leaf, torch.Tensor)
    ]
