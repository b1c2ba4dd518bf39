"""What forward does to its arguments reaches the caller's own objects, as in the plain call."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from parawrap import DataParallel, GatherError, ShardError, parallel, register_split
from tests.helpers.same import assert_same

TWO = ["cpu"] * 2
ROWS = torch.arange(9.0)[:, None]


@dataclass
class Graph:
    x: Any
    y: Any = None
    extra: dict = field(default_factory=dict)


class Words:
    """A registered class: one text per row, and whatever forward notes."""

    def __init__(self, items, note=None):
        self.items, self.note = [*items], note

    def __len__(self):
        return len(self.items)


def split_words(words, sizes):
    items = iter(words.items)
    return [Words([next(items) for _ in range(size)], words.note) for size in sizes]


def join_words(parts):
    notes = [part.note for part in parts]
    note = torch.cat(notes) if isinstance(notes[0], torch.Tensor) else notes[0]
    return Words([item for part in parts for item in part.items], note)


register_split(Words, split=split_words, join=join_words)


def set_entry(batch):
    batch["y"] = batch["x"] * 2


def replace_entry(batch):
    batch["x"] = batch["x"] + 1


def pop_entry(batch):
    batch["y"] = batch.pop("x") * 2


def alias_entry(batch):
    batch["same"] = batch["x"]


def nest_entry(batch):
    batch["new"] = {"deep": [batch["x"] * 3, None]}


def fill_inner(batch):
    batch["inner"]["found"] = batch["x"] - 1


def append(batch):
    batch["log"].append(batch["x"].sum(1))
    batch["log"].append(batch["x"])


def insert(batch):
    batch["log"].insert(0, batch["x"] * 5)


def swap(batch):
    first = batch["x"]
    batch["z"], batch["x"] = first, first * 2
    batch["pair"] = {"z": first, "a": first * 3, "m": batch["inner"]}


def write_in_place(batch):
    batch["x"].mul_(7)
    batch["x"][:, 0] += 1


DICTS = {each.__name__: each for each in (
    set_entry, replace_entry, pop_entry, alias_entry, nest_entry, fill_inner, append, insert, swap,
    write_in_place,
)}  # fmt: skip


def new_batch(kind=dict):
    return kind(x=ROWS.clone(), inner=OrderedDict(a=1), log=[])


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("change", DICTS)
def test_dicts_that_forward_writes(change, grad):
    """After a cut call, entries of a dict that stay are the caller's own objects."""

    def forward(batch):
        x = batch["x"]
        DICTS[change](batch)
        return x + 0

    expected, batch = new_batch(OrderedDict), new_batch(OrderedDict)
    kept = {name: batch[name] for name in ("inner", "log")}
    with torch.set_grad_enabled(grad):
        plain = forward(expected)
        with parallel(forward, TWO) as p:
            assert_same(p(batch), plain)
            assert len(p.stats().shards) == 2
    assert_same(batch, expected)
    assert [*batch] == [*expected]
    assert all(batch[name] is value for name, value in kept.items())
    if change == "alias_entry":
        assert batch["same"] is batch["x"]


def test_other_containers():
    """The caller sees what forward writes into lists, a deque with a bound, a dataclass, a
    namespace, and an object of a registered class.
    """

    class Namespace(dict):
        def __init__(self, **entries):
            super().__init__(**entries)
            self.__dict__ = self

    def forward(x, items, last, graph, names, words):
        items += [x * 2]
        last.append(x)
        graph.y, graph.extra["z"] = x + 1, x
        names.found = x
        words.note = x * 4
        return x * 1

    def made():
        items, last = [ROWS.clone()], deque([ROWS, ROWS], maxlen=2)
        words = Words("abcdefghi")
        return ROWS.clone(), items, last, Graph(ROWS), Namespace(first=ROWS), words

    expected, given = made(), made()
    forward(*expected)
    with parallel(forward, TWO) as p:
        p(*given)
    for mine, theirs in zip(given, expected, strict=True):
        assert_same(*(vars(each) if isinstance(each, Words) else each for each in (mine, theirs)))
    assert given[2].maxlen == 2
    assert given[4].found is given[4]["found"]


