"""Errors of outputs that cannot be joined.

One message names every such output, and the options that declare all of them at once. The options
are written with the keys of the output, and hold the entries that the user has given. Each entry
was tried on the outputs of the call before it is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from parawrap.engine.concatenate import is_number, list_values, shape_of
from parawrap.engine.join_rules import SEQUENCES, Declared, JoinMode, JoinRules, Refusal
from parawrap.engine.rules.transformers_caches import WITHOUT_CACHE, is_cache
from parawrap.errors import name_section
from parawrap.tree import UNDECLARED, WholeLeaf, address

_MOST_LISTED = 20  # outputs, in an error; its cure names every output
_NAMES = {"out_dims": "out_dim", "reduce": "reduce", "pad_value": "pad_value"}
_WORDS = {
    None: "None is for one value that is the same in every lane",
    "items": '"items" is for a list with one item per row',
    "ragged": '"ragged" joins rows in order, whatever their number',
}
_MEANINGS = {
    "reduce": (
        'In reduce, "mean" is for a mean over rows, "sum" for sums and counts, "stack" for one '
        "value per lane; or give a function of the vector"
    ),
    "pad_value": "In pad_value, give the padding that is right for each output",
}
_CACHE_NAMES = ("past_key_values", "cache_params")
_FEWEST_SHORTENED = 3  # outputs with one entry; the entries of a pair are clearer
_LABEL = -100  # what the losses of torch skip
_OPTIONS_OF_BLOCK = "out_dims and join are options of parallel(model, devices)"
_LIST = 'join="list" returns the outputs of the lanes as they are'


class Cure(NamedTuple):
    """A declaration of one place that joins it.

    Attributes:
        declared: The entries of the place.
        join: The option `join`.
        note: What the sizes say, for the error.
    """

    declared: Declared
    join: JoinMode
    note: str = ""


@dataclass
class OutputPlace:
    """One place of an output: a value of all lanes, or a container with its parts.

    Attributes:
        path: The keys that lead to it.
        column: The value of each lane.
        declared: Its declarations.
        refusal: Why it cannot be joined; None if it can, or if its parts say why.
        parts: The parts of a container, by key.
        is_tuple: True if options declare the parts by position.
        cure: The declaration that joins it.
        other: The declaration for another meaning of the same values.
        is_padded: True if it was padded without a value from the user.
        note: What the sizes say about it.
        is_opened: True if options must declare its parts, and declare the whole.
    """

    path: tuple[Any, ...]
    column: Sequence[Any]
    declared: Declared
    refusal: Refusal | None = None
    parts: dict[Any, OutputPlace] = field(default_factory=dict)
    is_tuple: bool = False
    cure: Cure | None = None
    other: Cure | None = None
    is_padded: bool = False
    note: str = ""
    is_opened: bool = False

    @property
    def name(self) -> str:
        """The place in words."""
        return address("output", self.path)

    @property
    def names_padding(self) -> bool:
        """True if the cure has a value to pad with."""
        return self.cure is not None and self.cure.declared.pad_value is not None

    def give_padding(self, join: JoinMode) -> None:
        """Name the value to pad this place with."""
        cure = self.cure or Cure(self.declared, join)
        declared = cure.declared._replace(pad_value=_guess_padding(self))
        self.cure = cure._replace(declared=declared)

    def walk(self) -> Iterator[OutputPlace]:
        """Yield this place and all places below it."""
        yield self
        for part in self.parts.values():
            yield from part.walk()

    def leaves(self) -> Iterator[OutputPlace]:
        """Yield the places without parts, in order."""
        if not self.parts:
            yield self
        for part in self.parts.values():
            yield from part.leaves()


Attempt = Callable[[OutputPlace, Declared, JoinMode], int | None]
"""Joins a place with other declarations, and with this option `join`.

