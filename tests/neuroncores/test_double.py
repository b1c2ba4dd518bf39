"""The double of NeuronCores: compilation, refused models and inputs, placement, and scheduling."""

from __future__ import annotations

import copy
import dataclasses
import io
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from parawrap import tree
from parawrap.errors import DeviceListError, DeviceUnavailableError, ReplicaError, ShapeError
from parawrap.neuroncores import CoreStats, TensorSpec, _double
from parawrap.testing import NeuronHost

LIMIT_S = 60
A, B = torch.arange(6.0).view(2, 3), torch.tensor([[3.0, 1.0, 4.0], [1.0, 5.0, 9.0]])

Pair = namedtuple("Pair", ["sum", "difference"])


@dataclasses.dataclass
class Scores:
    best: torch.Tensor
    rest: dict[str, torch.Tensor]


class Around(nn.Module):
    """A module around a compiled one, which returns its outputs in the user's own type."""

    def __init__(self, compiled, kind):
        super().__init__()
        self.compiled, self.kind = compiled, kind

    def forward(self, *args):
        return self.kind(*self.compiled(*args))


class Counting(nn.Module):
    """Adds the number of its calls so far."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return x + self.calls


def linear(columns=3):
    torch.manual_seed(0)
    return nn.Linear(columns, 2).eval()


def inferences(host):
    return [core.inferences for core in host.stats()]


def models(host):
    return [core.models for core in host.stats()]


def loads(host):
    return [core.loads for core in host.stats()]


def saved_and_loaded(compiled):
    file = io.BytesIO()
    torch.jit.save(compiled, file)
    return torch.jit.load(io.BytesIO(file.getvalue()))


def same(one, other):
    """True if two values have equal structure and bitwise equal tensors."""
    (leaves, structure), (others, other_structure) = tree.flatten(one), tree.flatten(other)
    return structure == other_structure and all(map(torch.equal, leaves, others))


# Inputs and outputs of a compiled model


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda x: x + 1, (A,)),
        (lambda x, y: x - y, (A, B)),
        (lambda x, y: x - y, (A, A)),
        (lambda x: (x, x * 2), (A,)),
        (lambda x: (x,), (A,)),
        (lambda x: [x, x * 2], (A,)),
        (lambda x: {"b": x, "a": x * 2}, (A,)),
        (lambda x: (x, [x * 2, x * 3], ({"k": x * 4},)), (A,)),
        (lambda pair: pair[0] - pair[1], ((A, B),)),
        (lambda items: items[0] - items[1], ([A, B],)),
        (lambda named: named["b"] - named["a"], ({"b": A, "a": B},)),
        (lambda x, rest: x + rest[0] * 2 - rest[1]["k"] * 3, (A, (B, {"k": A}))),
        (lambda x, y: {"ids": x.argmax(1), "mask": x > y}, (A, B)),
        (lambda x, weights: (x * weights, weights.sum()), (A, B[0])),
    ],
    ids=[
        "tensor", "two tensors", "one tensor twice", "to a tuple", "to a tuple of one", "to a list", "to a dict",
        "to nested", "from a tuple", "from a list", "from a dict", "from nested", "other dtypes", "other shapes",
    ],
)  # fmt: skip
def test_structures_of_inputs_and_outputs_are_kept(host, function, args):
    """Nested tuples, lists, and dicts give the same bits as the plain call, also for other values than the example's."""
    compiled = host.trace(function, args)
    leaves, structure = tree.flatten(args)
    others = tree.unflatten(structure, [leaf * 3 + place for place, leaf in enumerate(leaves, 1)])
    assert isinstance(compiled, torch.jit.ScriptModule)
    assert same(compiled(*args), function(*args))
    assert same(compiled(*others), function(*others))


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x, y: (x + y, x - y), Pair),
        (lambda x, y: (x + y, {"difference": x - y, "product": x * y}), Scores),
    ],
    ids=["namedtuple", "dataclass"],
)
def test_a_module_around_a_compiled_one_can_return_other_types(host, function, kind):
    """A module around the compiled model builds types that TorchScript does not support, and is placed with it."""
    placed = host.place(Around(host.trace(function, (A, B)), kind), 1, 1)
    assert same(placed(A, B), kind(*function(A, B)))
    assert inferences(host) == [0, 1, 0, 0]


