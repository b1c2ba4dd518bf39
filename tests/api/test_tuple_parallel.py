"""TupleParallel and tuple_fn: arguments are tuples with one part per device."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import pickle
import threading
from collections import OrderedDict, UserDict, namedtuple
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset

from parawrap import DataParallel, GatherError, ShardError, TupleParallel, cat, default_collate, tp_collate, tuple_fn

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3

Pair = namedtuple("Pair", ["x", "y"])


class Rows(Dataset):
    """Rows of 5 features, with their index as target."""

    def __init__(self, length=100):
        self.xs = torch.randn(length, 5, generator=torch.Generator().manual_seed(0))
        self.ys = torch.arange(length)

    def __getitem__(self, index):
        return self.xs[index], self.ys[index]

    def __len__(self):
        return len(self.xs)


class OnlyXs(Rows):
    """The same rows without targets."""

    def __getitem__(self, index):
        return self.xs[index]


@tp_collate(2)
def collate(samples):
    xs, ys = zip(*samples, strict=True)
    return torch.stack(xs), torch.stack(ys)


def chunked(n, samples):
    return torch.stack(samples).chunk(n)


class Recorder(nn.Module):
    """Records the sizes of its inputs."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 2)
        type(self).rows = []  # on the class, because a replica has its own attributes
        type(self).threads = set()

    def forward(self, x):
        self.rows.append(len(x))
        return self.fc(x)


def test_an_epoch_with_tp_collate_and_cat():
    """100 rows in batches of 30 on two devices have the plain outputs, also in the short last batch."""
    data, model = Rows(), Recorder()
    net = TupleParallel(model, TWO)
    outputs, targets, parts = [], [], []
    for xs, ys in DataLoader(data, batch_size=30, collate_fn=collate):
        out = net(xs)
        assert isinstance(out, tuple)
        parts.append([len(part) for part in out])
        outputs.append(cat(out))
        targets.append(cat(ys))
    assert parts == [[15, 15]] * 3 + [[5, 5]]
    assert_close(torch.cat(outputs), model.fc(data.xs))
    assert torch.equal(torch.cat(targets), data.ys)
    assert sorted(model.rows) == [5] * 2 + [15] * 6


def test_an_epoch_with_default_collate_and_reduction():
    """`default_collate(2)` and `reduction=cat` give the same outputs."""
    data, model = Rows(), Recorder()
    net = TupleParallel(model, TWO, reduction=cat)
    outputs = [net(xs) for xs, _ in DataLoader(data, batch_size=30, collate_fn=default_collate(2))]
    assert_close(torch.cat(outputs), model.fc(data.xs))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_chunking_in_the_collate_function(workers, shuffle):
    """A collate function may return `torch.stack(samples).chunk(n)`, also in workers."""
    data, model = OnlyXs(), Recorder()
    net = TupleParallel(model, TWO)
    loader = DataLoader(
        data,
        batch_size=30,
        shuffle=shuffle,
        num_workers=workers,
        collate_fn=functools.partial(chunked, 2),
        multiprocessing_context=multiprocessing.get_context("fork") if workers else None,
    )
    rows = 0
    for batch in loader:
        output = net(batch)
        assert isinstance(output, tuple)
        assert_close(cat(output), model.fc(torch.cat(batch)))
        rows += sum(map(len, output))
    assert rows == 100


def test_training_in_tuple_form_equals_plain_training():
    """With one loss per part, averaged over equal parts, the weights are those of plain training."""
    torch.manual_seed(0)
    plain = nn.Linear(5, 1)
    model = copy.deepcopy(plain)
    net = TupleParallel(model, TWO)
    mse = tuple_fn(nn.functional.mse_loss)
    data = torch.utils.data.TensorDataset(torch.randn(60, 5), torch.randn(60, 1))
    for (xs, ys), (x, y) in zip(
        DataLoader(data, batch_size=20, collate_fn=default_collate(2)), DataLoader(data, batch_size=20), strict=True
    ):
        for module, loss in ((model, sum(mse(net(xs), ys)) / 2), (plain, nn.functional.mse_loss(plain(x), y))):
            module.zero_grad()
            loss.backward()
            torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert_close(dict(model.state_dict()), dict(plain.state_dict()))


