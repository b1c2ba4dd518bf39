"""`gather_rows`: every rank gets the results of all rows, in dataset order and once per row."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from parawrap import GatherError, PlatformError, current_rank, functional


class Output(NamedTuple):
    logits: torch.Tensor
    names: list


def results(rows):
    """Return example results of these rows: tensors of several dtypes and lists
    of several types.
    """
    numbers = torch.tensor(rows, dtype=torch.int64)
    if not rows:  # other dtypes and shapes than with rows
        nothing = torch.empty(0)
        tree = dict.fromkeys(("complex", "bool"), nothing)
        return tree | {"output": Output(nothing, []), "lists": ([], []), "items": []}
    return {
        "complex": torch.complex(numbers.float(), -numbers.float()).conj(),
        "bool": (numbers % 2 == 0)[:, None, None].expand(-1, 2, 1),
        "output": Output(numbers * 3, ["é" * row for row in rows]),
        "lists": ([row / 3 for row in rows], [row > 1 for row in rows]),
        "items": [
            {"boxes": torch.ones(row % 3, 4), "of": (row, "é", None, [0.5] * row)} for row in rows
        ],
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


def rows_of(loader):
    return [int(row) for batch in loader for row in torch.as_tensor(batch).reshape(-1)]


@pytest.mark.parametrize("length", [1, 5, 8])
def test_rows_are_in_dataset_order(ranks, length):
    """For every kind of sampler, both ranks get the results of a plain loop."""

    def evaluate():
        data = range(length)
        torchs = DistributedSampler(data, 2, current_rank().global_rank)
        torchs.set_epoch(3)
        samplers = {
            "padded": functional.get_dataset_sampler(data),
            "torch": torchs,
            "in a loader": DataLoader(
                data, sampler=functional.get_dataset_sampler(data, pad=False)
            ),
        }
        loaders = {
            "shuffled": DataLoader(data, 2, shuffle=True),
            "single rows": DataLoader(data, None),
            "plain batches": DataLoader(
                data, batch_sampler=BatchSampler(RandomSampler(data), 2, False)
            ),
        }
        for name, loader in loaders.items():
            for pad in (False, True):
                samplers[name, pad] = functional.shard_loader(loader, pad=pad)
        found = {}
        for name, sampler in samplers.items():
            batches = (
                sampler if isinstance(sampler, DataLoader) else DataLoader(data, sampler=sampler)
            )
            for _ in range(2):  # the second epoch of a shuffled loader has another order
                rows = rows_of(batches)
            found[name] = flat(functional.gather_rows(results(rows), sampler))
        return found

    for found in ranks(evaluate):
        for name, value in found.items():
            assert value == flat(results(list(range(length)))), name


def test_any_item_of_a_list_is_gathered(ranks):
    """A list has one item per row and a tuple one column per item.

    Items may be nested, and dicts with other keys.
    """
    items = {
        "missing on one rank": lambda row: "text" if row < 2 else None,
        "by id": lambda row: {
            row: torch.ones(row, 4),
            (1, "a"): [],
            **({"more": None} if row else {}),
        },
        "nested": lambda row: [(row, {"a": [torch.ones(row, 2, dtype=torch.bool)]})] * row,
        "0-d tensor": lambda row: torch.tensor(row),
        "of a class": lambda row: Fraction(1, row + 1),
    }

    def evaluate():
        loader = functional.shard_loader(DataLoader(range(4), 2), pad=False)
        rows = rows_of(loader)
        found = {
            name: flat(functional.gather_rows([item(row) for row in rows], loader))
            for name, item in items.items()
        }
        columns = functional.gather_rows(tuple(torch.tensor([row, row]) for row in rows), loader)
        return found, [part.shape for part in columns]

    for found, columns in ranks(evaluate):
        assert columns == [(4,), (4,)]
        for name, item in items.items():
            assert found[name] == flat([item(row) for row in range(4)]), name


def test_rows_of_unequal_width(ranks):
    """Tensors of different widths on the ranks are refused, and the cure of the error works.

    There may be no rows.
    """

    def evaluate():
        nothing = functional.gather_rows(
            {"a": torch.empty(0, 3), "b": []}, functional.shard_loader(DataLoader([]))
        )
        assert (nothing["a"].shape, nothing["b"]) == ((0, 3), [])
        loader = functional.shard_loader(DataLoader(range(5), 2), pad=False)
        tensor = torch.cat(list(loader))[:, None].expand(-1, 3 + current_rank().global_rank)
        cure = r"rows differ in shape, give a list with one item per row, such as list\(tensor\)"
        with pytest.raises(GatherError, match=cure):
            functional.gather_rows(tensor, loader)
        return [row.tolist() for row in functional.gather_rows(list(tensor), loader)]

    assert ranks(evaluate) == ([[row] * (3 if row < 3 else 4) for row in range(5)],) * 2


def test_one_rank_gets_dataset_order():
    """One rank gets the order of the dataset, with and without a sampler. Tensors have no graph."""
    loader = functional.shard_loader(DataLoader(range(5), 5, shuffle=True))
    (rows,) = list(loader)
    items = [(torch.full((int(row),), 1.5, requires_grad=True) * 2, int(row)) for row in rows]
    found = functional.gather_rows(items, loader)
    assert [(x.tolist(), row, x.requires_grad) for x, row in found] == [
        ([3.0] * row, row, False) for row in range(5)
    ]
    assert functional.gather_rows(items, None) is items
    plain = DataLoader(range(5), 2)
    assert functional.gather_rows(torch.cat(list(plain)), plain).tolist() == [0, 1, 2, 3, 4]


ONE, TWO = torch.ones(1), torch.ones(2)


@pytest.mark.parametrize(
    ("trees", "message"),
    [
        (({"a": TWO}, {"b": TWO}), 'rank 0 has tree["a"], but rank 1 has tree["b"]'),
        (
            (TWO, TWO.double()),
            (
                "torch.float32 and shape (), but rank 1 has tree with rows of torch.float64 and "
                "shape ()"
            ),
        ),
        (
            ([ONE, TWO], TWO),
            "rank 0 has a list tree, but rank 1 has tree with rows of torch.float32",
        ),
    ],
    ids=["places", "dtypes", "kinds"],
)
def test_unequal_results_are_refused(ranks, trees, message):
    """Every rank raises, and the error shows both kinds."""

    def evaluate():
        loader = functional.shard_loader(DataLoader(range(4), 2))
        with pytest.raises(GatherError) as caught:
            functional.gather_rows(trees[current_rank().global_rank], loader)
        return str(caught.value)

    for text in ranks(evaluate):
        assert message in text


def test_missing_rows_are_refused(ranks, lone_ranks):
    """Missing rows are refused, and so are ranks that do not share the rows, and ranks without a
    process group.
    """

    def evaluate():
        rank = current_rank().global_rank
        dropped = DistributedSampler(range(5), 2, rank, drop_last=True)
        other = DistributedSampler(range(2 + 2 * rank), 2, rank, shuffle=False)
        surplus = "missing on all ranks" if rank else r"1 row\(s\) are not in this rank's dataset"
        for sampler, message in ((dropped, "missing on all ranks"), (other, surplus)):
            with pytest.raises(GatherError, match=message):
                functional.gather_rows(torch.ones(len(sampler)), sampler)
        for sampler in (None, DataLoader(range(3))):
            with pytest.raises(TypeError, match=r"gave to the 2 rank.*functional.shard_loader"):
                functional.gather_rows(torch.ones(3), sampler)

    def alone():
        with pytest.raises(PlatformError, match=r"gather_rows.*Leave ipc_groups out"):
            functional.gather_rows(torch.ones(3), functional.shard_loader(DataLoader(range(6))))

    ranks(evaluate)
    lone_ranks(alone)


@pytest.mark.parametrize(
    ("tree", "error", "message"),
    [
        (
            {"a": TWO},
            GatherError,
            r'tree\["a"\] is a Tensor of 2 row\(s\), but the sampler gave this rank 3',
        ),
        (torch.tensor(1.0), TypeError, "tree is a Tensor. .* with rows on dim 0"),
        (
            [torch.ones(3), torch.ones(3)],
            GatherError,
            r"tree is a list of 2 row\(s\), but .* rank 3.*tuple or dict",
        ),
        (
            {"a": [torch.ones(2, 5), torch.ones(1, 5)]},
            GatherError,
            "the outputs of batches concatenated",
        ),
        ({"a": None}, TypeError, r'tree\["a"\] is a NoneType'),
        (torch.eye(3).to_sparse(), TypeError, "tree is a Tensor. .* dense tensors"),
    ],
    ids=range(6),
)
def test_other_values_are_refused(tree, error, message):
    with pytest.raises(error, match=message):
        functional.gather_rows(tree, functional.shard_loader(DataLoader(range(3), 2)))


@pytest.mark.parametrize(
    ("loader", "name"),
    [
        (DataLoader(range(3), shuffle=True), "RandomSampler"),
        (DataLoader(range(3), batch_sampler=[[2], [0, 1]]), "list"),
    ],
    ids=["shuffled", "batches"],
)
def test_other_samplers_are_refused(loader, name):
    """Samplers are refused that draw other rows each time, or batches."""
    with pytest.raises(TypeError, match=f"a {name} gave to the 1 rank.*shard_loader"):
        functional.gather_rows(torch.ones(3), loader)
