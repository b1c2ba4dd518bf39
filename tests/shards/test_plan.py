"""How a call is cut: which leaves have rows, what is shared, and what is refused with its cure."""

from __future__ import annotations

import threading
from collections import namedtuple

import pytest
import torch
from torch.nn.utils import rnn

from parawrap.errors import ShardError
from parawrap.shards import Cutter, Parameters

CPU = torch.device("cpu")
Words = namedtuple("Words", "texts")


def forward(x, y=None, *rest, texts=None, mask=None):
    return x


def cut(cutter, *args, lanes=2, **kwargs):
    plan, leaves = cutter.plan(args, kwargs, lanes)
    return plan.scatter(leaves, [CPU] * lanes)


def cutter(**options):
    return Cutter(parameters=Parameters(forward), **options)


def test_rows_that_disagree_are_refused_naming_both_and_the_cure():
    """The message has both addresses, both counts and the in_dims that settles it."""
    with pytest.raises(ShardError) as caught:
        cut(cutter(), torch.zeros(64, 3), mask=torch.zeros(2, 3))
    message = str(caught.value)
    for part in ('kwargs["mask"]', "args[0]", "64", "2", 'in_dims={"mask": None}'):
        assert part in message


def test_the_name_in_the_cure_is_the_parameters_also_for_a_positional():
    """A positional argument is named as the target names it, also inside a container, and beyond *rest."""
    with pytest.raises(ShardError, match=r'args\[1\]\["k"\].*in_dims=\{"y": None\}'):
        cut(cutter(), torch.zeros(4), {"k": torch.zeros(3)})
    with pytest.raises(ShardError, match=r'args\[3\].*in_dims=\{"rest": None\}'):
        cut(cutter(), torch.zeros(4), None, None, torch.zeros(3))


@pytest.mark.parametrize("rows", [2, 5, 8])
def test_a_tensor_of_one_row_beside_more_is_shared(rows):
    """As in torch's broadcasting, one row stands for every row."""
    one = torch.ones(1, 3)
    shards = cut(cutter(), torch.zeros(rows, 3), one)
    assert all(shard.args[1] is one for shard in shards)
    assert sum(shard.rows for shard in shards) == rows


def test_one_row_everywhere_is_one_shard():
    """A batch of one row goes to one lane."""
    (shard,) = cut(cutter(), torch.zeros(1, 3), torch.zeros(1), lanes=4)
    assert shard.rows == 1


def test_one_row_beside_none_is_shared():
    """An empty batch beside a tensor of one row is an empty batch."""
    (shard,) = cut(cutter(), torch.zeros(0, 3), torch.zeros(1, 3), lanes=4)
    assert shard.rows == 0


def test_a_0d_tensor_and_a_tensor_of_too_few_dims_are_shared():
    """What has no `dim` has no rows."""
    scale, bias = torch.tensor(2.0), torch.zeros(7)
    first, second = cut(Cutter(dim=1), torch.zeros(3, 4), scale, bias)
    assert first.args[0].shape == (3, 2)
    assert second.args[1] is scale
    assert second.args[2] is bias


@pytest.mark.parametrize("args", [(), (1, "a"), ({"k": [None]},), (torch.tensor(1.0),)])
def test_a_call_without_rows_is_one_shard(args):
    """A call without tensors, or with 0-d ones alone, runs once."""
    (shard,) = cut(cutter(), *args, lanes=4)
    assert shard.args == args
    assert shard.rows == 0


def test_in_dims_none_shares_a_tensor():
    """A tensor that is no part of the batch is handed whole to every lane, whatever its size."""
    mask = torch.zeros(7, 3)
    for shard in cut(cutter(in_dims={"mask": None}), torch.zeros(4), mask=mask):
        assert shard.kwargs["mask"] is mask


def test_in_dims_names_another_dim_also_counted_from_the_end():
    """One argument may lie the other way round."""
    for dim in (1, -1):
        first, second = cut(cutter(in_dims={"y": dim}), torch.zeros(5, 2), torch.zeros(2, 5))
        assert (first.args[1].shape, second.args[1].shape) == ((2, 3), (2, 2))


def test_in_dims_holds_for_positionals_and_keywords_alike():
    """The name decides, not the way the argument is passed."""
    whole = torch.zeros(7)
    assert cut(cutter(in_dims={"y": None}), torch.zeros(4), whole)[1].args[1] is whole
    assert cut(cutter(in_dims={"y": None}), torch.zeros(4), y=whole)[1].kwargs["y"] is whole
    assert cut(cutter(in_dims={"rest": None}), torch.zeros(4), None, None, whole)[1].args[3] is whole