def test_it_is_a_data_parallel():
    """TupleParallel is a DataParallel: it has the module's attributes and state_dict keys that start with "module."."""
    net = TupleParallel(Recorder(), TWO)
    assert isinstance(net, DataParallel)
    assert isinstance(net, nn.DataParallel)
    assert net.fc is net.module.fc
    assert list(net.state_dict()) == ["module.fc.weight", "module.fc.bias"]
    with pytest.raises(AttributeError, match="nothing"):
        _ = net.nothing


def test_tuple_outputs_are_transposed():
    """A module with two outputs returns ((a1, a2), (b1, b2))."""

    class Model(nn.Module):
        def forward(self, x, y):
            return x + y, x - y

    x1, x2, y1, y2 = (torch.full((n,), float(v)) for n, v in ((3, 1), (2, 2), (3, 3), (2, 4)))
    (a1, a2), (b1, b2) = TupleParallel(Model(), TWO)((x1, x2), (y1, y2))
    assert [t.tolist() for t in (a1, a2, b1, b2)] == [[4.0] * 3, [6.0] * 2, [-2.0] * 3, [-2.0] * 2]


def test_keyword_arguments_are_tuples_too():
    """Each keyword argument is a tuple or a list with one part per device."""

    class Model(nn.Module):
        def forward(self, x, *, k):
            return x * k

    out = TupleParallel(Model(), TWO)([torch.ones(2), torch.ones(1)], k=(2, 3))
    assert [part.tolist() for part in out] == [[2.0, 2.0], [3.0]]


def test_parts_can_be_any_value():
    """A part may be a dict, a string, or None; only the outermost level is split."""

    class Model(nn.Module):
        def forward(self, batch, text):
            return {"y": batch["x"] * 2, "text": text}

    one, two = TupleParallel(Model(), TWO)(({"x": torch.ones(1)}, {"x": torch.ones(2)}), ("a", None))
    assert (one["text"], two["text"], len(two["y"])) == ("a", None, 2)


@pytest.mark.parametrize("parts", [1, 2])
def test_fewer_parts_than_devices_use_fewer_lanes(parts):
    """A call has as many outputs as parts."""
    out = TupleParallel(nn.Identity(), THREE)(tuple(torch.zeros(2) for _ in range(parts)))
    assert len(out) == parts


def test_more_parts_than_devices_are_refused():
    """The error names both numbers and suggests `tp_collate`."""
    with pytest.raises(ShardError, match=r"3 parts for 2 devices.*tp_collate\(2\)"):
        TupleParallel(nn.Identity(), TWO)((torch.zeros(1),) * 3)


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ((torch.zeros(4),), r"args\[0\] is a Tensor"),
        (((1, 2), (1,)), "different numbers of parts"),
        (((1, 2), 3), r"args\[1\] is a int"),
    ],
    ids=["tensor", "unequal", "number"],
)
def test_arguments_that_are_not_tuples_of_parts_are_refused(args, match):
    """Arguments that are not tuples, and tuples of different lengths, raise ShardError."""
    with pytest.raises(ShardError, match=match):
        TupleParallel(nn.Identity(), TWO)(*args)


def test_parts_run_at_the_same_time():
    """Without gradients, two parts run at the same time in two threads."""
    barrier = threading.Barrier(2)

    class Model(nn.Module):
        def forward(self, x):
            barrier.wait(20)
            return x

    net = TupleParallel(Model(), TWO)
    assert len(net((torch.zeros(1), torch.zeros(1)))) == 2


def test_transfer_output_and_reduction():
    """`reduction` gets the tuple of outputs, and the call returns its result."""
    parts = (torch.ones(2, 5), torch.ones(1, 5))
    net = TupleParallel(nn.Identity(), TWO, True, True, lambda outs: [len(out) for out in outs], output_device="cpu")
    assert net(parts) == [2, 1]


def test_transfer_input_false_moves_no_part():
    """With `transfer_input=False`, the module gets the same objects that the caller passed."""
    seen = []

    class Part:
        def to(self, *args, **kwargs):
            raise AssertionError("moved")

        cuda = to

    class Model(nn.Module):
        def forward(self, part):
            seen.append(part)
            return 1

    parts = (Part(), Part())
    assert TupleParallel(Model(), TWO, transfer_input=False)(parts) == (1, 1)
    assert set(seen) == set(parts)
    with pytest.raises(AssertionError, match="moved"):
        TupleParallel(Model(), TWO)(parts)