def test_a_compiled_model_takes_keyword_arguments(host):
    """The compiled model has the same parameter names as the model."""

    def weighed(x, weight):
        return x - weight

    compiled = host.trace(weighed, (A, B))
    assert torch.equal(compiled(weight=B, x=A), A - B)


def test_a_function_with_star_args_is_compiled_for_the_examples_arguments(host):
    """If parameters cannot be named, arguments are positional."""
    compiled = host.trace(lambda first, *rest: first - rest[0] * rest[1], (A, B, A))
    assert torch.equal(compiled(A, B, A), A - B * A)


@pytest.mark.parametrize("example", [A, (A,), [A]], ids=["tensor", "tuple", "list"])
def test_example_inputs_are_read_as_torch_reads_them(host, example):
    """A tensor is the only argument; a tuple or list holds all arguments, as in torch.jit.trace."""
    assert torch.equal(host.trace(torch.neg, example)(A), -A)


def test_the_signature_names_every_tensor(host):
    """It has the shape, dtype, and address of each leaf, in order. It is None for a module around a compiled model."""
    compiled = host.trace(lambda x, rest: {"y": x[:, 0], "z": rest["m"]}, (A, {"m": B > 2}))
    expected = (
        (TensorSpec((2, 3), torch.float32, "args[0]"), TensorSpec((2, 3), torch.bool, 'args[1]["m"]')),
        (TensorSpec((2,), torch.float32, 'output["y"]'), TensorSpec((2, 3), torch.bool, 'output["z"]')),
    )
    for model in (compiled, copy.deepcopy(compiled), saved_and_loaded(compiled), host.place(compiled, 0, 2)):
        assert host.signature(model) == expected
    assert host.signature(Around(compiled, Pair)) is None
    assert host.signature(linear()) is None


def test_a_vendors_compiler_options_are_accepted(host):
    """The emulated runtime ignores the vendor's options, so the same line runs on both."""
    compiled = host.trace(linear(), A, compiler_args=["--auto-cast", "none"], compiler_workdir="./work")
    assert torch.equal(compiled(A), linear()(A))


def test_a_function_closes_over_weights_as_constants(host):
    """The weights are compiled with their current values, and require gradients afterwards as before."""
    model, scale = linear(), torch.ones(2, requires_grad=True)
    compiled = host.trace(lambda x: model(x) * scale, A)
    expected = model(A) * scale
    with torch.no_grad():
        model.weight.zero_()
    assert torch.equal(compiled(A), expected)
    assert model.weight.requires_grad
    assert scale.requires_grad


def test_a_model_in_train_mode_is_compiled_in_train_mode(host):
    """Dropout is active, and BatchNorm uses the statistics of the batch."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Dropout(0.5))
    x = torch.randn(8, 1, 4, 4) * 5 + 3
    with pytest.warns(torch.jit.TracerWarning, match="Python boolean"):
        compiled = host.trace(model, x)
    y = compiled(x)
    kept = y[y != 0]
    assert 0.2 < kept.numel() / y.numel() < 0.8
    assert abs(kept.mean()) < 0.5 < kept.std() < 3


def test_writes_to_buffers_do_not_outlast_an_inference(host):
    """Each inference starts from the compiled buffers, on every core. Tracing does not change the module's buffers."""
    model = Counting()
    placed = host.place(host.trace(model, A), 0, 2)
    assert [placed(A).tolist() for _ in range(3)] == [(A + 1).tolist()] * 3
    assert model.calls == 0


