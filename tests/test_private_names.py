"""The private names of torch and Python: where they may stand, what each does today, and what happens without it."""

from __future__ import annotations

import ast
import sys
import tempfile
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch.nn import BatchNorm2d, Linear, Sequential, SyncBatchNorm
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import parawrap
from parawrap import VersionError, parallel
from parawrap._private_name import private_attribute, private_name, private_reader
from parawrap.backends import _private_names as of_backends
from parawrap.functional import _private_names as of_functional
from parawrap.lanes import _private_names as of_lanes
from parawrap.launch import _private_names as of_launch
from parawrap.replicas import _private_names as of_replicas
from tests.helpers.processes import run_script

PACKAGE = Path(parawrap.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {file: ast.parse(file.read_text()) for file in FILES}

# Documented, in spite of the underscore
DOCUMENTED = {"_asdict", "_exit", "_fields", "_getframe", "_current_frames", "_replace", "_xoptions"}
# Private names of optional packages, in the only file that uses them
OF_OTHERS = {
    "_batch_job.py": {"_get_default_parameters", "_make_sbatch_string"},
    "xla_backend.py": {"_XLAC", "_xla_sync_multi"},
    "_geometric_batches.py": {"_inc_dict", "_key", "_slice_dict"},
    "_transformers_caches.py": {"_quantized_keys"},
    "collate.py": {"torch.utils.data._utils"},
}
OF_MODULES = {"_parameters", "_buffers", "_modules"}
CANARIES = {}


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined_names(room):
    """The names that one package of parawrap defines, as functions, classes, variables, or attributes."""
    found = set()
    for file, tree in TREES.items():
        for node in ast.walk(tree) if file.parent == room else ():
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                    found.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
    return found


OURS = {room: defined_names(room) - {"_version"} for room in {file.parent for file in FILES}}


def private_attributes(file):
    """Yield the private names of objects other than parawrap's, and the private modules that are imported."""
    ours = OURS[file.parent] - OF_MODULES
    for node in ast.walk(TREES[file]):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) if is_private(name) and name not in ours:
                yield name
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] != "parawrap":
                if any(map(is_private, module.split("."))):
                    yield module
                yield from (each.name for each in node.names if is_private(each.name))
            case ast.Constant(value=str(name)) if name in NAMES:
                yield name


def names_in(file):
    """The private names in one file `_private_names.py`: the last part of each path, attributes, and strings."""
    for node in ast.walk(TREES[file]):
        match node:
            case ast.Constant(value=str(text)) if text.isidentifier() and is_private(text):
                yield text
            case ast.Call(
                func=ast.Name(id="private_name" | "private_reader" | "_name"), args=[ast.Constant(value=str(path)), *_]
            ):
                yield path.rpartition(".")[2]
            case ast.Call(func=ast.Name(id="private_attribute"), args=[_, ast.Constant(value=str(name)), _]):
                yield name
            case ast.Attribute(attr=name) if is_private(name):
                yield name


LISTS = {file: set(names_in(file)) for file in FILES if file.name == "_private_names.py"}
NAMES = set().union(*LISTS.values())


def test_only_the_lists_hold_them():
    """A private name of torch or Python stands in the file `_private_names.py` of its package, and nowhere else."""
    for file in set(FILES) - set(LISTS):
        assert set(private_attributes(file)) - DOCUMENTED - OF_OTHERS.get(file.name, set()) == set(), file


def test_contributing_lists_them():
    """CONTRIBUTING.md has one row for each name and room."""
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    section = text.partition("## Private names")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:4] for line in section.splitlines() if line.startswith("| `")]
    listed = {
        (name.strip(" `"), each.strip()) for names, room, _ in rows for name in names.split(",") for each in room.split(",")
    }
    assert listed == {(name, file.parent.name) for file, names in LISTS.items() for name in names}


def canary(*names):
    """Mark the test of what these names do today."""

    def mark(test):
        CANARIES.update(dict.fromkeys(names, test))
        return test

    return mark


def test_every_name_has_a_canary():
    """No private name is used without a test of what it does."""
    assert set(CANARIES) == NAMES


# What each name does today. A failure names the feature that a new release of torch or Python would break.


@canary("DeviceContext", "_get_current_function_mode_stack")
def test_default_devices_are_seen():
    """Lanes use the caller's default device. Other function modes make a call plain."""
    assert of_lanes.function_modes() == []
    with torch.device("meta"):
        (mode,) = of_lanes.function_modes()
    assert isinstance(mode, of_lanes.DeviceContext)
    assert mode.device == torch.device("meta")


@canary("_len_torch_dispatch_stack")
def test_dispatch_modes_are_seen():
    """A call under a dispatch mode, such as a FLOP counter, is plain."""
    assert of_lanes.dispatch_modes() == 0
    with TorchDispatchMode():
        assert of_lanes.dispatch_modes() == 1