def test_errors_name_the_lane():
    """The module's exception has a note that names the lane."""

    class Model(nn.Module):
        def forward(self, x):
            if len(x) == 1:
                raise LookupError("one")
            return x

    with pytest.raises(LookupError, match="one") as caught:
        TupleParallel(Model(), TWO)((torch.zeros(2), torch.zeros(1)))
    assert caught.value.__notes__ == ["in lane 1 on cpu, shard 1 of 2"]


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["deepcopy", "pickle"]
)
def test_copies_work(duplicate):
    """Copies and pickles work before and after the first call."""
    net = TupleParallel(nn.Linear(5, 2), TWO, reduction=cat)
    parts = (torch.randn(2, 5), torch.randn(1, 5))
    for _ in range(2):
        assert_close(duplicate(net)(parts), net(parts))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_without_an_accelerator_parts_run_in_turn():
    """Without an accelerator and without `device_ids`, parts run one after another, and any number of parts is allowed."""
    net = TupleParallel(nn.Identity())
    assert [len(part) for part in net((torch.zeros(1), torch.zeros(2), torch.zeros(3)))] == [1, 2, 3]


def test_no_grad_and_autocast_apply_in_lanes():
    """The caller's grad mode and autocast apply to every part."""

    class Model(nn.Module):
        def forward(self, x):
            return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert TupleParallel(Model(), TWO)((1, 2)) == ((False, False), (True, True))


# -- whole batches ----------------------------------------------------------------------------------------------------


class Subtract(nn.Module):
    """Takes a whole batch with the keys x and y, or the fields of a Pair, and scales the difference."""

    def forward(self, batch, scale=1):
        x, y = (batch.x, batch.y) if isinstance(batch, Pair) else (batch["x"], batch["y"])
        return (x - y) * scale


class Spread(nn.Module):
    """Takes the same values as keyword arguments."""

    def forward(self, x, y):
        return x - y


SAMPLES = [(torch.tensor(float(i)), torch.tensor(float(i * i))) for i in range(5)]


def as_dict(samples):
    xs, ys = zip(*samples, strict=True)
    return {"x": torch.stack(xs), "y": torch.stack(ys)}


@pytest.mark.parametrize("devices", [TWO, THREE, ["cpu"] * 7], ids=len)
@pytest.mark.parametrize(
    "kind",
    [dict, OrderedDict, UserDict, MappingProxyType, lambda b: Pair(**b)],
    ids=["dict", "ordered", "user", "proxy", "namedtuple"],
)
def test_a_collated_batch_is_passed_whole(devices, kind):
    """What `tp_collate` returns can be the only argument, for any number of devices next to the two keys."""
    batch = tp_collate(len(devices))(lambda samples: kind(as_dict(samples)))(SAMPLES)
    assert_close(cat(TupleParallel(Subtract(), devices)(batch)), Subtract()(as_dict(SAMPLES)))


def test_a_collated_mapping_keeps_its_class_and_attributes():
    """A dict subclass, such as the encoding of a tokenizer, arrives in the model as that class."""

    class Encoding(dict):
        def __init__(self, items=(), language=None):
            super().__init__(items)
            self.language = language

    class Model(nn.Module):
        def forward(self, batch):
            return {"class": type(batch), "language": batch.language, "n": len(batch["x"])}

    batch = tp_collate(2)(lambda samples: Encoding(as_dict(samples), "en"))(SAMPLES)
    assert TupleParallel(Model(), TWO)(batch) == tuple({"class": Encoding, "language": "en", "n": n} for n in (3, 2))


def test_a_model_may_change_the_dict_that_it_gets():
    """The dict of a lane is its own, so the caller's batch stays the same."""

    class Model(nn.Module):
        def forward(self, batch):
            return {"n": len(batch.pop("x"))}

    batch = tp_collate(2)(as_dict)(SAMPLES)
    assert TupleParallel(Model(), TWO)(batch) == ({"n": 3}, {"n": 2})
    assert list(batch) == ["x", "y"]


@pytest.mark.usefixtures("_deterministic")
def test_a_seed_gives_the_same_numbers_for_dict_batches():
    """Under deterministic algorithms, lanes on one device draw random numbers in lane order."""
    net = TupleParallel(nn.Sequential(OrderedDict(pick=Subtract(), drop=nn.Dropout())), TWO, reduction=cat)
    batch = tp_collate(2)(as_dict)(SAMPLES)
    torch.manual_seed(0)
    first = net(batch)
    torch.manual_seed(0)
    assert torch.equal(net(batch), first)