def test_a_model_in_eval_mode_gives_bitwise_equal_outputs(host):
    """The compiled operations run in the model's order: no BatchNorm is folded into a convolution."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout())
    model(torch.randn(8, 3, 8, 8) * 2 + 1)
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(host.trace(model.eval(), x)(x), model(x))


def test_tracer_warnings_point_at_the_users_line(host):
    """A branch on a tensor value issues a warning at the line of the branch."""

    def branch(x):
        return x if x.sum() > 0 else -x

    with pytest.warns(torch.jit.TracerWarning, match="Python boolean") as warned:
        host.trace(branch, A)
    assert {warning.filename for warning in warned} == {__file__}


def test_the_torchscript_deprecation_is_not_shown(host):
    """Tracing, placing, and calling issue no warning that the user could not act on."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = host.trace(linear(), A)
        host.place(compiled, 0, 2)(A)
        compiled(A)


def test_outputs_have_no_grad_and_their_own_memory(host):
    """No gradient flows, even if inputs require one. A write to an output changes neither inputs nor weights."""
    model = linear()
    compiled = host.trace(lambda x: (x, model.weight, model(x)), A)
    given = A.clone().requires_grad_()
    for output in compiled(given):
        assert not output.requires_grad
        output.zero_()
    assert torch.equal(given, A)
    assert torch.equal(compiled(A)[1], model.weight)


def test_a_model_that_writes_into_its_inputs_writes_into_the_cores_memory(host):
    """The example and the arguments of a call stay unchanged."""
    x, y = A.clone(), A.clone()
    compiled = host.trace(lambda x: x.mul_(2) + 1, x)
    assert torch.equal(compiled(y), A * 2 + 1)
    assert torch.equal(x, A)
    assert torch.equal(y, A)


def test_a_model_that_was_traced_and_first_called_in_inference_mode_works_outside_of_it(host):
    """Neither the program's buffers nor its flags stay inference tensors."""
    calls = torch.zeros(1)
    with torch.inference_mode():
        compiled, counting = host.trace(linear(), A), host.trace(lambda x: x + calls.add_(1), A)
        compiled(A)
        counting(A)
    assert not compiled(A).is_inference()
    assert counting(A).shape == A.shape
    assert torch.equal(host.dynamic_batch(compiled)(A[:1]), linear()(A)[:1])


# Refused models and inputs


@pytest.mark.parametrize(
    ("x", "rest", "says"),
    [
        (torch.zeros(3, 3), B, r"args\[0\] is \[3, 3\], .* for \[2, 3\]. .*neuron.dynamic_batch"),
        (torch.zeros(2, 4), B, r"args\[0\] is \[2, 4\], .* for \[2, 3\]. Trace it for this shape"),
        (torch.zeros(2), B, r"args\[0\] is \[2\], .* for \[2, 3\]"),
        (A.double(), B, r"args\[0\] is not of torch.float32. Convert it"),
        (A, B.half(), r'args\[1\]\["k"\] is not of torch.float32'),
        (A, torch.zeros(2, 3, device="meta"), r'args\[1\]\["k"\] is on meta, but NeuronCores take CPU tensors'),
    ],
    ids=["rows", "columns", "dimensions", "dtype", "nested dtype", "device"],
)
def test_other_shapes_and_dtypes_are_refused_by_name(host, x, rest, says):
    """The text has the address, the given and the compiled shape, and advice."""
    compiled = host.trace(lambda x, rest: x + rest["k"], (A, {"k": B}))
    with pytest.raises(torch.jit.Error, match=f"ShapeError: {says}"):
        compiled(x, {"k": rest})
    with pytest.raises(ShapeError, match=f"^{says}"):
        host.place(compiled, 0, 1)(x, {"k": rest})


