"""Packing: values arrive unchanged, and UnsendableError names the address of an unsendable part."""

from __future__ import annotations

import collections
import functools
import gc
import importlib.util
import io
import os
import sys
import tempfile
import threading
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from parawrap.errors import LaunchError, UnsendableError
from parawrap.launch.messages._pickle_values import _bytes_of, memory_file, pack, unpack
from tests.helpers.processes import run_script

LOCK = threading.Lock()  # cannot be sent to another process
BIG = 1 << 21  # bytes; large enough to be memory-mapped
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.uint16,
]  # fmt: skip


def sent(value: Any) -> Any:
    """Return the value after it was packed and unpacked."""
    file = memory_file("test")
    try:
        pack(value, file, "value")
        return unpack(file)
    finally:
        os.close(file)


def refusal(value: Any, address: str = "value") -> str:
    file = memory_file("test")
    try:
        with pytest.raises(UnsendableError) as caught:
            pack(value, file, address)
    finally:
        os.close(file)
    assert isinstance(caught.value, LaunchError)
    assert isinstance(caught.value, TypeError)
    return str(caught.value)


def address_of(value: Any, address: str = "value") -> str:
    place, _, _ = refusal(value, address).partition(" cannot be sent to another process: ")
    return place


def open_files() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd" if sys.platform == "linux" else "/dev/fd").iterdir()))


def assert_same(got: torch.Tensor, tensor: torch.Tensor) -> None:
    """Check that values, dtype, shape, strides, and requires_grad are equal."""
    assert (got.dtype, got.shape, got.stride(), got.requires_grad) == (
        tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad
    )  # fmt: skip
    assert got.detach().resolve_conj().reshape(-1).tolist() == tensor.detach().resolve_conj().reshape(-1).tolist()


# -- tensors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_arrive(dtype):
    """1-d, 0-d, and empty tensors keep their values and dtype."""
    tensor = torch.tensor([0, 1, 3]).to(dtype)
    for each in (tensor, tensor[2], tensor[:0], torch.empty(0, 3, dtype=dtype)):
        assert_same(sent(each), each)


base = torch.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    "tensor",
    [base.T, base[:, ::2], base[1:3, 2:5], base[0].expand(3, 6), base.permute(1, 0)[2:], base.reshape(2, 2, 6)[1]],
    ids=["transposed", "strided", "window", "expanded", "permuted", "second half"],
)
def test_non_contiguous_tensors_keep_their_strides(tensor):
    """The memory layout of a tensor is kept."""
    assert_same(sent(tensor), tensor)


@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    dtype=st.sampled_from(DTYPES[:6]),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_any_view_of_any_tensor_arrives(shape, dtype, data):
    """Views of any shape, dtype, order of dimensions, and offset arrive."""
    tensor = torch.arange(int(np.prod(shape))).to(dtype).reshape(shape)
    tensor = tensor.permute(data.draw(st.permutations(range(tensor.ndim))))
    for dim in range(tensor.ndim):
        start = data.draw(st.integers(0, tensor.shape[dim]))
        tensor = tensor.narrow(dim, start, tensor.shape[dim] - start)
    assert_same(sent(tensor), tensor)


@pytest.mark.parametrize("size", [8, BIG], ids=["small", "mapped"])
def test_views_that_share_memory_still_share_it(size):
    """A write to one unpacked view is visible in the other, but not in the original."""
    whole = torch.zeros(size)
    got = sent({"whole": whole, "part": whole[2:4]})
    got["part"].fill_(7)
    assert got["whole"][:5].tolist() == [0, 0, 7, 7, 0]
    assert whole.sum() == 0


def filled(first: torch.Tensor, second: torch.Tensor) -> tuple[list[float], list[float]]:
    """Return two empty tensors after 1 was written into the first, and then 2 into the second."""
    torch.add(torch.zeros(1), 1, out=first)
    torch.add(torch.zeros(1), 2, out=second)
    return first.tolist(), second.tolist()


