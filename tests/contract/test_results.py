"""Contract tests of successful launches: the view of each rank, its results, and its output."""

from __future__ import annotations

import os
import random
import sys
import threading

import pytest
import torch

from parawrap import RankResults, wrapper
from parawrap.displays import read_timeline
from tests.contract import scenarios
from tests.contract.harness import Observation, wait_for_reports

pytestmark = pytest.mark.contract


@pytest.fixture(scope="session")
def described(launcher, tmp_path_factory):
    """The observation of one launch that uses most options, and its folder."""
    folder = tmp_path_factory.mktemp("described")
    before = threading.active_count()

    here = os.getpid()

    def finished():
        (folder / f"finished-{os.getpid()}-{os.getpid() == here}").touch()

    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        observation = launcher.play(
            scenarios.describe_rank,
            [1, {"x": torch.arange(3)}],
            kwargs={"b": "two", "folder": folder},
            verbose=True,
            console_logs=folder / "logs",
            trace=folder / "trace.json",
            upon_finish=finished,
        )
    assert launcher.name != "local" or threading.active_count() == before
    return observation, folder


def values_of(described, key):
    """Return one entry of each rank's result."""
    return [each[key] for each in described[0].expect_results()]


def test_results_come_in_rank_order(launcher, described):
    """The result at index r comes from rank r."""
    assert type(described[0].expect_results()) is RankResults
    assert [tensor.tolist() for tensor in values_of(described, "tensor")] == [
        [[r, r]] * 3 for r in range(launcher.world_size)
    ]


