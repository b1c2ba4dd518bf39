"""`gather_rows`: every rank gets the results of all rows, in dataset order and once per row."""

from __future__ import annotations

import math
import pickle
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from parawrap import GatherError, PlatformError, current_rank, functional
from tests.helpers.ranks import on


class Output(NamedTuple):
    logits: torch.Tensor
    names: list


def results(rows):
    """Return example results of these rows: tensors of several dtypes and lists of several types."""
    numbers = torch.tensor(rows, dtype=torch.int64)
    return {
        "float": numbers.float()[:, None] / 7,
        "half": (numbers / 2).to(torch.bfloat16),
        "complex": torch.complex(numbers.float(), -numbers.float()).conj(),
        "bool": (numbers % 2 == 0)[:, None, None].expand(-1, 2, 1),
        "nothing": numbers.new_empty(len(rows), 0),
        "output": Output(numbers * 3, ["é" * int(row) for row in rows]),
        "lists": ([int(row) for row in rows], [row / 3 for row in rows], tuple(row > 1 for row in rows)),
        "ragged": [torch.arange(int(row), dtype=torch.int16) for row in rows],
        "items": [{"boxes": torch.ones(int(row) % 3, 4), "of": (int(row), "é", None, [0.5] * int(row))} for row in rows],
    }


def flat(tree):
    """Convert a result to plain Python values, with types and shapes."""
    if isinstance(tree, torch.Tensor):
        return str(tree.dtype), tuple(tree.shape), tree.tolist()
    if isinstance(tree, dict):
        return {key: flat(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree).__name__, [flat(value) for value in tree]
    return tree


def empty():
    """Return results without rows, with other dtypes and shapes than in `results`."""
    nothing = torch.empty(0)
    return {
        "float": nothing, "half": nothing, "complex": nothing, "bool": nothing, "nothing": nothing,
        "output": Output(nothing, []), "lists": ([], [], ()), "ragged": [], "items": [],
    }  # fmt: skip


def test_rows_are_in_dataset_order_once_each():
    """For every kind of sampler and length, both ranks get the results of a plain loop."""
    lengths = [1, 2, 5, 8]

    def evaluate(lengths, results, empty):
        found = {}
        for length in lengths:
            data = range(length)
            torchs = DistributedSampler(data, 2, current_rank().global_rank)
            torchs.set_epoch(3)
            samplers = {
                "padded": functional.get_dataset_sampler(data),
                "contiguous": functional.get_dataset_sampler(data, pad=False),
                "torch": torchs,
                "in a loader": DataLoader(data, sampler=functional.get_dataset_sampler(data, pad=False)),
            }
            loaders = {
                "in order": DataLoader(data, 2),
                "shuffled": DataLoader(data, 2, shuffle=True),
                "single rows": DataLoader(data, None, shuffle=True),
                "subset": DataLoader(data, 2, sampler=SubsetRandomSampler(data)),
                "batches": DataLoader(data, batch_sampler=[[i] for i in data]),
                "plain batches": DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 2, False)),
            }
            for name, loader in loaders.items():
                for pad in (False, True):
                    samplers[name, pad] = functional.shard_loader(loader, pad=pad)
            for name, sampler in samplers.items():
                batches = sampler if isinstance(sampler, DataLoader) else DataLoader(data, sampler=sampler)
                for _ in range(2):  # the second epoch of a shuffled loader has another order
                    rows = [int(row) for batch in batches for row in torch.as_tensor(batch).reshape(-1)]
                gathered = functional.gather_rows(results(rows) if rows else empty(), sampler)
                found[length, name] = flat(gathered)
        return found

    one, other = on(2, evaluate, lengths, results, empty)
    for (length, name), found in one.items():
        assert found == flat(results(range(length))), (length, name)
    assert one == other


def test_a_list_has_one_item_per_row():
    """A list has one item per row and a tuple one column per item, also if their lengths agree by chance."""

    def evaluate():
        rank = current_rank().global_rank
        loader = functional.shard_loader(DataLoader(range(4), 2), pad=False)
        rows = [torch.tensor([row, row]) for batch in loader for row in batch.tolist()]
        single = functional.gather_rows([row[0] for row in rows], loader)
        items, columns = functional.gather_rows(rows, loader), functional.gather_rows(tuple(rows), loader)
        return rank, flat(items), flat(columns), flat(single)

    def dtype(shape, values):
        return "torch.int64", shape, values

    for rank, items, columns, single in on(2, evaluate):
        assert items == ("list", [dtype((2,), [row, row]) for row in range(4)])
        assert columns[0] == "tuple"
        assert [part[1] for part in columns[1]] == [(4,), (4,)]
        assert single == ("list", [dtype((), row) for row in range(4)])
        assert rank in (0, 1)


