"""DataParallel and data_parallel on CPU lanes behave as torch.nn.DataParallel documents."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset

from parawrap import DataParallel, DeviceListError, DeviceUnavailableError, GatherError, ShardError, data_parallel, parallel

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3
no_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")


class RandomDataset(Dataset):
    """The dataset of torch's DataParallel tutorial."""

    def __init__(self, size, length):
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index):
        return self.data[index]

    def __len__(self):
        return self.len


class TutorialModel(nn.Module):
    """The model of torch's DataParallel tutorial."""

    def __init__(self, input_size, output_size):
        super().__init__()
        self.fc = nn.Linear(input_size, output_size)
        type(self).inside = []  # on the class, because a replica has its own attributes

    def forward(self, input):  # noqa: A002
        output = self.fc(input)
        self.inside.append((input.size(), output.size()))
        return output


def test_the_tutorial_runs():
    """The sizes that torch's tutorial prints (100 rows, batches of 30, two devices) are the same here."""
    model = TutorialModel(5, 2)
    net = DataParallel(model, ["cpu", "cpu"])
    outside = []
    for data in DataLoader(dataset=RandomDataset(5, 100), batch_size=30, shuffle=True):
        output = net(data)
        outside.append((data.size(), output.size()))
        assert_close(output, model.fc(data))
    assert outside == [((30, 5), (30, 2))] * 3 + [((10, 5), (10, 2))]
    assert model.inside == [((15, 5), (15, 2))] * 6 + [((5, 5), (5, 2))] * 2


def test_it_is_a_torch_data_parallel():
    """DataParallel is a torch.nn.DataParallel with the same attributes."""
    module = nn.Linear(4, 2)
    net = DataParallel(module, TWO)
    assert isinstance(net, nn.DataParallel)
    assert net.module is module
    assert net.device_ids == [torch.device("cpu")] * 2
    assert net.dim == 0


def test_the_state_dict_has_torchs_prefix():
    """Keys start with "module.", and a state_dict of torch.nn.DataParallel loads."""
    net = DataParallel(nn.Linear(4, 2), TWO)
    assert list(net.state_dict()) == ["module.weight", "module.bias"]
    state = nn.DataParallel(nn.Linear(4, 2)).state_dict()
    net.load_state_dict(state)
    assert_close(dict(net.state_dict()), dict(state))
    x = torch.randn(5, 4)
    assert_close(net(x), nn.functional.linear(x, state["module.weight"], state["module.bias"]))


@no_accelerator
@pytest.mark.parametrize("device_ids", [None, [0], [0, 1]])
def test_without_an_accelerator_calls_are_plain(device_ids):
    """As in torch, `device_ids` is empty, and the module gets the whole batch in the caller's thread."""
    seen = []

    class Model(nn.Module):
        def forward(self, x, *, k=1):
            seen.append((len(x), threading.get_ident()))
            return x * k

    net = DataParallel(Model(), device_ids)
    assert net.device_ids == []
    assert net(torch.ones(7), k=3).tolist() == [3.0] * 7
    assert seen == [(7, threading.get_ident())]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16, 17])