def test_a_rank_knows_its_place(launcher, described):
    """A rank reads its global rank, local rank, node, world size, restart, and device."""
    per_node = launcher.world_size // launcher.n_nodes
    expected = [(r, r % per_node, r // per_node, launcher.world_size, 0, "cpu") for r in range(launcher.world_size)]
    assert values_of(described, "place") == expected


def test_a_rank_knows_its_platform(launcher, described):
    """`current_rank().platform` has the platform of the launch."""
    assert values_of(described, "platform") == [("script", 4, launcher.n_nodes)] * launcher.world_size


def test_ranks_have_the_variables_of_torchrun(launcher, described):
    """Every rank has RANK, WORLD_SIZE, and so on. An inline rank keeps the caller's environment."""
    if launcher.name == "inline":
        assert values_of(described, "variables") == [{name: os.environ.get(name) for name in scenarios.VARIABLES}]
        return
    per_node = launcher.world_size // launcher.n_nodes
    for rank, variables in enumerate(values_of(described, "variables")):
        address, port = variables.pop("MASTER_ADDR"), variables.pop("MASTER_PORT")
        numbers = {"RANK": rank, "LOCAL_RANK": rank % per_node, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": per_node}
        assert variables == {name: str(value) for name, value in numbers.items()}
        assert address
        assert int(port) > 0


def test_each_node_is_one_host(launcher, described):
    """Ranks of one node run on one host; on Slurm, the two nodes are two hosts."""
    hosts, nodes = values_of(described, "host"), [place[2] for place in values_of(described, "place")]
    assert len(set(zip(nodes, hosts, strict=True))) == launcher.n_nodes
    if launcher.name == "slurm":
        assert set(zip(nodes, hosts, strict=True)) == {(0, "node0"), (1, "node1")}


def test_the_default_group_has_all_ranks(launcher, described):
    """An all_reduce gives the same sum in every rank, and the group has every rank."""
    size = launcher.world_size
    assert [total.item() for total in values_of(described, "total")] == [sum(range(10, 10 + size))] * size
    assert values_of(described, "group") == [(size, rank, rank) for rank in range(size)]


def test_arguments_arrive(launcher, described):
    """Positional and keyword arguments arrive, including tensors."""
    for (first, second), by_name in values_of(described, "arguments"):
        assert first == 1
        assert second["x"].tolist() == [0, 1, 2]
        assert by_name == "two"


def test_seeds_are_equal_everywhere(launcher, described):
    """Every rank draws the same numbers as a plain process with the seed of the script."""
    expected = random.Random(0).random(), torch.rand(3, generator=torch.Generator().manual_seed(0)).tolist()
    assert [(number, numbers.tolist()) for number, numbers in values_of(described, "drawn")] == [
        expected
    ] * launcher.world_size


def test_ranks_have_an_empty_standard_input(launcher, described):
    """A rank cannot read the caller's standard input. Under torchrun and inline, parawrap does not change it."""
    if launcher.name not in ("torchrun", "inline"):
        assert values_of(described, "stdin") == [""] * 4


def test_output_is_shown_with_a_rank_prefix(launcher, described):
    """Lines from stdout and stderr are shown with a prefix. Under torchrun and inline, they have no prefix."""
    lines = described[0].output.splitlines()
    for rank in range(launcher.world_size):
        if launcher.unable("keep output"):  # ranks share one pipe, so their lines can mix
            assert f"out of {rank}" in described[0].output
            assert f"err of {rank}" in described[0].output
        else:
            assert f"[rank {rank}] out of {rank}" in lines
            assert f"[rank {rank}] err of {rank}" in lines


def test_logs_have_the_output_of_each_rank(launcher, described):
    """`launch.logs` and the files in `console_logs` have the output. Launchers that keep no output have neither."""
    observation, folder = described
    texts = [f"out of {rank}\nerr of {rank}\n" for rank in range(launcher.world_size)]
    if launcher.unable("keep output"):
        assert not any(observation.logs)
        assert not (folder / "logs").exists()
        return
    (logs,) = (folder / "logs").iterdir()
    assert sorted(path.name for path in logs.iterdir()) == [f"rank-{rank}.log" for rank in range(4)]
    for rank, text in enumerate(texts):
        assert set(text.splitlines()) <= set(observation.logs[rank].splitlines())
        assert (logs / f"rank-{rank}.log").read_text() == observation.logs[rank]


def test_trace_has_the_phases_of_each_rank(launcher, described):
    """The timeline has the start, meeting, run, and teardown of each rank. Under torchrun and inline, there is no file."""
    path = described[1] / "trace.json"
    if launcher.unable("keep output"):
        assert not path.exists()
        return
    timeline = read_timeline(path)
    ranks = [label.split(" on ")[0] for label in timeline.tracks[1:]]
    assert ranks == [f"rank {rank}" for rank in range(launcher.world_size)]
    for track in range(1, launcher.world_size + 1):
        spans = sorted(span[1:4] for span in timeline.spans if span.track == track)
        assert [name for _, _, name in spans] == ["start", "meeting", "run", "teardown"]
        assert all(start <= end for start, end, _ in spans)


def test_upon_finish_is_called_once_where_the_launch_was_made(launcher, described):
    """The launching process calls `upon_finish` once. Under torchrun, the process of rank 0 does."""
    called = sorted(path.name.rpartition("-")[2] for path in described[1].glob("finished-*"))
    assert called == ["False" if launcher.name == "torchrun" else "True"]


def test_groups_are_those_of_the_platform(launcher, tmp_path, monkeypatch):
    """`ipc_groups` makes two groups, and a function from a module in the script's folder works in both."""
    (tmp_path / "user_module.py").write_text("def value_of(rank):\n    return 10 ** rank\n")
    monkeypatch.syspath_prepend(tmp_path)
    import user_module

    value_of = user_module.value_of if launcher.name != "torchrun" else lambda rank: 10**rank
    try:
        results = launcher.play(scenarios.sum_in_group, value_of, ipc_groups=[[0, 1], [2, 3]]).expect_results()
    finally:
        del sys.modules["user_module"]
    expected = [(2, 0, 11), (2, 1, 11), (2, 0, 1100), (2, 1, 1100)]
    assert list(results) == (expected if launcher.world_size == 4 else [(1, 0, 1)])


def test_big_values_work_without_a_process_group(launcher):
    """With ipc_groups=None, each rank changes its own copy of a big argument and returns it."""
    megabytes = 8 if launcher.name == "torchrun" else 64  # torchrun's ranks each receive all results
    big = torch.zeros(megabytes << 18)
    results = launcher.play(scenarios.return_big_argument, big, ipc_groups=None).expect_results()
    for rank, (has_none, is_initialized, tensor) in enumerate(results):
        assert (has_none, is_initialized) == (True, False)
        assert tensor.nbytes == megabytes << 20
        assert (tensor[0].item(), tensor[1:].any().item()) == (rank, False)
    assert big[0] == 0


def test_concurrent_launches_are_independent(launcher, tmp_path):
    """Two launches run at the same time, each in its own world."""
    if launcher.unable("launch twice at once") or launcher.unable("several ranks"):
        return
    others = []

    def launch_another(_launch):
        wait_for_reports(tmp_path, "waiting", launcher.world_size)
        others.append(launcher.play(scenarios.release_other_launch, tmp_path).expect_results())

    results = launcher.play(scenarios.wait_for_other_launch, tmp_path, do=launch_another).expect_results()
    assert list(results) == [4] * 4
    assert list(others[0]) == [400] * 4


def test_a_dry_run_names_the_launcher(launcher):
    """`dry_run` returns the launcher and the ranks and runs no rank."""
    if not hasattr(launcher, "platform"):
        assert isinstance(launcher.play(int), Observation)
        return
    preview = wrapper(launcher.platform())(scenarios.raise_key_error).dry_run()
    assert preview.launcher == launcher.name
    assert len(preview.ranks) == 4