def test_any_item_of_a_list_is_gathered():
    """Items may be None, large integers, odd strings, or dicts with other keys, and also nested, in each row."""
    items = {
        "missing": lambda row: None if row % 2 else torch.ones(row),
        "missing on one rank": lambda row: "text" if row < 2 else None,
        "by id": lambda row: {row: torch.ones(row, 4), (1, "a"): [], **({"more": None} if row else {})},
        "large": lambda row: 2**70 + row,
        "float": lambda row: [math.inf, -0.0, 5e-324, 0.1][row % 4],
        "half an emoji": lambda row: "\ud83d" * row + "\ude00",
        "nested": lambda row: [(row, {"a": [torch.ones(row, 2, dtype=torch.bool)]})] * row,
        "a dict like ours": lambda row: {"tensor": ["torch.float32", [1]], "dict": {"list": {}}},
    }

    def evaluate():
        loader = functional.shard_loader(DataLoader(range(5), 2), pad=False)
        rows = [row for batch in loader for row in batch.tolist()]
        return {name: flat(functional.gather_rows([item(row) for row in rows], loader)) for name, item in items.items()}

    for found in on(2, evaluate):
        for name, item in items.items():
            assert found[name] == flat([item(row) for row in range(5)]), name


def test_rows_of_unequal_width_are_gathered_as_a_list():
    """Tensors whose width differs between ranks are refused, and the error names a way that works."""

    def evaluate():
        loader = functional.shard_loader(DataLoader(range(5), 2), pad=False)
        rows = torch.cat(list(loader))
        tensor = rows[:, None].expand(-1, 3 + current_rank().global_rank)
        with pytest.raises(
            GatherError, match=r"rows differ in shape, give a list with one item per row, such as list\(tensor\)"
        ):
            functional.gather_rows(tensor, loader)
        return [row.tolist() for row in functional.gather_rows(list(tensor), loader)]

    assert on(2, evaluate) == ([[row] * (3 if row < 3 else 4) for row in range(5)],) * 2


def test_items_of_one_rank_keep_their_type():
    """With one rank, items are returned in dataset order; tensors in them have no graph, and share no memory."""
    loader = functional.shard_loader(DataLoader(range(3), 3, shuffle=True))
    (order,) = list(loader)
    rows = [(torch.full((int(row),), 1.5, requires_grad=True) * 2, {"row": int(row)}) for row in order]
    found = functional.gather_rows(rows, loader)
    assert [(x.tolist(), more) for x, more in found] == [([3.0] * row, {"row": row}) for row in range(3)]
    assert not any(x.requires_grad for x, _ in found)


def test_a_sampler_that_repeats_and_omits_rows():
    """Rows that were drawn several times are returned once; rows that were never drawn are missing."""

    def evaluate():
        torch.manual_seed(0)
        sampler = WeightedRandomSampler([1.0, 0.0, 1.0, 0.0, 1.0, 1.0], 30)
        loader = functional.shard_loader(DataLoader(range(6), 4, sampler=sampler))
        return functional.gather_rows(torch.cat(list(loader)), loader).tolist()

    assert on(2, evaluate) == ([0, 2, 4, 5],) * 2


def test_nothing_is_unpickled():
    """Results are exchanged as numbers, without pickle."""

    def evaluate():
        def refuse(*args, **kwargs):
            raise AssertionError

        dist.all_gather_object = dist.distributed_c10d._tensor_to_object = pickle.loads = refuse
        names = ["a", "", "\ud800", "c"]
        loader = functional.shard_loader(DataLoader(range(4)))
        return functional.gather_rows([names[int(row)] for row in loader], loader)

    assert on(2, evaluate) == (["a", "", "\ud800", "c"],) * 2


