"""DataParallel and TupleParallel on XLA devices."""

from __future__ import annotations

import torch

from parawrap import DataParallel, TupleParallel
from tests.xla.zoo import assert_near, assert_near_gradients, beside, mlp, rows


def test_data_parallel_on_two_devices():
    """Two XLA devices share the rows, and outputs and gradients equal those of the plain model."""
    model = mlp().to("xla:0")
    plain = beside(model)
    net = DataParallel(model, device_ids=["xla:0", "xla:1"])
    x = rows(7)
    output, expected = net(x), plain(x)
    output.square().sum().backward()
    expected.square().sum().backward()
    assert [str(device) for device in net.device_ids] == ["xla:0", "xla:1"]
    assert output.device == torch.device("xla:0")
    assert_near(output, expected)
    assert_near_gradients(model, plain)
    assert list(net.state_dict()) == [f"module.{name}" for name in plain.state_dict()]
    assert [len(shard[0]) for shard in net.scatter((x,), {}, net.device_ids)[0]] == [4, 3]
    net.close()


def test_tuple_parallel_on_two_devices():
    """Part i of the output lies on device i."""
    model = mlp().to("xla:0")
    plain = beside(model)
    net = TupleParallel(model, ["xla:0", "xla:1"])
    parts = rows(4), rows(2)
    outputs = net(parts)
    assert [str(output.device) for output in outputs] == ["xla:0", "xla:1"]
    for output, part in zip(outputs, parts, strict=True):
        assert_near(output, plain(part))
    net.close()
