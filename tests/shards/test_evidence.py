"""`Evidence`: calls of one kind show how later calls of that kind with equal shards are joined."""

from __future__ import annotations

import pytest
import torch

from parawrap.errors import GatherError
from parawrap.shards import Evidence, JoinRules, join

EQUAL = (2, 2)


def joined(evidence, *outputs, sizes=EQUAL, witness=None, **rules):
    return join(list(outputs), sizes, JoinRules(**rules), None, None, evidence, witness)


def evidence_of(*outputs, sizes=(3, 1), **rules):
    """Return the evidence of one call with shards of different sizes."""
    evidence = Evidence()
    joined(evidence, *outputs, sizes=sizes, **rules)
    return evidence


def test_equal_shards_prove_nothing():
    """Without evidence, an output of equal shards is refused, even if its sizes match the rows or its values are equal."""
    for output in (torch.zeros(2), torch.zeros(7), "text", ["a", "b"], [torch.zeros(2)]):
        with pytest.raises(GatherError, match="no earlier call of this kind had shards of different sizes") as caught:
            joined(Evidence(), output, output.clone() if isinstance(output, torch.Tensor) else output)
        assert "all lanes had 2 rows" in str(caught.value)
        assert "out_dims=0" in str(caught.value)


def test_a_call_with_different_sizes_proves_its_outputs():
    """After such a call, the same outputs are joined in the same way for equal shards."""
    table = torch.ones(7)

    def output(rows):
        return {"y": torch.zeros(rows, 2), "t": table, "l": ["a"] * rows, "s": "x", "p": [torch.zeros(rows)]}

    evidence = evidence_of(output(3), output(1))
    assert evidence.complete
    found = joined(evidence, output(2), output(2))
    assert (found["y"].shape, found["l"], found["s"], found["p"][0].shape) == ((4, 2), ["a"] * 4, "x", (4,))
    assert found["t"] is table


def test_numbers_and_none_need_no_evidence():
    """A number is joined by `reduce`, and None stays None, in every call."""
    found = joined(Evidence(), [1.0, None], [3.0, None], out_dims=[0, 0], reduce="mean")
    assert found == [2.0, None]


def test_declared_outputs_need_no_evidence():
    """Outputs that `out_dims` declares are joined and checked without a call with different sizes."""
    assert joined(Evidence(), torch.zeros(2), torch.zeros(2), out_dims=0).shape == (4,)


def test_the_same_object_from_every_lane_is_returned_once():
    """It may have as many entries as the shards have rows."""
    shared = torch.zeros(2)
    assert joined(evidence_of(shared, shared), shared, shared) is shared


@pytest.mark.parametrize(
    ("before", "later"),
    [
        ((torch.zeros(3), torch.zeros(1)), (torch.zeros(5), torch.zeros(5))),
        ((["a"] * 3, ["a"]), (["a"] * 3, ["a"] * 3)),
        ((["a"], ["a"]), (["a"], ["a", "b"])),
        ((("a",), ("a",)), (("a",), ("b",))),
        (({"a": torch.zeros(3)}, {"a": torch.zeros(1)}), ({"b": torch.zeros(2)}, {"b": torch.zeros(2)})),
    ],
    ids=["rows", "items", "fixed", "value", "keys"],
)
def test_evidence_is_checked_on_every_call(before, later):
    """An output that contradicts the evidence is refused, and the error names `out_dims`."""
    with pytest.raises(GatherError, match="out_dims"):
        joined(evidence_of(*before), *later)


def test_an_output_without_evidence_is_refused():
    """An output that appears only after the first call is refused."""
    evidence = evidence_of((torch.zeros(3),), (torch.zeros(1),))
    with pytest.raises(GatherError, match=r"output.*cannot be joined"):
        joined(evidence, (torch.zeros(2), torch.ones(2)), (torch.zeros(2), torch.ones(2)))


def test_evidence_belongs_to_a_key_and_not_to_a_position():
    """Evidence about one key is not used for another key at the same position."""
    evidence = evidence_of({"logits": torch.zeros(3)}, {"logits": torch.zeros(1)})
    constant = torch.tensor([5.0, 6.0])  # happens to have as many entries as the shards have rows
    with pytest.raises(GatherError):
        joined(evidence, {"aux": constant}, {"aux": constant.clone()})


def test_another_structure_does_not_use_the_evidence():
    """Evidence on a tuple does not hold for a dict."""
    evidence = evidence_of((torch.zeros(3), "x"), (torch.zeros(1), "x"))
    outputs = [{"a": torch.zeros(2), "b": "x"} for _ in range(2)]
    with pytest.raises(GatherError):
        joined(evidence, *outputs)