def test_one_rank_gets_dataset_order():
    """With one rank, rows are in dataset order, also without a sampler."""
    loader = functional.shard_loader(DataLoader(range(5), 2, shuffle=True))
    rows = torch.cat(list(loader))
    assert functional.gather_rows(rows, loader).tolist() == [0, 1, 2, 3, 4] != rows.tolist()
    plain = DataLoader(range(5), 2)
    assert functional.gather_rows(torch.cat(list(plain)), plain).tolist() == [0, 1, 2, 3, 4]
    tree = {"a": torch.ones(3)}
    assert functional.gather_rows(tree, functional.get_dataset_sampler(range(3))) is tree


def test_an_empty_dataset():
    """An empty dataset gives empty results."""

    def evaluate():
        loader = functional.shard_loader(DataLoader([]))
        return functional.gather_rows({"a": torch.empty(0, 3), "b": [], "c": ()}, loader)

    for found in on(2, evaluate):
        assert (found["a"].shape, found["b"], found["c"]) == ((0, 3), [], ())


def test_results_have_no_graph_and_keep_their_device():
    """Gathered tensors have no graph and lie on the CPU if the inputs did, also with another default device."""

    def evaluate():
        loader = functional.shard_loader(DataLoader(range(4)))
        values = torch.ones(2, 2, requires_grad=True) * 2
        with torch.device("meta"):
            found, names = functional.gather_rows((values, ["a", ""]), loader)
            mean = functional.reduce_metrics({"tensor": values[0], "number": 1.0})
        return found, names, mean

    for found, names, mean in on(2, evaluate):
        assert (found.requires_grad, found.device.type, found.tolist()) == (False, "cpu", [[2.0, 2.0]] * 4)
        assert names == ["a", "a", "", ""]
        assert (mean["tensor"].tolist(), mean["number"]) == ([2.0, 2.0], 1.0)


def test_results_that_differ_between_ranks_are_refused():
    """Different structures, dtypes, or row shapes, and rows on no rank, raise on both ranks and are named."""

    def evaluate():
        rank = current_rank().global_rank
        loader = functional.shard_loader(DataLoader(range(4), 2))
        trees = [
            ({"a": torch.ones(2)}, {"b": torch.ones(2)})[rank],
            (torch.ones(2), torch.ones(2).double())[rank],
            (torch.ones(2, 3), torch.ones(2, 4))[rank],
            (["a", "b"], [1, 2])[rank],
            ([torch.ones(1), torch.ones(2)], [torch.ones(1).double(), torch.ones(2).double()])[rank],
            ([None, {"a": 1}], [(1,)] * 2)[rank],
            ([torch.ones(1), torch.ones(2)], torch.ones(2))[rank],
        ]
        samplers = [loader] * 7
        trees += [torch.ones(2), torch.ones(2)]
        samplers.append(DistributedSampler(range(5), 2, rank, drop_last=True))
        samplers.append(functional.get_dataset_sampler(range(4 + rank), pad=True) if rank == 0 else loader)
        trees.append(torch.ones(2 + rank))
        samplers.append(functional.get_dataset_sampler(range(5 - 1 + rank * 2), pad=True))
        found = []
        for tree, sampler in zip(trees, samplers, strict=True):
            try:
                found.append(functional.gather_rows(tree, sampler))
            except GatherError as error:
                found.append(str(error))
        return found

    one, other = on(2, evaluate)
    messages = [
        'rank 0 has tree["a"], but rank 1 has tree["b"]',
        "tree: a row is torch.float32 () on rank 0, but torch.float64 () on rank 1",
        "tree: a row is torch.float32 (3,) on rank 0, but torch.float32 (4,) on rank 1",
        "tree: a row is an item of a list: str on rank 0, but an item of a list: int on rank 1",
        "torch.float32 with 1 dim(s) on rank 0, but an item of a list: torch.float64 with 1 dim(s) on rank 1",
        "a row is an item of a list: tuple on rank 1, but an item of a list: dict on rank 0",
        "a row is an item of a list: torch.float32 with 1 dim(s) on rank 0, but torch.float32 () on rank 1",
        "1 row(s) of the dataset are missing on all ranks",
    ]
    for found in (one, other):
        assert [message in text for message, text in zip(messages, found, strict=False)] == [True] * len(messages), found
    assert "missing on all ranks" in str(one[8]) or "missing on all ranks" in str(other[8])
    assert "missing on all ranks" in str(other[9])


