"""TupleParallel and tuple_fn: arguments are tuples with one part per device."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset

from parawrap import DataParallel, ShardError, TupleParallel, cat, default_collate, tp_collate, tuple_fn

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3


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
    """From the second call of a kind on, two parts run at the same time in two threads."""
    armed, barrier = threading.Event(), threading.Barrier(2)

    class Model(nn.Module):
        def forward(self, x):
            if armed.is_set():
                barrier.wait(20)
            return x

    net = TupleParallel(Model(), TWO)
    net((torch.zeros(1), torch.zeros(1)))
    armed.set()
    assert len(net((torch.zeros(1), torch.zeros(1)))) == 2


def test_transfer_output_and_reduction():
    """`reduction` gets the tuple of outputs, and the call returns its result."""
    parts = (torch.ones(2, 5), torch.ones(1, 5))
    net = TupleParallel(nn.Identity(), TWO, "cpu", transfer_output=True, reduction=lambda outs: [len(out) for out in outs])
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