@pytest.mark.parametrize(
    ("example", "says"),
    [
        ((), "the example has no tensors"),
        ((A, 3), r"the example has a int at args\[1\]"),
        ((A, {"mask": None}), r'the example has a NoneType at args\[1\]\["mask"\]'),
        ((A, torch.zeros(2, device="meta")), r"the example has a tensor on meta at args\[1\]"),
        ((A, Pair(A, {"k": Scores(A, {})})), "does not support one of the containers Pair, Scores"),
    ],
    ids=["none", "a number", "None", "another device", "a dataclass"],
)
def test_example_inputs_must_be_cpu_tensors(host, example, says):
    """The error names the address of anything else."""
    with pytest.raises(TypeError, match=says):
        host.trace(lambda x, *rest: x, example)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: (x, None), r"the model returns a NoneType at output\[1\]"),
        (lambda x: {"loss": 3.0}, r'the model returns a float at output\["loss"\]'),
        (lambda x: (), "the model returns no tensors"),
        (lambda x: Scores(x, {"k": x}), "does not support one of the containers Scores, dict, tuple"),
        (lambda x: {"a": x, "b": (x, x)}, "one of the containers dict, tuple. .* dicts with values of one type"),
    ],
    ids=["None", "a number", "nothing", "a dataclass", "a mixed dict"],
)
def test_a_model_must_return_tensors_in_containers_of_torchscript(host, function, says):
    """The error names the address of an output that is not a tensor, or the type of an unsupported container."""
    with pytest.raises(TypeError, match=says):
        host.trace(function, A)


def test_a_compiled_model_is_not_compiled_again(host):
    """A compiled model is refused, alone and as a part of another model, because a core cannot wait for another core."""
    compiled = host.trace(linear(), A)
    for model in (compiled, nn.Sequential(compiled, nn.ReLU())):
        with pytest.raises(TypeError, match="already compiled for NeuronCores"):
            host.trace(model, A)


@pytest.mark.parametrize(
    "model", [linear(), nn.Sequential(), torch.jit.script(linear())], ids=["module", "empty", "script"]
)
def test_an_untraced_model_can_be_neither_placed_nor_cut(host, model):
    """The error says to trace the model first."""
    for use in (lambda: host.place(model, 0, 1), lambda: host.dynamic_batch(model)):
        with pytest.raises(ReplicaError, match=r"was not traced for NeuronCores.*parawrap.neuron.trace\(model"):
            use()


@pytest.mark.parametrize("given", [{"cores": 0}, {"cores": -1}, {"latency_s": -0.1}], ids=str)
def test_a_host_refuses_values_out_of_range(given):
    """The error names the argument and its value."""
    ((name, value),) = given.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        NeuronHost(**given)


# Saving and copying


def test_a_saved_model_runs_in_another_process(host, tmp_path):
    """The other process does not need parawrap: the file is plain TorchScript."""
    compiled = host.dynamic_batch(host.trace(linear(), A))
    torch.jit.save(compiled, tmp_path / "model.pt")
    torch.save((torch.cat([A, B, A[:1]]), compiled(torch.cat([A, B, A[:1]]))), tmp_path / "call.pt")
    script = "import sys, torch\nx, y = torch.load(sys.argv[2])\nassert torch.equal(torch.jit.load(sys.argv[1])(x), y)\n"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, tmp_path / "model.pt", tmp_path / "call.pt"],
        check=True,
        timeout=LIMIT_S,
    )


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded], ids=["deepcopy", "saved and loaded"])
def test_dynamic_batching_is_copied_and_saved(host, copied):
    """A copy from before the setting does not have it; a copy from after it does."""
    compiled = host.trace(linear(), A)
    before = copied(compiled)
    after = copied(host.dynamic_batch(compiled))
    assert after(A[:1]).shape == (1, 2)
    with pytest.raises(torch.jit.Error, match="ShapeError"):
        before(A[:1])


def test_calls_from_many_threads_use_the_cores_evenly(host):
    """Each call gets its own outputs, and the cores are used in turn regardless of the calling thread."""
    placed = host.place(host.trace(linear(), A), 0, 4)
    start = threading.Barrier(8)

    def calls(seed):
        start.wait(LIMIT_S)
        inputs = [A + seed + step for step in range(20)]
        return all(torch.equal(placed(x), linear_of(x)) for x in inputs)

    linear_of = linear()
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(calls, range(8)))
    assert inferences(host) == [40] * 4


# Placing