@pytest.mark.parametrize("kind", ["dict", "dataclass", "registered", "nested"])
@pytest.mark.parametrize("way", ["call", "submit", "map", "DataParallel"])
def test_a_returned_argument(kind, way):
    """An argument that forward returns is the caller's own object, with what forward changed."""

    class Adds(nn.Module):
        def forward(self, x, batch):
            if kind == "dataclass":
                batch.y = batch.x * 2
            elif kind == "registered":
                batch.note = torch.ones(len(batch), 1)
            else:
                batch["y"] = batch["x"] * 2
            return (batch["x"] + 1, [batch]) if kind == "nested" else batch

    batch = {
        "dict": {"x": ROWS},
        "nested": {"x": ROWS},
        "dataclass": Graph(ROWS),
        "registered": Words("abcdefghi"),
    }[kind]
    if way == "DataParallel":
        net = DataParallel(Adds(), device_ids=TWO)
        output = net(ROWS, batch)
        net.close()
    else:
        with parallel(Adds().eval(), TWO) as p:
            if way == "call":
                output = p(ROWS, batch)
            elif way == "submit":
                output = p.submit(ROWS, batch).result()
            else:
                (output,) = p.map([(ROWS, batch)])
    returned = output[1][0] if kind == "nested" else output
    assert returned is batch
    if kind == "registered":
        assert batch.note.shape == (9, 1)
    else:
        assert_same(batch.y if kind == "dataclass" else batch["y"], ROWS * 2)


def test_an_argument_that_some_lanes_return():
    """The rows are joined if a lane returns its part, and another lane a new tensor or part."""

    def forward(x, y, options):
        is_first = x.flatten()[0] == 0
        return x if is_first else x * 1, {"y": y if is_first else x}

    with parallel(forward, TWO) as p:
        assert_same(p(ROWS, ROWS.clone(), [1]), (ROWS, {"y": ROWS}))


REFUSED = {
    "a loss without reduce": lambda batch: batch.update(loss=batch["x"].mean()),
    "a count": lambda batch: batch.update(count=len(batch["x"])),
    "an entry of one lane": lambda batch: (
        batch.update(y=batch["x"]) if batch["x"][0] == 0 else None
    ),
    "an item of one lane": lambda batch: (
        batch["log"].append(batch["x"]) if batch["x"][0] == 0 else None
    ),
    "other keys": lambda batch: batch.update({f"k{len(batch['x'])}": batch["x"]}),
}


@pytest.mark.parametrize("change", REFUSED)
def test_refused_changes(change):
    """A change that could not be an output is refused. Nothing is entered, the cure is named, and
    the next call runs.
    """

    def forward(batch):
        batch["first"] = batch["x"] * 2
        if "off" not in batch:
            REFUSED[change](batch)
        return batch["x"] + 0

    batch = new_batch()
    before = {**batch}
    with torch.no_grad(), parallel(forward, TWO) as p:
        with pytest.raises(ShardError, match="Return it instead"):
            p(batch)
        assert batch.keys() == before.keys()
        assert all(batch[key] is before[key] for key in before)
        assert batch["log"] == []
        p(batch := {**new_batch(), "off": None})
    assert_same(batch["first"], ROWS * 2)


def test_reduced_entries():
    """A loss that forward appends is reduced as an output is."""

    def forward(x, losses):
        losses.append(x.mean())
        return x, x.mean()

    losses = []
    with torch.no_grad(), parallel(forward, TWO, reduce="mean") as p:
        assert_same(p(ROWS, losses)[1], ROWS.mean())
    assert_same(losses, [ROWS.mean()])


class Log:
    def __init__(self):
        self.lines = []
        self.last = None


def test_objects_that_all_lanes_share():
    """A whole object that lanes write is refused; one that they read is not."""

    def forward(x, log, write):
        if write:
            log.last = x
        return x * len(log.lines) + x

    log = Log()
    with torch.no_grad(), parallel(forward, TWO, in_dims={"log": None}) as p:
        assert_same(p(ROWS, log, False), ROWS)
        with pytest.raises(ShardError, match=r"every lane gets whole.*Return what it writes"):
            p(ROWS, log, True)


