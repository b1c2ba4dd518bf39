"""A generator of models that mix rows: an output row depends on other rows.

The demanded result is the documented one: each lane calls the model with its shard, and the outputs are joined. Anything
else must be refused.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import torch
from torch import nn

from parawrap import parallel
from tests.fuzz.cases import Outcome, Refused, Wrong, agree, attempt, backward, compare, leaves_of, outcome_of
from tests.fuzz.models import WIDTH, Pair, float64_on

Mix = Callable[[nn.Module, torch.Tensor], Any]


def _bins(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.bincount((x.detach().sum(1) > 0).long(), minlength=3)


MIXES: dict[str, Mix] = {
    "softmax": lambda model, x: x.softmax(0),
    "centred": lambda model, x: x - x.mean(0),
    "cumsum": lambda model, x: x.cumsum(0),
    "flip": lambda model, x: x.flip(0),
    "sort": lambda model, x: x.sort(0).values,
    "argsort": lambda model, x: x.argsort(0),
    "rolled": lambda model, x: x.roll(1, 0),
    "batch_norm": lambda model, x: model.norm(x),
    "by_length": lambda model, x: x * len(x),
    "attended": lambda model, x: torch.tanh(x @ x.T) @ x,
    "first": lambda model, x: x - x[:1],
    "rows": lambda model, x: x * 2,
    # Outputs that do not follow the rows.
    "doubled": lambda model, x: torch.cat([x, x]),
    "repeated": lambda model, x: x.repeat_interleave(2, 0),
    "bins": _bins,
    "total": lambda model, x: x.sum(0),
    "kept_total": lambda model, x: x.sum(0, keepdim=True),
    "product": lambda model, x: x @ x.T,
    "shorter": lambda model, x: x[1:],
    "half": lambda model, x: x[: len(x) // 2],
    "positive": lambda model, x: x[x[:, 0] > 0],
    "mean": lambda model, x: x.mean(),
    "length": lambda model, x: len(x),
    "lengths": lambda model, x: [len(x)],
    "listed": lambda model, x: [float(row) for row in x[:, 0].detach()],
    "constant": lambda model, x: x.new_ones(model.size, 2),
    "range": lambda model, x: torch.arange(len(x)),
    "turned": lambda model, x: x.T,
}
FIXED = frozenset({"bins", "total", "kept_total", "lengths", "constant", "turned"})  # outputs with a fixed size on dim 0


class Mixing(nn.Module):
    """A layer, and then one or two ways of mixing rows."""

    def __init__(self, mixes: Sequence[str], size: int) -> None:
        super().__init__()
        self.mixes = tuple(mixes)
        self.size = size
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        hidden = self.layer(x)
        outputs = [MIXES[name](self, hidden) for name in self.mixes]
        return outputs[0] if len(outputs) == 1 else Pair(*outputs)


@dataclasses.dataclass(frozen=True)
class MixingCase:
    """All that a run depends on. A call is a mode and a row count."""

    seed: int
    mixes: tuple[str, ...]
    size: int
    devices: tuple[str, ...]
    home: str
    calls: tuple[tuple[str, int], ...]


def drawn_mixing_case(random: Random, devices: tuple[str, ...], home: str) -> MixingCase:
    """Draw a case. Row counts repeat, so that some calls are of a known kind."""
    mixes = tuple(random.choice(list(MIXES)) for _ in range(random.randint(1, 2)))
    rows = [random.randint(2, 17) for _ in range(2)]
    calls = tuple((random.choice(("grad", "grad", "no_grad")), random.choice(rows)) for _ in range(random.randint(2, 6)))
    return MixingCase(random.randrange(10**6), mixes, random.randint(2, 6), devices, home, calls)


def cuts_of(shards: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the cuts that statistics may report as these shards: the last lane may run its share in two parts."""
    yield tuple(shards)
    for part in range(1, shards[-1]):
        yield (*shards[:-1], part, shards[-1] - part)


