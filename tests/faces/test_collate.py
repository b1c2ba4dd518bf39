"""Collate functions in tuple form."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import OrderedDict, UserDict, deque, namedtuple

import cloudpickle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader
from torch.utils.data import default_collate as torch_default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from parawrap.errors import ShardError
from parawrap.faces.collate import default_collate, tp_collate

Sample = namedtuple("Sample", ["x", "y"])


@tp_collate(2)
def collate_pairs(samples, scale=1):
    """Pairs to a pair of tensors."""
    xs, ys = zip(*samples, strict=True)
    return torch.tensor(xs) * scale, torch.tensor(ys)


def plain(samples):
    """Undecorated, so that its name leads to itself."""
    return torch.tensor(samples)


class Offset:
    """A collate function that is an object, with decorated methods of every kind."""

    def __init__(self, offset):
        self.offset = offset

    def __call__(self, samples):
        return torch.tensor(samples) + self.offset

    @tp_collate(2)
    def collate(self, samples):
        return self(samples)

    @tp_collate(2)
    @classmethod
    def of_class(cls, samples):
        return cls(1)(samples)

    @tp_collate(2)
    @staticmethod
    def of_nobody(samples):
        return torch.tensor(samples)


class Pairs(torch.utils.data.Dataset):
    """100 rows: (row, its label)."""

    def __len__(self):
        return 100

    def __getitem__(self, row):
        return torch.tensor([row, row]), -row


def lists(value):
    """The nested value with every tensor as a list, for comparison."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: lists(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(lists, value)]
    return value


# -- how samples are cut


@given(st.integers(0, 40), st.integers(1, 12))
def test_parts_are_balanced_in_order_and_never_empty(rows, ndevices):
    """Sizes differ by at most one, the larger first; no row is lost; fewer rows give fewer parts."""
    parts = tp_collate(ndevices)(plain)(list(range(rows)))
    sizes = [len(part) for part in parts]
    assert torch.cat(parts).tolist() == list(range(rows))
    assert len(sizes) == max(1, min(ndevices, rows))
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_zero_samples_call_the_function_once_with_the_empty_list():
    """What the function makes of no samples is the one part."""
    calls = []
    assert tp_collate(3)(lambda samples: calls.append(samples) or {"n": 0})([]) == {"n": (0,)}
    assert calls == [[]]


def test_one_device_gives_parts_of_one():
    """The structure does not depend on the number of devices."""
    assert lists(tp_collate(1)(lambda s: (torch.tensor(s), 7))([1, 2])) == ["tuple", ["tuple", [1, 2]], ["tuple", 7]]


# -- what comes back


def test_a_tuple_is_turned_around():
    """(x, y) per part becomes ((x1, x2), (y1, y2))."""
    (x1, x2), (y1, y2) = collate_pairs([(0, 5), (1, 6), (2, 7)])
    assert (x1.tolist(), x2.tolist(), y1.tolist(), y2.tolist()) == ([0, 1], [2], [5, 6], [7])


def test_a_list_is_treated_like_a_tuple():
    """A collate function that returns a list gives a tuple of tuples."""
    assert tp_collate(2)(lambda s: [len(s), sum(s)])([1, 2, 3]) == ((2, 1), (3, 3))


@pytest.mark.parametrize("cls", [dict, OrderedDict, UserDict])
def test_a_mapping_becomes_that_mapping_of_tuples(cls):
    """A dict gives a dict of tuples, and a subclass keeps its type."""
    batch = tp_collate(2)(lambda s: cls(n=len(s), s=s))([1, 2, 3])
    assert type(batch) is cls
    assert dict(batch) == {"n": (2, 1), "s": ([1, 2], [3])}


def test_a_namedtuple_keeps_its_type():
    """A namedtuple gives that namedtuple of tuples."""
    assert tp_collate(2)(lambda s: Sample(len(s), sum(s)))([1, 2, 3]) == Sample((2, 1), (3, 3))


def test_a_single_value_becomes_a_plain_tuple_of_parts():
    """A tensor per part gives the tuple of them."""
    assert lists(tp_collate(2)(plain)([1, 2, 3])) == ["tuple", [1, 2], [3]]


def test_a_packed_sequence_is_a_single_value():
    """A PackedSequence is not taken apart, though it is a namedtuple."""
    parts = tp_collate(2)(pack_sequence)([torch.zeros(3), torch.zeros(2), torch.zeros(1)])
    assert [type(part) for part in parts] == [PackedSequence, PackedSequence]


def test_the_list_of_samples_handed_back_is_a_single_value():
    """A batch of texts, which collates to itself, is cut and not reshuffled."""
    assert tp_collate(2)(lambda samples: samples)(["a", "b", "c", "d"]) == (["a", "b"], ["c", "d"])


def test_only_the_outermost_level_is_turned_around():
    """A nested value stays whole within its part."""
    assert tp_collate(2)(lambda s: {"inner": {"s": s}})([1, 2]) == {"inner": ({"s": [1]}, {"s": [2]})}