@pytest.mark.parametrize("dim", [0, 1])
def test_outputs_and_gradients_equal_the_plain_ones(rows, dim):
    """Forward and backward equal those of the plain module for each row count and dim."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    net = DataParallel(model, THREE, dim=dim)
    shape = [3, 3, 4]
    shape[dim] = rows
    x = torch.randn(shape)
    model(x).square().sum().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    for _ in range(2):
        model.zero_grad()
        y = net(x)
        assert_close(y, model(x))
        y.square().sum().backward()
        assert_close([p.grad for p in net.parameters()], plain)


def test_keyword_arguments_and_nested_inputs_are_cut():
    """Tensors in tuples, lists, and dicts are scattered; None and numbers go to every device."""

    class Model(nn.Module):
        def forward(self, pair, *, more, k, none=None):
            assert none is None
            return {"sum": pair[0] + pair[1] + more["a"][0] * k, "rows": [pair[0]]}

    a, b, c = torch.randn(3, 7, 2)
    out = DataParallel(Model(), THREE)((a, b), more={"a": [c]}, k=2.0)
    assert_close(out, {"sum": a + b + c * 2, "rows": [a]})


def test_lists_without_tensors_are_shared():
    """As in torch, a list without tensors goes whole to every device, even if it is as long as the batch."""
    seen = []

    class Model(nn.Module):
        def forward(self, x, texts):
            seen.append(texts)
            return x

    texts = ["a", "b", "c", "d"]
    DataParallel(Model(), TWO)(torch.zeros(4, 1), texts)
    assert [value is texts for value in seen] == [True, True] or seen == [texts, texts]


def test_a_scalar_output_becomes_a_vector_with_a_warning_at_the_callers_line():
    """The output has one value per device, and the warning points to the call in this file."""

    class Mean(nn.Module):
        def forward(self, x):
            return x.mean()

    net = DataParallel(Mean(), TWO)
    with pytest.warns(UserWarning, match="0-d") as caught:
        out = net(torch.tensor([1.0, 3.0, 5.0, 7.0]))  # the caller's line
    assert out.tolist() == [2.0, 6.0]
    assert caught[0].filename == __file__
    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        net(torch.ones(4)).mean()
    assert len(again) == 1


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_scalar_output_is_a_vector_for_every_number_of_rows(rows):
    """As in torch, one row on several devices gives a vector of one value."""

    class Mean(nn.Module):
        def forward(self, x):
            return x.mean()

    with pytest.warns(UserWarning, match="0-d"):
        assert DataParallel(Mean(), TWO)(torch.ones(rows)).tolist() == [1.0] * min(rows, 2)


def test_a_scalar_output_in_a_nested_model_warns_at_the_callers_line():
    """The warning points past parawrap and torch, also if another module makes the call."""

    class Mean(nn.Module):
        def forward(self, x):
            return x.mean()

    outer = nn.Sequential(DataParallel(Mean(), TWO))
    with pytest.warns(UserWarning, match="0-d") as caught:
        outer(torch.ones(4))
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["deepcopy", "pickle"]
)
def test_copies_work_and_are_independent(duplicate):
    """A copy made before or after the first call has its own module and lanes."""
    net = DataParallel(nn.Linear(4, 2), TWO)
    x = torch.randn(5, 4)
    for _ in range(2):
        clone = duplicate(net)
        assert_close(clone(x), net(x))
        with torch.no_grad():
            clone.module.weight.zero_()
        assert not torch.equal(clone(x), net(x))


def test_the_four_verbs_can_be_called_separately():
    """scatter, replicate, parallel_apply, and gather work outside a call, as in torch."""
    net = DataParallel(nn.Linear(4, 2), THREE)
    x = torch.randn(7, 4)
    inputs, kwargs = net.scatter((x,), {"k": 1}, net.device_ids)
    assert [len(part[0]) for part in inputs] == [3, 2, 2]
    assert kwargs == ({"k": 1},) * 3
    replicas = net.replicate(net.module, net.device_ids)
    outputs = net.parallel_apply(replicas, inputs, [{}] * 3)
    assert_close(net.gather(outputs, net.output_device), net.module(x))


def test_overridden_verbs_are_used():
    """A call uses a subclass's scatter, replicate, parallel_apply, and gather, in this order."""
    called = []

    class Mine(DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            called.append("scatter")
            return super().scatter(inputs, kwargs, device_ids)

        def replicate(self, module, device_ids):
            called.append("replicate")
            return super().replicate(module, device_ids)

        def parallel_apply(self, replicas, inputs, kwargs):
            called.append("parallel_apply")
            return super().parallel_apply(replicas, inputs, kwargs)

        def gather(self, outputs, output_device):
            called.append("gather")
            return ["mine", super().gather(outputs, output_device)]

    net = Mine(nn.Linear(4, 2), TWO)
    x = torch.randn(5, 4)
    tag, out = net(x)
    assert tag == "mine"
    assert_close(out, net.module(x))
    assert called == ["scatter", "replicate", "parallel_apply", "gather"]


def test_an_overridden_scatter_may_return_unbalanced_lists():
    """The call uses the inputs that a subclass's scatter returns, as subclasses for graphs expect."""

    class Mine(DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            (x,) = inputs
            return [(x[:1],), (x[1:],)], [{}, {}]

        def gather(self, outputs, output_device):
            return outputs

    one, rest = Mine(nn.Identity(), TWO)(torch.arange(5.0))
    assert (one.tolist(), rest.tolist()) == ([0.0], [1.0, 2.0, 3.0, 4.0])


def test_module_can_be_replaced():
    """After `net.module = other`, the next call runs `other`, as in torch."""
    net = DataParallel(nn.Linear(4, 2), TWO)
    x = torch.randn(5, 4)
    net(x)
    net.module = nn.Linear(4, 3)
    assert_close(net(x), net.module(x))


def test_module_can_be_replaced_by_an_equal_one():
    """Identity decides: a module that equals every other one is replaced too."""

    class Alike(nn.Linear):
        def __eq__(self, other):
            return True

        __hash__ = nn.Module.__hash__

    net = DataParallel(Alike(4, 2), TWO)
    x = torch.randn(5, 4)
    net(x)
    net.module = Alike(4, 2)
    assert_close(net(x), net.module(x))


def test_dim_can_be_set():
    """After `net.dim = 1`, the next call cuts on dim 1, as in torch."""
    seen = []

    class Model(nn.Module):
        def forward(self, x):
            seen.append(tuple(x.shape))
            return x

    net = DataParallel(Model(), TWO)
    net(torch.zeros(4, 6))
    net.dim = 1
    net(torch.zeros(4, 6))
    assert seen == [(2, 6)] * 2 + [(4, 3)] * 2


def test_replicate_accepts_another_module():
    """replicate(other, device_ids) replicates `other`, as in torch."""
    net = DataParallel(nn.Linear(4, 2), TWO)
    other = nn.Linear(4, 2)
    x = torch.randn(4, 4)
    outputs = net.parallel_apply(net.replicate(other, net.device_ids), [(x,), (x,)], [{}, {}])
    assert_close(outputs[0], other(x))


def test_replicas_are_kept_from_call_to_call():
    """The same replica objects run in every call."""
    ran = []

    class Model(nn.Module):
        def forward(self, x):
            ran.append(self)
            return x

    net = DataParallel(Model(), THREE)
    for _ in range(4):
        net(torch.zeros(6))
    assert len({id(module) for module in ran}) == 3


def test_replicas_follow_eval_and_dtype_changes():
    """net.eval() and net.double() change the module, and the next call follows."""
    net = DataParallel(nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0)), TWO)
    x = torch.randn(6, 4)
    assert net(x).abs().sum().item() == 0
    net.eval().double()
    with torch.no_grad():
        assert_close(net(x.double()), net.module(x.double()))


