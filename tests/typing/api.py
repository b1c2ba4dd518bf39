"""Uses of the public API for type checkers.

``mypy --strict`` and pyright check this file; it is never run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from signal import Signals
from typing import Any, Literal, assert_type

import torch
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader, Dataset, Sampler

import parawrap
from parawrap import (
    DataParallel,
    Device,
    Launch,
    Parallel,
    ParallelWrapper,
    Platform,
    RankResults,
    Sweep,
    TupleParallel,
    Tuplewise,
    Wrapper,
    cat,
    cpu,
    current_rank,
    default_collate,
    functional,
    gather,
    neuron,
    parallel,
    replicate,
    scatter,
    tuple_fn,
    wrapper,
)


def a_block_is_generic_in_its_target(model: torch.nn.Linear, x: torch.Tensor) -> None:
    block = parallel(model, ["cpu", "cpu"])
    assert_type(block, Parallel[torch.nn.Linear])
    with block as p:
        assert_type(p, Parallel[torch.nn.Linear])
        assert_type(p.target, torch.nn.Linear)
        assert_type(p.devices, tuple[torch.device, ...] | tuple[neuron.NeuronCore, ...])
        assert_type(p.submit(x), Future[Any])
        assert_type(p.map([x]), Iterator[Any])
        assert_type(p.stats().lanes[0].busy_s, float)
        with p.trace("lanes.json"):
            pass


def a_decorated_function_keeps_its_signature(model: torch.nn.Linear, x: torch.Tensor) -> None:
    @parallel(model, ["cpu", "cpu"])
    def evaluate(batches: list[torch.Tensor], *, limit: int = 3) -> float:
        return float(limit)

    assert_type(evaluate([x], limit=2), float)
    evaluate([x], limit="2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def every_option(model: torch.nn.Module) -> None:
    parallel(model, ["cpu", 0, torch.device("cpu")])
    parallel(model, 3.5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    parallel(
        model,
        2,
        dim=1,
        in_dims={"mask": None, "texts": "items"},
        methods=("forward", "generate"),
        output_device="cpu",
    )
    parallel(model, 2, out_dims=(0, (1, None), {"texts": "items"}, "ragged"))
    parallel(model, 2, reduce="sum", join="list", unit=8)
    parallel(model, 2, reduce={"loss": "mean", "count": ("sum", None)})
    parallel(model, 2, reduce=torch.Tensor.max, join="pad", pad_value=-100)
    parallel(model, 2, in_dims={"texts": "rows"})  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
    parallel(model, 2, plan="auto")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def a_comparison_has_its_ways(model: torch.nn.Linear, x: torch.Tensor) -> None:
    comparison = parawrap.compare(
        model, (x,), ["cpu", "cpu"], train=True, rounds=2, calls=1, show=False, out_dims=0
    )
    assert_type(comparison.ways[-1].quartiles, list[float])
    assert_type(comparison.conclusion, str)
    with cpu.keep_freed_memory() as nothing:
        assert_type(nothing, None)


def a_stream_takes_a_buffersize(block: Parallel[torch.nn.Linear], x: torch.Tensor) -> None:
    assert_type(block.map([x], buffersize=4, chunksize=2, progress=True), Iterator[Any])
    block.map(
        [x], buffersize=None, prepare=tuple, with_inputs=True, return_exceptions=True, ordered=False
    )
    block.map([x], resume="outputs", key=len, progress=True, total=1, desc="embed")
    assert_type(block.method("forward").submit(x), Future[Any])
    block.map([x], window=4)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def data_parallels_are_generic_in_their_module(model: torch.nn.Linear, x: torch.Tensor) -> None:
    net = DataParallel(model, device_ids=["cpu", "cpu"], output_device="cpu", dim=0)
    assert_type(net.module, torch.nn.Linear)
    torch_net: torch.nn.DataParallel[torch.nn.Linear] = net
    assert torch_net is net
    assert_type(net.in_features, Any)
    with TupleParallel(model, ["cpu"], transfer_output=True, reduction=cat) as tuples:
        assert_type(tuples, TupleParallel[torch.nn.Linear])
    parawrap.data_parallel(model, x, ["cpu", "cpu"])
    TupleParallel(model, ["cpu"], "cpu")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    wrapped = ParallelWrapper(model, device="auto")
    assert_type(wrapped.to("cpu"), ParallelWrapper)


def the_four_steps_are_functions(model: torch.nn.Linear, x: torch.Tensor) -> None:
    scatter(x, ["cpu", 0, torch.device("cpu")])
    scatter({"x": x}, ["cpu"], dim=1)
    assert_type(
        parawrap.scatter_kwargs((x,), None, ["cpu"]),
        tuple[tuple[Any, ...], tuple[dict[str, Any], ...]],
    )
    replicas = replicate(model, ["cpu", "cpu"], detach=True)
    assert_type(replicas, list[torch.nn.Linear])
    assert_type(parawrap.parallel_apply(replicas, [x, (x,)], None, ["cpu", None]), list[Any])
    gather([x, x], -1, dim=1)
    gather([x], ["cpu"])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def the_helpers(x: torch.Tensor) -> None:
    cat(parawrap.transpose([(x, x), (x, x)]))
    assert_type(Tuplewise([(0, 1), (2, 3)])[0], Tuplewise)
    parawrap.recursive_to({"x": [x]}, "cpu", non_blocking=True)
    parawrap.recursive_cuda([x])


class Sample(parawrap.Batch):
    """A user-defined batch."""


def batches_keep_their_class(sample: Sample) -> None:
    assert_type(sample.to("cpu"), Sample)
    assert_type(sample.cuda(), Sample)
    assert_type(parawrap.cuda_attrs(sample), Sample)


def a_class_is_registered(
    split: Callable[[str, Sequence[int]], list[str]], join: Callable[[Sequence[str]], str]
) -> None:
    parawrap.register_split(str, split=split, join=join, rows=len)


def every_field_of_a_platform(log: Path) -> None:
    platform = Platform(
        "training",
        Device.CPU,
        n_cpus=2,
        ipc_groups=[[0], [1]],
        console_logs=log,
        upon_finish=log.unlink,
    )
    Platform(device="gpu", n_gpus=None, ipc_protocol="file", ipc_groups=None, seed=None)
    Platform(device=Device.from_str(str(log)))
    Platform(devices="cpu")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    platform.n_cpus = 3  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]


TWO = Platform(device="cpu", n_cpus=2)


@wrapper(TWO)
def train(a: int, b: float = 0.5, *, name: str = "") -> str:
    return f"{name}{a + b}"


class Trainer:
    """Has decorated methods."""

    @wrapper(TWO)
    def method(self, steps: int) -> list[float]:
        return [0.0] * steps

    @staticmethod
    @wrapper(TWO)
    def of_static(steps: int) -> bytes:
        return bytes(steps)


def a_launch_has_the_types_of_its_function() -> None:
    results = train(1, b=2.0)
    assert_type(results, RankResults[str])
    assert_type(results[0], str)
    assert_type(train.submit(1, name="x"), Launch[str])
    assert_type(train.inline(1), RankResults[str])
    assert_type(train.dry_run(1), str)
    sweep = train.map([1, 2], max_parallel=2)
    assert_type(sweep, Sweep[str])
    assert_type(next(sweep), RankResults[str] | Exception)
    assert_type(sweep.dry_run(), str)
    assert_type(train.platform, Platform)
    assert_type(wrapper(TWO)(lambda: 3)(), RankResults[int])


def wrong_arguments_of_a_launch_are_errors() -> None:
    train("1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    wrapper("cpu")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def methods_launch_without_their_self(trainer: Trainer) -> None:
    assert_type(trainer.method(3), RankResults[list[float]])
    assert_type(trainer.method.submit(steps=3), Launch[list[float]])
    assert_type(Trainer.method(trainer, 3), RankResults[list[float]])
    assert_type(Trainer.of_static(3), RankResults[bytes])
    trainer.method("3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def a_launch_has_typed_attributes(launch: Launch[int]) -> None:
    assert_type(launch.state, Literal["pending", "running", "finished", "failed", "cancelled"])
    as_tuple: tuple[object, ...] = launch.results(timeout=2.0)
    assert as_tuple


def task(
    global_rank: int,
    local_rank: int,
    process_group: ProcessGroup | None,
    args: tuple[Any, ...] | None,
) -> float:
    return global_rank / 2


def tasks_take_ranks_group_and_args() -> None:
    assert_type(Wrapper(TWO).start(task, ("example",)), RankResults[float])
    Wrapper(task)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def a_rank_has_typed_attributes() -> None:
    rank = current_rank()
    assert_type(rank, parawrap.Rank)
    assert_type(rank.group, ProcessGroup | None)
    rank.global_rank = 1  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]


def the_helpers_of_a_rank(
    data: torch.utils.data.TensorDataset,
    loader: DataLoader[list[torch.Tensor]],
    model: torch.nn.Linear,
) -> None:
    functional.seed_generators(7, offset=current_rank().global_rank)
    assert_type(functional.get_dataset_sampler(data, pad=False), Sampler[int] | None)
    assert_type(functional.shard_loader(loader, pad=False), DataLoader[list[torch.Tensor]])
    assert_type(functional.gather_rows([torch.ones(1)], loader), list[torch.Tensor])
    assert_type(functional.reduce_metrics({"loss": 0.5}, weight=3), dict[str, float])
    functional.reduce_metrics(0.5, op="max")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    functional.sync(model, torch.optim.SGD(model.parameters()), src=1)
    functional.sync(model, [torch.optim.SGD(model.parameters())])
    functional.sync(model, model)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def a_module_on_its_device_keeps_its_class(model: torch.nn.Linear, sync: bool) -> None:
    assert_type(functional.to(model, sync_modules=False, device="cpu"), torch.nn.Linear)
    assert_type(functional.to(model), torch.nn.Linear | torch.nn.parallel.DistributedDataParallel)
    assert_type(
        functional.to(model, None, sync),
        torch.nn.Linear | torch.nn.parallel.DistributedDataParallel,
    )


def errors_have_their_bases(
    died: parawrap.RankDiedError, unsendable: parawrap.UnsendableError, shard: parawrap.ShardError
) -> None:
    assert_type(died.signal, Signals | int | None)
    as_type_error: TypeError = unsendable
    as_value_errors: tuple[ValueError, type[ValueError]] = (shard, parawrap.PlatformError)
    as_launch_errors: list[parawrap.LaunchError] = [died, unsendable]
    as_root: list[parawrap.ParawrapError] = [shard, *as_launch_errors]
    assert as_root != [as_type_error, *as_value_errors]
    assert_type(parawrap.__version__, str)


@tuple_fn
def norms(x: torch.Tensor, scale: int = 1) -> tuple[torch.Tensor, float]:
    return x, float(x.norm()) * scale


def tuple_functions_take_parts(xs: tuple[torch.Tensor, ...]) -> None:
    tuple_fn(torch.nn.functional.mse_loss)(xs, xs)
    tuple_fn(parallel=True, devices=["cpu"])(torch.neg)(xs)
    norms(xs, scale=(2, 3))
    tuple_fn(3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]


@parawrap.tp_collate(2)
def collate_pairs(
    samples: Sequence[tuple[int, int]], scale: int = 1
) -> tuple[torch.Tensor, list[int]]:
    return torch.tensor([x * scale for x, _ in samples]), [y for _, y in samples]


def collate_functions_keep_their_parameters(pairs: Dataset[tuple[torch.Tensor, int]]) -> None:
    DataLoader(pairs, collate_fn=default_collate(2))
    collate_pairs([(1, 2)], scale=3)
    collate_pairs([1, 2])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]


def a_trace_takes_keyword_inputs(model: torch.nn.Linear, x: torch.Tensor) -> None:
    assert_type(neuron.trace(model, x), torch.jit.ScriptModule)
    assert_type(
        neuron.trace(func=model, example_kwarg_inputs={"input": x}, compiler_args=["-O1"]),
        torch.jit.ScriptModule,
    )