def test_in_dims_holds_for_everything_inside_the_argument():
    """A dim given for a container is that of the tensors in it."""
    first, _ = cut(cutter(in_dims={"y": 1}), torch.zeros(4), {"a": [torch.zeros(2, 4)]})
    assert first.args[1]["a"][0].shape == (2, 2)


@pytest.mark.parametrize("texts", [["a", "b", "c"], ("a", "b", "c"), [1, 2, 3], [["a"], ["b"], ["c"]]])
def test_a_sequence_that_in_dims_cuts_is_cut_as_a_sequence(texts):
    """The lanes get slices of the type that it was."""
    first, second = cut(cutter(in_dims={"texts": 0}), torch.zeros(3), texts=texts)
    assert first.kwargs["texts"] == texts[:2]
    assert second.kwargs["texts"] == texts[2:]
    assert type(first.kwargs["texts"]) is type(texts)


def test_a_sequence_alone_can_be_the_batch():
    """A call without tensors is cut too when in_dims says along what."""
    first, second = cut(cutter(in_dims={"texts": 0}), 1, texts=["a", "b", "c"])
    assert (first.kwargs["texts"], second.kwargs["texts"]) == (["a", "b"], ["c"])
    assert (first.rows, second.rows) == (2, 1)


def test_a_sequence_of_another_length_than_the_batch_is_refused():
    """A list that is cut must have a row an item."""
    with pytest.raises(ShardError, match=r'kwargs\["texts"\] has 2.*args\[0\] has 3'):
        cut(cutter(in_dims={"texts": 0}), torch.zeros(3), texts=["a", "b"])


def test_a_list_of_tensors_is_cut_tensor_by_tensor_also_with_in_dims():
    """in_dims on a list that holds tensors is the dim of those."""
    first, _ = cut(cutter(in_dims={"texts": 1}), torch.zeros(4), texts=[torch.zeros(2, 4), torch.zeros(3, 4)])
    assert [part.shape for part in first.kwargs["texts"]] == [(2, 2), (3, 2)]


def test_a_list_inside_an_argument_that_in_dims_names_is_cut_or_refused_never_shared_in_silence():
    """in_dims={"batch": 0} says that what is in the batch is cut: a list of texts in it is not handed whole to all."""
    batch = {"x": torch.zeros(4), "texts": ["a", "b", "c", "d"]}
    named = Cutter(in_dims={"batch": 0}, parameters=Parameters(lambda batch: batch))
    try:
        first, _ = cut(named, batch=batch)
    except ShardError:
        return
    assert first.kwargs["batch"]["texts"] == ["a", "b"]


@pytest.mark.parametrize("texts", [["a", "b", "c"], [1, 2, 3], [{"k": 1}] * 3, ("a", "b", "c"), [[1, 2]] * 3])
def test_a_list_as_long_as_the_batch_is_ambiguous(texts):
    """It may be one item a row or one value for all: refused with the two spellings that settle it."""
    with pytest.raises(ShardError) as caught:
        cut(cutter(), torch.zeros(3, 2), texts=texts)
    message = str(caught.value)
    for part in ('kwargs["texts"]', 'in_dims={"texts": 0}', 'in_dims={"texts": None}', "3"):
        assert part in message


def test_an_ambiguous_list_is_found_wherever_it_lies():
    """Inside a dict or another list it is refused at its address, by the parameter's name."""
    with pytest.raises(ShardError, match=r'args\[1\]\["k"\]\[0\].*in_dims=\{"y": None\}'):
        cut(cutter(), torch.zeros(3, 2), {"k": [["a", "b", "c"]]})


@pytest.mark.parametrize("shape", [(224, 224, 3), (None, 1, 2.0), (True, False, True), (torch.float32, CPU, 1j)])
def test_a_tuple_of_numbers_is_a_size_not_a_batch(shape):
    """A tuple that holds only numbers (or None, dtypes, devices) is shared."""
    assert all(shard.kwargs["texts"] == shape for shard in cut(cutter(), torch.zeros(3, 2), texts=shape))


@pytest.mark.parametrize("texts", [["a", "b"], [], ["a"] * 4, "abc", {"a": 1, "b": 2, "c": 3}, {"a", "b", "c"}, range(3)])
def test_what_is_not_a_list_as_long_as_the_batch_is_shared(texts):
    """Another length, a string, a dict of settings: there is no doubt about those."""
    for shard in cut(cutter(), torch.zeros(3, 2), texts=texts):
        assert shard.kwargs["texts"] == texts