def test_batch_norm_keeps_the_first_shards_statistics():
    """As torch documents, only the buffer updates of the first device are kept."""
    model = nn.BatchNorm1d(4)
    first = copy.deepcopy(model)
    net = DataParallel(model, TWO)
    x = torch.randn(9, 4)
    net(x)
    first(x[:5])
    assert_close(dict(model.state_dict()), dict(first.state_dict()))


def test_module_hooks_run_per_shard_and_wrapper_hooks_once():
    """As in torch, hooks on the module run once per device in every call, and hooks on the wrapper run once."""
    model = nn.Linear(4, 2)
    net = DataParallel(model, THREE)
    inner, outer = [], []
    model.register_forward_hook(lambda m, args, out: inner.append(len(out)))
    net.register_forward_hook(lambda m, args, out: outer.append(len(out)))
    for _ in range(3):
        net(torch.randn(6, 4))
        assert (inner, outer) == ([2, 2, 2], [6])
        inner.clear()
        outer.clear()


def assert_draws_in_lane_order(net, x):
    torch.manual_seed(0)
    expected = torch.cat([nn.functional.dropout(part) for part in x.split(8)])
    for _ in range(4):
        torch.manual_seed(0)
        assert torch.equal(net(x), expected)


@pytest.mark.parametrize("lanes", [2, 3, 4])
def test_lanes_on_one_device_draw_random_numbers_in_lane_order(lanes):
    """With gradients, dropout in lanes that share a generator draws the numbers of a loop over the shards."""
    net = DataParallel(nn.Dropout(0.5), ["cpu"] * lanes)
    assert_draws_in_lane_order(net, torch.ones(8 * lanes, 16, requires_grad=True))