def joined(outputs: Sequence[Any], sizes: Sequence[int], mixes: Sequence[str]) -> Any:
    """Join outputs of shards of those sizes by the documented rules.

    Raises:
        Refused: If the rules refuse them.
    """
    first = outputs[0]
    if isinstance(first, Pair):
        columns = zip(*outputs, strict=True)
        return Pair(*(joined(column, sizes, mixes[index : index + 1]) for index, column in enumerate(columns)))
    if mixes[0] in FIXED:
        return _equal(outputs)
    if isinstance(first, torch.Tensor) and first.ndim and [len(output) for output in outputs] == list(sizes):
        if len({output.shape[1:] for output in outputs}) > 1:
            raise Refused
        return torch.cat(list(outputs))
    if isinstance(first, list) and [len(output) for output in outputs] == list(sizes):
        return [item for output in outputs for item in output]
    if isinstance(first, torch.Tensor) and not first.ndim:
        raise Refused
    return _equal(outputs)


def _equal(outputs: Sequence[Any]) -> Any:
    for other in outputs[1:]:
        try:
            compare(other, outputs[0], "")
        except Wrong as error:
            raise Refused from error
    return outputs[0]


class MixingRun:
    """One case as it runs: the model in its block, and the oracle, which calls each shard."""

    def __init__(self, case: MixingCase) -> None:
        self.case = case
        torch.manual_seed(case.seed)
        with float64_on(torch.device(case.home)):
            self.model = Mixing(case.mixes, case.size)
        self.oracle = copy.deepcopy(self.model)
        self.p = parallel(self.model, list(case.devices))

    def run(self) -> None:
        """Make all calls."""
        with self.p:
            for index, (mode, rows) in enumerate(self.case.calls):
                with torch.set_grad_enabled(mode == "grad"):
                    self.call(rows, index)

    def call(self, rows: int, index: int) -> None:
        """Make one call, and compare it with each cut that the statistics allow."""
        generator = torch.Generator().manual_seed(self.case.seed + index)
        x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64).to(self.case.home)
        plain = self.p.stats().plain
        output, error = attempt(self.model, x)
        if error is not None:
            # A layer may refuse a shard of one row: batch norm in train mode does.
            agree(error, attempt(copy.deepcopy(self.oracle), x[:1])[1], "the call")
            raise Refused(repr(error)) from error
        cuts = [(rows,)] if self.p.stats().plain > plain else list(cuts_of(self.p.stats().shards))
        oracle = self._first_right(x, cuts, output)
        self._finish(oracle, output)

    def _first_right(self, x: torch.Tensor, cuts: Sequence[tuple[int, ...]], output: Any) -> nn.Module:
        """Return the oracle of the first cut that gives this output."""
        found = []
        for cut in cuts:
            oracle = copy.deepcopy(self.oracle)
            try:
                self._compare(oracle, x, cut, output)
            except (Wrong, Refused, ValueError) as error:
                found.append(str(error) or "it must be refused")
            else:
                return oracle
        msg = f"{self.case.mixes} gave {_shapes(output)} for {len(x)} rows in shards {cuts[0]}: {found[0]}"
        raise Wrong(msg)

    def _compare(self, oracle: nn.Module, x: torch.Tensor, cut: tuple[int, ...], output: Any) -> None:
        outputs = []
        for index, shard in enumerate(x.split(list(cut))):
            outputs.append(oracle(shard))
            if index == 0:
                oracle.buffers_of_lane_0 = [buffer.clone() for buffer in oracle.buffers()]
        self.expected = outputs[0] if len(cut) == 1 else joined(outputs, cut, self.case.mixes)
        compare(output, self.expected, "output")

    def _finish(self, oracle: nn.Module, output: Any) -> None:
        """Compare gradients and buffers. The buffers of lane 0 come back."""
        if torch.is_grad_enabled():
            backward(self.expected)
            backward(output)
            for (name, mine), theirs in zip(self.model.named_parameters(), oracle.parameters(), strict=True):
                compare(mine.grad, theirs.grad, f"gradient of {name}")
                mine.grad = None
        for (name, mine), theirs in zip(self.model.named_buffers(), oracle.buffers_of_lane_0, strict=True):
            if not name.endswith("num_batches_tracked"):
                compare(mine, theirs, f"buffer {name}")
        with torch.no_grad():
            for mine, theirs in zip(self.oracle.buffers(), oracle.buffers_of_lane_0, strict=True):
                mine.copy_(theirs)


def _shapes(output: Any) -> str:
    return ", ".join(str(tuple(getattr(leaf, "shape", [leaf]))) for leaf in leaves_of(output))


def run_mixing(case: MixingCase) -> Outcome:
    """Run a case, and return how it ended."""
    return outcome_of(lambda: MixingRun(case).run())