@canary("_top_saved_tensors_default_hooks")
def test_hooks_on_saved_tensors_are_seen():
    """A call under hooks on saved tensors is plain."""
    assert of_lanes.saved_tensor_hooks(False) is None
    with torch.autograd.graph.save_on_cpu():
        assert of_lanes.saved_tensor_hooks(False) is not None


@canary("peek_interpreter_stack")
def test_functorch_is_seen():
    """A call inside vmap or grad is plain."""
    seen = []

    def square(x):
        seen.append(of_lanes.functorch_level())
        return x * x

    torch.func.vmap(square)(torch.ones(2))
    assert of_lanes.functorch_level() is None
    assert seen[0] is not None


@canary("_current_level")
def test_forward_autograd_is_seen():
    """A call under forward-mode autograd is plain."""
    assert of_lanes.forward_ad_level() == -1
    with torch.autograd.forward_ad.dual_level():
        assert of_lanes.forward_ad_level() == 0


@canary("_profiler_enabled")
def test_profilers_are_seen():
    """A profiler shows the operators of lanes, because a call under it runs in the caller's thread."""
    assert not of_lanes.profiler_runs()
    with profile(activities=[ProfilerActivity.CPU]):
        assert of_lanes.profiler_runs()


@canary("_version")
def test_tensors_count_writes():
    """Replicas on other devices are renewed after a write in place."""
    tensor = torch.zeros(2)
    before = of_replicas.version_of(tensor)
    tensor.add_(1)
    assert of_replicas.version_of(tensor) == before + 1


@canary("_indices", "_values")
def test_sparse_tensors_have_parts():
    """The memory of a sparse tensor that is not coalesced belongs to its indices and values."""
    sparse = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,), is_coalesced=False)
    assert torch.equal(of_backends.indices_of(sparse)(), torch.tensor([[1, 1]]))
    assert torch.equal(of_backends.values_of(sparse)(), torch.tensor([2.0, 3.0]))


@canary("_parameters", "_buffers", "_modules")
def test_modules_keep_three_dictionaries():
    """Replicas follow new parameters, buffers, and submodules; messages of launches name them without the dictionary."""
    module = BatchNorm2d(2)
    assert set(vars(module)[of_replicas.PARAMETERS]) == {"weight", "bias"}
    assert set(vars(module)[of_replicas.BUFFERS]) == {"running_mean", "running_var", "num_batches_tracked"}
    assert set(vars(Sequential(module))[of_replicas.CHILDREN]) == {"0"}
    assert of_replicas.buffers_of(module) is vars(module)[of_replicas.BUFFERS]
    assert of_replicas.children_of(module) is vars(module)[of_replicas.CHILDREN]
    assert set(of_launch.REGISTERED_BY_MODULES) == {of_replicas.PARAMETERS, of_replicas.BUFFERS, of_replicas.CHILDREN}


@canary("_is_replica")
def test_modules_know_that_they_are_replicas():
    """Torch warns if zero_grad is called on a replica, where it has no effect."""
    module = Linear(2, 2)
    setattr(module, of_replicas.IS_REPLICA, True)
    with pytest.warns(UserWarning, match="zero_grad"):
        module.zero_grad()


@canary(
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_non_persistent_buffers_set",
)
def test_attributes_calls_do_not_read():
    """Replicas share these attributes, so that they are made faster."""
    assert set(vars(Linear(2, 2))) >= of_replicas.NOT_CALLED


@canary("_make_subclass")
def test_a_subclass_is_no_view():
    """A tensor of another class shares memory and version with the first, and a write leaves its place in the graph."""

    class Link(torch.autograd.Function):
        @staticmethod
        def forward(_, tensor):
            return of_replicas.make_subclass(torch.nn.Parameter, tensor.detach())

        @staticmethod
        def backward(_, gradient):
            return gradient

    weight = torch.nn.Parameter(torch.ones(2))
    linked = Link.apply(weight)
    node = linked.grad_fn
    with torch.no_grad():
        weight.mul_(3)
    assert isinstance(linked, torch.nn.Parameter)
    assert linked.tolist() == [3, 3]
    assert linked._version == weight._version
    assert linked.grad_fn is node


@canary("_foreach_copy_")
def test_many_tensors_are_copied_at_once():
    """Small parameters are copied together."""
    copies, originals = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.ones(3)]
    of_replicas.copy_all(copies, originals)
    assert all(map(torch.equal, copies, originals))


@canary("_compiled_call_impl")
def test_a_module_keeps_its_compiled_call():
    """Lanes run the uncompiled code of a module whose `compile` was called."""
    module = Linear(2, 2)
    assert getattr(module, of_replicas.COMPILED_CALL) is None
    module.compile(backend="eager")
    assert getattr(module, of_replicas.COMPILED_CALL) is not None


