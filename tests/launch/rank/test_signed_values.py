"""In a torchrun world, a rank unpickles only values that a rank of the same user signed for the same use.

The store of such a world listens on every interface, and any local user can write into it. This file is also the script
that runs the scenarios. It forks the ranks of each world to save an import of torch per rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import signal
import socket
import stat
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pytest
import torch.distributed as dist

from parawrap import Platform, current_rank, wrapper
from tests.helpers import worlds
from tests.helpers.waiting import PATIENCE_S, eventually

HERE = Path(__file__).resolve()
SECRET = "PARAWRAP_SECRET"
SCENARIOS = {}


def scenario(function):
    """Register a scenario. It takes a folder and checks itself."""
    SCENARIOS[function.__name__] = function
    return function


# -- worlds


def run_world(count, function, home, *, exits_at_once=False, **variables):
    """Run a function in each of `count` forked ranks and return its result, or the types and text of its error.

    A rank exits only after all ranks have finished, unless `exits_at_once` is True.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "HOME": home}
    gate, opener = os.pipe()
    started = []
    for rank in range(count):
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(opener)
            with contextlib.suppress(BaseException):
                signal.alarm(int(PATIENCE_S))
                own = shared | {"RANK": rank, "LOCAL_RANK": rank} | variables
                os.environ.update({name: str(value) for name, value in own.items()})
                tempfile.tempdir = None
                os.write(writer, json.dumps(ending_of(function)).encode())
                os.close(writer)
                if not exits_at_once:
                    os.read(gate, 1)
            os._exit(0)
        os.close(writer)
        started.append((pid, reader))
    endings = [json.loads(Path(f"/proc/self/fd/{reader}").read_bytes() or b'"killed"') for _, reader in started]
    for file in (gate, opener, *(reader for _, reader in started)):
        os.close(file)
    for pid, _ in started:
        os.waitpid(pid, 0)
    return endings


def ending_of(call):
    try:
        return call()
    except BaseException as error:
        return {"bases": [each.__name__ for each in type(error).__mro__], "text": str(error)}


def launched(function):
    """Launch a function as one rank of the surrounding world and return its results."""
    return list(wrapper(Platform(device="cpu", ipc_groups=None, timeout_min=1, verbose=False))(function)())


def number():
    return 10 * current_rank().global_rank


def launch_numbers():
    return launched(number)


def assert_refused(ending, text="signed"):
    assert "LaunchError" in ending["bases"], ending
    assert text in ending["text"]


# -- an attacker who can reach the store but has no key


class Malice:
    """Creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


class Attack:
    """Waits for rank 1's outcome of a call in the store. Anyone may list the keys of a store."""

    def __init__(self, call=0):
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.TCPStore(*address, is_master=False, wait_for_workers=False)
        pattern = re.compile(rf"(parawrap/[0-9a-f]{{64}}/{call})/joined")

        def find():
            return next(filter(None, map(pattern.fullmatch, self.store.list_keys())), None)

        self.prefix = eventually(find, "the call")[1]
        self.store.wait([f"{self.prefix}/1"])

    def read(self):
        return {name: self.store.get(f"{self.prefix}/{name}") for name in ("1/0", "1")}

    def write(self, values):
        for name, value in values.items():
            self.store.set(f"{self.prefix}/{name}", value)


def forgeries(marker):
    """Return values that create a file when they are unpickled, by the keys that they replace."""
    pickled = pickle.dumps(Malice(marker))
    piece = struct.pack("<QQ", len(pickled), 0) + pickled
    returned = pickle.dumps(("returned", {"at": 0.0}, 1))
    raised = pickle.dumps(("raised", {"at": 0.0, "summary": "", "traceback": "", "is_echo": False}, 1))
    place = {"1/place": b"here"}
    return [
        place | {"1": pickled},
        place | {"1/0": piece, "1": returned},
        place | {"1/0": piece, "1": raised, "failed": b"1"},
        {"1/0": piece},
    ]


@scenario
def forged_values(folder):
    """Results, pieces of results, and failures: the error names the rank, and the attacker's code does not run."""
    for secret in {}, {SECRET: "known to this user alone"}:
        for forgery in forgeries(folder / "executed"):

            def play(forgery=forgery):
                if current_rank().global_rank == 0:
                    Attack().write(forgery)
                return list(range(100))

            ending = run_world(2, lambda play=play: launched(play), folder / "home", **secret)[0]
            assert_refused(ending)
            assert re.search(r"rank 1|the rank that failed first", ending["text"])
            assert not (folder / "executed").exists()


