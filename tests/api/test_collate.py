"""`tp_collate` and `default_collate`: collate functions that return one part per device."""

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

from parawrap.api.collate import default_collate, tp_collate
from parawrap.errors import ShardError

Sample = namedtuple("Sample", ["x", "y"])


@tp_collate(2)
def collate_pairs(samples, scale=1):
    """Collate pairs into a pair of tensors."""
    xs, ys = zip(*samples, strict=True)
    return torch.tensor(xs) * scale, torch.tensor(ys)


def plain(samples):
    """An undecorated collate function."""
    return torch.tensor(samples)


class Offset:
    """A callable object as collate function, with decorated methods of every kind."""

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
    def of_static(samples):
        return torch.tensor(samples)


class Pairs(torch.utils.data.Dataset):
    """100 samples of a row and its label."""

    def __len__(self):
        return 100

    def __getitem__(self, row):
        return torch.tensor([row, row]), -row


def lists(value):
    """Replace tensors in a nested value with lists, for comparison."""
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
    """Part sizes differ by at most one, larger parts first. Fewer rows than devices give fewer parts."""
    parts = tp_collate(ndevices)(plain)(list(range(rows)))
    sizes = [len(part) for part in parts]
    assert torch.cat(parts).tolist() == list(range(rows))
    assert len(sizes) == max(1, min(ndevices, rows))
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_zero_samples_call_the_function_once_with_the_empty_list():
    """The result of the function for an empty list is the only part."""
    calls = []
    assert tp_collate(3)(lambda samples: calls.append(samples) or {"n": 0})([]) == {"n": (0,)}
    assert calls == [[]]


def test_one_device_gives_tuples_with_one_part():
    """With one device, the batch has the same structure as with several."""
    assert lists(tp_collate(1)(lambda s: (torch.tensor(s), 7))([1, 2])) == ["tuple", ["tuple", [1, 2]], ["tuple", 7]]


# -- structure of the batch


def test_a_tuple_is_transposed():
    """A tuple (x, y) per part becomes ((x1, x2), (y1, y2))."""
    (x1, x2), (y1, y2) = collate_pairs([(0, 5), (1, 6), (2, 7)])
    assert (x1.tolist(), x2.tolist(), y1.tolist(), y2.tolist()) == ([0, 1], [2], [5, 6], [7])


def test_a_list_is_treated_like_a_tuple():
    """A collate function that returns a list gives a tuple of tuples."""
    assert tp_collate(2)(lambda s: [len(s), sum(s)])([1, 2, 3]) == ((2, 1), (3, 3))


@pytest.mark.parametrize("cls", [dict, OrderedDict, UserDict])
def test_a_mapping_becomes_a_mapping_of_tuples(cls):
    """A mapping per part becomes a mapping of tuples of the same type."""
    batch = tp_collate(2)(lambda s: cls(n=len(s), s=s))([1, 2, 3])
    assert type(batch) is cls
    assert dict(batch) == {"n": (2, 1), "s": ([1, 2], [3])}


def test_a_namedtuple_keeps_its_type():
    """A namedtuple per part becomes a namedtuple of tuples of the same type."""
    assert tp_collate(2)(lambda s: Sample(len(s), sum(s)))([1, 2, 3]) == Sample((2, 1), (3, 3))


def test_a_single_value_becomes_a_plain_tuple_of_parts():
    """One tensor per part becomes a tuple of tensors."""
    assert lists(tp_collate(2)(plain)([1, 2, 3])) == ["tuple", [1, 2], [3]]


def test_a_packed_sequence_is_a_single_value():
    """A PackedSequence is not split into its fields, although it is a namedtuple."""
    parts = tp_collate(2)(pack_sequence)([torch.zeros(3), torch.zeros(2), torch.zeros(1)])
    assert [type(part) for part in parts] == [PackedSequence, PackedSequence]


def test_a_returned_list_of_samples_is_a_single_value():
    """If the collate function returns its samples, each part is a list of samples."""
    assert tp_collate(2)(lambda samples: samples)(["a", "b", "c", "d"]) == (["a", "b"], ["c", "d"])


