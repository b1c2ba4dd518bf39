"""Launches with few free descriptors, processes, or threads return results or name the limit and its value."""

from __future__ import annotations

import json
import os
import resource

import pytest
import torch

from parawrap import wrapper
from tests.helpers.processes import notes_of, ranks, run_script

# -- in the parent

SCRIPT = """
import json, os, pathlib, resource, time
import torch
from parawrap import Platform, current_rank, wrapper

def make(size):
    return torch.full((size,), float(current_rank().global_rank))

platform = Platform(device="cpu", n_cpus=3, ipc_protocol="file", verbose=False, timeout_min=0.2, grace_s=1)
launchable = wrapper(platform)(make)

def outcome_of(size):
    began = time.monotonic()
    try:
        results = launchable(size)
    except Exception as error:
        text = "\\n".join([type(error).__name__, str(error), *getattr(error, "__notes__", ())])
        return {"error": text, "seconds": time.monotonic() - began}
    return {"results": [float(each.sum()) / size for each in results]}

def outcomes(size):
    found = [outcome_of(size)]  # starts the warm process and runs late imports
    for limit in limits():
        found.append(outcome_of(size) | {"limit": limit})
    return found
"""

FILES = """
def limits():
    '''Leave 1, 3, 5, and so on descriptors free, and finally enough.'''
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 200
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    for free in (*range(1, 24, 2), 100):
        files = []
        try:
            while True:
                files.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        for file in files[-free:]:
            os.close(file)
        yield limit
        for file in files[:-free]:
            os.close(file)
"""

PROCESSES = """
def limits():
    '''Allow -2, -1, 0, and so on more processes and threads, and finally enough.

    The count may still contain a thread of the previous launch, so that 0 could in fact be 1.
    '''
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    for free in (*range(-2, 8), 1000):
        limit = running() + free
        resource.setrlimit(resource.RLIMIT_NPROC, (limit, hard))
        yield limit

def running():
    '''Return the number of processes and threads of this user.'''
    found = 0
    for path in pathlib.Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        except OSError:  # the process has ended
            continue
        found += int(lines["Threads"]) if int(lines["Uid"].split()[0]) == os.getuid() else 0
    return found
"""


def another_user():
    """Return a command prefix that runs a program as an unused user, because root has no process limit."""
    rights = "-all,+dac_override"  # lets the user read the interpreter and the folders of this user
    options = ["--clear-groups", f"--inh-caps={rights}", f"--ambient-caps={rights}"]
    return [] if os.getuid() else ["setpriv", "--reuid", str(60_000 + os.getpid() % 5_000), *options]


@pytest.mark.parametrize(
    ("limits", "name"), [(FILES, "RLIMIT_NOFILE"), (PROCESSES, "RLIMIT_NPROC")], ids=["descriptors", "processes"]
)
def test_a_parent_at_its_limit_names_the_limit(limits, name, tmp_path):
    """With any number left, a launch returns all results, or soon raises an error with the limit and its value."""
    text = SCRIPT + limits + "\nprint(json.dumps(outcomes(1 << 18)))\n"
    options = {"prefix": another_user(), "env": os.environ | {"OMP_NUM_THREADS": "1"}} if limits == PROCESSES else {}
    first, *others = json.loads(run_script(tmp_path, text, **options))
    assert first["results"] == others[-1]["results"] == [0.0, 1.0, 2.0]
    failed = [each for each in others if "results" not in each]
    assert failed
    for each in failed:
        assert "returned nothing" not in each["error"]
        assert name in each["error"], each
        assert str(each["limit"]) in each["error"], each
        assert each["seconds"] < 20


# -- in a rank


def exhausting(then):
    """Return a function that uses up its rank's descriptors and then ends in the given way."""

    def use_all_descriptors(limit):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            while True:
                os.open(os.devnull, os.O_RDONLY)
        except OSError:
            pass
        if then == "raises":
            raise KeyError("the user's")
        return torch.ones(1 << 18) if then == "returns a tensor" else "small"

    return use_all_descriptors


@pytest.mark.parametrize("then", ["returns", "returns a tensor", "raises"])
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_a_rank_without_free_descriptors_is_reported(method, then):
    """The result or exception arrives, or the error names RLIMIT_NOFILE; it never says "returned nothing"."""
    limit = 150
    arrived = {"returns": ("small",), "returns a tensor": (1 << 18,), "raises": "the user's"}[then]
    try:
        (result,) = wrapper(ranks(1, spawn_method=method))(exhausting(then))(limit)
        ending = (result if isinstance(result, str) else int(result.sum()),)
    except KeyError as error:
        (ending,) = error.args
    except Exception as error:
        text = f"{error}\n{notes_of(error)}"
        named = "RLIMIT_NOFILE" in text and str(limit) in text
        ending = arrived if named and "returned nothing" not in text else text
    assert ending == arrived