@scenario
def values_of_an_earlier_call(folder):
    """A signature is valid for one call of one world."""

    def attack(call, stolen):
        def function():
            if current_rank().global_rank == 0:
                attacked = Attack(call)
                attacked.write(stolen) if stolen else stolen.update(attacked.read())
            return call

        return function

    def play(stolen=None):
        stolen = {} if stolen is None else stolen
        first = ending_of(lambda: launched(attack(0, stolen)))
        if os.environ["RANK"] == "0":
            Path(folder, "stolen").write_bytes(pickle.dumps(stolen))
        return first, ending_of(lambda: launched(attack(1, stolen)))

    first, second = run_world(2, play, folder / "home")[0]
    assert first == [0, 0]
    assert_refused(second)
    of_earlier_world = pickle.loads((folder / "stolen").read_bytes())
    assert_refused(run_world(2, lambda: play(of_earlier_world), folder / "home")[0][0])


# -- keys


def files_below(folder):
    """Return the mode of each file and folder below a folder, by path."""
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in sorted(folder.rglob("*"))}


@scenario
def secrets(folder):
    """With PARAWRAP_SECRET, no key file is written. Different secrets raise an error in every rank."""
    (folder / "home").mkdir()
    assert run_world(2, launch_numbers, folder / "home", **{SECRET: "the same"}) == [[0, 10]] * 2
    assert files_below(folder) == {"home": stat.S_IMODE((folder / "home").stat().st_mode)}

    def play():
        os.environ[SECRET] = f"secret of rank {os.environ['RANK']}"
        return launch_numbers()

    for ending in run_world(2, play, folder / "home"):
        assert_refused(ending, SECRET)


@scenario
def the_rank_with_the_store_exits_first(folder):
    """The other rank, which has a slow connection to the store, still gets its results."""

    def play():
        if os.environ["RANK"] == "1":
            for name in ("add", "check", "delete_key", "get"):
                setattr(dist.TCPStore, name, slow(getattr(dist.TCPStore, name)))
        return launch_numbers()

    assert run_world(2, play, folder / "home", exits_at_once=True) == [[0, 10]] * 2


def slow(method):
    def delayed(*args):
        time.sleep(0.02)
        return method(*args)

    return delayed


@scenario
def ranks_that_make_the_key_at_once(folder):
    """Four ranks without a key create one private key in ~/.parawrap and read each other's results."""
    for home in (folder / name for name in "abc"):
        home.mkdir()
        assert run_world(4, launch_numbers, home) == [[0, 10, 20, 30]] * 4
        assert files_below(home) == {".parawrap": 0o700, ".parawrap/key": 0o600}


@scenario
def an_unwritable_home(folder):
    """The key is in a private folder in the temporary folder."""
    assert run_world(2, launch_numbers, "/proc/no-home", TMPDIR=folder) == [[0, 10]] * 2
    assert sorted(files_below(folder).values()) == [0o600, 0o700]


@scenario
def a_folder_that_others_may_write(folder):
    """As with umask 002: the folder loses the access of others, and the launch works."""
    for has_key in (False, True):
        home = folder / str(has_key)
        (home / ".parawrap").mkdir(parents=True)
        if has_key:
            run_world(2, launch_numbers, home)
        (home / ".parawrap").chmod(0o775)
        assert run_world(2, launch_numbers, home) == [[0, 10]] * 2
        assert files_below(home) == {".parawrap": 0o700, ".parawrap/key": 0o600}


@scenario
def a_key_that_others_know(folder):
    """A key that others may read or write is refused; the error names the file and the cure."""
    for mode in 0o644, 0o622:
        home = folder / f"{mode:o}"
        run_world(2, launch_numbers, home)
        key = home / ".parawrap" / "key"
        key.chmod(mode)
        for ending in run_world(2, launch_numbers, home):
            assert_refused(ending, str(key))
            assert "600" in ending["text"]


# -- tests


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """The traceback of each scenario that failed, by name."""
    folder = tmp_path_factory.mktemp("worlds")
    assert worlds.run_with_variables([{}], folder, script=HERE) == [0]
    return json.loads((folder / "failures.json").read_text())


@pytest.mark.parametrize("name", SCENARIOS)
def test_values_in_a_store(name, failures):
    assert failures.get(name) is None, failures[name]


def main(folder):
    os.environ.pop(SECRET, None)
    failures = {}
    for name, function in SCENARIOS.items():
        (folder / name).mkdir()
        try:
            function(folder / name)
        except BaseException:
            failures[name] = traceback.format_exc()
    (folder / "failures.json").write_text(json.dumps(failures))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