@canary("_torchdynamo_orig_callable")
def test_a_compiled_function_has_its_original():
    """Lanes run the uncompiled code of a compiled function."""

    def double(x):
        return x * 2

    assert getattr(torch.compile(double, backend="eager"), of_replicas.COMPILED_FROM) is double


@canary("_orig_mod", "dynamo_ctx", "OptimizedModule")
def test_a_compiled_module_is_compiled_again():
    """Each replica of a compiled module compiles its own copy of the module."""
    model = Linear(2, 2)
    compiled = torch.compile(model, backend="eager")
    assert of_replicas.compiler() is sys.modules["torch._dynamo"]
    assert of_replicas.is_compiled_module(type(compiled))
    assert getattr(compiled, of_functional.COMPILED) is model
    copy = type(compiled).__new__(type(compiled))
    replica = Linear(2, 2)
    of_replicas.recompiled(copy, compiled, {model: replica}.__getitem__)
    x = torch.ones(1, 2)
    assert torch.equal(copy(x), replica(x))


@canary("_is_full_backward_hook", "_replicate_for_data_parallel", "_c", "_type", "from_jit_type")
def test_scripted_modules_are_copied():
    """Replicas of a scripted module share its code, and have attributes of their own."""
    module = torch.jit.script(Linear(2, 2))
    copy = of_replicas.replicate_script(module)
    copy.weight = torch.nn.Parameter(torch.zeros(2, 2))
    assert module.weight.any()
    readers = of_replicas.getters_of_script(module)
    assert {"weight", "bias", "training", of_replicas.HOOK_KIND} <= set(readers)
    assert torch.equal(readers["weight"](), module.weight)


@canary("_BatchNorm")
def test_batch_norms_have_one_base():
    """`to(sync_batch_norm=True)` and its check see every batch norm, also of a user's own class."""
    assert all(isinstance(each, of_functional.BatchNorm) for each in (BatchNorm2d(2), SyncBatchNorm(2)))
    assert not isinstance(Linear(2, 2), of_functional.BatchNorm)


@canary("_clear", "_run_exitfuncs")
def test_exit_handlers(tmp_path):
    """A rank runs its exit handlers before it exits. A fork of the user's process does not run the user's."""
    script = """
import atexit
from parawrap.launch._private_names import forget_exit_handlers, run_exit_handlers
atexit.register(print, "forgotten")
forget_exit_handlers()
atexit.register(print, "once")
run_exit_handlers()
"""
    assert run_script(tmp_path, script).split() == ["once"]


@canary("_finalizer_registry", "_exit_function")
def test_multiprocessing_finalizers(tmp_path):
    """A fork of the launching process runs the finalizers that it makes itself."""
    script = """
from multiprocessing.util import Finalize
from parawrap.launch._private_names import forget_exit_handlers, forget_finalizers
Finalize(None, print, ("parent",), exitpriority=1)
forget_exit_handlers()
forget_finalizers()
Finalize(None, print, ("fork",), exitpriority=1)
"""
    assert run_script(tmp_path, script).split() == ["fork"]


@canary("_registry")
def test_finalizers_before_a_fork(tmp_path):
    """Ranks run the finalizers that their function makes, and not those of the modules that the warm process imported."""
    script = """
import weakref
from parawrap.launch._private_names import keep_finalizers_from_exits
class Owner:
    pass
imported, owned = Owner(), Owner()
weakref.finalize(imported, print, "imported")
keep_finalizers_from_exits()
weakref.finalize(owned, print, "owned")
"""
    assert run_script(tmp_path, script).split() == ["owned"]


@canary("_registry", "_registered_with_atexit")
def test_finalizers_of_a_parent(tmp_path):
    """A forked rank runs its own finalizers at exit, and not those of the user's process."""
    script = """
import weakref
from parawrap.launch._private_names import forget_exit_handlers, forget_finalizers, run_exit_handlers
class Owner: pass
first, second = Owner(), Owner()
weakref.finalize(first, print, "forgotten")
forget_exit_handlers()
forget_finalizers()
weakref.finalize(second, print, "once")
run_exit_handlers()
"""
    assert run_script(tmp_path, script).split() == ["once"]


@canary("_TemporaryFileWrapper")
def test_temporary_files():
    """A rank finds open temporary files by their class, and removes them."""
    with tempfile.NamedTemporaryFile() as file:
        assert type(file) is of_launch.TEMPORARY_FILE


