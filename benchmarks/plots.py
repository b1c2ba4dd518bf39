"""The pictures of the summary: one per claim, next to the sentence that it proves.

Each sentence is computed from the results and says whether its goals are met. A claim appears once
its rows are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks._table import number
from benchmarks.growth import BARE, CALL, upper_half

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["CLAIMS", "Claim", "claims_of", "draw"]

_OURS, _PEER = "C0", "0.6"
_WIDTH_IN, _DPI, _FONT = 10, 128, 15  # 1280 pixels

Document = Mapping[str, Any]
Item = Mapping[str, Any]


class Claim(NamedTuple):
    """One claim of the summary: its sentence, and the picture that proves it."""

    title: str
    suite: str
    picture: str
    needs: tuple[str, ...]  # how the names of its rows begin
    sentence: Callable[[Document], str]
    draw: Callable[[Axes, Document], None]
    height_in: float = 4.0


class Bar(NamedTuple):
    """A bar: its label, its length, the ends of its range, and its colour."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    color: str = _PEER


def claims_of(documents: Mapping[str, Document]) -> list[Claim]:
    """Return the claims that have all their rows in the documents."""
    names = {
        suite: [row["name"] for row in document["rows"]] for suite, document in documents.items()
    }
    return [
        claim
        for claim in CLAIMS
        if all(
            any(name.startswith(need) for name in names.get(claim.suite, ()))
            for need in claim.needs
        )
    ]


def draw(documents: Mapping[str, Document], folder: Path) -> None:
    """Draw the pictures into the folder."""
    claims = claims_of(documents)
    if not claims:
        return
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"font.size": _FONT, "axes.spines.top": False, "axes.spines.right": False}):
        for claim in claims:
            figure, axes = plt.subplots(figsize=(_WIDTH_IN, claim.height_in), layout="constrained")
            claim.draw(axes, documents[claim.suite])
            figure.savefig(folder / claim.picture, dpi=_DPI, metadata={"Software": None})
            plt.close(figure)


# -- rows and results


def _row(document: Document, start: str) -> Item:
    return next(row for row in document["rows"] if row["name"].startswith(start))


def _rows(document: Document, start: str) -> list[Item]:
    return [row for row in document["rows"] if row["name"].startswith(start)]


def _result(row: Item, start: str) -> Item:
    return next(result for result in row["results"] if result["quantity"].startswith(start))


def _text(row: Item, start: str) -> str:
    result = _result(row, start)
    return number(result["value"], result["unit"])


def _verdict(*results: Item) -> str:
    """Return the clause that says which goals are met."""
    goals = [f"{result['goal']}{'%' * (result['unit'] == '%')}" for result in results]
    states = ["met" if result["met"] else "missed" for result in results]
    if len(set(states)) > 1:
        return "of the goals, " + ", ".join(
            f"{goal} is {state}" for goal, state in zip(goals, states, strict=True)
        )
    if len(set(goals)) > 1:
        return f"the goals ({', '.join(goals)}) are {states[0]}"
    return f"the goal ({goals[0]}) is {states[0]}"


def _times(row: Item, scale: float, ours: Sequence[str]) -> list[Bar]:
    return [
        Bar(
            name,
            arm["median_us"] * scale,
            arm["low_us"] * scale,
            arm["high_us"] * scale,
            _OURS if name in ours else _PEER,
        )
        for name, arm in row["arms"].items()
    ]


# -- drawing


def _bars(axes: Axes, bars: Sequence[Bar], label: str, unit: str) -> None:
    """Draw horizontal bars, each with its value, and its range where one was measured."""
    for place, bar in enumerate(bars):
        axes.barh(place, bar.value, color=bar.color, height=0.7)
        end = bar.value
        if bar.low is not None and bar.high is not None:
            axes.errorbar(
                bar.value,
                place,
                xerr=[[bar.value - bar.low], [bar.high - bar.value]],
                color="black",
                capsize=5,
            )
            end = bar.high
        axes.annotate(
            number(bar.value, unit),
            (end, place),
            (8, 0),
            textcoords="offset points",
            va="center",
            backgroundcolor="white",
        )
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.margins(x=0.15)


def _line(axes: Axes, value: float, label: str) -> None:
    axes.axvline(value, color="C3", linestyle="--", label=label, zorder=0)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1))  # above the bars


# -- overhead of a call

_SLEEPS = "overhead: model that sleeps"
_TO_BARE, _TO_POOL = (
    f"overhead of parawrap divided by that of {peer}"
    for peer in ("bare lanes", "persistent ThreadPoolExecutor")
)


def _overhead_sentence(document: Document) -> str:
    row = _row(document, _SLEEPS)
    return (
        f"A call over 4 lanes adds {_text(row, 'overhead, parawrap')} us, {_text(row, _TO_BARE)} "
        f"times the overhead of bare lanes and {_text(row, _TO_POOL)} times that of a persistent "
        f"ThreadPoolExecutor: {_verdict(_result(row, _TO_BARE), _result(row, _TO_POOL))}."
    )