def test_a_placed_model_uses_its_cores_in_turn(host):
    """Each inference runs on the next core. The original model is not loaded anywhere."""
    compiled = host.trace(linear(), A)
    placed = host.place(compiled, 1, 3)
    assert placed is not compiled
    for _ in range(7):
        assert torch.equal(placed(A), linear()(A))
    assert inferences(host) == [0, 3, 2, 2]
    assert loads(host) == [0, 1, 1, 1]


def test_each_placed_model_counts_its_own_turns(host):
    """Two models on the same cores do not shift each other's turns."""
    compiled = host.trace(linear(), A)
    one, other = host.place(compiled, 0, 2), host.place(compiled, 0, 2)
    for _ in range(2):
        one(A)
        other(A)
    assert inferences(host) == [2, 2, 0, 0]


def test_every_compiled_part_of_a_module_is_placed(host):
    """Parts are found at any depth, and a repeated part is loaded once. The copy shares the module's ordinary weights."""
    first, second = host.trace(linear(), A), host.trace(nn.ReLU(), torch.zeros(2, 2))
    module = nn.Sequential(first, nn.ModuleDict({"deep": nn.Sequential(second, second)})["deep"], nn.Linear(2, 2))
    placed = host.place(module, 2, 1)
    assert loads(host) == [0, 0, 2, 0]
    assert torch.equal(placed(A), module[2](linear()(A).relu()))
    assert inferences(host) == [0, 0, 3, 0]
    assert placed[2].weight is module[2].weight


def test_a_compiled_part_of_a_scripted_module_is_placed(host):
    """A compiled model is also found inside a ScriptModule."""
    scripted = torch.jit.script(nn.Sequential(host.trace(linear(), A), nn.ReLU()))
    assert torch.equal(host.place(scripted, 3, 1)(A), linear()(A).relu())
    assert inferences(host) == [0, 0, 0, 1]


@pytest.mark.parametrize(("start", "count"), [(0, 0), (-1, 2), (3, 2), (4, 1)])
def test_a_model_is_placed_only_on_existing_cores(host, start, count):
    """The error names the cores that were asked for."""
    compiled = host.trace(linear(), A)
    with pytest.raises(DeviceUnavailableError, match=f"start={start}, count={count}: this process has 4 cores"):
        host.place(compiled, start, count)
    assert loads(host) == [0] * 4


def test_a_core_is_free_when_the_last_reference_goes(host):
    """A placed model leaves its cores at once. A call without being placed uses no core."""
    compiled = host.trace(linear(), A)
    placed, other = host.place(compiled, 0, 3), host.place(compiled, 2, 1)
    assert models(host) == [1, 1, 2, 0]
    del placed
    assert models(host) == [0, 0, 1, 0]
    assert torch.equal(other(A), compiled(A))
    assert inferences(host) == [0, 0, 1, 0]
    host.reset_stats()
    assert host.stats()[2] == CoreStats(0, 0, 1)


# One inference at a time


def test_a_core_runs_one_inference_at_a_time():
    """A call that arrives while the core is busy waits. Another core runs at the same time."""
    core, other = _double._Core(0.0), _double._Core(0.0)
    inside, leave, order = threading.Event(), threading.Event(), []

    def first():
        inside.set()
        assert leave.wait(LIMIT_S)
        order.append("first")

    with ThreadPoolExecutor(2) as threads:
        busy = threads.submit(core.run, first, (), {}, 1)
        assert inside.wait(LIMIT_S)
        pending = threads.submit(core.run, order.append, ("second",), {}, 1)
        other.run(order.append, ("other",), {}, 1)
        leave.set()
        busy.result(LIMIT_S)
        pending.result(LIMIT_S)
    assert order == ["other", "first", "second"]


def test_a_core_is_free_again_after_a_model_fails(host):
    """An error of the model reaches the caller, and the next call succeeds."""
    placed = host.place(host.trace(lambda x, index: x[:, index], (A, torch.tensor([0, 1]))), 0, 1)
    with pytest.raises(RuntimeError, match="index 7 is out of bounds"):
        placed(A, torch.tensor([7, 8]))
    assert torch.equal(placed(A, torch.tensor([2, 0])), A[:, [2, 0]])
    assert inferences(host) == [2, 0, 0, 0]


