"""The session of a model on NeuronCores: the engine's, with lanes that each use one core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from parawrap.engine.call import Entry
from parawrap.engine.cut import Cutter
from parawrap.engine.join import join
from parawrap.engine.join_rules import JoinRules
from parawrap.engine.lanes import here
from parawrap.engine.session import Session
from parawrap.engine.shard_sizes import balanced_sizes, sizes_in_units
from parawrap.engine.survey import Survey
from parawrap.errors import ShapeError, ShardError
from parawrap.neuroncores._choose_runtime import runtime
from parawrap.neuroncores._neuron_cores import NeuronCore, find_runs
from parawrap.neuroncores._runtime import not_traced

LANES_PER_CORE = 2
"""The core computes for one lane while the other one copies its input.

It is also the default of num_workers in torch_neuronx.DataParallel.
"""

_CPU = torch.device("cpu")


class Placement:
    """The copies of compiled models on some cores, and the rows that each core gets of a call.

    Consecutive cores share one copy, which uses them in turn. The placement owns the copies from
    the first call of `copies_in_lanes` until `unload`. One thread at a time calls these.

    Attributes:
        cores: The cores, in the given order.
        compiled: The number of rows of an inference; None if it is not known.
        split_size: The largest number of rows that a core gets at once. With None, calls are cut
            into whole inferences.
        why_fixed: The reason why a core must get exactly the compiled number of rows; None with
            dynamic batching.

    Raises:
        ShardError: If `dim` is not a dim of the model's inputs.
    """

    def __init__(
        self,
        model: Any,
        cores: Sequence[NeuronCore],
        dim: int = 0,
        *,
        dynamic: bool = True,
        split_size: int | None = None,
    ) -> None:
        self._runtime = runtime()
        signature = None  # stays so for a function around compiled models
        if isinstance(model, torch.nn.Module):
            signature = self._runtime.signature(model)
        # `range`, because `dim` may be of any type
        if signature is not None and dim not in range(-signature.most_dims, signature.most_dims):
            msg = (
                f"dim={dim!r} is out of range: the model is compiled for inputs with at most "
                f"{signature.most_dims} dims"
            )
            raise ShardError(msg)
        self.cores = tuple(cores)
        self.compiled = None if signature is None else signature.rows(dim)
        self.split_size = split_size
        self.why_fixed: str | None = None
        if not dynamic:
            self.why_fixed = "it is off"  # ends a sentence about dynamic batching
        elif dim != 0:
            self.why_fixed = f"dynamic batching is off because dim={dim}: it works only on dim 0"
        self._dim = dim
        self._parts: list[torch.jit.ScriptModule] = []  # the compiled models that are loaded
        self._copies: list[list[torch.nn.Module]] = []  # for each core, the copies of the parts

    def copies_in_lanes(self, lanes: int, survey: Survey) -> list[dict[int, Any]]:
        """Return, for each lane, the copies of compiled models on its core, by the id of the model.

        Load the compiled models of the target if they are others than at the last call.

        Raises:
            ReplicaError: If the target has no part compiled for NeuronCores.
            RuntimeError: If the runtime cannot load a part.
        """
        if not survey.scripts:
            raise not_traced(survey.target)
        parts = [*survey.scripts]
        if self._parts != parts:
            # First: the old and the new models may not fit into the memory of a core together
            self.unload()
            self._copies = self._load(parts)
            # Last: if loading fails, the next call tries again
            self._parts = parts
        ids = [*map(id, parts)]
        on_cores = [dict(zip(ids, copies, strict=True)) for copies in self._copies]
        return [on_cores[lane % len(self.cores)] for lane in range(lanes)]

    def unload(self) -> None:
        """Drop the copies. The runtime frees their memory on the cores after the last call."""
        self._parts, self._copies = [], []

    def cut(self, rows: int, lanes: int) -> tuple[int, ...]:
        """Return the sizes of a call's parts. There may be more parts than lanes.

        If the compiled number of rows is known, all sizes but the last are multiples of it, so that
        only the last inference is filled up.

        Raises:
            ShapeError: If dynamic batching is off, and a core would not get the compiled number of
                rows.
        """
        if self.why_fixed is not None:
            return self._cut_exactly(rows)
        if self.split_size is not None:
            if rows == 0:  # a call without rows has one part
                return (0,)
            full, rest = divmod(rows, self.split_size)
            sizes = (self.split_size,) * full
            return (*sizes, rest) if rest else sizes
        if self.compiled is None:
            return balanced_sizes(rows, len(self.cores))
        return sizes_in_units(rows, max(lanes, len(self.cores)), self.compiled)

    def _load(self, parts: Sequence[torch.jit.ScriptModule]) -> list[list[torch.nn.Module]]:
        """Return the copies of the parts for each core, with dynamic batching unless it is off.

        If a part cannot have dynamic batching, turn it off: set `why_fixed`.
        """
        on_core: dict[int, list[torch.nn.Module]] = {}
        # The runtime loads consecutive cores in one call
        for start, count in find_runs(core.index for core in self.cores):
            copies = self._runtime.load(parts, start, count)
            for index in range(start, start + count):
                on_core[index] = copies
            if self.why_fixed is None:
                try:
                    for copied in copies:
                        self._runtime.dynamic_batch(copied)
                except ShapeError as error:
                    self.why_fixed = error.message
        return [on_core[core.index] for core in self.cores]

    def _cut_exactly(self, rows: int) -> tuple[int, ...]:
        """Return the sizes without dynamic batching: the compiled row count for each inference.

        By default, each core has one inference. With `split_size`, a call has one for each of its
        parts.
        """
        cores = len(self.cores)
        # If the compiled count is not known, it is taken to be that of equal parts
        each = self.compiled or self.split_size or rows // cores
        parts, has_split_size = cores, True
        if self.split_size is not None:
            parts, has_split_size = rows // each, self.split_size == each
        is_exact = rows > 0 and rows == each * parts
        if is_exact and has_split_size:
            return (each,) * parts
        needed = f"the same number. Pass a multiple of {cores}"
        if self.compiled:
            needed = f"{each} rows. Pass {each * cores}"
        if self.split_size is not None:
            needed += f", or set split_size to {each} and pass a multiple of it"
        msg = (
            f"{rows} rows on dim {self._dim} over {cores} NeuronCores are {rows / cores:g} "
            f"per core, but without dynamic batching each inference takes {needed}. "
            f"Dynamic batching accepts any number of rows, but {self.why_fixed}"
        )
        raise ShapeError(msg)


class CoreSession(Session):
    """The calls of a model on NeuronCores, until `close`. Thread-safe.

    Several lanes feed each core: one lane copies its input while the core computes for another. The
    constructor loads the compiled parts of the model. Each lane has a replica of the ordinary
    modules around them, as on any device.
    """

    def __init__(
        self,
        target: Any,
        placement: Placement,
        lanes: int | None = None,
        *,
        cutters: Mapping[str | None, Cutter],
        rules: JoinRules,
        output_device: torch.device | None = None,
    ) -> None:
        cores = placement.cores
        lanes = lanes or LANES_PER_CORE * len(cores)
        # Lane i feeds core ``i % len(cores)``
        labels = [str(cores[lane % len(cores)]) for lane in range(lanes)]
        super().__init__(
            target,
            [_CPU] * lanes,
            cutters=cutters,
            rules=rules,
            output_device=output_device,
            labels=labels,
            copies_of_parts=partial(placement.copies_in_lanes, lanes),
        )
        self.placement = placement
        self.refresh()  # now, so that a model that does not fit is refused before the first call

    def call(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call: cut over the lanes if `is_ready`, and plainly otherwise."""
        if self.is_ready():
            return super().call(entry, args, kwargs)
        return self.run_plainly(entry, args, kwargs)

    def run_plainly(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call whole: within a lane on the core of the lane, and elsewhere on the first core.

        After `close`, and while a module around the compiled model has lazy parameters, run the
        model itself, on no core.
        """
        lane = here.lane
        state = self.replicas.state
        # The lane of this thread may be one of another session
        if lane is not None and lane in self.lanes.all and state.replicas:
            return entry.of(state.replicas[lane.index].target)(*args, **kwargs)
        if not self.lanes.is_alive or state.survey.is_lazy:
            return entry.plain(*args, **kwargs)
        # One call at a time uses all lanes, as in cut calls
        with self._lock:
            self.plain_calls += 1
            outputs = self.apply_replicas(entry, [args], [kwargs])
        if self.rules.keep_single:
            return outputs[0]
        # The rules of torch make a vector of a single 0-d output too
        return join(outputs, (1,), self.rules)

    def close(self) -> None:
        """Let the lanes finish, end them, and free the memory of the cores."""
        super().close()  # first: until then, lanes use the copies
        self.placement.unload()

    def _is_here(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """False: a call of one part is not run with the model itself, which is on no core."""
        return False