@pytest.mark.parametrize(
    ("empty", "full"), [(torch.zeros(0, 4), torch.zeros(2, 4)), ([], ["a", "a"])], ids=["tensors", "lists"]
)
def test_empty_outputs_prove_nothing(empty, full):
    """Empty outputs give no evidence, so a later output with rows is concatenated or refused."""
    evidence = evidence_of(empty, empty)
    try:
        found = joined(evidence, full, full.clone() if isinstance(full, torch.Tensor) else list(full))
    except GatherError:
        return
    assert len(found) == 4


def test_empty_lists_do_not_make_later_items_numbers_of_one_list():
    """After lists that were empty in every lane, a list with one number per row is not reduced across lanes."""
    evidence = evidence_of([], [], reduce="sum")
    try:
        found = joined(evidence, [1, 2], [3, 4], reduce="sum")
    except GatherError:
        return
    assert found == [1, 2, 3, 4]


def test_a_refusal_makes_the_evidence_incomplete():
    """After a GatherError, the next call of the kind gathers evidence again."""
    evidence = evidence_of(torch.zeros(3), torch.zeros(1))
    with pytest.raises(GatherError):
        joined(evidence, torch.zeros(5), torch.zeros(5))
    assert (evidence.complete, evidence.places) == (False, {})
    joined(evidence, "x", "x", sizes=(3, 1))
    assert joined(evidence, "x", "x") == "x"


def test_a_refused_first_call_gives_no_evidence():
    """Evidence of outputs that were joined before a refused output is not kept."""
    evidence = Evidence()
    with pytest.raises(GatherError):
        joined(evidence, (torch.zeros(3), torch.zeros(2)), (torch.zeros(1), torch.ones(2)), sizes=(3, 1))
    assert (evidence.complete, evidence.places) == (False, {})


def test_later_uneven_calls_keep_the_evidence():
    """If every call of a kind has uneven shards, each call is checked, and the evidence is kept."""
    evidence = evidence_of((torch.zeros(3),), (torch.zeros(1),))
    joined(evidence, (torch.zeros(2),), (torch.zeros(1),), sizes=(2, 1))
    assert evidence.complete
    with pytest.raises(GatherError):
        joined(evidence, (torch.zeros(2),), (torch.zeros(2),), sizes=(2, 1))


# Witnesses: a whole call supplies one of the two row counts


def test_a_whole_call_and_a_cut_call_prove_an_output_together():
    """Equal shards, together with a whole call with another row count, show which outputs follow the rows."""
    evidence = Evidence()
    witness = {"y": torch.zeros(5, 2), "t": "x", "l": list("abcde")}, 5
    outputs = [{"y": torch.zeros(2, 2), "t": "x", "l": ["f", "g"]} for _ in range(2)]
    for each in (witness, None):
        found = joined(evidence, *outputs, witness=each)
        assert (found["y"].shape, found["t"], found["l"]) == ((4, 2), "x", ["f", "g"] * 2)
        assert evidence.complete


def test_a_witness_is_not_part_of_the_output():
    """The output of the whole call is only evidence: it does not affect rows, padding, or reductions."""
    witness = (torch.zeros(5, 9), 100.0), 5
    outputs = [(torch.ones(2, 3), 1.0), (torch.ones(2, 3), 3.0)]
    found = joined(Evidence(), *outputs, witness=witness, join="pad", reduce="mean")
    assert (found[0].shape, found[1]) == ((4, 3), 2.0)


@pytest.mark.parametrize("output", [torch.zeros(2), "b", ["a"], {"k": torch.zeros(5)}])
def test_an_output_that_contradicts_the_witness_is_refused(output):
    """An output must follow the rows in both calls, or have equal values in both."""
    evidence = Evidence()
    later = output.clone() if isinstance(output, torch.Tensor) else output
    with pytest.raises(GatherError):
        joined(evidence, output, later, sizes=(3, 3), witness=(torch.zeros(4), 4))
    assert not evidence.complete


def test_a_witness_needs_the_same_other_dims():
    """A whole call with different sizes on other dims is not evidence."""
    with pytest.raises(GatherError, match=r"\(2, 3\).*\(5, 9\)"):
        joined(Evidence(), torch.zeros(2, 3), torch.zeros(2, 3), witness=(torch.zeros(5, 9), 5))


def test_a_witness_with_as_many_rows_as_each_shard_proves_nothing():
    """A whole call is evidence only if its row count differs from that of the shards."""
    with pytest.raises(GatherError, match="no earlier call of this kind"):
        joined(Evidence(), torch.zeros(2), torch.zeros(2), witness=(torch.zeros(2), 2))
