"""The contract, where all goes well: what ranks find out, what comes back, and what is shown meanwhile."""

from __future__ import annotations

import os
import random
import sys
import threading

import pytest
import torch

from parawrap import RankResults, wrapper
from tests.contract import scenarios
from tests.contract.harness import Seen, all_said

pytestmark = pytest.mark.contract


@pytest.fixture(scope="session")
def plain(launcher, tmp_path_factory):
    """One launch that is asked for nearly everything, and its folder."""
    folder = tmp_path_factory.mktemp("plain")
    before = threading.active_count()

    here = os.getpid()

    def finished():
        (folder / f"finished-{os.getpid()}-{os.getpid() == here}").touch()

    seen = launcher.play(
        scenarios.about_itself,
        [1, {"x": torch.arange(3)}],
        kwargs={"b": "two", "folder": folder},
        verbose=True,
        console_logs=folder / "logs",
        upon_finish=finished,
    )
    assert launcher.name != "local" or threading.active_count() == before
    return seen, folder


def of(plain, what):
    """One thing that every rank told."""
    return [each[what] for each in plain[0].given()]


def test_results_come_in_rank_order(launcher, plain):
    """One value a rank, tensors among them, at the place of its rank."""
    assert type(plain[0].given()) is RankResults
    assert [tensor.tolist() for tensor in of(plain, "tensor")] == [[[r, r]] * 3 for r in range(launcher.world_size)]