@pytest.mark.parametrize("samples", [SAMPLES[:1], []], ids=len)
def test_short_dict_batches_have_one_part(samples):
    """One sample, and no sample, give one part."""
    collate = tp_collate(3)(lambda each: {"x": torch.zeros(len(each)), "y": torch.zeros(len(each))})
    (output,) = TupleParallel(Subtract(), THREE)(collate(samples))
    assert len(output) == len(samples)


def test_a_collated_dict_can_be_spread():
    """`model(**batch)` gives each keyword argument its parts."""
    batch = tp_collate(2)(as_dict)(SAMPLES)
    assert_close(cat(TupleParallel(Spread(), TWO)(**batch)), Subtract()(as_dict(SAMPLES)))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_of_dict_batches(workers):
    """DataLoader workers return dict batches that are passed whole, also a short last one."""
    loader = DataLoader(
        SAMPLES,
        batch_size=4,
        collate_fn=tp_collate(2)(as_dict),
        num_workers=workers,
        multiprocessing_context=multiprocessing.get_context("fork") if workers else None,
    )
    outputs = [TupleParallel(Subtract(), TWO)(batch) for batch in loader]
    assert [len(out) for out in outputs] == [2, 1]
    assert_close(torch.cat([cat(out) for out in outputs]), Subtract()(as_dict(SAMPLES)))


def test_a_whole_batch_next_to_other_arguments():
    """A dict of parts may be positional or a keyword argument, next to tuples of parts."""
    batch = tp_collate(2)(as_dict)(SAMPLES)
    expected = Subtract()(as_dict(SAMPLES)) * 2
    net = TupleParallel(Subtract(), TWO, reduction=cat)
    assert_close(net(batch, (2, 2)), expected)
    assert_close(net(scale=[2, 2], batch=batch), expected)


def test_dicts_and_namedtuples_of_parts_may_be_nested():
    """The first tuple or list on the way down holds the parts. Each lane gets its own containers."""

    class Model(nn.Module):
        def forward(self, batch):
            batch["seen"] = True
            return (batch,)

    batch = {"a": {"b": (1, 2)}, "c": Pair([3, 4], {}), "d": ({"e": (5,)}, {"e": (6,)})}
    ((one, two),) = TupleParallel(Model(), TWO)(batch)
    assert one == {"a": {"b": 1}, "c": Pair(3, {}), "d": {"e": (5,)}, "seen": True}
    assert two == {"a": {"b": 2}, "c": Pair(4, {}), "d": {"e": (6,)}, "seen": True}
    assert "seen" not in batch
    assert one["c"].y is not two["c"].y


def test_a_tuple_of_tuples_has_one_tuple_per_device():
    """The outermost tuple holds the parts, whatever the lengths are. A batch `(xs, ys)` is spread."""
    seen = TupleParallel(nn.Identity(), THREE)((("a", "b", "c"), ("d", "e", "f")))
    assert seen == (("a", "d"), ("b", "e"), ("c", "f"))
    batch = tp_collate(3)(lambda samples: tuple(as_dict(samples).values()))(SAMPLES)
    assert_close(cat(TupleParallel(Spread(), THREE)(*batch)), Subtract()(as_dict(SAMPLES)))


