"""`cat` and `transpose`."""

from __future__ import annotations

from collections import UserDict, namedtuple
from types import MappingProxyType

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from parawrap import cat, transpose
from parawrap.errors import GatherError

Output = namedtuple("Output", ["logits", "hidden"])
ZERO, ONE = torch.zeros(1), torch.ones(1)


# --- cat ---


def test_cat_joins_tensors_on_a_dim():
    """`dim` may be negative. 0-d losses become a vector, and gradients flow to every part."""
    assert torch.equal(cat((torch.arange(3), torch.arange(3, 5))), torch.arange(5))
    parts = (torch.zeros(2, 3), torch.ones(2, 1))
    assert cat(parts, dim=1).shape == cat(parts, dim=-1).shape == (2, 4)
    assert cat((torch.tensor(1.0), torch.tensor(2.0))).tolist() == [1, 2]
    parts = tuple(torch.ones(n, requires_grad=True) for n in (2, 1))
    cat(parts).sum().backward()
    assert all(torch.equal(part.grad, torch.ones_like(part)) for part in parts)


def test_cat_of_containers():
    """Tuples of tuples, dicts, and namedtuples are joined per position, inside or outside."""
    a, b = cat(((ZERO, torch.ones(2)), [torch.zeros(1, 3), torch.ones(2, 3)]))
    assert (a.tolist(), b.shape) == ([0, 1, 1], (3, 3))
    joined = cat(({"x": ZERO, "h": (ZERO,)}, {"h": (ONE,), "x": ONE}))
    assert list(joined) == ["x", "h"]
    assert (type(joined["h"]), joined["h"][0].tolist()) == (tuple, [0, 1])
    assert cat({"x": (ZERO, ONE)})["x"].tolist() == [0, 1]
    for turned in (
        cat((Output(ZERO, ZERO), Output(ONE, ONE))),
        cat(Output((ZERO, ONE), (ZERO, ONE))),
    ):
        assert (type(turned), turned.hidden.tolist()) == (Output, [0, 1])


@pytest.mark.parametrize(
    "rows",
    [["r0", "r1", "r2"], [{"boxes": 1}, {}, {}], [ZERO, ONE, ONE]],
    ids=["texts", "dicts", "tensors"],
)
def test_cat_of_lists_per_row(rows):
    """A list in a part has one item per row: no item is lost, and their order
    is that of the rows.
    """
    parts = rows[:2], rows[2:]
    for joined in (cat(({"ids": parts[0]}, {"ids": parts[1]})), cat({"ids": parts})):
        assert [*map(id, joined["ids"])] == [*map(id, rows)]


def test_cat_of_lists_with_rows():
    """The tensors beside a list have the rows.

    Without them, or with as many items as rows, the list may mean both.
    """
    parts = [torch.zeros(3, 2), torch.ones(2, 2)]
    joined = cat(tuple({"y": part, "levels": [part] * 4} for part in parts))
    assert [level.shape for level in joined["levels"]] == [(5, 2)] * 4
    with pytest.raises(
        GatherError, match=r"whose tensors have 3, 2 rows: one item per row.* Return a tuple"
    ):
        cat(tuple({"levels": [part] * 2} for part in parts))
    joined = cat(tuple({"levels": (part,) * 2} for part in parts))
    assert [level.shape for level in joined["levels"]] == [(5, 2)] * 2
    two = torch.zeros(2, 3)
    with pytest.raises(
        GatherError, match=r"output\['aux'\].*lists of 2 items, whose tensors have 2, 2 rows"
    ):
        cat(({"y": two, "aux": [two, two]}, {"y": two, "aux": [two, two]}))


def test_cat_moves_items_to_the_first_part():
    """Lists with one item per row go to the device of the first part, as tensors do."""
    first = {"boxes": [torch.zeros(2, device="meta")]}
    joined = cat((first, {"boxes": [ZERO, ONE]}))
    assert [item.device.type for item in joined["boxes"]] == ["meta"] * 3


def test_cat_keeps_other_values():
    """Parts that are all None become None.

    Values that cannot be joined, and PackedSequences, stay a tuple.
    """
    assert cat(({"past": None, "n": 3}, {"past": None, "n": 4})) == {"past": None, "n": (3, 4)}
    assert cat((("a", "b"), (None, None))) == (("a", "b"), None)
    packed = pack_sequence([torch.zeros(2)])
    assert cat((packed, packed)) == (packed, packed)


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_cat_refuses_other_scales():
    """torch.cat would take the scale of the first part for all."""
    one, other = (
        torch.quantize_per_tensor(torch.ones(2), scale, 0, torch.quint8) for scale in (0.5, 1.0)
    )
    with pytest.raises(
        GatherError, match=r"quantized, and may have different scales. Return tensor.dequantize\(\)"
    ):
        cat((one, other))
    assert cat((one.dequantize(), other.dequantize())).tolist() == [1, 1, 1, 1]


# --- transpose ---


def test_transpose_keeps_types():
    """Rows are tuples, lists, namedtuples, or mappings, also from an iterator.

    Keys have the first row's order.
    """
    assert transpose(iter([[1, 2], (3, 4), [5, 6]])) == ((1, 3, 5), (2, 4, 6))
    assert transpose([{"x": 1, "y": 2}, {"y": 4, "x": 3}]) == {"x": (1, 3), "y": (2, 4)}
    assert transpose([Output(1, 2), Output(3, 4)]) == Output((1, 3), (2, 4))
    rows = [UserDict(x=1), UserDict(x=2)]
    turned = transpose(rows)
    assert (type(turned), turned, rows[0]) == (UserDict, {"x": (1, 2)}, {"x": 1})
    fixed = transpose([MappingProxyType({"x": 1})])
    assert (type(fixed), fixed["x"]) == (MappingProxyType, (1,))
    assert transpose([]) == ()