def test_empty_tensors_share_memory_only_if_they_did():
    """Two empty tensors stay apart, and two views of one empty storage stay together."""
    assert filled(*sent([torch.empty(0), torch.empty(0)])) == ([1], [2])
    assert filled(*sent([nn.Parameter(torch.empty(0), requires_grad=False) for _ in range(2)])) == ([1], [2])
    empty = torch.empty(0)
    assert filled(*sent([empty, empty.view(0)])) == filled(empty, empty.view(0)) == ([2], [2])


def test_empty_views_of_one_tensor_share_its_memory():
    """Two views without elements keep the storage that they are views of."""
    whole = torch.arange(4.0)
    first, second = sent([whole[:0], whole[3:3]])
    assert first.untyped_storage() is second.untyped_storage()
    assert first.untyped_storage().nbytes() == 16


def test_tensors_on_one_array_share_its_memory():
    """Two tensors that were made from one array share memory, although each has a storage of its own."""
    array = np.zeros(3)
    first, second = sent([torch.from_numpy(array), torch.from_numpy(array)])
    first.fill_(1)
    assert second.tolist() == [1, 1, 1]


def test_one_tensor_sent_twice_is_one_tensor():
    """Two references to one tensor stay references to one tensor."""
    tensor = torch.ones(3)
    first, second = sent([tensor, tensor])
    assert first is second


def test_tied_parameters_stay_tied():
    """A Parameter in two places of a module is still one Parameter."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    got = sent(model)
    assert got[0].weight is got[1].weight
    assert isinstance(got[0].weight, nn.Parameter)
    assert len(list(got.parameters())) == 1


def test_a_module_and_its_optimizer_hold_the_same_parameters():
    """After a module and its optimizer are sent together, an optimizer step changes the module."""
    model = nn.Linear(2, 1)
    got, optimizer = sent((model, torch.optim.SGD(model.parameters(), lr=1.0)))
    got(torch.ones(1, 2)).sum().backward()
    before = got.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(got.weight, before)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameters_stay_parameters(requires_grad):
    """Parameters with and without gradients, and integer parameters, stay parameters."""
    for data in (torch.ones(2), torch.empty(0)) if requires_grad else (torch.ones(2), torch.ones(2, dtype=torch.int64)):
        got = sent(nn.Parameter(data, requires_grad))
        assert type(got) is nn.Parameter
        assert_same(got, nn.Parameter(data, requires_grad))


def test_hooks_on_a_tensor_are_left_with_a_warning():
    """A hook of `Tensor.register_hook` is not sent, and torch's warning says so."""
    tensor = torch.ones(2, requires_grad=True)
    tensor.register_hook(print)
    with pytest.warns(UserWarning, match="backward hook .* will not be serialized"):
        assert_same(sent(tensor), tensor)


def test_a_computed_tensor_arrives_as_a_leaf():
    """The tensor still requires a gradient but has no autograd history."""
    got = sent(2 * torch.ones(2, requires_grad=True))
    assert got.requires_grad
    assert got.is_leaf
    assert got.tolist() == [2, 2]


def test_a_tensor_from_inference_mode_arrives():
    """Inference tensors arrive, although many torch functions refuse them."""
    with torch.inference_mode():
        tensor = torch.arange(3.0)
    assert sent(tensor).tolist() == [0, 1, 2]


def test_a_buffer_stays_a_buffer():
    """A buffer keeps its type and its `persistent` flag."""
    got = sent(nn.Buffer(torch.ones(2), persistent=False))
    assert isinstance(got, nn.Buffer)
    assert got.persistent is False


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor([1 + 2j, 3 - 4j]).conj(), torch.tensor([1 + 2j]).conj().imag],
    ids=["conj", "neg"],
)
def test_lazily_computed_tensors_arrive(tensor):
    """Tensors with the conjugate or negative bit keep their values."""
    assert sent(tensor).tolist() == tensor.tolist()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.zeros(2, 2).to_sparse(),
    ],
)
def test_sparse_tensors_arrive(tensor):
    """Sparse tensors keep their layout and values."""
    got = sent(tensor)
    assert got.layout is tensor.layout
    assert torch.equal(got.detach().to_dense(), tensor.detach().to_dense())