def test_an_empty_dict_takes_the_number_of_parts_from_other_arguments():
    """Each part of an empty dict is empty."""

    class Model(nn.Module):
        def forward(self, x, options):
            return {"x": x, **options}

    assert TupleParallel(Model(), TWO)((1, 2), {}) == ({"x": 1}, {"x": 2})


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        (({},), {}, ["args[0] is an empty dict", "Give a tuple with one dict per device"]),
        (({"x": torch.zeros(2)},), {}, ['args[0]["x"] is a Tensor', "If the dict itself is one part, give a tuple"]),
        (((1, 2), {"x": {"y": "ab"}}), {}, ['args[1]["x"]["y"] is a str']),
        ((), {"batch": {"x": (1, 2), "y": 3}}, ['kwargs["batch"]["y"] is a int']),
        (({"x": (1, 2), "y": (1,)},), {}, ["different numbers of parts", """'args[0]["x"]': 2, 'args[0]["y"]': 1"""]),
        (({"x": (1, 2), "y": (1, 2)}, (1, 2, 3)), {}, ["different numbers of parts"]),
        (({"x": (1, 2, 3)},), {}, ["3 parts for 2 devices"]),
        ((Pair(torch.zeros(2), (1, 2)),), {}, ["args[0][0] is a Tensor", "one Pair per device"]),
        ((pack_sequence([torch.zeros(2)]),), {}, ["args[0] is a PackedSequence"]),
        ((torch.ones(2, 3).max(1),), {}, ["args[0] is a max"]),
        ((((1,), (2,), (3,)),), {}, ["3 parts for 2 devices", "pass each item as an argument: model(*batch)"]),
        ((iter((1, 2)),), {}, ["args[0] is a tuple_iterator"]),
        ((None,), {}, ["args[0] is a NoneType"]),
    ],
)  # fmt: skip
def test_what_structure_does_not_settle_is_refused(args, kwargs, words):
    """The error names the place and the remedy."""
    with pytest.raises(ShardError) as caught:
        TupleParallel(nn.Identity(), TWO)(*args, **kwargs)
    for word in words:
        assert word in str(caught.value)


def test_packed_sequences_are_single_outputs():
    """A PackedSequence is returned per part, although it is a namedtuple."""
    outputs = TupleParallel(nn.Identity(), TWO)((pack_sequence([torch.zeros(2)]), pack_sequence([torch.ones(1)])))
    assert [type(output) for output in outputs] == [PackedSequence] * 2


def test_outputs_with_different_numbers_of_items_are_refused():
    """Tuples of different lengths cannot be transposed without dropping items."""
    with pytest.raises(GatherError, match=r"output 1 has 1 item, output 0 has 2.*into a dict"):
        TupleParallel(nn.Identity(), TWO)(((1, 2), (3,)))


@pytest.mark.parametrize("parts", [(["a", "b"], ["c", "d"]), (["a", "b"], ["c"]), ([{"x": 1}], [{"x": 2}])])
def test_lists_per_row_are_outputs(parts):
    """A list of texts or dicts has one item per row, so it is not transposed, and `cat` keeps all items in order."""
    assert TupleParallel(nn.Identity(), TWO)(parts) == parts
    assert TupleParallel(nn.Identity(), TWO, reduction=cat)(parts) == [*parts[0], *parts[1]]
    in_dict = TupleParallel(KeyedBy("ids"), TWO, reduction=cat)(parts)
    assert in_dict == {"ids": [*parts[0], *parts[1]]}


class KeyedBy(nn.Module):
    """Returns its input in a dict."""

    def __init__(self, key):
        super().__init__()
        self.key = key

    def forward(self, value):
        return {self.key: value}


# -- the constructor and the end ------------------------------------------------------------------------------------------


def test_the_options_have_the_order_of_tuple_parallel():
    """By position: module, device_ids, transfer_output, transfer_input, reduction."""
    net = TupleParallel(nn.Identity(), TWO, True, False, cat)
    assert (net.transfer_output, net.transfer_input, net.reduction) == (True, False, cat)
    assert (net.ndevices, net.home_device, net.output_device) == (2, torch.device("cpu"), torch.device("cpu"))


def test_the_module_moves_to_its_first_device():
    """As in tuple_parallel, the caller need not move the module."""
    moved = []

    class Model(nn.Identity):
        def to(self, device):
            moved.append(device)
            return super().to(device)

    TupleParallel(Model(), TWO)
    assert moved == [torch.device("cpu")]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_without_lanes_there_is_one_device():
    """`ndevices` can be passed to `tp_collate` on a machine without an accelerator."""
    net = TupleParallel(nn.Identity())
    assert (net.ndevices, net.home_device) == (1, torch.device("cpu"))


@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        (("cpu",), {}, "transfer_output='cpu' is not True or False. .* use output_device="),
        ((), {"transfer_input": None}, "transfer_input=None is not True or False"),
        ((), {"output_device": "cpu"}, "output_device='cpu' has no effect without transfer_output=True"),
        ((), {"reduction": "mean"}, "reduction='mean' is not callable"),
        ((), {"dim": 1}, r"dim=1 has no effect: .*partial\(parawrap\.cat, dim=1\)"),
    ],
)
def test_options_that_would_do_nothing_are_refused(args, options, words):
    """The error names the value and the option that does what was meant."""
    with pytest.raises(ShardError, match=words):
        TupleParallel(nn.Identity(), TWO, *args, **options)