def _draw_overhead(axes: Axes, document: Document) -> None:
    results = [each for each in _row(document, _SLEEPS)["results"] if each["unit"] == "us"]
    names = [each["quantity"].removeprefix("overhead, ") for each in results]
    bars = [
        Bar(name, each["value"], color=_OURS if name == "parawrap" else _PEER)
        for name, each in zip(names, results, strict=True)
    ]
    _bars(axes, bars, "overhead over the plain call (us)", "us")


# -- growth

_GROWN = {"lanes": "growth with lanes", "leaves": "growth with leaves"}


def _growth_sentence(document: Document) -> str:
    by_lanes, by_leaves = (_row(document, name) for name in _GROWN.values())
    grown = []
    for counted, row in (("lanes", by_lanes), ("leaves", by_leaves)):
        fitted = upper_half([count for count, _ in _points(row, CALL)])
        exponents = (
            f"{counted}^{_text(row, CALL)} (torch's split and cat alone: "
            f"{counted}^{_text(row, BARE)})"
        )
        grown.append(f"as {exponents} from {fitted[0]:,} to {fitted[-1]:,} {counted}")
    return (
        f"The time of a call grows {', and '.join(grown)}: "
        f"{_verdict(_result(by_lanes, CALL), _result(by_leaves, CALL))}."
    )


def _points(row: Item, arm: str) -> list[tuple[int, float]]:
    """Return the times of an arm, by the number of lanes or leaves."""
    return [
        (int(each["quantity"].rpartition(": ")[2].replace(",", "")), each["value"])
        for each in row["results"]
        if each["unit"] == "us" and each["quantity"].startswith(arm)
    ]


def _draw_growth(axes: Axes, document: Document) -> None:
    fixed = {"lanes": "1 leaf", "leaves": "4 lanes"}
    for color, (counted, name) in zip(("C0", "C1"), _GROWN.items(), strict=True):
        row = _row(document, name)
        for arm, style in ((CALL, "o-"), (BARE, "s--")):
            counts, times = zip(*_points(row, arm), strict=True)
            axes.loglog(
                counts, times, style, color=color, label=f"{arm}, by {counted} ({fixed[counted]})"
            )
        fitted = upper_half(_points(row, CALL))
        last, time = fitted[-1]
        line = [time * count / last for count, _ in fitted]
        axes.loglog(
            [count for count, _ in fitted],
            line,
            ":",
            color="black",
            label="linear" if counted == "leaves" else None,
        )
    axes.set_xlabel("number of lanes or leaves")
    axes.set_ylabel("time per call (us)")
    axes.grid(visible=True, alpha=0.4)
    axes.legend(fontsize=_FONT - 2)


# -- memory

_MEMORY, _FREED = "memory of each further lane", "memory_kept"


def _memory_sentence(document: Document) -> str:
    row = _row(document, _MEMORY)
    share = _result(row, "parawrap, as a share")
    return (
        f"Each further lane adds {_text(row, 'parawrap')} MB, {_text(row, share['quantity'])}% of "
        f"a model of {_text(row, 'model')} MB, and a copy per worker adds "
        f"{_text(row, 'a deepcopy')} MB: {_verdict(share)}."
    )


def _draw_memory(axes: Axes, document: Document) -> None:
    results = [each for each in _row(document, _MEMORY)["results"] if each["unit"] == "MB"]
    bars = [
        Bar(
            "size of the model" if each["quantity"] == "model" else each["quantity"],
            each["value"],
            color=_OURS if each["quantity"] == "parawrap" else _PEER,
        )
        for each in results
    ]
    _bars(axes, bars, "memory per further lane (MB)", "MB")


def _freed_sentence(document: Document) -> str:
    row = _row(document, _FREED)
    gain = _result(row, "speed-up")
    return (
        f"A convolution runs at {_text(row, 'speed-up')} times the speed inside "
        f"`keep_freed_memory` ({number(gain['low'], 'ratio')} to "
        f"{number(gain['high'], 'ratio')}), with {_text(row, 'page faults, keep')} page faults "
        f"per call compared with {_text(row, 'page faults, default')}: {_verdict(gain)}."
    )


def _draw_freed(axes: Axes, document: Document) -> None:
    _bars(
        axes,
        _times(_row(document, _FREED), 1e-3, ["keep_freed_memory"]),
        "time per call (ms), 64 images of 32x32",
        "ms",
    )


# -- launching

_SECOND = "second call"


def _launch_sentence(document: Document) -> str:
    row = _row(document, _SECOND)
    torchrunx, fork = (
        _result(row, start) for start in ("time of torchrunx", "time of parawrap divided by")
    )
    return (
        "A second launch on 2 ranks takes "
        f"{number(row['arms']['parawrap']['median_us'] / 1e3, 'ms')} ms; torchrunx takes "
        f"{number(torchrunx['value'], 'ratio')} times as long, and parawrap "
        f"{number(fork['value'], 'ratio')} times as long as debug_launcher, a plain fork: "
        f"{_verdict(torchrunx, fork)}."
    )


