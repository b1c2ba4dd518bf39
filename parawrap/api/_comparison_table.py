"""The result of `compare`: measurements of each way, and a table of them."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.testing import assert_close

from parawrap.displays import Table

_HEADER = "way", "median ms", "middle half ms", "speed-up", "outputs differ", "gradients differ"
_ABSOLUTE = re.compile(r"absolute difference: (\S+)", re.IGNORECASE)  # in the messages of assert_close


class Difference(NamedTuple):
    """The greatest difference from the plain way: absolute, and relative to the largest value of the same tensor."""

    absolute: float
    relative: float

    def __str__(self) -> str:
        return f"{self.absolute:.1e} ({self.relative:.1e})" if self.absolute else "0"


@dataclass(frozen=True, slots=True)
class Way:
    """Measurements of one way to run the call.

    Attributes:
        name: "plain", "plain, 1 thread", "map", or "lanes".
        seconds: The time per call, or per batch of `map`, in each round.
        outputs: The greatest difference of the outputs from the plain way.
        gradients: The greatest difference of the gradients from the plain way; None without `train`.
    """

    name: str
    seconds: tuple[float, ...]
    outputs: Difference
    gradients: Difference | None

    @property
    def quartiles(self) -> list[float]:
        """The quartiles of the times in seconds. The second one is the median."""
        return statistics.quantiles(self.seconds, n=4, method="inclusive")


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """Measurements of each way, "plain" first and "lanes" last. `print` shows a table.

    Attributes:
        title: The block, the mode, and the number of rounds and calls.
        ways: A `Way` for each row of the table.
    """

    title: str
    ways: tuple[Way, ...]

    def __repr__(self) -> str:
        return f"<Comparison: {', '.join(f'{way.name} {1e3 * way.quartiles[1]:.3g} ms' for way in self.ways)}>"

    def __str__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        rows = []
        fastest = min(way.quartiles[1] for way in self.ways if way.name.startswith("plain"))
        for way in self.ways:
            low, median, high = (f"{1e3 * quartile:.3f}" for quartile in way.quartiles)
            speed_up = f"{fastest / way.quartiles[1]:.2f}"
            rows.append((way.name, median, f"{low} to {high}", speed_up, str(way.outputs), str(way.gradients)))
        columns = len(_HEADER) if self.ways[0].gradients else len(_HEADER) - 1
        return Table(self.title, _HEADER[:columns], [row[:columns] for row in rows])


def difference(ours: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> Difference:
    """Return the greatest difference, infinite if shapes, dtypes, or positions of NaNs differ."""
    if len(ours) != len(plain):
        return Difference(math.inf, math.inf)
    greatest = Difference(0.0, 0.0)
    for one, other in zip(ours, plain, strict=True):
        try:
            assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        except AssertionError as error:
            found = _ABSOLUTE.search(str(error))
            gap = math.inf if found is None or found[1] == "nan" else float(found[1])
            magnitudes = other.to(torch.promote_types(other.dtype, torch.float64)).abs().nan_to_num(0.0, posinf=0.0)
            largest = float(magnitudes.max()) if magnitudes.numel() else 0.0
            relative = gap / largest if largest else math.inf
            greatest = Difference(max(greatest.absolute, gap), max(greatest.relative, relative))
    return greatest