def test_only_the_outermost_level_is_transposed():
    """Nested values stay whole within their part."""
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
    """Parts with different structures raise ShardError, which names both parts, instead of dropping values as zip does."""
    with pytest.raises(ShardError) as caught:
        tp_collate(2)(collate)([1, 2, 3])
    assert words in str(caught.value)


# -- the decorator


@pytest.mark.parametrize("ndevices", [0, -1, 2.0, "2", None, True])
@pytest.mark.parametrize("make", [tp_collate, default_collate])
def test_an_invalid_number_of_devices_is_refused(make, ndevices):
    """The error shows the value and a valid call."""
    with pytest.raises(
        ShardError, match=rf"ndevices={ndevices!r} is not a number of devices\. Give {make.__name__} an int"
    ):
        make(ndevices)


def test_a_decorator_without_parentheses_is_refused():
    """`@tp_collate` without a number raises, and the error shows the correct syntax."""
    with pytest.raises(ShardError, match=r"tp_collate got the callable plain .* Write tp_collate\(2\)"):
        tp_collate(plain)


def test_a_batch_in_place_of_the_number_is_shortened_in_the_error():
    """With `collate_fn=default_collate`, the first batch becomes the argument. The error does not print all of it."""
    with pytest.raises(ShardError) as caught:
        default_collate([torch.zeros(1000)] * 1000)
    assert len(str(caught.value)) < 400


def test_a_value_that_is_not_callable_cannot_be_decorated():
    """The decorator refuses the value at once."""
    with pytest.raises(ShardError, match="'text', which is not callable"):
        tp_collate(2)("text")


@pytest.mark.parametrize("samples", [{"x": 1}, iter([1])])
def test_samples_must_be_a_list(samples):
    """A dict or an iterator of samples cannot be cut, and raises."""
    with pytest.raises(ShardError, match=r"tp_collate cannot cut a .*\. Give it a list: list\(samples\)"):
        tp_collate(2)(plain)(samples)


def test_the_decorated_function_keeps_its_metadata():
    """Name, docstring, and signature are those of the function, and `__wrapped__` is the function."""
    assert collate_pairs.__name__ == "collate_pairs"
    assert collate_pairs.__doc__ == "Collate pairs into a pair of tensors."
    assert str(inspect.signature(collate_pairs)) == "(samples, scale=1)"
    assert inspect.isfunction(collate_pairs.__wrapped__)


def test_samples_by_keyword_and_other_arguments():
    """The samples can be a keyword argument, and other arguments are passed on for every part."""
    assert lists(collate_pairs(samples=[(1, 0), (2, 0)], scale=3)[0]) == ["tuple", [3], [6]]
    assert lists(collate_pairs([(1, 0), (2, 0)], 4)[0]) == ["tuple", [4], [8]]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'samples'"):
        collate_pairs()


def test_an_exception_of_the_collate_function_is_not_replaced():
    """The caller gets the user's exception."""
    with pytest.raises(ZeroDivisionError):
        tp_collate(2)(lambda s: 1 / 0)([1])


def test_methods_of_every_kind_work():
    """A decorated method, classmethod, or staticmethod is bound like an undecorated one."""
    offset = Offset(10)
    assert lists(offset.collate([1, 2])) == lists(Offset.collate(offset, [1, 2])) == ["tuple", [11], [12]]
    assert lists(offset.of_class([1, 2])) == lists(Offset.of_class([1, 2])) == ["tuple", [2], [3]]
    assert lists(offset.of_static([1, 2])) == ["tuple", [1], [2]]


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
        Offset.of_static,
        default_collate(2),
        tp_collate(2)(torch_default_collate),
    ],
    ids=["function", "object", "method", "staticmethod", "default", "torch's"],
)
def test_copies_of_a_collate_function_still_cut(collate, through):
    """Copied and unpickled collate functions still return parts."""
    assert lists(through(collate)([1, 2, 3])) == ["tuple", [1, 2], [3]]


def test_a_module_level_function_pickles_by_name():
    """Unpickling returns the same decorated function object."""
    assert pickle.loads(pickle.dumps(collate_pairs)) is collate_pairs


