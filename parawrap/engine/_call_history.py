"""Evidence from calls of one kind: which outputs follow the rows, and whether calls draw random numbers.

A kind is the method, the structure of the arguments without sizes, the dtypes of tensors, the non-tensor arguments, and the
train, grad, and autocast modes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from parawrap.backends import backend_of, warn_caller
from parawrap.lanes import Modes
from parawrap.shards import Evidence, FlatCall, ShardPlan
from parawrap.tree import Opaque, flatten, unflatten

__all__ = ["Generators", "Kind", "Kinds"]

_MOST_KINDS = 4096
_MANY_KINDS = 64
_TENSOR = frozenset({torch.Tensor})
_form_of = attrgetter("ndim", "dtype")
_OWN_HASH: Any = object.__hash__
_NAMED = (type, FunctionType, BuiltinFunctionType)


class Kind:
    """The calls of one kind.

    `draws` is True if a call drew random numbers. `in_turns` is True if it drew from a generator that lanes share. The
    first call runs in turns to find out both, with shards of different sizes. A kind that draws keeps this cut for all
    calls, because its random numbers depend on the cut.
    """

    __slots__ = ("_witness", "draws", "evidence", "in_turns", "is_new", "structure", "verified")

    def __init__(self) -> None:
        self.is_new = self.in_turns = True
        self.draws = self.verified = False
        self.evidence = Evidence()
        self.structure = 0
        self._witness: tuple[Any, int, Any] | None = None

    def follow(self, structure: int) -> None:
        """Discard the evidence after the structure of the module changed."""
        self.evidence, self._witness = Evidence(), None
        self.structure = structure  # set last: a thread that reads the new value may use the evidence

    def note(self, *, drew: bool, drew_shared: bool, ran_in_turns: bool) -> None:
        """Record whether a call drew random numbers. Warn if lanes drew them without running in turns."""
        if drew_shared and not ran_in_turns:
            warn_caller(
                "a call drew random numbers, but earlier calls of the same kind did not. Its lanes, or another thread, "
                "drew them in no fixed order, so a seed does not reproduce this call. From now on the lanes of such calls "
                "run in turns"
            )
        self.draws = self.draws or drew
        self.in_turns = drew_shared or (self.in_turns and not self.is_new)
        self.is_new = False

    def keep_witness(self, output: Any, plan: ShardPlan, flat: FlatCall) -> None:
        """Keep the output of a whole call as evidence for its row count, for calls with the same other sizes."""
        leaves, spec = flatten(output)
        leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._witness = unflatten(spec, leaves), plan.rows, _other_sizes(plan, flat)

    def witness(self, plan: ShardPlan, flat: FlatCall) -> tuple[Any, int] | None:
        """Return the kept output and its row count, if the row count differs from this plan's shards; otherwise None.

        All other sizes must be equal, and the kind must not draw random numbers.
        """
        kept = self._witness
        if kept is None or self.draws:
            return None
        output, rows, sizes = kept
        return (output, rows) if rows != plan.sizes[0] and sizes == _other_sizes(plan, flat) else None


class Kinds:
    """The kinds of one session. Thread-safe: at worst, two threads gather the evidence of one kind twice."""

    def __init__(self) -> None:
        self._kinds: dict[Any, Kind] = {}
        self._differ_in_values: Counter[Any] = Counter()

    def of(self, method: str | None, flat: FlatCall, modes: Modes, training: object) -> Kind:
        """Return the kind of a call."""
        only_tensors = _TENSOR.issuperset(map(type, flat.leaves))
        values = tuple(map(_form_of, flat.leaves)) if only_tensors else _values(flat.leaves)
        key = method, flat.spec, values, modes.grad, modes.inference, modes.autocast, training
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= _MOST_KINDS:
                self._kinds.clear()
                self._differ_in_values.clear()
            kind = self._kinds[key] = Kind()
            if not only_tensors:
                self._warn_of_many((*key[:2], *key[3:]))
        return kind

    def _warn_of_many(self, common: Any) -> None:
        """Warn once per kind without values: the lanes of a first call run one after another."""
        self._differ_in_values[common] += 1
        if self._differ_in_values[common] == _MANY_KINDS:
            warn_caller(
                f"{_MANY_KINDS} calls differed in arguments that are not tensors, such as a text or the number of a step. "
                "Each such call is the first of its kind, whose lanes run one after another. Pass a number that changes "
                "with each call as a 0-d tensor"
            )


class Generators:
    """The random generators that lanes may use: of the CPU, of devices, and in modules and arguments."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        lanes = Counter(device for device in devices if device.type != "cpu")
        self._shared = [device for device, count in lanes.items() if count > 1]
        self._own = [device for device, count in lanes.items() if count == 1]

    def state(self, leaves: Sequence[Any], held: Sequence[torch.Generator] = ()) -> list[bytes]:
        """Return the state of each generator that several lanes share. `held` are the generators of modules."""
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
    """Return the bytes of a state. Comparing bytes takes a tenth of the time of torch.equal."""
    try:
        return state.numpy().tobytes()
    except RuntimeError:  # numpy is not installed
        return bytes(state.untyped_storage())


def _values(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Return the key of each leaf: dims and dtype of a tensor; otherwise the value, or its class if it is unhashable."""
    return tuple(map(_value_of, leaves))


def _value_of(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _form_of(leaf)
    if isinstance(leaf, Opaque):
        return type(leaf.value)
    if isinstance(leaf, _NAMED):
        return leaf
    try:
        hash(leaf)
    except TypeError:
        return type(leaf)
    # An object that is equal to itself alone would be held by its kind.
    return type(leaf) if type(leaf).__hash__ is _OWN_HASH else (type(leaf), leaf)


def _other_sizes(plan: ShardPlan, flat: FlatCall) -> list[list[int]]:
    """Return the sizes of all tensors on the dims other than the row dim."""
    return [
        [size for each, size in enumerate(leaf.shape) if dim is None or each != dim % leaf.ndim]
        for leaf, dim in zip(flat.leaves, plan.dims, strict=True)
        if isinstance(leaf, torch.Tensor)
    ]