@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant):UserWarning")
def test_compressed_sparse_tensors_arrive():
    """CSR tensors keep their layout and values."""
    got = sent(torch.eye(3).to_sparse_csr())
    assert got.layout is torch.sparse_csr
    assert torch.equal(got.to_dense(), torch.eye(3))


@pytest.mark.filterwarnings("ignore:.*quantize.*")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_quantised_tensors_arrive():
    """Quantised tensors keep their scale, zero point, and values."""
    tensor = torch.quantize_per_tensor(torch.tensor([0.0, 0.5, 1.0]), 0.5, 3, torch.quint8)
    got = sent(tensor)
    assert (got.q_scale(), got.q_zero_point(), got.int_repr().tolist()) == (0.5, 3, [3, 4, 5])


def test_meta_tensors_arrive():
    """Meta tensors keep their shape and dtype and use no memory."""
    got = sent(torch.empty(1 << 20, 1 << 20, device="meta", dtype=torch.bfloat16))
    assert (got.device.type, got.shape, got.dtype) == ("meta", (1 << 20, 1 << 20), torch.bfloat16)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_arrive(layout):
    """Nested tensors keep rows of different lengths."""
    got = sent(torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=layout))
    assert [row.tolist() for row in got.unbind()] == [[1, 1], [0, 0, 0]]


def test_attributes_of_a_tensor_arrive():
    """Attributes that a user set on a tensor or parameter arrive."""
    tensor, parameter = torch.ones(2), nn.Parameter(torch.ones(2))
    tensor.origin, parameter.frozen = "weights", True
    got, got_parameter = sent((tensor, parameter))
    assert (got.tolist(), got.origin) == ([1, 1], "weights")
    assert (type(got_parameter), got_parameter.frozen) == (nn.Parameter, True)


class Image(torch.Tensor):
    """A tensor subclass such as torchvision's."""


def test_tensor_subclasses_keep_their_type():
    """An instance of a subclass keeps its type, values, and attributes."""
    image = torch.arange(4.0).as_subclass(Image)
    image.format = "xyxy"
    got = sent(image)
    assert (type(got), got.format, got.tolist()) == (Image, "xyxy", [0, 1, 2, 3])


def test_storages_arrive():
    """A storage without a tensor arrives."""
    assert list(sent(torch.tensor([1, 2], dtype=torch.uint8).untyped_storage())) == [1, 2]


def test_unpacked_values_are_writable():
    """Small and memory-mapped tensors and arrays are private, writable memory."""
    for size in (4, BIG):
        got = sent((torch.zeros(size), np.zeros(size)))
        got[0].add_(1)
        got[1][:] = 2
        assert (got[0][-1].item(), got[1][-1]) == (1, 2)


# -- arrays


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(6)[::2],
        np.array(5.0),
        np.empty((0, 3)),
        np.array(["a", None, 3], dtype=object),
        np.array([(1, 2.0)], dtype=[("i", "i4"), ("x", "f8")]),
        np.array(["2024-01-01"], dtype="datetime64[D]"),
        np.ma.masked_array([1, 2], [False, True]),
    ],
    ids=["c", "fortran", "strided", "0-d", "empty", "objects", "records", "dates", "masked"],
)
def test_arrays_arrive(array):
    """Arrays keep their values, dtype, and memory order."""
    got = sent(array)
    assert (type(got), got.dtype, got.shape, got.tolist()) == (type(array), array.dtype, array.shape, array.tolist())
    assert got.flags.f_contiguous == array.flags.f_contiguous or not array.flags.contiguous


def test_read_only_arrays_stay_read_only():
    """The writeable flag of an array is kept."""
    array = np.arange(3)
    array.setflags(write=False)
    assert not sent(array).flags.writeable