@pytest.mark.parametrize(
    ("collate", "words"),
    [
        (lambda s: tuple(s), "part 1 has 1 item, part 0 has 2"),
        (lambda s: {f"n{len(s)}": 1}, "part 1 has the keys ['n1'], part 0 has ['n2']"),
        (lambda s: (1,) if len(s) == 2 else {"x": 1}, "part 1 is of type dict, part 0 is of type tuple"),
        (lambda s: torch.tensor(s) if len(s) == 2 else None, "part 1 is None, part 0 is of type Tensor"),
    ],
)
def test_parts_of_unequal_structure_are_refused(collate, words):
    """Where zip would drop values silently, ShardError names both parts."""
    with pytest.raises(ShardError) as caught:
        tp_collate(2)(collate)([1, 2, 3])
    assert words in str(caught.value)


# -- the decorator


@pytest.mark.parametrize("ndevices", [0, -1, 2.0, "2", None, True])
@pytest.mark.parametrize("make", [tp_collate, default_collate])
def test_a_number_of_devices_that_is_none_is_refused(make, ndevices):
    """ShardError names the value and the cure."""
    with pytest.raises(ShardError, match=rf"ndevices={ndevices!r} is not a number of devices: give {make.__name__} an int"):
        make(ndevices)


def test_forgotten_parentheses_are_named():
    """@tp_collate alone, which is given the function, says what to write."""
    with pytest.raises(ShardError, match=r"tp_collate was given plain where .* write tp_collate\(2\)"):
        tp_collate(plain)


def test_a_batch_given_for_the_number_is_not_printed_whole():
    """collate_fn=default_collate without a number meets its first batch: the message stays short."""
    with pytest.raises(ShardError) as caught:
        default_collate([torch.zeros(1000)] * 1000)
    assert len(str(caught.value)) < 400


def test_what_is_no_function_cannot_be_decorated():
    """Anything that cannot be called is refused at once."""
    with pytest.raises(ShardError, match="not 'text': give it a callable"):
        tp_collate(2)("text")


@pytest.mark.parametrize("samples", [{"x": 1}, iter([1])])
def test_what_is_no_list_of_samples_is_refused(samples):
    """A dict or an iterator cannot be cut, and the message says so."""
    with pytest.raises(ShardError, match=r"cuts a list of samples, not a .*: give list\(samples\)"):
        tp_collate(2)(plain)(samples)


def test_the_decorated_function_looks_like_the_bare_one():
    """Name, docstring, signature and __wrapped__ are the function's own."""
    assert collate_pairs.__name__ == "collate_pairs"
    assert collate_pairs.__doc__ == "Pairs to a pair of tensors."
    assert str(inspect.signature(collate_pairs)) == "(samples, scale=1)"
    assert inspect.isfunction(collate_pairs.__wrapped__)


def test_samples_by_name_and_further_arguments_arrive():
    """The samples may be named, and what comes beside them reaches every part."""
    assert lists(collate_pairs(samples=[(1, 0), (2, 0)], scale=3)[0]) == ["tuple", [3], [6]]
    assert lists(collate_pairs([(1, 0), (2, 0)], 4)[0]) == ["tuple", [4], [8]]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'samples'"):
        collate_pairs()


def test_an_exception_of_the_collate_function_arrives_as_it_is():
    """The user's own error is not replaced."""
    with pytest.raises(ZeroDivisionError):
        tp_collate(2)(lambda s: 1 / 0)([1])


def test_methods_of_every_kind_work():
    """A decorated method, classmethod or staticmethod is bound as an undecorated one."""
    offset = Offset(10)
    assert lists(offset.collate([1, 2])) == lists(Offset.collate(offset, [1, 2])) == ["tuple", [11], [12]]
    assert lists(offset.of_class([1, 2])) == lists(Offset.of_class([1, 2])) == ["tuple", [2], [3]]
    assert lists(offset.of_nobody([1, 2])) == ["tuple", [1], [2]]


# -- copies, pickles, workers

