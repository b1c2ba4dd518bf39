"""The choice of the failure to raise, and the text of its exception."""

from __future__ import annotations

import contextlib
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist

from parawrap.errors import LaunchError
from parawrap.processes import torch_groups
from parawrap.processes.outcomes import (
    Died,
    Ended,
    Ending,
    Raised,
    Requeued,
    Returned,
    error_of,
    first_failure,
    is_echo,
    outcome_of,
    values_of,
)
from tests.helpers.processes import notes_of

PLACE = "node 3, a-host"
ECHO = RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:39837")


def raised(error, at=1.0):
    return replace(outcome_of(error), at=at, is_echo=error is ECHO)


def died(at=1.0, number=None):
    return Died(at, 4711, None if number is None else -number)


@pytest.mark.parametrize(
    ("outcomes", "rank"),
    [
        ({0: raised(ValueError(), 1), 1: raised(KeyError(), 1)}, 0),
        ({0: raised(ECHO, 1), 1: raised(KeyError(), 2)}, 1),
        ({0: raised(ECHO, 2), 1: raised(ECHO, 1)}, 1),
        ({0: raised(ECHO, 1), 1: died(2, number=signal.SIGKILL)}, 1),
        ({0: raised(ValueError(), 2), 1: died(1)}, 1),
        ({0: Requeued(1), 1: raised(ECHO, 2)}, None),
        ({0: Requeued(3), 1: raised(ECHO, 1), 2: raised(KeyError(), 2)}, 2),
    ],
)
def test_earliest_cause_is_raised(outcomes, rank):
    """Echoes of a failure come after it.

    Ties go to the lowest rank. An echo of a requeue is not a failure.
    """
    assert first_failure(outcomes) == rank


def test_other_failures_are_noted():
    outcomes = {
        4: died(4, number=signal.SIGABRT),
        3: raised(KeyError("k"), 3),
        0: raised(ValueError("v")),
        2: Ended(2),
    }
    (_, note) = error_of(0, outcomes, 5, PLACE).__notes__
    assert note == "other failed ranks: rank 3 raised KeyError: 'k'; rank 4 was killed by SIGABRT"
    (_, note) = error_of(
        0, {rank: raised(ValueError(), rank) for rank in range(20)}, 20, PLACE
    ).__notes__
    assert note.count("raised") == 8
    assert note.endswith("; and 11 more")


@pytest.mark.parametrize(
    "how",
    [
        {"outcomes": {0: raised(ValueError())}},
        {"timed_out": "not done after timeout_min=1 minutes"},
        {"deadlocked": True},
        {"lost": "the process of rank 0 cannot be forked"},
        {"error": OSError("too many open files")},
    ],
)
def test_notes_of_attempts(how):
    """Whatever ended the last attempt, its error says how those before ended."""
    note = "attempt 0 failed: rank 0 raised KeyError: 1"
    ending = Ending(**{"outcomes": {0: Ended(1)}, "history": [note], **how})
    with pytest.raises(Exception) as caught:
        values_of("train", ending, [0], 1)
    assert note in notes_of(caught.value)


@pytest.mark.parametrize(
    ("outcomes", "is_uneven"),
    [
        ([Returned(1, b""), Returned(2, b"")], False),
        ([raised(NameError("model")), raised(NameError("model"))], False),
        ([raised(NameError("model")), raised(NameError("loss"))], True),
        ([raised(NameError("model")), Ended(2)], True),
        ([raised(NameError("model")), Returned(2, b"")], True),
        ([Ended(1), Ended(2)], True),
        ([raised(ECHO), raised(ECHO)], True),
    ],
)
def test_ranks_stop_at_different_points(outcomes, is_uneven):
    """Ranks that all raised the same error on their own stopped at the same point."""
    assert Ending(dict(enumerate(outcomes))).is_uneven == is_uneven


def test_a_lost_connection_is_below():
    """If a rank had returned, the error says so, and neither its text nor a cause shows gloo's
    error first.
    """
    error = error_of(1, {0: Returned(1, b""), 1: raised(ECHO)}, 2, PLACE)
    assert "rank 0 had returned already" in str(error)
    assert "Connection" not in str(error)
    assert error.__cause__ is error.__context__ is None
    assert "Connection closed by peer" in notes_of(error)


def test_unreadable_error_is_told():
    error = error_of(
        1, {1: Raised(1.0, "OddError: odd", "the traceback", False, bytes(99))}, 2, PLACE
    )
    assert type(error) is LaunchError
    assert "rank 1 raised OddError: odd" in str(error)
    assert "the traceback" in notes_of(error)


# -- echoes


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:6534: Connection "
            "reset by peer. This is"
        ),
        dist.DistNetworkError(
            "Failed to recv, got 0 bytes. Connection was likely closed. Did the "
            "remote server shutdown?"
        ),
        dist.DistBackendError(
            "socketStartConnect: Connect to 10.0.0.1<41029> failed : Connection refused"
        ),
    ],
    ids=["gloo", "store", "NCCL"],
)
def test_lost_connection_is_echo(error, monkeypatch):
    """A lost connection is an echo, and so is an error that it causes. An error of the user with
    similar words is not one.
    """
    monkeypatch.setattr(torch_groups, "_has_joined", True)
    raised_by_c(error)
    wrapping = RuntimeError("training failed in step 5")
    wrapping.__cause__ = error
    assert is_echo(error)
    assert is_echo(wrapping)
    others = [
        ValueError("connection closed by peer"),
        ConnectionRefusedError(111, "Connection refused"),  # by a database, for example
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"
        ),
        RuntimeError("ProcessGroupNCCL is only supported with GPUs, no GPUs found!"),
        type("RequestError", (RuntimeError,), {})("[pair.cc:553] connection reset by peer"),
        # Of an awaited future, or of another library in C
        RuntimeError("upload failed: connection reset by peer"),
    ]
    assert not any(is_echo(raised_by_c(each)) for each in others)
    monkeypatch.undo()
    assert not is_echo(error)  # without process groups, there is no other rank to lose


def raised_by_c(error):
    """Raise an error in a frame that is not at a `raise`, as a function of torch in C does."""
    with contextlib.suppress(type(error)):
        (each for each in ()).throw(error)
    return error


def test_errors_that_mention_connections(monkeypatch):
    """Code of the user raises it, in a rank with process groups: it is the failure itself."""
    monkeypatch.setattr(torch_groups, "_has_joined", True)

    def request():
        raise RuntimeError("request failed: connection reset by peer")

    for reraise in request, lambda: wait_for(request):
        with pytest.raises(RuntimeError) as caught:
            reraise()
        assert not is_echo(caught.value)


def wait_for(function):
    """Raise the error of another thread, as a pool does."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()