def test_one_value_uses_one_descriptor():
    """A value with many tensors and arrays uses one descriptor, which is closed with the last of them."""
    before = open_files()
    got = sent([torch.zeros(BIG // 4), np.zeros(BIG // 8)] + [torch.zeros(100) for _ in range(50)])
    assert open_files() - before == 1
    del got[1:]
    assert open_files() - before == 1
    got.clear()
    assert open_files() == before


@pytest.mark.parametrize("value", [[torch.ones(10)] * 3, {"lock": LOCK}, torch.zeros(BIG)], ids=["small", "refused", "big"])
def test_packing_leaks_no_descriptors(value):
    """Descriptors are closed after values are deleted and after a refusal."""
    before = open_files()
    for _ in range(5):
        (refusal if isinstance(value, dict) else sent)(value)
    assert open_files() == before


@pytest.mark.parametrize("size", [16, BIG], ids=["small", "mapped"])
def test_several_threads_can_read_one_file(size):
    """Each reader gets the whole value, and writes by one reader are not visible to the others."""
    file = memory_file("test")
    pack([torch.arange(size), "text"], file, "value")
    gate, got = threading.Barrier(4), []

    def read() -> None:
        gate.wait()
        value = unpack(file)
        value[0][0] += 1
        got.append(value)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    os.close(file)
    assert [(value[0][0].item(), value[0][-1].item(), value[1]) for value in got] == [(1, size - 1, "text")] * 4


# -- other values


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.complex_numbers(
        allow_nan=False
    ),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    | st.tuples(inner, inner)
    | st.lists(inner, max_size=3).map(collections.deque)
    | st.binary().map(bytearray),
    max_leaves=12,
)  # fmt: skip


@given(value=values)
@settings(max_examples=60, deadline=None)
def test_any_nested_value_arrives(value):
    """Nested values keep their values and types."""
    got = sent(value)
    assert got == value
    assert repr(got) == repr(value)


def test_lambdas_and_closures_arrive():
    """Lambdas and closures keep their captured variables and defaults."""
    step = torch.tensor(3)

    def add(x, by=2):
        return x + by + int(step)

    double, got = sent((lambda x: 2 * x, add))
    assert (double(4), got(1), got(1, by=0)) == (8, 6, 4)


def test_local_classes_arrive():
    """Local classes, their methods, and their instances arrive."""

    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def up(self) -> int:
            self.count += 1
            return self.count

    cls, counter = sent((Counter, Counter()))
    assert type(counter) is cls
    assert [counter.up(), counter.up(), cls().up()] == [1, 2, 1]


def test_a_cycle_arrives_as_a_cycle():
    """A list that contains itself still contains itself."""
    ring: list[Any] = [1]
    ring.append(ring)
    got = sent(ring)
    assert got[1] is got


def test_a_file_is_only_slightly_larger_than_its_tensors():
    """Tensor memory is written once, with a small pickle."""
    file = memory_file("test")
    pack(torch.zeros(BIG, dtype=torch.uint8), file, "value")
    written = os.fstat(file).st_size
    assert BIG <= written < BIG + 4096
    os.close(file)


# -- modules and operators


class Settings(types.ModuleType):
    """A module of a class of its own, like those of torch.backends."""

    def __getattr__(self, name):
        raise AttributeError(name)


class Namespace:
    """An object that a library puts into sys.modules."""

    __name__ = "namespace_of_a_library"


@pytest.mark.parametrize(
    "value",
    [
        torch.backends, torch.backends.cudnn, torch.backends.mkldnn, torch.utils.deterministic, torch.ops, torch.ops.aten,
        torch.ops.aten.add, torch.ops.aten.add.Tensor, torch.ops.higher_order, torch.ops.higher_order.cond, torch.classes,
        torch._dynamo.config,
    ],
    ids=lambda value: value.__name__,
)  # fmt: skip
def test_modules_and_operators_of_torch_are_sent_by_name(value):
    """The reader gets its own module or operator, also if the class of the module cannot be pickled."""
    assert sent([value])[0] is value


@pytest.mark.parametrize("kind", [Settings, lambda name: Namespace()], ids=["module", "object"])
def test_what_stands_for_a_module_is_sent_by_name(monkeypatch, kind):
    """An object that stands in `sys.modules` under its own name is the reader's module of that name."""
    module = kind("namespace_of_a_library")
    monkeypatch.setitem(sys.modules, "namespace_of_a_library", module)
    assert sent([module])[0] is module


def test_packing_does_not_load_a_lazy_module(monkeypatch, tmp_path):
    """A module of `importlib.util.LazyLoader` is loaded by its first use, not by sending it."""
    (tmp_path / "lazily.py").write_text("raise RuntimeError('loaded')")
    spec = importlib.util.spec_from_file_location("lazily", tmp_path / "lazily.py")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "lazily", module)
    file = memory_file("test")
    pack([module], file, "value")
    os.close(file)


def test_a_module_that_cannot_be_imported_is_sent_with_its_content():
    """A module that a program made, and that is not in `sys.modules`, arrives as a copy. What it cannot send is named."""
    module = types.ModuleType("made_by_hand")
    module.rate = 3
    assert sent(module).rate == 3
    module.lock = LOCK
    assert address_of([module]) == "value[0].lock"
    assert address_of([Settings("made_by_hand")]) == "value[0]"


# -- unsendable values


class Holder:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def method(self) -> None: ...


class Slotted:
    __slots__ = ("__hidden", "name", "part")

    def __init__(self, part: Any = None, hidden: Any = None) -> None:
        self.part = part
        self.__hidden = hidden


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Record:
    inner: Any


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = LOCK


class Key:
    def __init__(self, lock: Any) -> None:
        self.lock = lock

    def __repr__(self) -> str:
        return "Key()"


def capturing(part: Any) -> Any:
    return lambda: part


def defaulting(part: Any) -> Any:
    return lambda x=part, *, y=1: (x, y)


def defaulting_by_keyword(part: Any) -> Any:
    return lambda x=1, *, y=part: (x, y)


def generator() -> Any:
    yield 1


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.origin = LOCK
    return tensor


def ring_with_lock() -> list[Any]:
    ring: list[Any] = []
    ring += [ring, {"back": ring, "lock": LOCK}]
    return ring


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"lock": LOCK}, "value['lock']"),
        ([1, (2, {"steps": [3, LOCK]})], "value[1][1]['steps'][1]"),
        ({0: {("a", 1): LOCK}}, "value[0][('a', 1)]"),
        (Pair(1, LOCK), "value[1]"),
        (Record(Record(LOCK)), "value.inner.inner"),
        (Holder(net=Holder(lock=LOCK)), "value.net.lock"),
        (Slotted(part=[LOCK]), "value.part[0]"),
        (Slotted(hidden=LOCK), "value._Slotted__hidden"),
        (capturing(LOCK), "the variable 'part' captured by value"),
        (capturing({"a": LOCK}), "['a'] of the variable 'part' captured by value"),
        ([capturing(capturing(LOCK))], "the variable 'part' captured by the variable 'part' captured by value[0]"),
        (lambda: LOCK, "the global 'LOCK' used by value"),
        (defaulting(LOCK), "the default of value's parameter 'x'"),
        (defaulting_by_keyword(LOCK), "the default of value's parameter 'y'"),
        (functools.partial(print, 1, LOCK), "value.args[1]"),
        (functools.partial(print, file=LOCK), "value.keywords['file']"),
        (functools.partial(capturing(LOCK)), "the variable 'part' captured by value.func"),
        (Holder(lock=LOCK).method, "value.__self__.lock"),
        ({Key(LOCK): 1}, ".lock of the key Key() of value"),
        ({1, Key(LOCK)}, ".lock of a member of value"),
        ([generator()], "value[0]"),
        ((each for each in ()), "value"),
        ([io.StringIO, sys.stderr.buffer if hasattr(sys.stderr, "buffer") else sys.__stderr__], "value[1]"),
        ([torch.ones(1), with_attribute(torch.ones(1))], "value[1].origin"),
        (nn.Sequential(Locked()), "value[0].lock"),
        (ring_with_lock(), "value[1]['lock']"),
        (collections.deque([1, LOCK]), "value[1]"),
        (collections.defaultdict(capturing(LOCK)), "the variable 'part' captured by an argument that makes value"),
        (types.SimpleNamespace(lock=LOCK), "value.lock"),
    ],
)
def test_an_unsendable_part_is_named_by_its_address(value, place):
    """The address is the expression of the innermost part."""
    assert address_of(value) == place