def test_a_call_without_arguments_runs_once_per_device():
    """As in tuple_parallel, a module without inputs gives one output per device."""

    class Model(nn.Module):
        def forward(self):
            return 7

    assert TupleParallel(Model(), THREE)() == (7, 7, 7)


def test_the_context_manager_ends_the_threads():
    """After the block no thread is left, also after an error in it. A later call starts threads again."""
    before = set(threading.enumerate())
    net = TupleParallel(nn.Identity(), TWO)

    def leave_with_an_error():
        with net as entered:
            assert [entered((1, 2)) for _ in range(2)] == [(1, 2)] * 2
            assert set(threading.enumerate()) > before
            raise LookupError

    with pytest.raises(LookupError):
        leave_with_an_error()
    assert set(threading.enumerate()) == before
    assert net((1, 2)) == (1, 2)
    net.close()
    net.close()
    assert set(threading.enumerate()) == before


# -- tuple_fn --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [False, True])
def test_tuple_fn_calls_a_function_once_per_part(parallel):
    """The decorated function is called once per part and keeps its name and docstring."""

    @tuple_fn(parallel=parallel)
    def loss(output, *, target):
        """Return the absolute error."""
        return (output - target).abs()

    out = loss((torch.ones(2), torch.ones(1)), target=[torch.zeros(2), torch.full((1,), 3.0)])
    assert [part.tolist() for part in out] == [[1.0, 1.0], [2.0]]
    assert (loss.__name__, loss.__doc__) == ("loss", "Return the absolute error.")


def test_tuple_fn_in_parallel_runs_parts_at_the_same_time():
    """With `parallel=True`, three parts that wait for each other all finish."""
    barrier = threading.Barrier(3)
    meet = tuple_fn(lambda x: barrier.wait(20) is not None and x, parallel=True)
    assert meet((1, 2, 3)) == (1, 2, 3)


def test_tuple_fn_transposes_tuples():
    """If the function returns a tuple, the result is a tuple of tuples."""
    assert tuple_fn(lambda x: (x, -x))((1, 2, 3)) == ((1, 2, 3), (-1, -2, -3))


@pytest.mark.parametrize("parallel", [False, True])
def test_tuple_fn_takes_whole_batches(parallel):
    """A dict of parts is cut as by TupleParallel."""
    batch = tp_collate(2)(as_dict)(SAMPLES)
    difference = tuple_fn(lambda batch, scale: (batch["x"] - batch["y"]) * scale, parallel=parallel)
    assert_close(cat(difference(batch, scale=(2, 2))), Subtract()(as_dict(SAMPLES), 2))


def test_tuple_fn_refuses_more_parts_than_devices():
    """With `devices`, a call with more parts raises ShardError."""
    with pytest.raises(ShardError, match="3 parts for 2 devices"):
        tuple_fn(abs, parallel=True, devices=TWO)((1, 2, 3))


def test_tuple_fn_works_on_methods():
    """`self` is passed unchanged to every call of a decorated method."""

    class Loss:
        scale = 2

        @tuple_fn
        def plain(self, x):
            return x * self.scale

        @tuple_fn(parallel=True)
        def lanes(self, x):
            return x * self.scale

    assert Loss().plain((1, 2)) == (2, 4)
    assert Loss().lanes((1, 2)) == (2, 4)
    del Loss.lanes  # the garbage collector cannot see the wrapper's reference to its class


def test_tuple_fn_can_be_called_by_many_threads():
    """Concurrent calls with different numbers of parts return their own results."""
    double = tuple_fn(lambda x: x * 2, parallel=True)
    wrong = []

    def work(parts):
        wrong.extend(parts for _ in range(20) if double(tuple(range(parts))) != tuple(2 * value for value in range(parts)))

    threads = [threading.Thread(target=work, args=(parts,)) for parts in (1, 2, 3, 4, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_tuple_fn_refuses_a_value_that_is_not_callable():
    """Decorating a number raises ShardError."""
    with pytest.raises(ShardError, match="3"):
        tuple_fn(3)