@torch.no_grad()
def test_attributes_of_a_registered_object():
    """A tensor that no lane has set stays the caller's own. One that a lane writes is joined."""

    def forward(x, words, writes):
        words.items = [item.upper() for item in words.items]
        if writes and x[0] == 0:
            words.note += 1
        return x

    note = torch.zeros(1)
    for writes in (False, True):
        words = Words("abcdefghi", note)
        with parallel(forward, TWO) as p:
            p(ROWS, words, writes)
        assert words.items == [*"ABCDEFGHI"]
        assert (words.note is note) == (not writes)


@torch.no_grad()
def test_registered_objects_that_cannot_be_joined():
    """The error names the argument, and the argument stays as it is."""

    class Sealed(Words):
        pass

    def refuse(parts):
        raise GatherError("parts have different notes")

    register_split(Sealed, split=split_words, join=refuse)

    def forward(x, words):
        words.note = len(x)
        return x

    words = Sealed("abcdefghi")
    with (
        parallel(forward, TWO) as p,
        pytest.raises(GatherError, match=r"args\[1\] was changed differently.*different notes"),
    ):
        p(ROWS, words)
    assert words.note is None


@pytest.mark.parametrize("workers", ["thread", "process"])
@pytest.mark.parametrize("change", [lambda rows: rows.append("z"), lambda rows: rows.pop()])
def test_new_row_counts_are_refused(change, workers):
    """Each lane would add a row in the middle of the caller's object, or remove one there."""
    in_dims = {"rows": "items"}
    for rows, forward in (
        ([*"abcdef"], lambda rows: [change(rows), 1][1:] * 3),
        (Words("abcdef"), lambda rows: [change(rows.items), 1][1:] * 3),
    ):
        before = [*getattr(rows, "items", rows)]
        with (
            torch.no_grad(),
            parallel(forward, TWO, in_dims=in_dims, out_dims="ragged", workers=workers) as p,
            pytest.raises(ShardError, match=r"number of rows of args\[0\].*after the call"),
        ):
            p(rows)
        assert [*getattr(rows, "items", rows)] == before


def test_rows_of_a_list_may_be_replaced():
    def forward(rows):
        rows[:] = [row.upper() for row in rows]
        return [*rows]

    rows = [*"abcdef"]
    with parallel(forward, TWO, in_dims={"rows": "items"}, out_dims="items") as p:
        assert p(rows) == rows == [*"ABCDEF"]


def test_a_write_that_another_argument_shows_is_refused():
    """With gradients, lanes have copies. Columns of one matrix have no common element."""

    def forward(batch):
        batch["image"].div_(2)
        return batch["first"] * 1

    matrix = torch.ones(9, 4)
    with parallel(forward, TWO) as p:
        with pytest.raises(ShardError, match=r"in place, which shares memory with.*a clone of"):
            p({"image": matrix[:, 1:], "first": matrix[:, :2]})
        assert_same(matrix, torch.ones(9, 4))
        p({"image": matrix[:, 2:], "first": matrix[:, :2]})
        assert_same(matrix[0], torch.tensor([1.0, 1.0, 0.5, 0.5]))
        p({"image": matrix[:, 2:], "first": matrix[:, 1:].clone()})
        assert_same(matrix[0], torch.tensor([1.0, 1.0, 0.25, 0.25]))


@torch.no_grad()
def test_refused_entries_of_a_returned_argument():
    """The error names the entries by their places in the output, with the option for each."""

    def forward(batch):
        batch["inner"]["mean"] = batch["x"].mean()
        batch["log"].append(batch["x"])
        return {"batch": batch}

    batch = new_batch()
    with parallel(forward, TWO) as p, pytest.raises(GatherError) as caught:
        p(batch)
    assert 'output["batch"]["inner"]["mean"] cannot be joined' in str(caught.value)
    assert 'reduce={"batch": {"inner": {"mean": "mean"}}}' in str(caught.value)
    assert (batch["inner"], batch["log"]) == ({"a": 1}, [])


@torch.no_grad()
def test_an_argument_at_two_places():
    """The caller's one object gets what forward wrote at either place."""

    def forward(x, one, other):
        one["y"] = x * 2
        return x

    batch = {"x": ROWS}
    with parallel(forward, TWO) as p:
        p(ROWS, batch, batch)
    assert_same(batch, {"x": ROWS, "y": ROWS * 2})