def test_a_list_is_no_matter_of_doubt_where_nothing_is_cut():
    """With one lane, or one row, a list as long as the batch is handed on."""
    assert cut(cutter(), torch.zeros(3), texts=["a"] * 3, lanes=1)[0].kwargs["texts"] == ["a"] * 3
    assert cut(cutter(), torch.zeros(1), texts=["a"], lanes=4)[0].kwargs["texts"] == ["a"]


def test_in_dims_none_shares_a_list_as_long_as_the_batch():
    """One of the two spellings that the refusal names."""
    texts = ["a", "b", "c"]
    for shard in cut(cutter(in_dims={"texts": None}), torch.zeros(3), texts=texts):
        assert shard.kwargs["texts"] == texts


def test_lists_are_shared_where_the_cutter_says_so():
    """torch.nn.DataParallel's rule: what is no tensor is shared."""
    for shard in cut(cutter(lists_are_shared=True), torch.zeros(3), texts=["a", "b", "c"]):
        assert shard.kwargs["texts"] == ["a", "b", "c"]


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dim_that_no_tensor_has_is_out_of_range(dim):
    """When nothing could be cut there, the message has the dim, the address and the shape."""
    with pytest.raises(ShardError, match=rf"dim {dim}.*args\[0\].*\(4, 3\)"):
        cut(Cutter(dim=dim), torch.zeros(4, 3))


def test_a_dim_that_in_dims_names_must_be_there():
    """A tensor that in_dims names is never shared for want of the dim."""
    with pytest.raises(ShardError, match=r"dim 1.*args\[1\].*\(4,\)"):
        cut(cutter(in_dims={"y": 1}), torch.zeros(4), torch.zeros(4))


@pytest.mark.parametrize("harmless", [3.0, torch.tensor(3.0)])
def test_a_dim_out_of_range_is_refused_also_after_a_call_that_it_did_no_harm(harmless):
    """A plan that was made for a number or a 0-d tensor does not serve a tensor that lacks the dim."""
    used = cutter(in_dims={"y": 1})
    cut(used, torch.zeros(4), harmless)
    with pytest.raises(ShardError, match="dim 1"):
        cut(used, torch.zeros(4), torch.zeros(4))


def test_a_dim_out_of_range_is_no_matter_for_a_number():
    """After the refusal, the same structure with a number in the place is cut."""
    used = cutter(in_dims={"y": 1})
    with pytest.raises(ShardError):
        cut(used, torch.zeros(4), torch.zeros(4))
    assert len(cut(used, torch.zeros(4), 3.0)) == 2


def test_a_packed_sequence_is_cut_by_its_sequences():
    """Each lane gets whole sequences, in the order that they were packed in."""
    sequences = [torch.arange(3.0), torch.arange(1.0), torch.arange(2.0) + 5, torch.arange(4.0)]
    packed = rnn.pack_sequence(sequences, enforce_sorted=False)
    shards = cut(Cutter(), packed, torch.zeros(4), lanes=3)
    assert [shard.rows for shard in shards] == [2, 1, 1]
    found = [s for shard in shards for s in rnn.unpack_sequence(shard.args[0])]
    assert all(map(torch.equal, found, sequences))


def test_a_packed_sequence_must_agree_with_the_batch():
    """Its rows are its sequences."""
    packed = rnn.pack_sequence([torch.zeros(3), torch.zeros(2)])
    with pytest.raises(ShardError, match=r"args\[1\].*2.*args\[0\].*5"):
        cut(Cutter(), torch.zeros(5), packed)


def test_a_packed_sequence_with_in_dims_none_is_shared():
    """in_dims decides about packed sequences too."""
    packed = rnn.pack_sequence([torch.zeros(3), torch.zeros(2)])
    for shard in cut(cutter(in_dims={"y": None}), torch.zeros(5), packed):
        assert torch.equal(shard.args[1].data, packed.data)


def test_a_plan_is_made_once_a_structure_and_count_of_rows():
    """The same structure and rows give the same plan, other rows, lanes or structures another."""
    used = cutter()

    def plan(*args, lanes=2, **kwargs):
        return used.plan(args, kwargs, lanes)[0]

    first = plan(torch.zeros(4, 3), 5)
    assert plan(torch.ones(4, 3), 6) is first
    assert plan(torch.ones(4, 9), 6) is first
    assert plan(torch.ones(5, 3), 6) is not first
    assert plan(torch.ones(4, 3), 6, lanes=3) is not first
    assert plan(torch.ones(4, 3), y=6) is not first


def test_a_plan_never_depends_on_values():
    """Tensors whose values cannot be read are planned: no value is looked at, none is waited for."""
    meta = torch.empty(4, 3, device="meta")
    plan, _ = cutter().plan((meta, torch.empty((), device="meta")), {"mask": torch.empty(1, device="meta")}, 2)
    assert plan.sizes == (2, 2)