def _draw_launch(axes: Axes, document: Document) -> None:
    bars = _times(_row(document, _SECOND), 1e-3, ["parawrap"])
    _bars(axes, bars, "time of a second launch on 2 ranks (ms)", "ms")


# -- lanes and map on the CPU

_INFERENCE, _TRAINING, _MAP = "CPU lanes", "training step", "map"


def _gains(document: Document) -> tuple[list[Bar], list[Bar]]:
    """Return the speed-ups of the largest number of lanes, for inference and for training."""
    groups = []
    for start, color in ((_INFERENCE, _OURS), (_TRAINING, "C1")):
        bars = []
        for row in _rows(document, start):
            gain = [each for each in row["results"] if each["quantity"].startswith("speed-up")][-1]
            net = row["name"].partition(": ")[2].partition(",")[0]
            kind = "inference" if start == _INFERENCE else "training"
            bars.append(Bar(f"{kind}: {net}", gain["value"], gain["low"], gain["high"], color))
        groups.append(bars)
    return groups[0], groups[1]


def _lanes_sentence(document: Document) -> str:
    inference, training = (
        [number(bar.value, "ratio") for bar in sorted(bars, key=_value)]
        for bars in _gains(document)
    )
    return (
        f"On {document['hardware']['cores']}, lanes run at {inference[0]} to {inference[-1]} "
        f"times the speed of as many of torch's own threads in inference, and at {training[0]} to "
        f"{training[-1]} times in a training step."
    )


def _value(bar: Bar) -> float:
    return bar.value


def _draw_lanes(axes: Axes, document: Document) -> None:
    inference, training = _gains(document)
    _bars(
        axes,
        [*inference, *training],
        "speed-up over as many of torch's own threads (ratio)",
        "ratio",
    )
    _line(axes, 1, "equal speed")


def _map_sentence(document: Document) -> str:
    row = _row(document, _MAP)
    pool = _result(row, "speed-up of map over ThreadPoolExecutor")
    return (
        "`map` of a traced encoder over 2 lanes runs at "
        f"{_text(row, 'speed-up of map over loop, one')} times the speed of a loop on one thread, "
        f"and at {_text(row, pool['quantity'])} times that of a ThreadPoolExecutor: "
        f"{_verdict(pool)}."
    )


def _draw_map(axes: Axes, document: Document) -> None:
    _bars(axes, _times(_row(document, _MAP), 1e-3, ["map"]), "time of 32 batches (ms)", "ms")


# -- NeuronCores

_NEURON, _POOL_RATIO = "neuron: identity", "overhead of pool per call divided"


def _neuron_sentence(document: Document) -> str:
    rows = _rows(document, _NEURON)
    ratios = [_result(row, _POOL_RATIO) for row in rows]
    added = " and ".join(_text(row, "overhead, parawrap") for row in rows)
    times = " and ".join(number(ratio["value"], "ratio") for ratio in ratios)
    return (
        f"On 4 emulated NeuronCores, a call of 4 and of 16 rows adds {added} us, and a "
        f"ThreadPoolExecutor per call adds {times} times as much: {_verdict(*ratios)}."
    )


def _draw_neuron(axes: Axes, document: Document) -> None:
    bars = []
    for row in _rows(document, _NEURON):
        size = row["name"].split(", ")[1]
        for name, color in (("parawrap", _OURS), ("pool per call", _PEER)):
            bars.append(
                Bar(f"{size}: {name}", _result(row, f"overhead, {name}")["value"], color=color)
            )
    _bars(axes, bars, "overhead over the same inferences in sequence (us)", "us")


CLAIMS = (
    Claim(
        "Overhead of a call",
        "engine",
        "overhead.png",
        (_SLEEPS,),
        _overhead_sentence,
        _draw_overhead,
    ),
    Claim(
        "Growth",
        "engine",
        "growth.png",
        tuple(_GROWN.values()),
        _growth_sentence,
        _draw_growth,
        6.0,
    ),
    Claim(
        "Memory of a lane", "engine", "memory.png", (_MEMORY,), _memory_sentence, _draw_memory, 3.0
    ),
    Claim(
        "Freed memory", "engine", "freed_memory.png", (_FREED,), _freed_sentence, _draw_freed, 2.5
    ),
    Claim(
        "Second launch",
        "launching",
        "second_launch.png",
        (_SECOND,),
        _launch_sentence,
        _draw_launch,
    ),
    Claim(
        "Lanes and torch's own threads",
        "cpu_lanes",
        "lanes.png",
        (_INFERENCE, _TRAINING),
        _lanes_sentence,
        _draw_lanes,
        5.0,
    ),
    Claim("Streams of batches", "cpu_lanes", "map.png", (_MAP,), _map_sentence, _draw_map, 3.5),
    Claim(
        "NeuronCores, emulated",
        "neuron",
        "neuron.png",
        (_NEURON,),
        _neuron_sentence,
        _draw_neuron,
        3.5,
    ),
)