COPIES = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "cloudpickle": lambda value: cloudpickle.loads(cloudpickle.dumps(value)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


@pytest.mark.parametrize("through", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize(
    "collate",
    [
        tp_collate(2)(plain),
        tp_collate(2)(Offset(0)),
        Offset(0).collate,
        Offset.of_nobody,
        default_collate(2),
        tp_collate(2)(torch_default_collate),
    ],
    ids=["function", "object", "method", "staticmethod", "default", "torch's"],
)
def test_copies_still_cut(collate, through):
    """No copy or pickle loses the cutting."""
    assert lists(through(collate)([1, 2, 3])) == ["tuple", [1, 2], [3]]


def test_a_module_level_function_pickles_by_name():
    """Unpickling finds the decorated function itself, as it would find the bare one."""
    assert pickle.loads(pickle.dumps(collate_pairs)) is collate_pairs


def test_cloudpickle_sends_a_function_of_main_by_value_and_decorated(monkeypatch):
    """A collate function of a script or a notebook reaches a process that has another __main__."""
    collate = tp_collate(2)(lambda samples: torch.tensor(samples))
    collate.__wrapped__.__module__ = "__main__"
    collate.__wrapped__.__qualname__ = "collate"
    monkeypatch.setattr("__main__.collate", collate, raising=False)
    sent = cloudpickle.dumps(collate)
    monkeypatch.delattr("__main__.collate")
    assert lists(cloudpickle.loads(sent)([1, 2, 3])) == ["tuple", [1, 2], [3]]


def test_the_seed_example_loses_no_row_and_keeps_the_order():
    """100 rows in batches of 30 over 2 devices: 15 + 15 three times, then 5 + 5."""
    batches = list(DataLoader(Pairs(), batch_size=30, collate_fn=default_collate(2)))
    assert [[len(x) for x in xs] for xs, _ in batches] == [[15, 15], [15, 15], [15, 15], [5, 5]]
    assert torch.cat([x[:, 0] for xs, _ in batches for x in xs]).tolist() == list(range(100))
    assert torch.cat([y for _, ys in batches for y in ys]).tolist() == [-row for row in range(100)]


def test_a_last_batch_shorter_than_the_devices_gives_fewer_parts():
    """100 rows in batches of 33 over 4 devices end with one part of one row."""
    *_, (xs, ys) = DataLoader(Pairs(), batch_size=33, collate_fn=default_collate(4))
    assert [len(x) for x in xs] == [len(y) for y in ys] == [1]


def test_shuffling_keeps_each_row_with_its_label():
    """Parts of x and of y are cut alike."""
    loader = DataLoader(Pairs(), batch_size=30, shuffle=True, collate_fn=default_collate(2))
    pairs = [(x[:, 0], y) for xs, ys in loader for x, y in zip(xs, ys, strict=True)]
    assert all(torch.equal(x, -y) for x, y in pairs)
    assert sorted(torch.cat([x for x, _ in pairs]).tolist()) == list(range(100))


@pytest.mark.parametrize("collate", [default_collate(2), tp_collate(2)(torch_default_collate)], ids=["whole", "parts"])
def test_spawned_workers_take_it(collate):
    """DataLoader workers that share nothing with the parent return the same parts in the same order."""
    loader = DataLoader(Pairs(), 30, num_workers=1, pin_memory=False, collate_fn=collate, multiprocessing_context="spawn")
    assert torch.cat([x[:, 0] for xs, _ in loader for x in xs]).tolist() == list(range(100))


# -- default_collate

leaves = st.integers(0, 9) | st.floats(0, 1) | st.just("text") | st.just(b"b")
layouts = st.recursive(
    leaves.map(lambda leaf: lambda row: leaf * 2 if isinstance(leaf, (str, bytes)) else leaf + row)
    | st.just(lambda row: torch.tensor([row, row])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda makes: lambda row: tuple(make(row) for make in makes)),
        st.lists(inner, max_size=3).map(lambda makes: lambda row: [make(row) for make in makes]),
        st.tuples(inner, inner).map(lambda makes: lambda row: Sample(*(make(row) for make in makes))),
        st.dictionaries(st.sampled_from("ab"), inner).map(
            lambda makes: lambda row: {key: make(row) for key, make in makes.items()}
        ),
    ),
    max_leaves=6,
)


@given(layouts, st.integers(1, 9), st.integers(1, 4))
def test_default_collate_equals_collating_each_part(layout, rows, ndevices):
    """Collating once and cutting gives what tp_collate of torch's default_collate gives, for every structure."""
    samples = [layout(row) for row in range(rows)]
    expected = tp_collate(ndevices)(torch_default_collate)(samples)
    assert lists(default_collate(ndevices)(samples)) == lists(expected)


def test_default_collate_cuts_containers_that_torch_keeps():
    """A deque or a UserDict of tensors is cut and keeps its type."""
    parts = default_collate(2)([deque([row]) for row in range(3)])
    assert [type(part) for part in parts] == [deque, deque]
    assert parts[0][0].tolist() == [0, 1]
    assert default_collate(2)([UserDict(x=row) for row in range(3)])["x"][1].tolist() == [2]


def test_default_collate_copies_no_tensor_twice():
    """The parts are views of one batch."""
    one, two = default_collate(2)([torch.zeros(3)] * 4)
    assert one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


def test_default_collate_takes_shapes_that_agree_only_within_a_part():
    """One image per device may have any size; shapes that differ within a part are torch's own error."""
    assert [part.shape for part in default_collate(2)([torch.zeros(2), torch.zeros(3)])] == [(1, 2), (1, 3)]
    with pytest.raises(RuntimeError, match="equal size"):
        default_collate(1)([torch.zeros(2), torch.zeros(3)])


def test_default_collate_honours_a_registered_type(monkeypatch):
    """A user's own collate function for a type is called for each part, whatever it returns."""
    monkeypatch.setitem(default_collate_fn_map, complex, lambda batch, *, collate_fn_map: torch.tensor(sum(batch)))
    assert lists(default_collate(2)([1j, 2j, 3j])) == ["tuple", 3j, 3j]


def test_default_collate_shows_what_it_is():
    """Its repr is the call that makes it."""
    assert repr(default_collate(2)) == "default_collate(2)"