@torch.no_grad()
def test_two_copies_of_one_argument():
    """An object at two places is two in each lane, and what both of them got cannot be joined."""

    def forward(x, one, other):
        one.append(x)
        other.append(x)
        return x

    log = []
    with parallel(forward, TWO) as p, pytest.raises(ShardError, match="at two places of the call"):
        p(ROWS, log, log)
    assert log == []


@torch.no_grad()
def test_entries_of_a_list_of_outputs():
    """Each lane's own output stays as it is, and options for places of the output hold for an
    argument in it.
    """

    def forward(batch):
        batch["mean"] = batch["x"].mean()
        return batch

    batch = {"x": ROWS}
    with parallel(forward, TWO, reduce={"mean": "mean"}) as p:
        output = p(batch)
    assert output is batch
    assert_same(batch, {"x": ROWS, "mean": ROWS.mean()})
    with parallel(lambda batch: {"x": batch["x"]}, TWO, join="list") as p:
        assert_same(p({"x": ROWS}), [{"x": ROWS[:5]}, {"x": ROWS[5:]}])


@torch.no_grad()
def test_numbers_that_lanes_count():
    """A number of the lanes that equals one of the caller's is still theirs, and has no sum by
    itself.
    """

    def forward(batch):
        batch["n"] = len(batch["x"])
        return batch["x"]

    batch = {"x": ROWS[:8], "heads": 4}
    with (
        parallel(forward, TWO, out_dims=0) as p,
        pytest.raises(ShardError, match=r'"n".*Return it'),
    ):
        p(batch)
    assert [*batch] == ["x", "heads"]


@torch.no_grad()
def test_equal_numbers_under_two_keys():
    """Each number is reduced by the option of its own key, also if both are the same object."""

    def forward(batch):
        batch["total"] = batch["each"] = len(batch["x"])
        return batch

    with parallel(forward, TWO, reduce={"total": "sum", "each": "stack"}) as p:
        output = p({"x": ROWS})
    assert output["total"] == 9
    assert [*output["each"]] == [5, 4]


@pytest.mark.parametrize("grad", [False, True])
def test_new_shapes_in_place(grad):
    """Lanes have parts of their own, whose new shape the argument cannot take over."""
    x = ROWS.clone()
    with (
        torch.set_grad_enabled(grad),
        parallel(lambda x: x.unsqueeze_(1) * 2, TWO, out_dims=0) as p,
    ):
        if grad:
            with pytest.raises(ShardError, match=r"args\[0\].*shape in place"):
                p(x.add_(0))
    assert x.shape == (9, 1)


@torch.no_grad()
def test_one_list_of_many_calls():
    """Calls that run at the same time write one list of the caller, and no entry is lost."""

    def forward(x, log):
        log.append(x + 1)
        return x

    log = []
    with parallel(forward, TWO) as p:
        futures = [p.submit(ROWS + number, log) for number in range(50)]
        for future in futures:
            future.result()
    assert sorted(each[0].item() for each in log) == [float(number + 1) for number in range(50)]


@torch.no_grad()
def test_arguments_of_streams():
    """Batches of `map` and `submit` are the caller's own objects: one lane writes them."""

    def forward(batch):
        append(batch)
        return batch["x"] + 1

    batches = [new_batch() for _ in range(6)]
    expected = copy.deepcopy(batches)
    outputs = [forward(batch) for batch in expected]
    with parallel(forward, TWO) as p:
        assert_same([*p.map((batch,) for batch in batches[:3])], outputs[:3])
        assert_same([p.submit(batch).result() for batch in batches[3:]], outputs[3:])
    assert_same(batches, expected)


def test_a_list_that_is_emptied_during_the_call():
    """Items that lanes append arrive also if another thread takes the old ones meanwhile."""
    log = ["old"]

    def note(x, entries):
        entries.append(x + 1)
        log.clear()  # the caller's own list
        return x

    with torch.no_grad(), parallel(note, TWO, out_dims=0) as p:
        p(ROWS, log)
    (noted,) = log
    assert_same(noted, ROWS + 1)