@pytest.mark.usefixtures("_deterministic")
def test_lanes_draw_in_lane_order_under_deterministic_algorithms():
    """Under torch.use_deterministic_algorithms(True), the same holds without gradients."""
    with torch.no_grad():
        assert_draws_in_lane_order(DataParallel(nn.Dropout(0.5), THREE), torch.ones(24, 16))


def test_lanes_run_at_the_same_time_without_gradients():
    """Without gradients, lanes on one device run at the same time."""
    barrier = threading.Barrier(3)

    class Model(nn.Module):
        def forward(self, x):
            barrier.wait(20)
            return x

    net = DataParallel(Model(), THREE)
    for _ in range(2):
        assert net(torch.zeros(6)).shape == (6,)


def test_the_profiler_sees_data_parallel_forward():
    """The call runs inside record_function("DataParallel.forward"), as in torch."""
    net = DataParallel(nn.Linear(4, 2), TWO)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        net(torch.randn(6, 4))
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["DataParallel.forward"] == 1
    assert counts["aten::linear"] == 2


def test_a_parameter_on_another_device_raises_torchs_error():
    """A parameter that is not on device_ids[0] raises torch's RuntimeError."""
    net = DataParallel(nn.Linear(4, 2), TWO)
    net.module.bias = nn.Parameter(torch.zeros(2, device="meta"))
    with pytest.raises(RuntimeError, match="module must have its parameters and buffers on device cpu"):
        net(torch.randn(4, 4))


@pytest.mark.parametrize("device_ids", [[], ()])
def test_empty_device_ids_are_refused(device_ids):
    """An empty list or tuple raises DeviceListError."""
    with pytest.raises(DeviceListError, match="empty"):
        DataParallel(nn.Linear(4, 2), device_ids)


@pytest.mark.parametrize("device_ids", [["cpu", "cpu:1"], ["cpu", "cuda:0"], ["cpu", 0]])
def test_absent_and_mixed_device_ids_are_refused(device_ids):
    """An absent index, such as "cpu:1", and devices of two types raise."""
    with pytest.raises((DeviceListError, DeviceUnavailableError)):
        DataParallel(nn.Linear(4, 2), device_ids)


def test_one_device_runs_the_module_itself():
    """With one device, there is no replica: the module itself is called."""
    seen = []

    class Model(nn.Module):
        def forward(self, x):
            seen.append(self)
            return x

    model = Model()
    DataParallel(model, ["cpu"])(torch.zeros(5))
    assert seen == [model]