def test_a_rank_knows_its_place(launcher, plain):
    """Its numbers in the world and on the node, the node's number, the world's size, and its device."""
    per_node = launcher.world_size // launcher.n_nodes
    expected = [(r, r % per_node, r // per_node, launcher.world_size, 0, "cpu") for r in range(launcher.world_size)]
    assert of(plain, "place") == expected


def test_a_rank_knows_its_platform(launcher, plain):
    """It is the one of the launch."""
    assert of(plain, "platform") == [(0, 4, launcher.n_nodes)] * launcher.world_size


def test_the_variables_of_a_world_are_set(launcher, plain):
    """Those that torchrun sets, in every rank but an inline one, which is in the caller's process."""
    if launcher.name == "inline":
        assert of(plain, "variables") == [{name: os.environ.get(name) for name in scenarios.VARIABLES}]
        return
    per_node = launcher.world_size // launcher.n_nodes
    for rank, variables in enumerate(of(plain, "variables")):
        address, port = variables.pop("MASTER_ADDR"), variables.pop("MASTER_PORT")
        numbers = {"RANK": rank, "LOCAL_RANK": rank % per_node, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": per_node}
        assert variables == {name: str(value) for name, value in numbers.items()}
        assert address
        assert int(port) > 0


def test_nodes_are_apart(launcher, plain):
    """Ranks of one node are on one machine."""
    hosts, nodes = of(plain, "host"), [place[2] for place in of(plain, "place")]
    assert len(set(zip(nodes, hosts, strict=True))) == launcher.n_nodes
    if launcher.name == "slurm":
        assert set(zip(nodes, hosts, strict=True)) == {(0, "node0"), (1, "node1")}


def test_collectives_are_right(launcher, plain):
    """A sum over all ranks is that in each, and the group is all of them."""
    size = launcher.world_size
    assert [total.item() for total in of(plain, "total")] == [sum(range(10, 10 + size))] * size
    assert of(plain, "group") == [(size, rank, rank) for rank in range(size)]


def test_arguments_arrive(launcher, plain):
    """By position and by name, tensors among them."""
    for (first, second), by_name in of(plain, "arguments"):
        assert first == 1
        assert second["x"].tolist() == [0, 1, 2]
        assert by_name == "two"


def test_seeds_are_equal_everywhere(launcher, plain):
    """Every rank under every launcher draws what a process with that seed draws."""
    expected = random.Random(0).random(), torch.rand(3, generator=torch.Generator().manual_seed(0)).tolist()
    assert [(number, numbers.tolist()) for number, numbers in of(plain, "drawn")] == [expected] * launcher.world_size


def test_no_rank_reads_what_is_meant_for_the_caller(launcher, plain):
    """Its standard input is empty; that of torchrun's ranks and of an inline one is what they were given."""
    if launcher.name not in ("torchrun", "inline"):
        assert of(plain, "stdin") == [""] * 4


def test_what_ranks_write_is_shown_behind_their_rank(launcher, plain):
    """Both streams; torchrun shows its ranks itself, and an inline one needs no prefix."""
    lines = plain[0].shown.splitlines()
    for rank in range(launcher.world_size):
        if launcher.unable("keep output"):  # ranks share one pipe, and a line and its end may come apart
            assert f"out of {rank}" in plain[0].shown
            assert f"err of {rank}" in plain[0].shown
        else:
            assert f"[rank {rank}] out of {rank}" in lines
            assert f"[rank {rank}] err of {rank}" in lines


def test_logs_have_what_each_rank_wrote(launcher, plain):
    """The handle has them, and so have the files of console_logs; but where nobody reads what ranks write."""
    seen, folder = plain
    texts = [f"out of {rank}\nerr of {rank}\n" for rank in range(launcher.world_size)]
    if launcher.unable("keep output"):
        assert not any(seen.logs)
        assert not (folder / "logs").exists()
        return
    (logs,) = (folder / "logs").iterdir()
    assert sorted(path.name for path in logs.iterdir()) == [f"rank-{rank}.log" for rank in range(4)]
    for rank, text in enumerate(texts):
        assert set(text.splitlines()) <= set(seen.logs[rank].splitlines())
        assert (logs / f"rank-{rank}.log").read_text() == seen.logs[rank]


def test_upon_finish_is_called_once_where_the_launch_was_made(launcher, plain):
    """By the process that launches: this one, or each of torchrun's."""
    called = sorted(path.name.rpartition("-")[2] for path in plain[1].glob("finished-*"))
    assert called == (["False"] * 4 if launcher.name == "torchrun" else ["True"])


def test_groups_are_those_of_the_platform(launcher, tmp_path, monkeypatch):
    """A sum within each of two groups; by a function of the user's own module beside the script."""
    (tmp_path / "beside.py").write_text("def value_of(rank):\n    return 10 ** rank\n")
    monkeypatch.syspath_prepend(tmp_path)
    import beside

    value_of = beside.value_of if launcher.name != "torchrun" else lambda rank: 10**rank
    try:
        results = launcher.play(scenarios.in_its_group, value_of, ipc_groups=[[0, 1], [2, 3]]).given()
    finally:
        del sys.modules["beside"]
    expected = [(2, 0, 11), (2, 1, 11), (2, 0, 1100), (2, 1, 1100)]
    assert list(results) == (expected if launcher.world_size == 4 else [(1, 0, 1)])


def test_big_values_travel_and_no_group_is_made_where_none_is_wanted(launcher):
    """With ipc_groups=None there is no process group; each rank has a big argument of its own, and gives a big result."""
    megabytes = 8 if launcher.name == "torchrun" else 64  # there every rank gets all, through one store
    big = torch.zeros(megabytes << 18)
    results = launcher.play(scenarios.without_a_group, big, ipc_groups=None).given()
    for rank, (has_none, is_initialized, tensor) in enumerate(results):
        assert (has_none, is_initialized) == (True, False)
        assert tensor.nbytes == megabytes << 20
        assert (tensor[0].item(), tensor[1:].any().item()) == (rank, False)
    assert big[0] == 0


def test_two_launches_at_once_do_not_meet(launcher, tmp_path):
    """One waits for what the other does; each has a world of its own."""
    if launcher.unable("launch twice at once") or launcher.unable("several ranks"):
        return
    others = []

    def launch_another(_):
        all_said(tmp_path, "waiting", launcher.world_size)
        others.append(launcher.play(scenarios.let_the_other_go, tmp_path).given())

    results = launcher.play(scenarios.wait_for_the_other, tmp_path, do=launch_another).given()
    assert list(results) == [4] * 4
    assert list(others[0]) == [400] * 4


def test_a_dry_run_tells_the_launcher(launcher):
    """And starts nothing."""
    if not hasattr(launcher, "platform"):
        assert isinstance(launcher.play(int), Seen)
        return
    preview = wrapper(launcher.platform())(scenarios.raise_key_error).dry_run()
    assert preview.launcher == launcher.name
    assert len(preview.ranks) == 4