Returns how many tensors were padded without a value of the user; None if it cannot be joined."""


# Sizes


def sizes_on(column: Sequence[Any], dim: int) -> list[int]:
    """Return the size of each part on a dim; an empty list if a part does not have the dim."""
    try:
        return [part.shape[dim] for part in column]
    except IndexError:
        return []


def dims_with_rows(column: Sequence[Any], rows: Sequence[int] | None) -> list[int]:
    """Return the dims on which every part has as many entries as its shard has rows."""
    shapes = [shape_of(part) or () for part in column]
    dims = range(min(map(len, shapes)))
    return [dim for dim in dims if rows and sizes_on(column, dim) == list(rows)]


def compares_rows(column: Sequence[Any], rows: Sequence[int] | None) -> bool:
    """True if two dims have the rows of each shard, and the shards have different sizes."""
    return len(set(rows or ())) > 1 and len(dims_with_rows(column, rows)) > 1


def count_per_row(column: Sequence[Any], rows: Sequence[int] | None, dim: int) -> int | None:
    """Return the same number of entries on `dim` that every row has, from 2 on; None if none."""
    sizes = sizes_on(column, dim)
    if not rows or not sizes or 0 in rows:
        return None
    count = sizes[0] // rows[0]
    is_same = all(size == count * each for size, each in zip(sizes, rows, strict=True))
    return count if count > 1 and is_same else None


def _find_other_dim(
    column: Sequence[Any], rows: Sequence[int] | None, dim: int
) -> tuple[int, int] | None:
    """Return the one dim beyond `dim` with several entries per row, and their number per row.

    None if another dim has the rows, or if the sizes of the shards prove nothing.
    """
    if len(set(rows or ())) < 2 or dims_with_rows(column, rows):
        return None
    dims = range(min(len(part.shape) for part in column))
    counts = {each: count_per_row(column, rows, each) for each in dims}
    found = [(each, count) for each, count in counts.items() if count is not None]
    if len(found) != 1:
        return None
    ((other_dim, count),) = found
    return None if other_dim == dim else (other_dim, count)


# Cures of one place


def find_cures(
    place: OutputPlace, rules: JoinRules, rows: Sequence[int] | None, attempt: Attempt
) -> None:
    """Enter the declaration that joins a place, and the one for another meaning, if there are."""
    if is_array_column(place.column) and compares_rows(place.column, rows):
        return
    is_equal = attempt(place, _as_constant(place.declared), rules.join) is not None
    for cure in _list_cures(place, rules, rows, is_equal=is_equal):
        padded = attempt(place, cure.declared, cure.join)
        if padded is None:
            continue
        if place.cure is None:
            place.cure = cure
            place.is_padded = padded > 0
            place.note = cure.note
        elif (cure.declared.out_dim is None) != (place.cure.declared.out_dim is None):
            place.other = cure
            return


def is_array_column(column: Sequence[Any]) -> bool:
    """True for tensors or arrays with dims."""
    return all(shape_of(part) for part in column)


def _as_constant(declared: Declared) -> Declared:
    return declared._replace(out_dim=None, reduce=None)


def _list_cures(
    place: OutputPlace, rules: JoinRules, rows: Sequence[int] | None, *, is_equal: bool
) -> Iterator[Cure]:
    """Yield declarations that may join a place, the most probable first."""
    column, declared, join = place.column, place.declared, rules.join
    names = bool(place.path)
    without_reduce = declared._replace(reduce=None) if declared.names_reduce else declared
    dim = rules.dim if declared.out_dim is None else declared.out_dim

    def reduce_by(how: Any) -> Cure:
        entries = declared._replace(out_dim=dim, reduce=how, names_reduce=names)
        return Cure(entries, join)

    constant = [Cure(_as_constant(declared), join)] if is_equal else []
    is_proven = len(set(rows or ())) > 1
    if all(map(is_number, column)):
        yield from _list_reductions(column[0], reduce_by, constant, is_proven=is_proven)
        return
    if not is_array_column(column):
        items = Cure(without_reduce._replace(out_dim="items"), join)
        ragged = Cure(without_reduce._replace(out_dim="ragged"), join)
        yield from (items, *constant, ragged)
        return
    if _find_other_dim(column, rows, rules.dim) is not None:
        return
    found: list[Cure] = []
    # Left out of a named reduction, it may follow the rows
    if declared.reduce is not None and declared.names_reduce:
        found.append(Cure(without_reduce, join))
    with_rows = dims_with_rows(column, rows)
    if len(with_rows) == 1:
        note = f"dim {with_rows[0]} has them"
        found.append(Cure(without_reduce._replace(out_dim=with_rows[0]), join, note))
    shapes = {shape_of(part) for part in column}
    per_row = count_per_row(column, rows, rules.dim)
    ragged = Cure(without_reduce._replace(out_dim="ragged"), join)
    if per_row is not None and (is_proven or not is_equal):
        found.append(ragged._replace(note=f"{per_row} rows per row of the batch"))
    if len(shapes) == 1:
        found += [*constant, reduce_by("sum"), reduce_by("stack")]
    elif per_row is None:
        found.append(ragged)
    yield from found
    if join == "list" or not all(isinstance(part, torch.Tensor) for part in column):
        return
    # The declaration of the user comes first: only the other dims may have to be padded
    for cure in (Cure(declared, join), *found):
        padded = cure._replace(join="pad")
        if declared.pad_value is None:
            yield padded
        entries = cure.declared._replace(pad_value=_guess_padding(place))
        yield padded._replace(declared=entries)


def _list_reductions(
    number: Any,
    reduce_by: Callable[[Any], Cure],
    constant: Sequence[Cure],
    *,
    is_proven: bool,
) -> Iterator[Cure]:
    yield reduce_by("mean")  # of floats: the mean of equal numbers is that number
    if str(getattr(number, "dtype", "")).endswith("bool"):
        yield reduce_by(torch.any)  # of equal values: that value
    yield from constant if is_proven else ()
    # Shards of different sizes seldom count the same, and shards of one size often do
    yield reduce_by(torch.any if isinstance(number, bool) else "sum")
    yield reduce_by("stack")
    yield from constant


def _guess_padding(place: OutputPlace) -> Any:
    """Return a padding for an output that the user may have to replace."""
    dtype = place.column[0].dtype
    if dtype is torch.bool:
        return False
    if dtype.is_floating_point or dtype.is_complex:
        return 0.0
    is_label = "label" in str(place.path[-1:])
    return _LABEL if is_label else 0


# Options


def write_options(root: OutputPlace, rules: JoinRules, fill: Callable[[OutputPlace], Any]) -> str:
    """Return the options with the cures of all places, and with what the user has given.

    `fill` returns an entry for a place that needs none, where a tuple must have one.
    """
    written = []
    for name in _NAMES:
        given = getattr(rules, name)
        entry = _build(root, given, name, fill)
        if entry is not given and entry != given:
            written.append(f"{name}={_write(entry)}")
    cures = [place.cure for place in root.leaves() if place.cure is not None]
    if rules.join != "pad" and any(cure.join == "pad" for cure in cures):
        written.append('join="pad"')
    return ", ".join(written)


def _build(place: OutputPlace, given: Any, name: str, fill: Callable[[OutputPlace], Any]) -> Any:
    """Return the entry of one option for a place and its parts."""
    missing = UNDECLARED if name == "out_dims" else None
    if not _is_changed(place, name):
        return given
    if not place.parts:
        assert place.cure is not None  # or the place would not be changed
        return getattr(place.cure.declared, _NAMES[name])
    entries: dict[Any, Any] = {}
    for step, part in place.parts.items():
        own = given
        if isinstance(given, dict):
            own = given.get(step, missing)
        elif isinstance(given, tuple):
            own = given[step]
        elif name == "reduce":
            own = _own_reduction(part, given)
        entries[step] = _build(part, own, name, fill)
        if entries[step] is missing and place.is_tuple and name == "out_dims":
            entries[step] = _fill(part, fill)
    if place.is_tuple:
        return _shorten(place, tuple(entries.values()), name)
    if ... in entries:  # a registered object, which is its own only part
        return entries[...]
    named = {step: entry for step, entry in entries.items() if entry is not missing}
    return named or missing


def _shorten(place: OutputPlace, entries: tuple[Any, ...], name: str) -> Any:
    """Return one entry for a list of outputs if it says the same of each, as of many layers.

    One dim for a list without tensors would declare one item per row, and "ragged" for a list that
    its items follow each other.
    """
    leaves = [*place.leaves()]
    found = _leaves_of(entries)
    one = found[0]
    is_same = not any(isinstance(each, dict) or each != one for each in found)
    if len(leaves) < _FEWEST_SHORTENED or not is_same:
        return entries
    if name == "reduce":
        fits = all(all(map(is_number, leaf.column)) for leaf in leaves)
    elif name == "out_dims":
        are_tensors = all(
            isinstance(value, torch.Tensor) for leaf in leaves for value in leaf.column
        )
        kinds = {type(each.column[0]) for each in place.walk() if each.parts}
        fits = one is None or (are_tensors and (one != "ragged" or kinds == {tuple}))
    else:
        fits = False
    return one if fits else entries


def _leaves_of(entries: tuple[Any, ...]) -> list[Any]:
    """Return the entries of nested tuples, with dicts as entries."""
    found: list[Any] = []
    for entry in entries:
        found += _leaves_of(entry) if isinstance(entry, tuple) else [entry]
    return found


def _own_reduction(place: OutputPlace, given: Any) -> Any:
    """Return the entry of a part of an output with one reduction, which holds for numbers alone."""
    if place.parts:
        has_numbers = any(all(map(is_number, leaf.column)) for leaf in place.leaves())
        return given if has_numbers else None
    declared = place.declared if place.cure is None else place.cure.declared
    return declared.reduce if all(map(is_number, place.column)) else None


def _is_changed(place: OutputPlace, name: str) -> bool:
    """True if a cure gives this option another entry at a place, or below it."""
    if name == "out_dims" and any(each.is_opened for each in place.walk()):
        return True
    for leaf in place.leaves():
        if leaf.cure is None:
            continue
        now = leaf.cure.declared
        old, new = getattr(leaf.declared, _NAMES[name]), getattr(now, _NAMES[name])
        # A None in out_dims that names a place comes before a reduction for all numbers
        is_left_out = new is None and now.out_dim is None and not leaf.declared.names_reduce
        if name == "reduce" and is_left_out and leaf.path:
            continue
        # A reduction for the whole output holds for its numbers, and an array must be named
        is_named = now.names_reduce and not leaf.declared.names_reduce
        if name == "reduce" and is_named and is_array_column(leaf.column):
            return True
        if old is not new and not (type(old) is type(new) and old == new):
            return True
    return False


def _fill(place: OutputPlace, fill: Callable[[OutputPlace], Any]) -> Any:
    """Return an entry for a place that needs none."""
    if not place.parts:
        return fill(place)
    entries = {step: _fill(part, fill) for step, part in place.parts.items()}
    found = [*entries.values()]
    # One entry for a list would say of the list what it says here of its items
    has_lists = any(type(each.column[0]) in SEQUENCES for each in place.walk())
    if ... in entries or (not has_lists and all(entry == found[0] for entry in found)):
        return found[0]
    return tuple(found) if place.is_tuple else entries


def _write(entry: Any) -> str:
    """Return an entry as Python code."""
    if isinstance(entry, dict):
        items = [f"{_write(key)}: {_write(each)}" for key, each in entry.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(entry, tuple):
        items = [_write(each) for each in entry]
        return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
    if isinstance(entry, str):
        return repr(str(entry)) if '"' in entry or "\\" in entry else f'"{entry}"'
    if callable(entry):
        name = getattr(entry, "__name__", type(entry).__name__)
        return f"torch.{name}" if getattr(torch, name, None) is entry else str(name)
    return repr(entry)


# Messages


def write_message(
    refused: Sequence[OutputPlace],
    root: OutputPlace,
    rules: JoinRules,
    rows: Sequence[int] | None,
    fill: Callable[[OutputPlace], Any],
) -> str:
    """Return the message for the refused places, whose cures are entered below `root`.

    `root` has the same structure: its places are those of the rules of a block, if `rules` are
    those of torch.
    """
    sentences = [_say_what(refused, rows)]
    sentences += dict.fromkeys(place.refusal.advice for place in refused if place.refusal)
    pairs = [each for each in root.leaves() if _is_refused_pair(each, rows)]
    if not pairs:
        sentences += _say_possible_pairs(root, rows)
    if pairs:
        sentences.append(_say_pairs(pairs))
        for place in root.leaves():
            # A loss next to the pairs compares only the rows of its lane
            if _is_number_column(place):
                place.cure = place.other = None
    beyond = [*_say_other_dims(root, rows, rules)]
    sentences += beyond
    if any(map(_is_of_cache, refused)):
        sentences.append(WITHOUT_CACHE)
    if rows is None and rules.as_torch:
        sentences.append(_OPTIONS_OF_BLOCK)
    else:
        sentences += _say_options(root, rules, fill, is_final=bool(pairs or beyond))
    return ". ".join(filter(None, sentences))


def _is_refused_pair(place: OutputPlace, rows: Sequence[int] | None) -> bool:
    is_refused = place.refusal is not None
    return is_refused and is_array_column(place.column) and compares_rows(place.column, rows)


def _say_what(refused: Sequence[OutputPlace], rows: Sequence[int] | None) -> str:
    """Return what the lanes returned at each place, and why it cannot be joined."""
    lanes = "the lanes"
    if rows is not None:
        lanes = f"the lanes had {list_values(rows)} rows and"
    if len(refused) == 1:
        (place,) = refused
        returned, why = _describe(place)
        if returned:
            why = ", ".join(filter(None, [f"{lanes} returned {returned}", why]))
        return f"{place.name} cannot be joined: {why}"
    said = []
    reasons: set[str] = set()
    for place in refused[:_MOST_LISTED]:
        returned, why = _describe(place)
        # A reason is given once, for the first of several outputs
        is_repeated = bool(returned) and why in reasons
        parts = [returned] if is_repeated else [returned, why]
        said.append(f"{place.name}: {', '.join(filter(None, parts))}")
        reasons.add(why)
    more = ""
    if len(refused) > _MOST_LISTED:
        more = f"; and {len(refused) - _MOST_LISTED} more"
    has = "" if rows is None else f" (the lanes had {list_values(rows)} rows)"
    return f"{len(refused)} outputs cannot be joined{has}: {'; '.join(said)}{more}"


def _describe(place: OutputPlace) -> tuple[str, str]:
    assert place.refusal is not None  # only refused places are described
    why = place.refusal.why
    if place.note:
        why = f"{why} ({place.note})" if why else place.note
    return place.refusal.returned, why


def _say_pairs(pairs: Sequence[OutputPlace]) -> str:
    names = " and ".join(place.name for place in pairs)
    one = len(pairs) == 1
    section = name_section("losses", "Compute a loss in a block", "Contrastive losses")
    return (
        f"{names} {'has' if one else 'have'} the rows of the shard on two dims: the lane compared "
        "only its own rows with each other, and no option can join such comparisons, nor losses "
        f"of them. Let the model return embeddings, and compare them after the call: {section}"
    )


def _say_possible_pairs(root: OutputPlace, rows: Sequence[int] | None) -> Iterator[str]:
    """Yield what to do with outputs that compare rows with rows, if the sizes do not prove it.

    Shards of one size may have as many rows as an output has features.
    """
    places = [*root.leaves()]
    # A loss, or a count, may be one of the comparisons that another output holds
    has_number = any(each.refusal is not None and _is_number_column(each) for each in places)
    for place in places:
        may_compare = is_array_column(place.column) and (place.refusal is not None or has_number)
        if may_compare and len(dims_with_rows(place.column, rows)) > 1:
            section = name_section("losses", "Compute a loss in a block", "Contrastive losses")
            yield (
                f"If {place.name} compares rows with rows, no option joins it, nor a loss of it: "
                f"let the model return embeddings, and compare them after the call: {section}"
            )
            return


def _is_number_column(place: OutputPlace) -> bool:
    return all(map(is_number, place.column))


def _say_other_dims(
    root: OutputPlace, rows: Sequence[int] | None, rules: JoinRules
) -> Iterator[str]:
    """Yield what to do with outputs that have several entries per row on another dim."""
    found: dict[str, tuple[int, int]] = {}
    for place in root.leaves():
        if place.refusal is None or place.cure is not None or not is_array_column(place.column):
            continue
        beyond = _find_other_dim(place.column, rows, rules.dim)
        if beyond is not None:
            found[address("each", place.path)] = beyond
    if not found:
        return
    counts = ", ".join(f"{count} on dim {other}" for other, count in dict.fromkeys(found.values()))
    first, (other, _) = next(iter(found.items()))
    as_lists = _call('join="list"', rules)
    yield (
        f"Each row has several entries ({counts}), and options join those of dim {rules.dim} "
        f"alone. Use {as_lists}, which returns the outputs of the lanes, and "
        f"join them with torch.cat([{first} for each in outputs], {other})"
    )


def _is_of_cache(place: OutputPlace) -> bool:
    if any(step in _CACHE_NAMES for step in place.path):
        return True
    values = [value.value if isinstance(value, WholeLeaf) else value for value in place.column]
    return any(map(is_cache, values))


def _say_options(
    root: OutputPlace, rules: JoinRules, fill: Callable[[OutputPlace], Any], *, is_final: bool
) -> Iterator[str]:
    """Yield the options that join the outputs, and what they mean.

    With `is_final`, the error says already what to do with outputs that no option joins.
    """
    if rules.options == "none":
        return
    cured = [place for place in root.leaves() if place.cure is not None]
    # Options for the whole output hold for an entry of an argument, and those for its keys do not
    if rules.options == "whole" and root.parts:
        return
    uncured = [each for each in root.leaves() if each.refusal is not None and each.cure is None]
    plain = JoinRules(rules.dim) if rules.as_torch else rules
    options = write_options(root, plain, fill)
    if options:
        use = f"Use {_call(options, rules)}"
        if uncured:
            use = f"For the other outputs, use {_call(options, rules)}"
        if len(cured) == 1 and cured[0].other is not None:
            before, cured[0].cure = cured[0].cure, cured[0].other
            other = _call(write_options(root, plain, fill), rules)
            cured[0].cure = before
            use += f", or {other} if it {_say_meaning(cured[0])}"
        yield use
        if len(cured) > 1:
            yield from _say_others(cured)
        yield from _say_words(cured)
        yield from (_MEANINGS[name] for name in _MEANINGS if f"{name}=" in use)
    has_advice = any(place.refusal is not None and place.refusal.advice for place in root.leaves())
    if rules.as_torch and not options and not has_advice:
        yield f"parallel(model, devices, {_LIST.replace(' ', ') ', 1)}"
    elif not rules.as_torch and not is_final and rules.options == "all":
        yield _LIST


def _call(options: str, rules: JoinRules) -> str:
    return f"parallel(model, devices, {options})" if rules.as_torch else options


def _say_words(cured: Sequence[OutputPlace]) -> Iterator[str]:
    """Yield what the entries of out_dims in these cures mean."""
    used = [place.cure.declared.out_dim for place in cured if place.cure is not None]
    # A dim needs no words: what each lane returned stands in the same error
    said = [words for word, words in _WORDS.items() if word in used]
    if said:
        yield f"In out_dims, {', '.join(said)}"


def _say_meaning(place: OutputPlace) -> str:
    """Return what the other cure of a place declares it to be."""
    assert place.other is not None  # only such places have another meaning
    is_constant = place.other.declared.out_dim is None
    return "is the same in every lane" if is_constant else "depends on the rows"


def _say_others(cured: Sequence[OutputPlace]) -> Iterator[str]:
    """Yield what to change in the options if values have another meaning."""
    by_meaning: dict[str, list[str]] = {}
    for place in cured:
        if place.other is not None:
            by_meaning.setdefault(_say_meaning(place), []).append(place.name)
    for meaning, names in by_meaning.items():
        instead = "give it None in out_dims instead"
        if meaning == "depends on the rows":
            instead = "name it in reduce or as rows in out_dims instead of None"
        yield f"If {' or '.join(names)} {meaning}, {instead}"


def is_sequence_type(kind: type) -> bool:
    """True if options declare the parts of a container of this class by position."""
    return kind in SEQUENCES or issubclass(kind, tuple)
