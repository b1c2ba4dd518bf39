"""The choice of the failure to raise, and the text of its exception."""

from __future__ import annotations

import os
import signal

import pytest

from parawrap.errors import LaunchError, RankDiedError
from parawrap.launch import RankResults
from parawrap.launch.messages._first_rank_failure import (
    Died,
    Ended,
    Parcel,
    Raised,
    Requeued,
    Returned,
    error_of,
    first_failure,
    values_of,
)
from parawrap.launch.messages._pickle_values import memory_file, pack
from parawrap.launch.messages._rank_errors import is_echo, pack_exception, summary_of, traceback_of

PLACE = "node 3, a-host"
ECHO = RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:39837")


def returned(value=None, at=1.0) -> Returned:
    file = memory_file("test")
    pack(value, file, "value")
    return Returned(at, Parcel(file))


def raised(error, at=1.0) -> Raised:
    return Raised(at, Parcel(pack_exception(error)), summary_of(error), traceback_of(error), is_echo(error))


def died(at=1.0, **how) -> Died:
    return Died(at, 4711, **how)


def error_for(rank, outcomes, world_size) -> BaseException:
    return error_of(rank, outcomes, world_size, PLACE)


def notes_of(error) -> str:
    return "\n".join(error.__notes__)


class Frozen(Exception):
    def __setattr__(self, name, value):
        raise AttributeError(name)


class Unmakable:
    def __init__(self, *args):
        self.args = args

    def __reduce__(self):
        return open, ("/no/such/file",)


@pytest.mark.parametrize(
    ("outcomes", "rank"),
    [
        ({}, None),
        ({0: returned(), 1: returned()}, None),
        ({0: returned(), 1: Ended(1)}, None),
        ({0: returned(), 1: raised(ValueError())}, 1),
        ({0: raised(ValueError(), 2), 1: raised(KeyError(), 1)}, 1),
        ({0: raised(ValueError(), 1), 1: raised(KeyError(), 1)}, 0),
        ({0: raised(ECHO, 1), 1: raised(KeyError(), 2)}, 1),
        ({0: raised(ECHO, 2), 1: raised(ECHO, 1)}, 1),
        ({0: raised(ECHO, 1), 1: Ended(0)}, 0),
        ({0: raised(ECHO, 1), 1: died(2, signal=signal.SIGKILL)}, 1),
        ({0: raised(ECHO, 1), 1: died(2, exit_code=0)}, 1),
        ({0: raised(ValueError(), 1), 1: died(2)}, 0),
        ({0: raised(ValueError(), 2), 1: died(1)}, 1),
        ({0: Requeued(1), 1: returned()}, None),
        ({0: Requeued(1), 1: raised(ECHO, 2)}, None),
        ({0: Requeued(3), 1: raised(ECHO, 1), 2: raised(KeyError(), 2)}, 2),
        ({0: Requeued(1), 1: raised(ECHO, 2), 2: died(3, signal=signal.SIGKILL)}, 2),
    ],
)
def test_the_earliest_failure_that_is_not_an_echo_is_raised(outcomes, rank):
    """Ties go to the lowest rank. Without other failures, the earliest echo is raised, but not after a requeue."""
    assert first_failure(outcomes) == rank


def test_results_are_in_the_order_of_ranks():
    """Results have the order of ranks, not of arrival."""
    values = values_of({1: returned("b"), 2: returned("c"), 0: returned("a")}, range(3), 3)
    assert values == ("a", "b", "c")
    assert isinstance(values, RankResults)


def test_a_result_that_cannot_be_unpickled_names_its_rank():
    """The error of unpickling is returned, with a note that names the rank."""
    error = values_of({0: returned(), 1: returned(Unmakable())}, range(2), 2)
    assert isinstance(error, FileNotFoundError)
    assert "result of rank 1 of 2" in notes_of(error)


def test_an_exception_of_a_rank_is_raised():
    """The exception keeps its type and args and gets a note with rank, node, host, and traceback."""
    try:
        raise KeyError("k")
    except KeyError as caught:
        error = error_for(1, {1: raised(caught)}, 2)
    assert (type(error), error.args) == (KeyError, ("k",))
    assert f"rank 1 of 2 ({PLACE})" in error.__notes__[0]
    assert "test_an_exception_of_a_rank_is_raised" in error.__notes__[0]


def test_notes_of_the_user_come_first():
    """Notes of the launch follow the user's notes."""
    own = ValueError("v")
    own.add_note("in epoch 3")
    assert error_for(0, {0: raised(own)}, 1).__notes__[0] == "in epoch 3"


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"signal": signal.SIGKILL}, "was killed by SIGKILL"),
        ({"signal": signal.SIGSEGV}, "was killed by SIGSEGV"),
        ({"exit_code": 3}, "exited with code 3"),
        ({"exit_code": 0}, "exited with code 0"),
        ({"exit_code": 1, "by_sys_exit": True}, "called sys.exit(1)"),
        ({}, "ended with an unknown exit code"),
        ({"lost_with": "node 3, a-host"}, "was lost with node 3, a-host"),
    ],
)
def test_a_dead_rank_raises_rank_died_error(how, text):
    """RankDiedError has rank, signal, and exit code; its message also has the place and the process id."""
    error = error_for(1, {1: died(**how)}, 4)
    assert isinstance(error, RankDiedError)
    assert (error.rank, error.signal, error.exit_code) == (1, how.get("signal"), how.get("exit_code"))
    assert text in str(error)
    assert "rank 1 of 4" in str(error)
    assert "4711" in str(error)
    assert PLACE in str(error)