def test_a_core_starts_a_pending_call_when_the_previous_inference_ends(monkeypatch):
    """The caller sleeps for the rest of the latency. A pending call starts on the core's clock, not at its wake-up."""
    now, slept = [0.0], []

    def read():
        now[0] += 1
        return now[0] - 1

    monkeypatch.setattr(_double, "time", SimpleNamespace(perf_counter=read, sleep=slept.append))
    core = _double._Core(10.0)
    core.run(lambda: None, (), {}, 1)  # arrives at 0, starts at 0, has run by 1, ends at 10
    now[0] = 9.0
    core.run(now.__setitem__, (0, 13.0), {}, 1)  # arrives at 9, starts at 10, has run by 13, ends at 20
    core.run(now.__setitem__, (0, 41.0), {}, 1)  # arrives at 14, starts at 20, has run by 41: no sleep
    core.run(lambda: None, (), {}, 2)  # arrives at 42, starts at 42, has run by 43, ends at 62
    assert slept == [9.0, 7.0, 19.0]


def test_a_call_of_several_inferences_is_one_turn(host):
    """Dynamic batching counts each inference. A batch of zero rows runs none."""
    placed = host.dynamic_batch(host.place(host.trace(linear(), A), 0, 2))
    assert torch.equal(placed(torch.ones(9, 3)), linear()(torch.ones(9, 3)))
    assert placed(torch.ones(0, 3)).shape == (0, 2)
    assert inferences(host) == [5, 0, 0, 0]


def test_a_core_gets_contiguous_inputs(host):
    """A model that views its input runs on any strides, with and without dynamic batching."""
    compiled = host.dynamic_batch(host.trace(lambda x: x.view(2, 3, 1), torch.zeros(2, 3)))
    for rows in (2, 5):
        x = torch.arange(3.0 * rows).view(3, rows).t()
        assert torch.equal(compiled(x), x.reshape(rows, 3, 1))


def test_a_placed_model_keeps_its_dtypes_under_autocast(host):
    """The model was compiled without autocast, so the caller's autocast does not affect it."""
    placed = host.place(host.trace(linear(), A), 0, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = placed(A)
    assert torch.equal(under_autocast, linear()(A))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_finds_the_cores_free(host):
    """A lock that another thread of the parent holds does not block the child."""
    placed, expected = host.place(host.trace(linear(), A), 0, 1), linear()(A)
    (core, *_) = host._cores()
    with core._lock:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(LIMIT_S)
                code = 0 if torch.equal(placed(A), expected) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# Dynamic batching


def rowwise(x, rest):
    return {"y": torch.tanh(x * 3 + rest[0])}, [x.flip(1), rest[0].sum(1)]


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_dynamic_batching_gives_exact_rows_for_any_batch_size(host, batch):
    """From zero rows to three batches and one row, each row has the same bits as in the plain call."""
    compiled = host.dynamic_batch(host.trace(rowwise, (torch.zeros(batch, 3), (torch.zeros(batch, 3),))))
    x, other = torch.randn(3 * batch + 1, 3), torch.randn(3 * batch + 1, 3)
    for rows in range(3 * batch + 2):
        assert same(compiled(x[:rows], (other[:rows],)), rowwise(x[:rows], (other[:rows],)))


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_the_bits_of_a_row_do_not_depend_on_the_other_rows(host, batch):
    """In a batch of any size, each row has the bits that it has in a compiled batch of copies of itself."""
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5)).eval()
    compiled = host.trace(network, torch.zeros(batch, 1, 4, 4))
    images = torch.randn(3 * batch + 1, 1, 4, 4)
    alone = torch.stack([compiled(image.expand(batch, 1, 4, 4)) for image in images])
    host.dynamic_batch(compiled)
    for rows in range(1, 3 * batch + 2):
        found = compiled(images[:rows])
        assert (found[:, None] == alone[:rows]).all(dim=2).any(dim=1).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_nan_row_does_not_affect_other_rows(host, bad):
    """NaN and infinity stay in their own row, also if that row fills up a chunk."""
    compiled = host.dynamic_batch(host.trace(linear(), torch.zeros(3, 3)))
    for rows in range(1, 11):
        for place in range(rows):
            x = torch.ones(rows, 3)
            x[place] = bad
            fine = torch.isfinite(compiled(x)).all(1)
            assert fine.tolist() == [row != place for row in range(rows)]