@pytest.mark.parametrize("mode", ["r", "w", "r+", "rb", "wb", "r+b"])
def test_open_files_are_refused(tmp_path, mode):
    """No file object is sent: neither its content nor the object. The message says what to send."""
    (tmp_path / "data.txt").write_text("1 2 3")
    with (tmp_path / "data.txt").open(mode) as file:
        assert address_of({"files": [file]}) == "value['files'][0]"
        assert address_of(capturing(file)) == "the variable 'part' captured by value"
        assert "an open file belongs to its process: send the path, and open the file there" in refusal(file)
    with tempfile.NamedTemporaryFile("w+") as file:
        assert address_of([file]) == "value[0].file"


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_standard_streams_are_those_of_the_reader(monkeypatch, name):
    """`sys.stdout` and `sys.stderr` stand for the streams of the process that unpacks them."""
    with Path(os.devnull).open("w") as ours, Path(os.devnull).open("w") as theirs:
        monkeypatch.setattr(sys, name, ours)
        file = memory_file("test")
        try:
            pack([ours], file, "value")
            monkeypatch.setattr(sys, name, theirs)
            assert unpack(file) == [theirs]
        finally:
            os.close(file)


def test_addresses_of_arguments_start_with_args_or_kwargs():
    """In a call, addresses start with ``args``, ``kwargs``, or "the function"."""
    assert address_of({"args": ({"lock": LOCK},), "kwargs": {}}, "") == "args[0]['lock']"
    assert address_of({"args": (), "kwargs": {"out": LOCK}}, "") == "kwargs['out']"
    assert address_of({"the function": lambda: LOCK, "args": ()}, "") == "the global 'LOCK' used by the function"