@pytest.mark.parametrize(
    ("code", "number"), [(-9, 9), (-11, 11), (-int(signal.SIGRTMIN) - 1, int(signal.SIGRTMIN) + 1), (-64, 64)]
)
def test_every_signal_can_kill(code, number):
    """Real-time signals, most of them without a name, are reported too."""
    death = Died.of(code, at=1.0, pid=4711, last_words="")
    assert death.signal == number
    assert str(number) in death.summary or signal.Signals(number).name in death.summary


@pytest.mark.parametrize("code", [0, 3, None])
def test_a_non_negative_code_is_an_exit_code(code):
    """Codes of at least 0, and None, are exit codes, not signals."""
    assert (Died.of(code, at=1.0, pid=1, last_words="").exit_code, Died.of(code, at=1.0, pid=1, last_words="").signal) == (
        code, None
    )  # fmt: skip


def test_sigkill_has_a_note_about_memory():
    """A note on SIGKILL mentions memory, because the kernel sends SIGKILL when memory runs out."""
    assert "memory" in notes_of(error_for(0, {0: died(signal=signal.SIGKILL)}, 1))
    assert not hasattr(error_for(0, {0: died(signal=signal.SIGSEGV)}, 1), "__notes__")


def test_the_last_output_of_a_dead_rank_is_noted():
    """The note has the last lines of the rank's output, indented."""
    words = "\n".join(f"line {i}" for i in range(10_000))
    note = notes_of(error_for(0, {0: died(exit_code=1, last_words=words)}, 1))
    assert note.endswith("\n  | line 9999")
    assert len(note) < 4000


def test_failures_of_other_ranks_are_in_one_note():
    """The note lists the ranks that raised or died, in rank order, without ranks that returned or were ended."""
    outcomes = {
        4: died(4, signal=signal.SIGABRT),
        3: raised(KeyError("k"), 3),
        0: raised(ValueError("v"), 1),
        1: returned(),
        2: Ended(2),
    }
    (_, note) = error_for(0, outcomes, 5).__notes__
    assert note == "other failed ranks: rank 3 raised KeyError: 'k'; rank 4 was killed by SIGABRT"


def test_the_note_about_other_ranks_is_limited():
    """If many ranks fail, the note lists eight of them and the number of the others."""
    note = error_for(0, {rank: raised(ECHO, rank) for rank in range(20)}, 20).__notes__[1]
    assert note.count("raised") == 8
    assert note.endswith("; and 11 more")


@pytest.mark.parametrize(
    ("done", "text"), [([1], "rank 1 had returned already"), ([1, 2], "ranks 1, 2 had returned already")]
)
def test_an_echo_names_the_ranks_that_had_returned(done, text):
    """An echo without another failure usually means that some ranks skipped a collective."""
    outcomes = {0: raised(ECHO)} | {rank: returned() for rank in done}
    error = error_for(0, outcomes, len(done) + 1)
    assert str(error).startswith(text)
    assert type(error) is LaunchError
    assert type(error.__cause__) is type(ECHO)


def test_other_failures_do_not_name_the_ranks_that_had_returned():
    """A failure that is not an echo has no note about returned ranks."""
    assert "returned already" not in notes_of(error_for(0, {0: raised(ValueError()), 1: returned()}, 2))


def test_an_exception_that_cannot_be_unpickled_becomes_a_launch_error():
    """LaunchError has the exception's summary, its traceback, and the reason."""
    file = memory_file("test")
    pack(Unmakable("odd"), file, "value")
    error = error_for(1, {1: Raised(1.0, Parcel(file), "Unmakable: odd", "the traceback", False)}, 2)
    assert isinstance(error, LaunchError)
    assert "rank 1 raised Unmakable: odd" in str(error)
    assert "No such file" in str(error)
    assert "the traceback" in notes_of(error)


def test_an_exception_that_refuses_notes_is_raised():
    """An exception that does not allow notes is raised without notes."""
    file = memory_file("test")
    pack(Frozen("odd"), file, "value")
    error = error_for(0, {0: Raised(1.0, Parcel(file), "Frozen: odd", "the traceback", False), 1: raised(ECHO)}, 2)
    assert (type(error), error.args) == (Frozen, ("odd",))


def is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("how", ["opened", "closed", "forgotten", "broken"])
def test_a_parcel_closes_its_file(how):
    """`close` or garbage collection closes the file, even if unpickling failed. Until then, `open` works again."""
    file = memory_file("test")
    pack(Unmakable() if how == "broken" else 3, file, "value")
    parcel = Parcel(file)
    assert is_open(file)
    if how == "broken":
        with pytest.raises(FileNotFoundError):
            parcel.open()
    elif how == "opened":
        assert parcel.open() == parcel.open() == 3
    if how == "forgotten":
        del parcel
    else:
        parcel.close()
        parcel.close()
    assert not is_open(file)
