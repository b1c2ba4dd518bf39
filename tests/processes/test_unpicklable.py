"""UnsendableError names the address of the part that cannot be sent, with its
type and the reason.
"""

from __future__ import annotations

import functools
import threading
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from parawrap.processes.packing import Packer
from parawrap.processes.pickling import pack, unpack
from tests.helpers.packing import address_of, refusal_of, sent
from tests.helpers.ranks import on

LOCK = threading.Lock()


def locked(value):
    value.lock = LOCK
    return value


def locked_ring():
    ring = []
    ring += [ring, {"back": ring, "lock": LOCK}]
    return ring


def capturing(part):
    return lambda: part


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ([1, (2, {"steps": [3, LOCK]})], "value[1][1]['steps'][1]"),
        (SimpleNamespace(net=SimpleNamespace(lock=LOCK)), "value.net.lock"),
        (capturing({"a": LOCK}), "value's variable 'part'['a']"),
        ([capturing(capturing(LOCK))], "value[0]'s variable 'part''s variable 'part'"),
        (lambda: [(lambda: LOCK) for _ in range(3)], "value's global 'LOCK'"),
        (functools.partial(print, 1, LOCK), "value.args[1]"),
        (functools.partial(print, end=LOCK), "value.keywords['end']"),
        (MethodType(print, SimpleNamespace(lock=LOCK)), "value.__self__.lock"),
        ([torch.ones(1), locked(torch.ones(1))], "value[1].lock"),
        (nn.Sequential(locked(nn.ReLU())), "value[0].lock"),
        (locked_ring(), "value[1]['lock']"),
        ([{LOCK}], "value[0][0]"),
    ],
)
def test_innermost_part_is_named(value, place):
    assert address_of(value) == place


def class_with(**attributes):
    def copied(self):
        return row()

    row = type("Row", (), {"__module__": __name__, "copied": copied, **attributes})
    return row


def test_attributes_of_classes_are_named():
    """The error names the attribute of a class that travels by value, also if
    it belongs to a base.
    """
    row = class_with(size=1, lock=LOCK)
    assert address_of(row) == "value.lock"
    assert address_of([row()]) == "value[0]'s class Row.lock"
    assert address_of(type("Child", (row,), {"__module__": __name__})) == "value's base Row.lock"
    for method in staticmethod(lambda: LOCK), property(lambda self: LOCK):
        assert address_of(class_with(read=method)) == "value.read's global 'LOCK'"
    generic = functools.singledispatch(capturing(0))
    generic.register(int)(capturing(LOCK))
    assert address_of(class_with(read=functools.singledispatchmethod(generic))()).endswith(
        "Row.read.dispatcher's implementation for int's variable 'part'"
    )


def test_open_files_are_refused(tmp_path):
    with (tmp_path / "data.txt").open("w") as file:
        assert address_of({"files": [file]}) == "value['files'][0]"
        assert address_of(capturing(file)) == "value's variable 'part'"
        assert "an open file belongs to its process: send the path, and open the file there" in str(
            refusal_of(file)
        )


def test_message_has_the_reason():
    class Session:
        def __reduce__(self):
            msg = "a session stays where it is"
            raise RuntimeError(msg)

    error = refusal_of([Session()])
    assert str(error).startswith("value[0] cannot be sent to another process: ")
    assert "Session: a session stays where it is (" in str(error)
    assert isinstance(error.__cause__, RuntimeError)


def refused_shards():
    """Return the refusals of a rank's tensors and modules that have only its shard."""
    from torch.distributed import init_device_mesh
    from torch.distributed._shard import sharded_tensor
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1,))
    whole = nn.Sequential(nn.Linear(2, 2))
    sharded = fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh=mesh)
    placed = parallelize_module(nn.Linear(2, 2), mesh, ColwiseParallel())
    state = get_model_state_dict(
        sharded, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    assert (
        sent([state, sharded.state_dict()["0.weight"].full_tensor()])[0].keys()
        == whole.state_dict().keys()
    )
    values = {
        "tensor": [distribute_tensor(torch.ones(2), mesh)],
        "state": sharded.state_dict(),
        "module": {"net": sharded},
        "parallel": placed,
        "old state": [sharded_tensor.zeros(sharded_tensor_spec(), 2)],
        "old module": FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")),
    }
    return {name: str(refusal_of(value)) for name, value in values.items()}


def sharded_tensor_spec():
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    return ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])


@pytest.mark.filterwarnings("ignore")
def test_shards_are_refused():
    """The message names the first one, and how to make the whole."""
    (found,) = on(1, refused_shards)
    places = {name: text.partition(" cannot be sent")[0] for name, text in found.items()}
    assert places == {
        "tensor": "value[0]",
        "state": "value['0.weight']",
        "module": "value['net']",
        "parallel": "value.weight",
        "old state": "value[0]",
        "old module": "value",
    }
    for name, text in found.items():
        assert (
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
            "cpu_offload=True))" in text
        )
        assert ("full_tensor()" in text) == (name in ("tensor", "state", "parallel")), text


@pytest.mark.parametrize("allows", [True, False])
def test_fake_tensors_are_refused(allows):
    """Fake tensors are refused, and so are real ones inside the mode, which cannot be copied there.
    Other modes copy them.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    real, net, mode = (
        torch.ones(2, requires_grad=True),
        nn.Linear(2, 1),
        FakeTensorMode(allow_non_fake_inputs=allows),
    )
    part, block = torch.ones(8)[:2].requires_grad_(), pack([real], "value").to_bytes()
    with mode:
        fake = torch.ones(2)
        for value, place in (
            ([real], "value[0]"),
            (net, "value.weight"),
            (torch.eye(2).to_sparse(), "value"),
        ):
            error = refusal_of(value)
            assert str(error).startswith(f"{place} cannot be sent")
            assert "leave the mode before the launch" in str(error)
        with pytest.raises(TypeError, match="leave the mode before the launch"):
            Packer().add([part], "value")
        with pytest.raises(Exception, match="leave the mode before the launch"):
            unpack(block)
    assert "a fake tensor has no values" in str(refusal_of({"a": fake}))
    with FlopCounterMode(display=False):
        assert sent([real])[0].tolist() == [1, 1]