@canary("_shutdown")
def test_threads_are_joined(tmp_path):
    """A rank ends when the threads of its function end. Idle workers of thread pools do not hold it."""
    script = """
import threading
from concurrent.futures import ThreadPoolExecutor
from parawrap.launch._private_names import join_threads
pool = ThreadPoolExecutor(1)
pool.submit(print, "pool").result()
go = threading.Event()
threading.Thread(target=lambda: (go.wait(), print("thread"))).start()
threading.Timer(0.1, go.set).start()
join_threads()
print("joined")
"""
    assert run_script(tmp_path, script).split() == ["pool", "thread", "joined"]


@canary("_world", "_get_sequence_number_for_group")
def test_groups_count_their_operations(tmp_path):
    """Ranks that stay notice groups that are out of step: torch counts groups, and each group its operations."""
    script = """
import torch
import torch.distributed as dist
from parawrap.launch._private_names import groups_of_process, number_of_groups, sequence_number_of
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert groups_of_process() == [dist.group.WORLD]
before = sequence_number_of(dist.group.WORLD), number_of_groups()
dist.all_reduce(torch.ones(1))
dist.new_group([0])
after = sequence_number_of(dist.group.WORLD), number_of_groups()
print(all(second > first for first, second in zip(before, after)))
dist.destroy_process_group()
"""
    assert run_script(tmp_path, script).split() == ["True"]


# Without a name


def test_imports_without_any_name(tmp_path):
    """If all names are missing, every module imports. What needs a name raises VersionError; the rest works."""
    script = """
import importlib, pkgutil, sys
import torch

def missing(path):
    raise AttributeError(path)

pkgutil.resolve_name = missing
import parawrap
for module in pkgutil.walk_packages(parawrap.__path__, "parawrap."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(parawrap.default_collate(2)([torch.ones(1), torch.ones(1)]))
with parawrap.parallel(torch.nn.Linear(2, 2), ["cpu", "cpu"]) as p:
    try:
        p(torch.ones(9, 2))
    except parawrap.VersionError as error:
        print(error)
"""
    collated, error = run_script(tmp_path, script, fresh=True).splitlines()
    assert collated == "(tensor([[1.]]), tensor([[1.]]))"
    assert error.startswith("lanes need torch.")
    assert f"with torch {torch.__version__.partition('+')[0]}" in error


@pytest.mark.parametrize("name", [name for name in of_lanes.__all__ if name != "DeviceContext"])
def test_a_call_without_a_name_is_refused(name, monkeypatch):
    """If lanes cannot see one kind of watcher, a call raises VersionError instead of running where it is not seen."""
    monkeypatch.setattr(f"parawrap.lanes._thread_modes.{name}", private_name("torch.gone", "lanes"))
    model = Linear(2, 2)
    with parallel(model, ["cpu", "cpu"]), pytest.raises(VersionError, match=r"lanes need torch\.gone, which Python 3"):
        model(torch.ones(3, 2))


def test_missing_class_is_refused():
    """`isinstance` with a missing class raises VersionError."""
    with pytest.raises(VersionError, match="lanes need"):
        isinstance(1, private_name("torch.Gone", "lanes"))
    with pytest.raises(VersionError, match="lanes need"):
        issubclass(int, private_name("torch.Gone", "lanes"))
    with pytest.raises(VersionError, match="lanes need"):
        private_reader("torch.Tensor._gone", "lanes")(torch.ones(1))


@pytest.mark.parametrize("name", ["PARAMETERS", "BUFFERS", "CHILDREN", "COMPILED_CALL"])
def test_replicas_of_other_modules_are_refused(name, monkeypatch):
    """If modules no longer have an attribute that replicas change, a block raises VersionError, and runs no replica."""
    monkeypatch.setattr(of_replicas, name, "_gone")
    of_replicas.check_modules.cache_clear()
    model = Linear(2, 2)
    with pytest.raises(VersionError, match=r"replicas need torch\.nn\S*\.Module\._gone"), parallel(model, ["cpu", "cpu"]):
        model(torch.ones(3, 2))


def test_compiled_without_originals(monkeypatch):
    """If the original of a compiled function cannot be found, a block raises VersionError instead of sharing its code."""
    monkeypatch.setattr(of_replicas, "COMPILED_FROM", "_gone")
    of_replicas._check_compiled_functions.cache_clear()
    model = Linear(2, 2)
    model.double = torch.compile(lambda x: x * 2, backend="eager")
    with pytest.raises(VersionError, match="replicas of compiled models need _gone"), parallel(model, ["cpu", "cpu"]):
        model(torch.ones(3, 2))


def test_missing_attribute_is_refused():
    """An attribute that only instances have is looked for when it is needed."""
    with pytest.raises(VersionError, match=r"replicas need fractions\.Fraction\._gone"):
        private_attribute(Fraction(1, 2), "_gone", "replicas")
    assert private_attribute(Fraction(1, 2), "_numerator", "replicas") == 1
