"""The output that a launch shows and the log files that it writes."""

from __future__ import annotations

import os
import resource
import sys
import time
from contextlib import contextmanager

import pytest

from parawrap import PlatformError, current_rank, wrapper
from tests.helpers.processes import ranks
from tests.helpers.waiting import PATIENCE_S


def write_lines():
    rank = current_rank().global_rank
    print("out", rank, flush=True)
    print("err", rank, file=sys.stderr, flush=True)


def logged_lines(launch, rank):
    """Return a rank's log lines, sorted, because the order of stdout and stderr is not fixed."""
    return sorted(launch.logs(rank).splitlines())


# -- print_ranks


@pytest.mark.parametrize(
    ("given", "shown"), [((0,), [0]), ((1,), [1]), ([0, 1], [0, 1]), ((), []), (None, [0, 1])], ids=repr
)
def test_only_the_lines_of_chosen_ranks_are_shown(given, shown, capfd):
    """``print_ranks`` selects the ranks to show; ``logs`` keeps the lines of all ranks."""
    launch = wrapper(ranks(verbose=True, print_ranks=given))(write_lines).submit()
    launch.results(timeout=PATIENCE_S)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [f"[rank {rank}] out {rank}" for rank in shown]
    assert sorted(err.splitlines()) == [f"[rank {rank}] err {rank}" for rank in shown]
    assert [logged_lines(launch, rank) for rank in range(2)] == [[f"err {rank}", f"out {rank}"] for rank in range(2)]


def test_a_quiet_launch_shows_no_rank(capfd):
    """With ``verbose=False``, ``print_ranks`` shows nothing."""
    wrapper(ranks(verbose=False, print_ranks=(0,)))(write_lines)()
    assert tuple(capfd.readouterr()) == ("", "")


@pytest.mark.parametrize("given", [(2,), (-1,), ("0",), (0.5,), "0", 0, (True,)], ids=repr)
def test_invalid_print_ranks_raise(given):
    """PlatformError names the field and its value."""
    with pytest.raises(PlatformError, match=r"print_ranks=.*rank"):
        ranks(print_ranks=given)


# -- console_logs


def logs_below(folder):
    """Return the text of every log file, by launch folder and file name."""
    launches = [each for each in folder.iterdir() if each.is_dir()]
    return {each.name: {path.name: path.read_text() for path in sorted(each.iterdir())} for each in launches}


def test_concurrent_launches_have_separate_logs(tmp_path):
    """Two launches that run at the same time write to different log folders."""

    def writes(word, folder):
        (folder / f"{word} {current_rank().global_rank}").touch()
        while len(list(folder.iterdir())) < 4:  # both launches run
            time.sleep(0.01)
        for _ in range(50):
            print(word, flush=True)

    logs, meeting = tmp_path / "logs", tmp_path / "meeting"
    meeting.mkdir()
    launchable = wrapper(ranks(console_logs=logs))(writes)
    launches = [launchable.submit(word, meeting) for word in ("one", "two")]
    for launch in launches:
        launch.results(timeout=PATIENCE_S)
    assert sorted(logs_below(logs).values(), key=str) == [
        {f"rank-{rank}.log": f"{word}\n" * 50 for rank in range(2)} for word in ("one", "two")
    ]


@contextmanager
def file_size_limit(size):
    """Limit the size of files that this process writes, to simulate a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_truncates_only_the_log_file(tmp_path, caplog):
    """The launch continues, `logs` keeps all output, and a warning names the truncated file."""
    wrapper(ranks(1))(os.getpid)()  # start the warm process before the limit applies

    def floods():
        print("x" * (300 << 10) if current_rank().global_rank == 0 else "text")

    launch = wrapper(ranks(console_logs=tmp_path))(floods)
    with file_size_limit(200 << 10):
        launch = launch.submit()
        assert launch.results(timeout=PATIENCE_S) == (None, None)
    assert launch.logs(0) == "x" * (300 << 10) + "\n"
    (logs,) = logs_below(tmp_path).values()
    assert len(logs["rank-0.log"]) == 200 << 10
    assert logs["rank-1.log"] == "text\n"
    assert "rank-0.log ends here" in caplog.text