def test_the_message_has_type_and_reason():
    """The message has the type of the part and the reason from pickle."""
    message = refusal([LOCK])
    assert message.startswith("value[0] cannot be sent to another process: lock: cannot pickle '_thread.lock' object (docs")


def test_the_message_has_the_text_of_a_class_that_refuses():
    """If a class raises when it is pickled, the message contains its text."""

    class Session:
        def __reduce__(self):
            msg = "a session stays where it is"
            raise RuntimeError(msg)

    assert "a session stays where it is" in refusal([Session()])
    assert "Session" in refusal([Session()])


def test_the_pickling_error_is_the_cause():
    """``__cause__`` is the exception that pickle raised."""
    file = memory_file("test")
    with pytest.raises(UnsendableError) as caught:
        pack([LOCK], file, "value")
    os.close(file)
    assert isinstance(caught.value.__cause__, TypeError)


def test_attributes_omitted_by_getstate_are_not_named():
    """The address does not name an attribute that ``__getstate__`` leaves out."""

    class Careful:
        def __init__(self) -> None:
            self.lock = LOCK
            self.rows = [generator()]

        def __getstate__(self):
            return {"rows": self.rows}

    assert "lock" not in address_of([Careful()])


def test_a_class_with_a_part_that_cannot_be_sent_is_named():
    """A class that is pickled by value is named if one of its attributes cannot be sent."""

    class Config:
        lock = LOCK

    assert address_of({"args": (Config,)}, "").startswith("args[0]")


def test_globals_of_an_inner_function_are_named():
    """A global that only an inner function uses is named."""
    assert "'LOCK'" in address_of(lambda: [LOCK for _ in range(3)] and (lambda: LOCK))


def test_a_captured_variable_without_a_value_is_skipped():
    """The search skips a captured variable that was never assigned."""

    def outer():
        def inner():
            return never, lock

        lock = LOCK
        if lock is None:
            never = 1
        return inner

    assert address_of(outer()) == "the variable 'lock' captured by value"


def test_an_attribute_that_cannot_be_read_does_not_hide_the_address():
    """The search continues if reading an attribute raises."""

    class Moody:
        __slots__ = ("lock",)

        def __getattr__(self, name):
            msg = f"{name} is not there today"
            raise ValueError(msg)

    assert address_of([Moody()]) == "value[0]"


