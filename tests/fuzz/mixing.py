"""A generator of models that mix rows: an output row depends on other rows.

The demanded result is the documented one: each lane calls the model with its shard, and the outputs are joined by their
sizes or refused. Each call is made six times, and must end in the same way each time.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import nn

from parawrap import GatherError, parallel
from parawrap.engine.cut import uneven_sizes
from tests.fuzz.cases import (
    TIMES,
    Outcome,
    Refused,
    Wrong,
    agree,
    attempt,
    backward,
    compare,
    leaves_of,
    outcome_of,
    require_one_end,
)
from tests.fuzz.models import WIDTH, Pair, float64_on

MIXES: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "softmax": lambda model, x: x.softmax(0),
    "centred": lambda model, x: x - x.mean(0),
    "cumsum": lambda model, x: x.cumsum(0),
    "by_length": lambda model, x: x * len(x),
    "rows": lambda model, x: x * 2,
    # Outputs that do not follow the rows.
    "doubled": lambda model, x: torch.cat([x, x]),
    "bins": lambda model, x: torch.bincount((x.detach().sum(1) > 0).long(), minlength=3),
    "total": lambda model, x: x.sum(0),
    "shorter": lambda model, x: x[1:],
    "positive": lambda model, x: x[x[:, 0] > 0],
    "mean": lambda model, x: x.mean(),
    "lengths": lambda model, x: [len(x)],
    "constant": lambda model, x: x.new_ones(model.size, 2),
    "turned": lambda model, x: x.T,
}


class Mixing(nn.Module):
    """A layer, and then one or two ways of mixing rows."""

    def __init__(self, mixes: Sequence[str], size: int) -> None:
        super().__init__()
        self.mixes = tuple(mixes)
        self.size = size
        self.layer = nn.Linear(WIDTH, WIDTH)

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
    """Draw a case. Row counts repeat, so that calls come again after others."""
    mixes = tuple(random.choice(list(MIXES)) for _ in range(random.randint(1, 2)))
    rows = [random.randint(2, 17) for _ in range(2)]
    calls = tuple((random.choice(("grad", "grad", "no_grad")), random.choice(rows)) for _ in range(random.randint(2, 6)))
    return MixingCase(random.randrange(10**6), mixes, random.randint(2, 6), devices, home, calls)


def joined(column: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join outputs of shards of those sizes, which are not all equal, by the documented rules; or raise Refused."""
    first = column[0]
    if isinstance(first, Pair):
        return Pair(*(joined(each, sizes) for each in zip(*column, strict=True)))
    if isinstance(first, torch.Tensor) and first.ndim:
        counts = [len(output) for output in column]
        if counts != list(sizes) and any(counts):  # equal values prove nothing
            raise Refused
        if len({output.shape[1:] for output in column}) > 1:
            raise Refused
        return torch.cat(list(column))
    if isinstance(first, list):
        if [len(output) for output in column] == list(sizes):
            return [item for output in column for item in output]
        if len({len(output) for output in column}) > 1:
            raise Refused
        return [joined(each, sizes) for each in zip(*column, strict=True)]
    raise Refused  # a number needs `reduce`


def run_mixing(case: MixingCase) -> Outcome:
    return outcome_of(lambda: _run(case))


def _run(case: MixingCase) -> None:
    """Make each call six times, and compare it with its shards."""
    torch.manual_seed(case.seed)
    with float64_on(torch.device(case.home)):
        model = Mixing(case.mixes, case.size)
    oracle = copy.deepcopy(model)
    with parallel(model, list(case.devices)) as p:
        for index, (mode, rows) in enumerate(case.calls):
            generator = torch.Generator().manual_seed(case.seed + index)
            x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64).to(case.home)
            ends = []
            with torch.set_grad_enabled(mode == "grad"):
                for _ in range(TIMES):
                    plain = p.stats().plain
                    output, error = attempt(model, x)
                    ends.append(repr(error))
                    if error is None:
                        _compare(model, oracle, x, (rows,) if p.stats().plain > plain else p.stats().shards, output)
            require_one_end(ends, f"{case.mixes} with {rows} rows")
            if error is not None:
                _require_refusal(oracle, x, uneven_sizes(rows, len(case.devices)), error)
                raise Refused(repr(error)) from error


def _compare(model: Mixing, oracle: Mixing, x: torch.Tensor, sizes: Sequence[int], output: Any) -> None:
    try:
        expected = _joined_shards(oracle, x, sizes)
    except Refused as error:
        shapes = [tuple(getattr(leaf, "shape", [leaf])) for leaf in leaves_of(output)]
        raise Wrong(f"{model.mixes} gave {shapes} for {len(x)} rows in shards {sizes}: it must be refused") from error
    compare(output, expected, f"output for {len(x)} rows in shards {sizes}")
    if torch.is_grad_enabled():
        backward(expected)
        backward(output)
        for (name, mine), theirs in zip(model.named_parameters(), oracle.parameters(), strict=True):
            compare(mine.grad, theirs.grad, f"gradient of {name}")
            mine.grad = theirs.grad = None


def _require_refusal(oracle: Mixing, x: torch.Tensor, sizes: Sequence[int], error: BaseException) -> None:
    """Check that a call had to raise: the rules refuse the outputs."""
    try:
        _joined_shards(oracle, x, sizes)
    except Refused:
        agree(None if isinstance(error, GatherError) else error, None, "a call that must be refused")
    else:
        raise Wrong(f"{oracle.mixes} refused {len(x)} rows in shards {sizes}, which follow the rows: {error}")


def _joined_shards(oracle: Mixing, x: torch.Tensor, sizes: Sequence[int]) -> Any:
    outputs = [oracle(shard) for shard in x.split(list(sizes))]
    return outputs[0] if len(outputs) == 1 else joined(outputs, sizes)