def test_a_short_chunk_is_filled_with_rows_of_the_batch(host):
    """A model that returns the other rows of its chunk sees rows of the batch, never zeros."""
    compiled = host.dynamic_batch(host.trace(lambda x: x.t().expand(4, 4), torch.zeros(4, 1)))
    for rows in range(1, 14):
        x = torch.arange(1.0, rows + 1).view(rows, 1)
        company = compiled(x)
        assert company.shape == (rows, 4)
        assert set(company.flatten().tolist()) <= set(x.flatten().tolist())
        assert all(row + 1 in company[row] for row in range(rows))


def test_dynamic_batching_is_enabled_in_place_in_every_part(host):
    """Parts that are already loaded have it too, and the call returns the same module."""
    module = nn.Sequential(host.trace(linear(), A), host.trace(nn.ReLU(), torch.zeros(2, 2)))
    module(A)
    assert host.dynamic_batch(module) is module
    assert torch.equal(module(torch.cat([A, B, A])), linear()(torch.cat([A, B, A])).relu())


@pytest.mark.parametrize(
    ("x", "y", "says"),
    [
        (torch.zeros(5, 4), torch.zeros(5, 3), r"args\[0\] is \[5, 4\]"),
        (torch.zeros(5, 3), torch.zeros(5, 3).double(), r"args\[1\] is not of torch.float32"),
        (torch.zeros(5, 3), torch.zeros(4, 3), r"args\[1\] has 4 rows, but args\[0\] has 5"),
        (torch.tensor(1.0), torch.zeros(5, 3), r"args\[0\] is \[\]"),
    ],
    ids=["columns", "dtype", "rows", "dimensions"],
)
def test_dynamic_batching_only_frees_dim_0(host, x, y, says):
    """All inputs must have the same size on dim 0, and their compiled size elsewhere."""
    compiled = host.dynamic_batch(host.trace(torch.add, (A, B)))
    with pytest.raises(torch.jit.Error, match=f"ShapeError: {says}"):
        compiled(x, y)


@pytest.mark.parametrize(
    ("function", "args", "says"),
    [
        (torch.sum, (A,), r"output has no batch dimension"),
        (lambda x, y: x[:, :1] + y, (A, torch.tensor(1.0)), r"args\[1\] has no batch dimension"),
        (lambda x: x.t(), (A,), r"args\[0\] is compiled for 2 rows on dim 0, and output for 3"),
    ],
    ids=["output", "input", "rows"],
)
def test_dynamic_batching_is_refused_with_the_reason(host, function, args, says):
    """The error leaves every part of the module unchanged."""
    eligible, other = host.trace(linear(), A), host.trace(function, args)
    with pytest.raises(ShapeError, match=f"this model cannot use dynamic batching: .*{says}"):
        host.dynamic_batch(nn.ModuleList([eligible, other]))
    with pytest.raises(torch.jit.Error, match="ShapeError"):
        eligible(A[:1])


# Counters, and the host in use


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({}, 2),
        ({"NEURON_RT_NUM_CORES": "5"}, 5),
        ({"NEURON_RT_VISIBLE_CORES": "7-9,12"}, 4),
        ({"NEURON_RT_VISIBLE_CORES": "3", "NEURON_RT_NUM_CORES": "5"}, 1),
    ],
    ids=str,
)
def test_the_environment_sets_the_number_of_cores(monkeypatch, environment, count):
    """It is read at each use. Cores are numbered from zero within the process."""
    for name in ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"):
        monkeypatch.delenv(name, raising=False)
    host = NeuronHost()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert host.core_count() == len(host.stats()) == count
    assert NeuronHost(cores=6).core_count() == 6
    compiled = host.trace(linear(), A)
    host.place(compiled, count - 1, 1)(A)
    assert inferences(host) == [0] * (count - 1) + [1]
    with pytest.raises(DeviceUnavailableError, match=f"this process has {count} core"):
        host.place(compiled, count, 1)


