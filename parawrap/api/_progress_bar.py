"""A progress bar for `Parallel.map` that shows the rows per second of each lane."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from parawrap.engine.stats import Stats


def _bar_class() -> Any:
    """Return the class of a bar for the terminal, or for a notebook."""
    from tqdm import TqdmWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TqdmWarning)  # about ipywidgets; without them, a bar of text is shown
        from tqdm.auto import tqdm
    return tqdm


class Progress:
    """A tqdm bar that counts batches. `stats` returns the counters of the block."""

    def __init__(self, stats: Callable[[], Stats], total: int | None, desc: str | None) -> None:
        try:
            tqdm = _bar_class()
        except ImportError as error:
            msg = "progress=True needs tqdm, which is not installed. Run pip install 'parawrap-torch[cli]'"
            raise ImportError(msg) from error
        self._stats = stats
        self._make: Callable[[], Any] = lambda: tqdm(total=total, desc=desc, unit="batch")

    def __enter__(self) -> Self:
        self._bar = self._make()
        self._rows = [lane.rows for lane in self._stats().lanes]
        self._start = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.close()

    def update(self) -> None:
        """Count one batch, and show the speed of each lane."""
        passed = time.perf_counter() - self._start
        speeds = {
            f"lane {index}": f"{(lane.rows - before) / passed:,.0f} rows/s"
            for index, (lane, before) in enumerate(zip(self._stats().lanes, self._rows, strict=True))
            if lane.rows > before
        }
        self._bar.set_postfix(speeds, refresh=False)
        self._bar.update()