def test_errors_name_the_lane_the_argument_or_the_shapes():
    """The model's exception has a note with its lane. Other errors name the argument's row count or the outputs' shapes."""

    class Model(nn.Module):
        def forward(self, x, y):
            if len(x) == 2:
                raise LookupError("two")
            return torch.zeros(len(x), len(x))

    net = DataParallel(Model(), TWO)
    with pytest.raises(LookupError) as caught:
        net(torch.zeros(5), None)
    assert caught.value.__notes__ == ["in lane 1 on cpu, shard 1 of 2: 2 of 5 rows. Every lane got args[1] whole"]
    with pytest.raises(ShardError, match=r"args\[1\] has 3"):
        net(torch.zeros(5), torch.zeros(3))
    with pytest.raises(GatherError, match=r"\(4, 4\)"):
        net(torch.zeros(7), None)


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.zeros(5), torch.zeros(3)),
        (torch.zeros(5), SimpleNamespace(y=torch.zeros(5))),
        (torch.zeros(5), torch.sparse_coo_tensor([[0]], [1.0], (5,), check_invariants=True)),
    ],
    ids=["rows", "object", "sparse"],
)
def test_cures_name_the_face_that_has_the_option(arguments):
    """The error of an argument that cannot be cut points to the `in_dims` of a parallel block, and that works."""

    class Model(nn.Module):
        def forward(self, x, y):
            return x

    with pytest.raises(ShardError, match=r"(?i)a parallel block") as caught:
        DataParallel(Model(), TWO)(*arguments)
    assert "in_dims" in str(caught.value)
    with parallel(Model(), TWO, in_dims={"y": None}, out_dims=0) as p:
        assert p.target(*arguments).shape == (5,)


def test_the_cure_of_an_output_names_the_face_that_has_the_option():
    """The error of an output that cannot be joined points to the options of `parallel`, and one of them works."""

    class Model(nn.Module):
        def forward(self, x):
            return torch.zeros(len(x), len(x))

    with pytest.raises(GatherError, match=r"options of parallel\(model, devices\) \(docs/errors\.md#gathererror\)$"):
        DataParallel(Model(), TWO)(torch.zeros(5))
    with parallel(Model(), TWO, join="list") as p:
        assert [output.shape for output in p.target(torch.zeros(5))] == [(3, 3), (2, 2)]


