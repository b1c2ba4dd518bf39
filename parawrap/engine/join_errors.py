"""Errors of outputs that cannot be joined.

One message names every such output, and the options that declare all of them at once. The options
are written with the keys of the output, and keep the entries that the user has given. Calls by the
rules of torch.nn.DataParallel have no options: `Trials.of_block` tries those of a parallel block,
which their messages name with the block.

A message, and the functions that write its parts::

    output["loss"] cannot be joined: the lanes had 3, 2 rows and    _say_what_of_one
    returned one torch.float32 each (tensor(9.), tensor(6.)),       concatenate.reduce_numbers
    and no reduction is right for every number.                     reduce_numbers, in its `Refusal`
    Use reduce={"loss": "mean"}.                                    _write_options
    In reduce, "mean" is for a mean over rows, "sum" for ...        _say_options, from _MEANINGS
    join="list" returns the outputs of the lanes as they are        _say_options

`Trials` (`join_trials.py`) joins each place again, and keeps the `Refusal` that `join_by_place.py`
or `concatenate.py` raises there. Then it tries the declarations that may join the place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from parawrap.engine.columns import are_tensors, describe_column, list_values, write_code
from parawrap.engine.join_by_place import MANY_PADDED, Joiner, is_sequence
from parawrap.engine.join_rules import JoinRules, Refusal
from parawrap.engine.join_trials import Trials
from parawrap.engine.output_place import Cure, OtherDim, OutputPlace
from parawrap.engine.rules.transformers_caches import WITHOUT_CACHE, is_cache
from parawrap.errors import name_section
from parawrap.tree import INSIDE, UNDECLARED, WholeLeaf, address

_MOST_LISTED = 20  # outputs that an error describes; its cure names every output
_FIELDS = {"out_dims": "out_dim", "reduce": "reduce", "pad_value": "pad_value"}
"""The fields of `Declared`, by the names of the options."""

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
_FEWEST_SHORTENED = 3  # outputs with one entry; a pair is clearer with an entry for each
_AS_LISTS = 'join="list"'
_OPTIONS_OF_BLOCK = (
    "out_dims, reduce, and join are options of parallel(model, devices), whose errors say what to "
    "set"
)
_EMBEDDINGS = "the model return embeddings, and compare them after the call: " + name_section(
    "losses", "Compute a loss in a block", "Contrastive losses"
)


def explain_refusal(joiner: Joiner, refusal: Refusal) -> str:
    """Return the message for all outputs that cannot be joined. The joiner stands at the first."""
    first = address("output", joiner.path)
    joiner.path.clear()
    trials = Trials(joiner)
    root = trials.find_places()
    refused = root.refused()
    for place in refused:
        if place.reason.is_of_options:  # the meaning of the other options is not known
            return f"{place.name} cannot be joined: {place.reason}"
    rules = joiner.rules
    if rules.as_torch:
        # The cures are options of a block. It may refuse places that torch joins, such as numbers,
        # and its options must join them too
        trials = trials.of_block()
        root = trials.find_places()
        _keep_refused_lists(refused, root)
    _find_cures(root, trials)
    if not rules.as_torch:
        refused = root.refused()  # also the outputs that need a value to pad with
    if not refused:  # a second look finds no place if a `reduce` counts its calls
        return f"{first} cannot be joined: {refusal}"
    return _write_message(refused, root, rules, trials)


def _keep_refused_lists(refused: Sequence[OutputPlace], root: OutputPlace) -> None:
    """Refuse the lists below `root` that the rules of torch have refused, so that they get cures.

    A block takes the items of a list as long as its shard for rows. The cure writes that out, since
    only the user knows what the items are.
    """
    leaves = {place.path: place for place in root.leaves()}
    for place in refused:
        same = leaves.get(place.path)
        if same is not None and same.refusal is None and is_sequence(place.column[0]):
            same.refusal = place.refusal


def _find_cures(root: OutputPlace, trials: Trials) -> None:
    """Enter the cures of all refused places, and the padding of each padded one."""
    for place in root.leaves():
        if place.refusal is not None and place.refusal.has_cure:
            trials.find_cures(place)
    # Without a value from the user, only a single output of floats is padded, with zeros
    padded = [place for place in root.leaves() if place.is_padded or place.names_padding]
    if len(padded) < 2:
        return
    for place in padded:
        if place.is_padded:
            place.give_padding(trials.rules.join)
            if place.refusal is None:  # alone, it would have been padded
                place.refusal = Refusal(MANY_PADDED, returned=describe_column(place.column))


# Options


def _write_options(root: OutputPlace, trials: Trials) -> str:
    """Return the options that join all places, as Python code, without unchanged options."""
    written = []
    for option in _FIELDS:
        given = getattr(trials.rules, option)
        entry = _build(root, given, option, trials)
        is_unchanged = entry is given or entry == given  # a NaN, as padding, does not equal itself
        if not is_unchanged:
            written.append(f"{option}={write_code(entry)}")
    cures = [place.cure for place in root.leaves() if place.cure is not None]
    if trials.rules.join != "pad" and any(cure.join == "pad" for cure in cures):
        written.append('join="pad"')
    return ", ".join(written)


def _write_other_options(root: OutputPlace, place: OutputPlace, trials: Trials) -> str:
    """Return the options for the other meaning of one place."""
    usual = place.cure
    place.cure = place.other
    options = _write_options(root, trials)
    place.cure = usual
    return options


def _build(place: OutputPlace, given: Any, option: str, trials: Trials) -> Any:
    """Return the entry of one option for a place and its parts.

    `given` is the entry of the user.
    """
    if not _is_changed(place, option):
        return given
    if not place.parts:
        assert place.cure is not None  # since the place is changed
        return getattr(place.cure.declared, _FIELDS[option])
    missing = UNDECLARED if option == "out_dims" else None
    entries: dict[Any, Any] = {}
    for step, part in place.parts.items():
        given_for_part = given  # one entry for all parts
        if isinstance(given, dict):
            given_for_part = given.get(step, missing)
        elif isinstance(given, tuple):
            given_for_part = given[step]
        elif option == "reduce":
            given_for_part = _own_reduction(part, given)
        entry = _build(part, given_for_part, option, trials)
        if entry is UNDECLARED and place.is_tuple:  # a tuple cannot leave an entry out
            entry = _entry_from_sizes(part, trials)
        entries[step] = entry
    if place.is_tuple:
        return _shorten(place, tuple(entries.values()), option)
    if INSIDE in entries:  # a registered object, which is its own only part
        return entries[INSIDE]
    named = {step: entry for step, entry in entries.items() if entry is not missing}
    return named or missing


def _shorten(place: OutputPlace, entries: tuple[Any, ...], option: str) -> Any:
    """Return one entry for a long list of outputs if all have the same, such as 24 layers.

    Otherwise, return the entries as they are.
    """
    found = _list_entries(entries)
    first = found[0]
    has_dict = any(isinstance(entry, dict) for entry in found)
    if has_dict or any(entry != first for entry in found):
        return entries
    is_long = len([*place.leaves()]) >= _FEWEST_SHORTENED
    return first if is_long and _holds_for_each(place, first, option) else entries


def _list_entries(entries: tuple[Any, ...]) -> list[Any]:
    """Return the entries of nested tuples, in order. A dict is one entry."""
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, tuple):
            found += _list_entries(entry)
        else:
            found.append(entry)
    return found


def _holds_for_each(place: OutputPlace, entry: Any, option: str) -> bool:
    """True if an entry for a whole list declares each output as an entry of its own does."""
    leaves = [*place.leaves()]
    if option == "pad_value":  # the user has to choose each value
        return False
    if option == "reduce":  # one reduction for a list is for its numbers alone
        return all(leaf.holds_numbers for leaf in leaves)
    if entry is None:
        return True
    # "ragged" takes the items of a list for rows. Of a tuple of tensors, it joins each tensor
    kinds = {type(each.column[0]) for each in place.walk() if each.parts}
    if entry == "ragged" and kinds != {tuple}:
        return False
    # For a list without tensors, a dim declares one item per row
    return all(are_tensors(leaf.column) for leaf in leaves)


def _own_reduction(place: OutputPlace, given: Any) -> Any:
    """Return the entry of a part if `given` is one reduction for all numbers of the output."""
    if place.parts:
        has_numbers = any(leaf.holds_numbers for leaf in place.leaves())
        return given if has_numbers else None
    declared = place.declared if place.cure is None else place.cure.declared
    return declared.reduce if place.holds_numbers else None


def _is_changed(place: OutputPlace, option: str) -> bool:
    """True if a cure gives this option another entry at a place, or below it."""
    if option == "out_dims" and any(each.is_opened for each in place.walk()):
        return True
    return any(_changes_entry(leaf, option) for leaf in place.leaves())


def _changes_entry(leaf: OutputPlace, option: str) -> bool:
    """True if the cure of a leaf gives this option another entry."""
    if leaf.cure is None:
        return False
    old = getattr(leaf.declared, _FIELDS[option])
    new = getattr(leaf.cure.declared, _FIELDS[option])
    if option == "reduce" and not leaf.declared.names_reduce:
        # A None in out_dims that names a place comes before a reduction for all numbers, so the
        # reduction may stay. The whole output, without a path, has no name
        if new is None and leaf.cure.is_constant and leaf.path:
            return False
        # An equal entry that names no place is for numbers alone, and does not reduce an array
        if leaf.cure.declared.names_reduce and leaf.holds_arrays:
            return True
    # By type too: the paddings 0 and False are equal, and not the same
    is_same = old is new or (type(old) is type(new) and old == new)
    return not is_same


def _entry_from_sizes(place: OutputPlace, trials: Trials) -> Any:
    """Return the entry of out_dims for what sizes have shown of a place that needs no entry."""
    if not place.parts:
        return trials.entry_of(place)
    entries = {step: _entry_from_sizes(part, trials) for step, part in place.parts.items()}
    found = [*entries.values()]
    if INSIDE in entries:  # a registered object, which is its own only part
        return entries[INSIDE]
    # One entry for a list may declare the list itself, and not its items
    has_lists = any(is_sequence(each.column[0]) for each in place.walk())
    if not has_lists and all(entry == found[0] for entry in found):
        return found[0]
    return tuple(found) if place.is_tuple else entries


# Messages


def _write_message(
    refused: Sequence[OutputPlace], root: OutputPlace, rules: JoinRules, trials: Trials
) -> str:
    """Return the message for the refused places of an output.

    `rules` are those of the call, which refused the places. `root` has the places with their cures,
    and `trials` the rules that the cures are for: those of a block if `rules` are those of torch.
    """
    sentences = [_say_what(refused, trials.rows)]
    sentences += dict.fromkeys(place.reason.advice for place in refused)  # each advice once
    pairs = [place for place in root.refused() if place.compares_rows]
    if pairs:
        sentences.append(_say_pairs(pairs))
        for place in root.leaves():
            # A number next to the pairs is a loss of them, which no option joins either
            if place.holds_numbers:
                place.cure = place.other = None
    else:
        sentences += _say_possible_pairs(root)
    if any(map(_is_of_cache, refused)):
        sentences.append(WITHOUT_CACHE)
    if rules.as_torch and trials.rows is None:  # the sizes do not show what joins the outputs
        sentences.append(_OPTIONS_OF_BLOCK)
    else:
        other_dims = [*_say_other_dims(root, rules)]
        sentences += other_dims
        is_final = bool(pairs or other_dims)
        if rules.as_torch:  # advice on how to change the model comes before another wrapper
            is_final = is_final or any(place.reason.advice for place in refused)
        sentences += _say_options(root, rules, trials, is_final=is_final)
    return ". ".join(filter(None, sentences))


def _say_what(refused: Sequence[OutputPlace], rows: Sequence[int] | None) -> str:
    """Return what the lanes returned at each place, and why that cannot be joined."""
    if len(refused) == 1:
        return _say_what_of_one(refused[0], rows)
    said = []
    reasons: set[str] = set()
    for place in refused[:_MOST_LISTED]:
        returned, why = place.reason.returned, _say_why(place)
        # A reason is given once, for the first of several outputs
        is_repeated = bool(returned) and why in reasons
        parts = [returned] if is_repeated else [returned, why]
        said.append(f"{place.name}: {', '.join(filter(None, parts))}")
        reasons.add(why)
    more = ""
    if len(refused) > _MOST_LISTED:
        more = f"; and {len(refused) - _MOST_LISTED} more"
    had = "" if rows is None else f" (the lanes had {list_values(rows)} rows)"
    return f"{len(refused)} outputs cannot be joined{had}: {'; '.join(said)}{more}"


def _say_what_of_one(place: OutputPlace, rows: Sequence[int] | None) -> str:
    returned, why = place.reason.returned, _say_why(place)
    if returned:
        had = "" if rows is None else f" had {list_values(rows)} rows and"
        why = ", ".join(filter(None, [f"the lanes{had} returned {returned}", why]))
    return f"{place.name} cannot be joined: {why}"


def _say_why(place: OutputPlace) -> str:
    """Return the reason of a refusal, with what the sizes say about the place."""
    why = place.reason.why
    if why and place.note:
        return f"{why} ({place.note})"
    return why or place.note


def _say_pairs(pairs: Sequence[OutputPlace]) -> str:
    """Return what to do with outputs that compare rows with rows."""
    names = " and ".join(place.name for place in pairs)
    have = "has" if len(pairs) == 1 else "have"
    return (
        f"{names} {have} the rows of the shard on two dims: the lane compared "
        "only its own rows with each other, and no option can join such comparisons, nor losses "
        f"of them. Let {_EMBEDDINGS}"
    )


def _say_possible_pairs(root: OutputPlace) -> Iterator[str]:
    """Yield what to do with an output that may compare rows with rows.

    Shards of one size do not show it: they may have as many rows as the output has features.
    """
    places = [*root.leaves()]
    # A refused number may be a loss of comparisons, which another output holds
    has_number = any(each.refusal is not None and each.holds_numbers for each in places)
    for place in places:
        may_compare = place.holds_arrays and (place.refusal is not None or has_number)
        if may_compare and len(place.dims_with_rows()) > 1:
            yield (
                f"If {place.name} compares rows with rows, no option joins it, nor a loss of it: "
                f"let {_EMBEDDINGS}"
            )
            return


def _say_other_dims(root: OutputPlace, rules: JoinRules) -> Iterator[str]:
    """Yield what to do with outputs that have several entries per row on another dim."""
    found: dict[str, OtherDim] = {}  # by the code of the place in the output `each` of a lane
    for place in root.leaves():
        if place.refusal is None or place.cure is not None or not place.holds_arrays:
            continue
        other = place.find_other_dim(rules.dim)
        if other is not None:
            found[address("each", place.path)] = other
    if not found:
        return
    others = dict.fromkeys(found.values())  # each once
    counts = ", ".join(f"{other.entries} on dim {other.dim}" for other in others)
    code, example = next(iter(found.items()))
    yield (
        f"Each row has several entries ({counts}), and options join those of dim {rules.dim} "
        f"alone. Use {_write_block(_AS_LISTS, rules)}, which returns the outputs of the lanes, and "
        f"join them with torch.cat([{code} for each in outputs], {example.dim})"
    )


def _is_of_cache(place: OutputPlace) -> bool:
    if any(step in _CACHE_NAMES for step in place.path):
        return True
    values = [value.value if isinstance(value, WholeLeaf) else value for value in place.column]
    return any(map(is_cache, values))


def _say_options(
    root: OutputPlace, rules: JoinRules, trials: Trials, *, is_final: bool
) -> Iterator[str]:
    """Yield the options that join the outputs, and their meanings.

    With `is_final`, the error says already what to do with outputs that no option joins.
    """
    if rules.options == "none":
        return
    # An option for a whole output holds for an entry of an argument too, unless it names keys.
    # With out_dims=None, outputs with rows would be refused instead
    is_constant = root.cure is not None and root.cure.is_constant
    if rules.options == "whole" and (root.parts or is_constant):
        return
    cured = [place for place in root.leaves() if place.cure is not None]
    options = _write_options(root, trials)
    # `reduce` is for numbers alone, but one entry of out_dims would hold for the outputs too
    if rules.options == "whole" and "out_dims=" in options:
        return
    if options:
        has_others = any(leaf.refusal is not None and leaf.cure is None for leaf in root.leaves())
        use = "For the other outputs, use" if has_others else "Use"
        use += f" {_write_block(options, rules)}"
        if len(cured) == 1 and cured[0].other is not None:
            other = _write_other_options(root, cured[0], trials)
            use += f", or {_write_block(other, rules)} if it {_say_meaning(cured[0].other)}"
        yield use
        if len(cured) > 1:
            yield from _say_other_meanings(cured)
        yield from _say_words(cured)
        for name, meaning in _MEANINGS.items():
            if f"{name}=" in use:
                yield meaning
    # A user of DataParallel has to write a block for either, and options join the outputs too
    has_better = rules.as_torch and options != ""
    if not is_final and not has_better and rules.options == "all":
        yield f"{_write_block(_AS_LISTS, rules)} returns the outputs of the lanes as they are"


def _write_block(options: str, rules: JoinRules) -> str:
    """Return options as the user can give them: in a new block instead of DataParallel.

    The options of other calls are given where the user gives the present ones.
    """
    return f"parallel(model, devices, {options})" if rules.as_torch else options


def _say_words(cured: Sequence[OutputPlace]) -> Iterator[str]:
    """Yield what the entries of out_dims in these cures mean."""
    used = [place.cure.declared.out_dim for place in cured if place.cure is not None]
    # A dim needs no explanation: the same error says what each lane returned
    said = [words for word, words in _WORDS.items() if word in used]
    if said:
        yield f"In out_dims, {', '.join(said)}"


def _say_meaning(cure: Cure) -> str:
    """Return what a cure declares an output to be."""
    return "is the same in every lane" if cure.is_constant else "depends on the rows"


def _say_other_meanings(cured: Sequence[OutputPlace]) -> Iterator[str]:
    """Yield what to change in the options if values have another meaning."""
    constant: list[str] = []
    varying: list[str] = []
    for place in cured:
        if place.other is not None:
            names = constant if place.other.is_constant else varying
            names.append(place.name)
    if constant:
        yield (
            f"If {' or '.join(constant)} is the same in every lane, "
            "give it None in out_dims instead"
        )
    if varying:
        yield (
            f"If {' or '.join(varying)} depends on the rows, "
            "name it in reduce or as rows in out_dims instead of None"
        )