def test_a_value_nested_too_deeply_raises():
    """A RecursionError while pickling becomes an UnsendableError."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert "recursion" in refusal(deep)


def test_memory_keeps_its_storage():
    """The memory of a tensor from another device is that of a copy, which nothing else refers to."""
    storage = torch.arange(3).untyped_storage()
    references = sys.getrefcount(storage)
    memory = _bytes_of(storage)
    assert sys.getrefcount(storage) == references + 1
    del memory
    assert sys.getrefcount(storage) == references


# -- what decorators make of the script's functions

SCRIPT = """
import functools, typing, torch
from parawrap import Platform, UnsendableError, wrapper
import operators

@functools.cache
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

@functools.lru_cache(maxsize=3, typed=True)
def square(n):
    return n * n

class Table:
    @functools.cached_property
    def rows(self):
        return [1]

    @functools.singledispatchmethod
    def kind(self, value):
        return "object"

    @kind.register
    def _(self, value: int):
        return "integer"

@functools.singledispatch
def describe(value):
    return "object"

@describe.register
def _(value: int):
    return "integer"

@describe.register
def _(value: list):
    return [describe(each) for each in value]

UserId = typing.NewType("UserId", int)
P = typing.ParamSpec("P")
twice = functools.partial(square, 2)

@torch.compile
def compiled(x):
    return x + 1

@torch.library.custom_op("of_script::increment", mutates_args=())
def operator(x: torch.Tensor) -> torch.Tensor:
    return x + 1

@torch.jit.script
def scripted(x: torch.Tensor):
    return x + 1

def use_all():
    table = Table()
    texts = describe([1, "a"]), P.__name__, UserId.__supertype__.__name__
    same = describe.__module__ == square.__module__ == "__main__"
    numbers = fibonacci(30), square.cache_parameters()["maxsize"], square(3), twice(), UserId(4)
    rows = table.rows, table.rows is table.rows
    return *texts, table.kind(1), same, *numbers, *rows, operators.increment(torch.ones(1)).item()

def use_imported():
    from_module = operator_of_module, jitted_of_module
    return [each(torch.ones(1)).item() for each in from_module]

from operators import increment as operator_of_module, jitted as jitted_of_module

if __name__ == "__main__":
    launched = [wrapper(Platform(device="cpu", verbose=False))(each) for each in (use_all, use_imported)]
    for each in launched:
        print(each()[0])
    for each in (compiled, operator, scripted):
        try:
            wrapper(Platform(device="cpu", verbose=False))(lambda: each)()
        except UnsendableError as error:
            print(error)
"""
OPERATORS = """
import torch

@torch.library.custom_op("of_module::increment", mutates_args=())
def increment(x: torch.Tensor) -> torch.Tensor:
    return x + 1

@torch.jit.script
def jitted(x: torch.Tensor):
    return x + 1
"""


@pytest.fixture(scope="module")
def decorated(tmp_path_factory):
    """The lines that the script prints."""
    folder = tmp_path_factory.mktemp("decorated")
    (folder / "operators.py").write_text(OPERATORS)
    return run_script(folder, SCRIPT).splitlines()


def test_decorated_functions_of_the_script_arrive(decorated):
    """Caches, cached properties, dispatching functions, and types work in ranks as in the script."""
    numbers = 832040, 3, 9, 4, 4
    assert decorated[0] == str((["integer", "object"], "P", "int", "integer", True, *numbers, [1], True, 2.0))


def test_operators_of_modules_arrive(decorated):
    """Custom operators and scripted functions that a module defines are sent by name."""
    assert decorated[1] == "[2.0, 2.0]"


def test_functions_that_cannot_be_sent_name_the_cure(decorated):
    """Compiled functions, custom operators, and scripted functions of the script belong into a module."""
    assert len(decorated) == 5
    for line in decorated[2:]:
        assert line.startswith("the global 'each' used by the function cannot be sent")
        assert "define it in a module, and import it from there" in line