def test_a_plan_hands_the_same_call_whole_to_one_lane():
    """`uncut` keeps the rows and cuts nothing."""
    x = torch.arange(4.0)
    plan, leaves = cutter().plan((x,), {"texts": "a"}, 2)
    (shard,) = plan.uncut().scatter(leaves, [CPU])
    assert shard.args[0] is x
    assert (shard.kwargs, shard.rows) == ({"texts": "a"}, 4)


def test_a_whole_call_may_hold_rows_that_disagree():
    """What is not cut need not agree; the first rows are counted."""
    plan, leaves = cutter().whole((torch.zeros(4), torch.zeros(3)), {})
    (shard,) = plan.scatter(leaves, [CPU])
    assert (shard.rows, len(shard.args)) == (4, 2)


def test_containers_keep_their_identity_of_leaves_not_their_own():
    """Each lane has containers of its own: what one writes into its dict the others do not see."""
    first, second = cut(cutter(), torch.zeros(4), {"k": 1})
    first.args[1]["k"] = 2
    assert second.args[1] == {"k": 1}


def test_threads_may_plan_at_once():
    """A cutter is shared: every thread gets a plan that cuts its own call."""
    used, gate = cutter(), threading.Barrier(8)
    found = {}

    def plan(rows):
        gate.wait()
        found[rows] = [used.plan((torch.zeros(rows + step),), {}, 3)[0].rows for step in range(50)]

    threads = [threading.Thread(target=plan, args=(rows,)) for rows in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {rows: list(range(rows, rows + 50)) for rows in range(8)}


def test_a_cutter_keeps_working_beyond_the_plans_that_it_keeps():
    """Batches of ever new sizes are planned, whatever is forgotten."""
    used = cutter()
    assert [used.plan((torch.empty(rows),), {}, 2)[0].rows for rows in range(1100)] == list(range(1100))


def test_parameters_name_what_the_target_takes():
    """Positionals by place, the rest by the starred name, keywords by themselves."""
    names = Parameters(forward)
    assert [names.at(place) for place in range(4)] == ["x", "y", "rest", "rest"]
    assert names.takes("mask")
    assert not names.takes("other")
    assert str(names) == "x, y, *rest"


def test_parameters_of_a_target_with_any_keyword_take_any_name():
    """**kwargs and builtins that tell nothing take every name."""
    assert Parameters(lambda x, **options: x).takes("anything")
    assert Parameters(lambda: None).at(0) is None


def test_parameters_of_a_script_module_are_its_schemas():
    """TorchScript methods have no signature and a schema."""

    class Scale(torch.nn.Module):
        def forward(self, x, factor: float = 2.0):
            return x * factor

    names = Parameters(torch.jit.script(Scale()).forward)
    assert (names.at(0), names.at(1), names.at(2)) == ("x", "factor", None)
    assert names.takes("factor")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["sparse", "jagged"])
def test_a_tensor_that_torch_cannot_split_is_named_with_the_cure(kind):
    """A sparse or nested tensor is cut or refused at its address; torch's own error says neither where nor what to do."""
    if kind == "sparse":
        tensor = torch.eye(4).to_sparse()
    else:
        tensor = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)] * 2, layout=torch.jagged)
    try:
        shards = cut(cutter(), torch.zeros(4), tensor)
    except ShardError as error:
        assert "args[1]" in str(error)  # noqa: PT017
        assert "in_dims" in str(error)  # noqa: PT017
        return
    assert [shard.args[1].shape[0] for shard in shards] == [2, 2]


def test_an_array_of_another_library_as_long_as_the_batch_is_refused():
    """A numpy array would go whole to every lane, where a tensor in its place would be cut."""
    numpy = pytest.importorskip("numpy")
    with pytest.raises(ShardError, match="from_numpy"):
        Cutter().plan((torch.zeros(6, 2), numpy.arange(6.0)), {}, 2)
    plan, _ = Cutter().plan((torch.zeros(6, 2), numpy.arange(4.0)), {}, 2)
    assert plan.sizes == (3, 3)


def test_attributes_of_containers_are_those_of_the_call():
    """A plan serves many calls; what a list subclass carries beside its items is each call's own."""

    class Tagged(list):
        scale = 1.0

    cutter = Cutter()
    found = []
    for scale in (2.0, 3.0):
        value = Tagged([torch.zeros(4)])
        value.scale = scale
        plan, flat = cutter.plan((value,), {}, 2)
        found.append([shard.args[0].scale for shard in plan.scatter(flat, [torch.device("cpu")] * 2)])
    assert found == [[2.0, 2.0], [3.0, 3.0]]