class Returns(nn.Module):
    """A module that returns what a function makes of its batch."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


LISTS = {
    "numbers": lambda x: x.argmax(1).tolist(),
    "texts": lambda x: ["a"] * len(x),
    "tokens": lambda x: [[7] * 5 for _ in x],
    "dicts": lambda x: [{"score": 1.0, "name": None} for _ in x],
    "tuple": lambda x: tuple(x.argmax(1).tolist()),
    "in a dict": lambda x: {"ids": ["a"] * len(x), "y": x},
    "empty lists": lambda x: [[] for _ in x],
    "pairs": lambda x: tuple((int(i), 1.0, "a", None, 0) for i in x.argmax(1)),
    "tuple of lists": lambda x: (x.argmax(1).tolist(), ["a"] * len(x)),
    "nothing": lambda x: (None, [None, None], [], x),
}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 7])
def test_lists_with_one_item_per_row_are_joined(name, rows):
    """Lists without tensors are concatenated, also if all lanes return equal ones."""
    model, x = Returns(LISTS[name]), torch.eye(4)[torch.arange(rows) % 2]
    net = DataParallel(model, TWO)
    assert str(net(x)) == str(model(x))
    net.close()


@pytest.mark.parametrize(
    ("function", "place", "why"),
    [
        (lambda x: [3, 4, 5, 6], "output", "returned a list of 4, 4 items without tensors"),
        (lambda x: {"y": x, "size": (8, 8, 8, 8)}, r'output\["size"\]', "returned a tuple of 4, 4 items"),
        (lambda x: {"y": x, "n": len(x)}, r'output\["n"\]', r"each lane returned one int \(3, 3\)"),
        (lambda x: (x, [x, 2]), r"output\[1\]\[1\]", r"each lane returned one int \(2, 2\)"),
        (lambda x: [[7] * len(x) for _ in x], "output", "both the list and each list in it follow"),
    ],
    ids=["list", "tuple", "number", "number next to a tensor", "square"],
)
def test_other_values_that_torch_refuses_are_refused(function, place, why):
    """Values that are equal in all lanes may be counts of rows, or half of the rows."""
    net = DataParallel(Returns(function), TWO)
    with pytest.raises(GatherError, match=f"{place} cannot be joined: .*{why}"):
        net(torch.eye(6))
    net.close()


def test_a_gather_of_other_outputs_has_no_row_counts():
    """`gather` alone takes tensors and refuses lists without tensors. A list of its own is not that of the call."""

    class Own(DataParallel):
        def gather(self, outputs, output_device):
            return super().gather(list(outputs), output_device)

    net = Own(Returns(LISTS["in a dict"]), TWO)
    with pytest.raises(GatherError, match="gather alone has no row counts"):
        net(torch.eye(6))
    net.close()


class Sample:
    """An object with tensors, which only an overridden `scatter` can cut."""

    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("rest", [None, "text"])
def test_an_overridden_scatter_may_make_any_shards(rest):
    """The rows of its shards are not counted, and values that are no lists are joined as ever."""

    class Own(DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            return tuple((Sample(part),) for part in inputs[0].chunk(2)), ({"mask": torch.ones(9)},) * 2

    net = Own(Taking(rest), TWO)
    y, found = net(torch.eye(6))
    assert (y.shape, found) == ((6, 6), rest)
    net.close()


class Taking(nn.Module):
    def __init__(self, rest):
        super().__init__()
        self.rest = rest

    def forward(self, sample, mask):
        return sample.x, self.rest


def test_zero_rows_and_no_input_run_once():
    """A batch of zero rows, or a call without arguments, calls the module once."""
    calls = []

    class Model(nn.Module):
        def forward(self, x=None):
            calls.append(x)
            return torch.zeros(0, 2)

    net = DataParallel(Model(), TWO)
    assert net(torch.zeros(0, 4)).shape == (0, 2)
    assert net().shape == (0, 2)
    assert len(calls) == 2


def test_nested_data_parallel():
    """A DataParallel inside another one has the plain output."""
    inner = DataParallel(nn.Linear(4, 4), TWO)
    outer = DataParallel(nn.Sequential(inner, nn.Tanh()), THREE)
    x = torch.randn(7, 4)
    assert_close(outer(x), torch.tanh(inner.module(x)))


def test_many_threads_can_make_the_first_call():
    """Eight threads call a new wrapper at once, and each gets its own output."""
    model = nn.Linear(4, 2)
    net = DataParallel(model, THREE)
    barrier = threading.Barrier(8)
    wrong = []

    def work():
        x = torch.randn(7, 4)
        barrier.wait(20)
        for _ in range(10):
            if not torch.allclose(net(x), nn.functional.linear(x, model.weight, model.bias), atol=1e-5):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    net.close()


def test_close_ends_the_lanes_and_the_next_call_starts_them_again():
    """After close(), no lane thread is left, and the wrapper stays usable."""
    net = DataParallel(nn.Linear(4, 2), THREE)
    x = torch.randn(7, 4)
    for _ in range(2):
        assert_close(net(x), net.module(x))
        net.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("parawrap-")]


# -- data_parallel -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,)], ids=["tensor", "tuple"])
def test_data_parallel_function(wrap):
    """data_parallel takes one input or a tuple of inputs, and leaves no lane thread."""
    model = nn.Linear(4, 2)
    x = torch.randn(7, 4)
    assert_close(data_parallel(model, wrap(x), THREE), model(x))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("parawrap-")]


def test_data_parallel_function_with_module_kwargs_only():
    """With `inputs=None`, tensors in `module_kwargs` are cut. `output_device=-1` is the CPU."""

    class Model(nn.Module):
        def forward(self, *, x, k):
            return x * k

    out = data_parallel(Model(), None, TWO, output_device=-1, module_kwargs={"x": torch.ones(5), "k": 2})
    assert out.tolist() == [2.0] * 5


def test_data_parallel_function_with_another_dim():
    """`dim` applies to inputs and outputs."""
    x = torch.randn(2, 7)
    assert_close(data_parallel(nn.Tanh(), x, THREE, None, 1), torch.tanh(x))