LOADER = functional.shard_loader(DataLoader(range(3), 2))


@pytest.mark.parametrize(
    ("tree", "error", "message"),
    [
        ({"a": torch.ones(2)}, GatherError, r'tree\["a"\] has 2 row\(s\), but the sampler gave this rank 3'),
        (["a", "b"], GatherError, r"tree is a list of 2 item\(s\), but .* 3 row\(s\)"),
        (torch.tensor(1.0), GatherError, "tree is a tensor without dims.*reduce_metrics"),
        ((torch.tensor(1.0),) * 3, GatherError, r"tree\[0\] is a tensor without dims. Give a list with one tensor per row"),
        ([torch.ones(3), torch.ones(3)], GatherError, r"tree is a list of 2 item\(s\), but .* 3 row\(s\).*tuple or dict"),
        ({"a": [torch.ones(2, 5), torch.ones(1, 5)]}, GatherError, "concatenate the outputs of batches"),
        ([torch.ones(1), torch.ones(1), torch.ones(1).int()], GatherError, r"float32 .* but tree\[2\] is torch.int32"),
        ([torch.ones(1), torch.ones(1), torch.ones(1, 1)], GatherError, r"1 dim\(s\), but tree\[2\] .* 2 dim\(s\)"),
        (
            [None, torch.ones(1), 2],
            GatherError,
            r"tree\[1\] is torch.float32 .*, but tree\[2\] is int. Give all rows the same",
        ),
        ([{Sampler: 1}] * 3, TypeError, r"a key of tree\[0\] is a type"),
        ([{"a": {1}}] * 3, TypeError, r"tree\[0\]\['a'\] is a set"),
        ([torch.eye(3).to_sparse()] * 3, TypeError, r"tree\[0\] is a tensor of torch.sparse_coo"),
        ([1, 2.5, 3], GatherError, r"tree\[0\] is int, but tree\[1\] is float"),
        ({"a": None}, TypeError, r'tree\["a"\] is a NoneType'),
        (1.5, TypeError, "tree is a float"),
        (torch.eye(3).to_sparse(), TypeError, "tree is a tensor of torch.sparse_coo"),
    ],
    ids=lambda value: None,
)
def test_values_that_cannot_be_gathered_are_refused(tree, error, message):
    """The error names the place and the value."""
    with pytest.raises(error, match=message):
        functional.gather_rows(tree, LOADER)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (RandomSampler(range(3)), "a RandomSampler gave to the 1 rank.*shard_loader"),
        (DataLoader(range(3), shuffle=True), "a RandomSampler gave"),
        (DataLoader(range(3), batch_sampler=[[0, 1], [2]]), "a list gave"),
        (functional.shard_loader(DataLoader({"a": 1}, sampler=["a"])), "the sampler gave 'a'"),
    ],
    ids=["sampler", "loader", "batches", "keys"],
)
def test_samplers_that_do_not_record_the_rows_are_refused(sampler, message):
    """Samplers that draw other rows each time, or yield keys instead of indices, are refused."""
    with pytest.raises(TypeError, match=message):
        functional.gather_rows(torch.ones(3), sampler)


def test_ranks_must_share_the_rows_and_a_group():
    """With two ranks, a loader that is not sharded is refused, and so are ranks without a process group."""

    def evaluate():
        for sampler in (None, DataLoader(range(3))):
            with pytest.raises(TypeError, match=r"gave to the 2 rank.*functional.shard_loader"):
                functional.gather_rows(torch.ones(3), sampler)

    def alone():
        with pytest.raises(PlatformError, match=r"gather_rows.*Leave ipc_groups out"):
            functional.gather_rows(torch.ones(3), functional.shard_loader(DataLoader(range(6))))

    on(2, evaluate)
    on(2, alone, ipc_groups=None)


def test_numbers_are_gathered_bitwise():
    """NaN, infinities, subnormal numbers, and -0.0 do not change."""
    values = torch.tensor([math.nan, -math.inf, 5e-324, -0.0], dtype=torch.float64)

    def evaluate(values):
        loader = functional.shard_loader(DataLoader(values))
        return functional.gather_rows(torch.cat(list(loader)), loader)

    for found in on(2, evaluate, values):
        assert torch.equal(found.view(torch.int64), values.view(torch.int64))