def test_a_malformed_environment_is_an_error(monkeypatch):
    """The host does not guess a number of cores."""
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-")
    with pytest.raises(DeviceListError, match="NEURON_RT_VISIBLE_CORES='0-'"):
        NeuronHost().core_count()


def test_place_uses_the_hosts_own_cores(host):
    """Only a first call without placement depends on the host in use."""
    other = NeuronHost(cores=1)
    placed = other.place(host.trace(linear(), A), 0, 1)
    placed(A)
    assert (inferences(other), inferences(host)) == ([1], [0] * 4)


# Models that trace must leave alone, and parts that are not compiled


class Writing(nn.Module):
    """Writes into a buffer, fills a missing one, registers one, and writes into a plain tensor, in each call."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("table", None)
        self.seen = torch.zeros(1)

    def forward(self, x):
        self.calls += 1
        self.seen.add_(1)
        if self.table is None:
            self.table = torch.arange(3.0)
        self.register_buffer("last", x.detach().clone())
        return x * self.weight + self.calls + self.seen + self.table


@pytest.mark.parametrize("fails", [False, True])
def test_trace_leaves_the_module_as_it_was(host, fails):
    """Also if forward fills, registers, or writes tensors, and if the trace fails afterwards."""
    model = Writing()
    if fails:
        model.register_forward_hook(lambda module, args, output: 1 / 0)
    calls, seen = model.calls, model.seen
    if fails:
        with pytest.raises(ZeroDivisionError):
            host.trace(model, A)
    else:
        compiled = host.trace(model, A)
        placed = host.place(compiled, 0, 1)
        for _ in range(3):  # no state remains between inferences
            assert torch.equal(placed(A), A + 2 + torch.arange(3.0))
    assert (model.calls is calls, model.seen is seen) == (True, True)
    assert (calls.item(), seen.item(), model.table) == (0, 0, None)
    assert dict(model.named_buffers()).keys() == {"calls"}
    assert model.weight.requires_grad


def test_two_names_of_one_buffer_are_refused(host):
    """TorchScript does not support them; the error says what to do, and its cure works."""
    model = nn.Module()
    model.register_buffer("one", torch.ones(3))
    model.register_buffer("other", model.one)
    model.forward = lambda x: x + model.one
    with pytest.raises(TypeError, match=r"two names of a module hold one buffer.* Give each name a clone\(\)"):
        host.trace(model, A)


def test_dynamic_batching_is_refused_for_programs_within_other_torchscript(host):
    """A trace around a compiled model does not hide that the model mixes rows."""

    class Outer(nn.Module):
        def __init__(self, compiled):
            super().__init__()
            self.compiled = compiled

        def forward(self, x):
            return self.compiled(x)

    outer = torch.jit.trace(Outer(host.trace(lambda x: x.sum(0), A)), A)
    with pytest.raises(ShapeError, match=r"args\[0\] is compiled for 2 rows on dim 0, and output for 3"):
        host.dynamic_batch(outer)
    rowwise = torch.jit.trace(Outer(host.trace(linear(), A)), A)
    assert torch.equal(host.dynamic_batch(rowwise)(A[:1]), linear()(A)[:1])


def test_torchscript_of_the_user_next_to_a_compiled_part_stays_ordinary(host):
    """It runs on the CPU, and does not use a core."""
    module = nn.Sequential(torch.jit.script(nn.ReLU()), host.trace(linear(), A))
    assert torch.equal(host.place(module, 0, 1)(A), linear()(A.relu()))
    assert models(host) == [0] * 4
    assert loads(host) == [1, 0, 0, 0]
