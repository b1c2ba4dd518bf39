"""The public API as a type checker sees it: checked by ``mypy --strict`` and pyright, never run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, assert_type

import torch

import parawrap
from parawrap import (
    Batch,
    DataParallel,
    Parallel,
    ParallelWrapper,
    ParawrapError,
    ShardError,
    TupleParallel,
    Tuplewise,
    cat,
    cuda_attrs,
    data_parallel,
    default_collate,
    parallel,
    recursive_cuda,
    recursive_to,
    register_split,
    tp_collate,
    transpose,
    tuple_fn,
)


def a_block_knows_its_target(model: torch.nn.Linear, x: torch.Tensor) -> None:
    block = parallel(model, ["cpu", "cpu"])
    assert_type(block, Parallel[torch.nn.Linear])
    with block as p:
        assert_type(p, Parallel[torch.nn.Linear])
        assert_type(p.target, torch.nn.Linear)
        assert_type(p.devices, tuple[torch.device, ...])
        assert_type(p.submit(x), Future[Any])
        assert_type(p.map([x]), Iterator[Any])
        assert_type(p.stats().shards, tuple[int, ...])
        assert_type(p.stats().lanes[0].busy_s, float)
        with p.trace("lanes.json"):
            pass
    assert_type(block.close(), None)


def a_function_is_a_target(x: torch.Tensor) -> None:
    def scale(values: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return values * factor

    with parallel(scale, 2) as p:
        assert_type(p.target(x, 3.0), torch.Tensor)


def every_way_to_name_devices(model: torch.nn.Module) -> None:
    parallel(model)
    parallel(model, None)
    parallel(model, "auto")
    parallel(model, 2)
    parallel(model, torch.device("cpu"))
    parallel(model, ["cpu", 0, torch.device("cpu")])
    parallel(model, ("cuda:0", "cuda:1"))
    parallel(model, 3.5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def every_option(model: torch.nn.Module) -> None:
    parallel(model, 2, dim=1, in_dims={"mask": None, "texts": 0}, methods=("forward", "generate"), output_device="cpu")
    parallel(model, 2, reduce="sum", join="list", verify=True)
    parallel(model, 2, reduce=torch.Tensor.max)
    parallel(model, 2, reduce="median")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    parallel(model, 2, join="stack")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    parallel(model, 2, 1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def the_data_parallels_know_their_module(model: torch.nn.Linear, x: torch.Tensor) -> None:
    net = DataParallel(model, device_ids=["cpu", "cpu"], output_device="cpu", dim=0)
    assert_type(net.module, torch.nn.Linear)
    torch_net: torch.nn.DataParallel[torch.nn.Linear] = net
    assert torch_net is net
    tuples = TupleParallel(model, ["cpu"], transfer_output=True, reduction=cat)
    assert_type(tuples.module, torch.nn.Linear)
    data_parallel(model, x, ["cpu", "cpu"])
    wrapped = ParallelWrapper(model, device="auto")
    assert_type(wrapped.to("cpu"), ParallelWrapper)


@tuple_fn
def shift(x: torch.Tensor, by: int = 1) -> torch.Tensor:
    return x + by


@tuple_fn(parallel=True, devices=["cpu", "cpu"])
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@tp_collate(2)
def collate(samples: Sequence[int]) -> torch.Tensor:
    return torch.tensor(samples)


def decorated_functions_keep_their_parameters(x: torch.Tensor) -> None:
    assert_type(double(x), torch.Tensor)
    assert_type(shift(x, by=2), torch.Tensor)
    shift(x, by="1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    collate([1, 2, 3])
    collate("no", "such", "arguments")  # type: ignore[call-arg, arg-type]  # pyright: ignore[reportCallIssue]
    default_collate(2)([x, x])


def the_helpers(x: torch.Tensor) -> None:
    cat((x, x))
    transpose([(1, 2), (3, 4)])
    assert_type(Tuplewise([(0, 1), (2, 3)])[0], Tuplewise)
    assert_type(len(Tuplewise([x])), int)
    recursive_to({"x": [x]}, "cpu", non_blocking=True)
    recursive_cuda([x])


class Sample(Batch):
    """A batch of the user's own."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def batches_keep_their_class(sample: Sample) -> None:
    assert_type(sample.to("cpu"), Sample)
    assert_type(sample.cuda(), Sample)
    assert_type(cuda_attrs(sample), Sample)


class Words:
    """A value that is cut in a way of its own."""

    def __init__(self, items: list[str]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)


def _split(words: Words, sizes: Sequence[int]) -> list[Words]:
    return [Words(words.items[:size]) for size in sizes]


def _join(parts: Sequence[Words]) -> Words:
    return Words([item for part in parts for item in part.items])


def a_class_is_registered() -> None:
    register_split(Words, split=_split, join=_join)
    register_split(Words, split=_split, join=_join, rows=len)


def errors_are_what_they_say() -> None:
    try:
        parallel(len)
    except ShardError as error:
        as_value_error: ValueError = error
        as_root: ParawrapError = error
        raise as_root from as_value_error
    assert_type(parawrap.__version__, str)