def test_cloudpickle_sends_a_function_of_main_by_value_and_decorated(monkeypatch):
    """A collate function of a script or a notebook can be sent to a process with another `__main__`."""
    collate = tp_collate(2)(lambda samples: torch.tensor(samples))
    collate.__wrapped__.__module__ = "__main__"
    collate.__wrapped__.__qualname__ = "collate"
    monkeypatch.setattr("__main__.collate", collate, raising=False)
    sent = cloudpickle.dumps(collate)
    monkeypatch.delattr("__main__.collate")
    assert lists(cloudpickle.loads(sent)([1, 2, 3])) == ["tuple", [1, 2], [3]]


def test_a_data_loader_keeps_all_rows_in_order():
    """100 rows in batches of 30 over 2 devices give parts of 15 + 15 rows three times, then 5 + 5."""
    batches = list(DataLoader(Pairs(), batch_size=30, collate_fn=default_collate(2)))
    assert [[len(x) for x in xs] for xs, _ in batches] == [[15, 15], [15, 15], [15, 15], [5, 5]]
    assert torch.cat([x[:, 0] for xs, _ in batches for x in xs]).tolist() == list(range(100))
    assert torch.cat([y for _, ys in batches for y in ys]).tolist() == [-row for row in range(100)]


def test_a_last_batch_with_fewer_rows_than_devices_gives_fewer_parts():
    """100 rows in batches of 33 over 4 devices end with one part of one row."""
    *_, (xs, ys) = DataLoader(Pairs(), batch_size=33, collate_fn=default_collate(4))
    assert [len(x) for x in xs] == [len(y) for y in ys] == [1]


def test_shuffling_keeps_each_row_with_its_label():
    """Parts of x and y have the same rows."""
    loader = DataLoader(Pairs(), batch_size=30, shuffle=True, collate_fn=default_collate(2))
    pairs = [(x[:, 0], y) for xs, ys in loader for x, y in zip(xs, ys, strict=True)]
    assert all(torch.equal(x, -y) for x, y in pairs)
    assert sorted(torch.cat([x for x, _ in pairs]).tolist()) == list(range(100))


@pytest.mark.parametrize("collate", [default_collate(2), tp_collate(2)(torch_default_collate)], ids=["whole", "parts"])
def test_spawned_workers_can_collate(collate):
    """Spawned DataLoader workers return all rows in order."""
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
    """For every structure, default_collate equals tp_collate around torch's default_collate."""
    samples = [layout(row) for row in range(rows)]
    expected = tp_collate(ndevices)(torch_default_collate)(samples)
    assert lists(default_collate(ndevices)(samples)) == lists(expected)


def test_default_collate_cuts_containers_that_torch_keeps():
    """A deque or a UserDict is cut and keeps its type."""
    parts = default_collate(2)([deque([row]) for row in range(3)])
    assert [type(part) for part in parts] == [deque, deque]
    assert parts[0][0].tolist() == [0, 1]
    assert default_collate(2)([UserDict(x=row) for row in range(3)])["x"][1].tolist() == [2]


def test_default_collate_returns_views_of_one_batch():
    """The parts share one storage, so tensors are copied only once."""
    one, two = default_collate(2)([torch.zeros(3)] * 4)
    assert one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


def test_default_collate_needs_equal_shapes_only_within_a_part():
    """Parts may differ in shape. Different shapes within a part raise torch's error."""
    assert [part.shape for part in default_collate(2)([torch.zeros(2), torch.zeros(3)])] == [(1, 2), (1, 3)]
    with pytest.raises(RuntimeError, match="equal size"):
        default_collate(1)([torch.zeros(2), torch.zeros(3)])


def test_default_collate_uses_a_registered_function(monkeypatch):
    """A collate function that the user registered for a type is called once per part."""
    monkeypatch.setitem(default_collate_fn_map, complex, lambda batch, *, collate_fn_map: torch.tensor(sum(batch)))
    assert lists(default_collate(2)([1j, 2j, 3j])) == ["tuple", 3j, 3j]


def test_default_collate_repr():
    """The repr is the call that creates the function."""
    assert repr(default_collate(2)) == "default_collate(2)"
