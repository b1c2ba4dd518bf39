"""Promise 5: in a torchrun world, a rank unpickles only values that a rank of the same user signed.

The store of such a world listens on every interface, and any local user can write into it. This file is also the script
that runs the scenarios. It forks the ranks of each world to save an import of torch per rank.
"""

from __future__ import annotations

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
from contextlib import closing
from pathlib import Path

import pytest
import torch.distributed as dist

from parawrap import Platform, current_rank, wrapper

HERE = Path(__file__).resolve()
PATIENCE_S = 100.0
LONGEST_S = 15  # limit for a rank; SIGALRM ends the rank
KILLED = b'{"error": "killed", "bases": [], "text": "the rank did not end"}'
PLATFORM = Platform(device="cpu", ipc_groups=None, timeout_min=0.1, verbose=False)
SECRET = "PARAWRAP_SECRET"
SCENARIOS = {}


def scenario(function):
    """Register a scenario, a function that takes a folder."""
    SCENARIOS[function.__name__] = function
    return function


# -- worlds


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_world(count, function, home, *, exits_at_once=False, **variables):
    """Run a function in each of `count` forked ranks and return its result or error in each rank.

    A rank exits only after all ranks have finished, unless `exits_at_once` is True.
    """
    places = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    gate, opener = os.pipe()
    started = []
    for rank in range(count):
        ranks_own = {"RANK": rank, "LOCAL_RANK": rank, "HOME": home}
        started.append(_fork_rank(function, places | ranks_own | variables, None if exits_at_once else (gate, opener)))
    endings = [json.loads(Path(f"/proc/self/fd/{reader}").read_bytes() or KILLED) for _, reader in started]
    for file in (gate, opener, *(reader for _, reader in started)):
        os.close(file)
    for pid, _ in started:
        os.waitpid(pid, 0)
    return endings


def _fork_rank(function, variables, gate):
    """Run a function in a fork with these variables; return its pid and a pipe with its result or error."""
    reader, writer = os.pipe()
    if pid := os.fork():
        os.close(writer)
        return pid, reader
    try:
        signal.alarm(LONGEST_S)
        os.environ.update({name: str(value) for name, value in variables.items()})
        tempfile.tempdir = None
        os.write(writer, json.dumps(ending_of(function)).encode())
        os.close(writer)
        if gate is not None:
            os.close(gate[1])
            os.read(gate[0], 1)
    finally:
        os._exit(0)


def ending_of(call):
    """Return the result of a call, or the name, text, bases, and duration of its exception."""
    began = time.monotonic()
    try:
        return {"result": call()}
    except BaseException as error:
        return {
            "error": type(error).__name__,
            "bases": [each.__name__ for each in type(error).__mro__],
            "text": "\n".join([str(error), *getattr(error, "__notes__", ())]),
            "seconds": time.monotonic() - began,
            "trace": traceback.format_exc(),
        }


def launched(function):
    """Launch a function as one rank of the surrounding world and return its results."""
    return list(wrapper(PLATFORM)(function)())


def number():
    return 10 * current_rank().global_rank


# -- an attacker who can reach the store but has no key


class Malice:
    """Creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


def connect_to_store():
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)


def packed_malice(marker):
    """Return a packed value that creates a file when it is unpickled."""
    pickled = pickle.dumps(Malice(marker))
    return struct.pack("<QQ", len(pickled), 0) + pickled


def keys_of_call(store, number=0):
    """Wait until a call runs, and return the prefix of its keys. Anyone may list the keys of a store."""
    while True:
        for key in store.list_keys():
            if found := re.search(rf"parawrap/[0-9a-f]{{64}}/{number}(?=/joined$)", key):
                return found.group()
        time.sleep(0.01)


def forge(header, piece, *, failed=False):
    """Replace rank 1's outcome in the store once rank 1 has reported it."""
    store = connect_to_store()
    prefix = keys_of_call(store)
    store.wait([f"{prefix}/1"])
    store.set(f"{prefix}/1/0", piece)
    store.set(f"{prefix}/1/place", "here")
    store.set(f"{prefix}/1", header)
    if failed:
        store.set(f"{prefix}/failed", "1")


def run_attacked(folder, attack, **variables):
    """Run two ranks; rank 0's function attacks. Return rank 0's result or error, and whether the attacker's code ran."""

    def play():
        return attack(folder) if current_rank().global_rank == 0 else list(range(100))

    endings = run_world(2, lambda: launched(play), folder / "home", **variables)
    return endings[0] | {"executed": (folder / "executed").exists()}


def _forged_result(folder):
    forge(pickle.dumps(Malice(folder / "executed")), b"")
    return 0


def _forged_piece(folder):
    forge(pickle.dumps(("returned", {"at": 0.0}, 1)), packed_malice(folder / "executed"))
    return 0


def _forged_failure(folder):
    body = {"at": 0.0, "summary": "", "traceback": "", "is_echo": False}
    forge(pickle.dumps(("raised", body, 1)), packed_malice(folder / "executed"), failed=True)
    return 0


def _replaced_piece(folder):
    store = connect_to_store()
    prefix = keys_of_call(store)
    store.wait([f"{prefix}/1"])
    store.set(f"{prefix}/1/0", packed_malice(folder / "executed"))
    return 0


@scenario
def a_forged_result(folder):
    return run_attacked(folder, _forged_result)


@scenario
def a_forged_piece_of_a_result(folder):
    return run_attacked(folder, _forged_piece)


@scenario
def a_forged_failure(folder):
    return run_attacked(folder, _forged_failure)


@scenario
def a_forged_result_with_a_secret(folder):
    return run_attacked(folder, _forged_result, **{SECRET: "known to this user alone"})


@scenario
def a_value_that_is_replaced(folder):
    return run_attacked(folder, _replaced_piece)


def steal(call):
    """Return rank 1's signed outcome of a call."""
    store = connect_to_store()
    prefix = keys_of_call(store, call)
    store.wait([f"{prefix}/1"])
    return {name: store.get(f"{prefix}/{name}") for name in ("1/0", "1")}


def replay(stolen, call):
    """Replace rank 1's outcome of a call by another one."""
    store = connect_to_store()
    prefix = keys_of_call(store, call)
    store.wait([f"{prefix}/1"])
    for name, value in stolen.items():
        store.set(f"{prefix}/{name}", value)


@scenario
def a_value_of_an_earlier_call(folder):
    """The attacker replaces rank 1's value of the second call by its signed value of the first call."""

    def play():
        stolen = {}

        def steals():
            if current_rank().global_rank == 0:
                stolen.update(steal(0))
            return "first"

        def replays():
            if current_rank().global_rank == 0:
                replay(stolen, 1)
            return "second"

        return [launched(steals), ending_of(lambda: launched(replays))]

    return run_world(2, play, folder / "home")[0]["result"]


@scenario
def a_value_of_an_earlier_world(folder):
    """The attacker replaces rank 1's value by its signed value in the same call of an earlier world."""

    def steals():
        if current_rank().global_rank == 0:
            Path(folder, "stolen").write_bytes(pickle.dumps(steal(0)))
        return "first"

    def replays():
        if current_rank().global_rank == 0:
            replay(pickle.loads(Path(folder, "stolen").read_bytes()), 0)
        return "second"

    first, second = (run_world(2, lambda each=each: launched(each), folder / "home")[0] for each in (steals, replays))
    return first["result"], second


# -- keys


@scenario
def ranks_with_different_secrets(folder):
    def play():
        os.environ[SECRET] = f"secret of rank {os.environ['RANK']}"
        return launched(number)

    return run_world(2, play, folder / "home")


@scenario
def ranks_with_one_secret(folder):
    endings = run_world(2, lambda: launched(number), folder / "home", **{SECRET: "the same"})
    return {"endings": endings, "files": files_below(folder)}


@scenario
def the_rank_with_the_store_exits_first(folder):
    """Rank 0, which hosts the store, exits as soon as its call has returned; rank 1 has a slow connection to the store."""

    def play():
        if os.environ["RANK"] == "1":
            for name in ("add", "check", "delete_key", "get"):
                setattr(dist.TCPStore, name, slow(getattr(dist.TCPStore, name)))
        return launched(number)

    return run_world(2, play, folder / "home", exits_at_once=True)


def slow(method):
    def delayed(*args):
        time.sleep(0.02)
        return method(*args)

    return delayed


@scenario
def ranks_that_make_the_key_at_once(folder):
    """Four ranks start at the same moment, in three new home folders."""
    rounds = []
    for home in map(str, range(3)):
        begin = time.time() + 0.1

        def play(begin=begin):
            while time.time() < begin:
                pass
            return launched(number)

        (folder / home).mkdir()
        rounds.append({"endings": run_world(4, play, folder / home), "files": files_below(folder / home)})
    return rounds


@scenario
def a_home_that_cannot_be_written(folder):
    endings = run_world(2, lambda: launched(number), "/proc/no-home", TMPDIR=folder)
    return {"endings": endings, "files": files_below(folder)}


def launch_after_chmod(mode):
    """Return a scenario that creates a key, changes the mode of its file, and launches again."""

    def chmod_and_launch(folder):
        run_world(2, lambda: launched(number), folder)
        keys = [folder / name for name, each in files_below(folder).items() if each["is_file"]]
        before = [key.read_bytes() for key in keys]
        for key in keys:
            key.chmod(mode)
        endings = run_world(2, lambda: launched(number), folder)
        return {
            "keys": list(map(str, keys)),
            "endings": endings,
            "modes": [stat.S_IMODE(key.stat().st_mode) for key in keys if key.exists()],
            "is_new": [not key.exists() or key.read_bytes() != old for key, old in zip(keys, before, strict=True)],
        }

    return chmod_and_launch


@scenario
def a_folder_that_others_may_write(folder):
    """The folder of the key is open to a group, as with umask 002, and has a key, or none."""
    endings = []
    for has_key in (False, True):
        home = folder / str(has_key)
        (home / ".parawrap").mkdir(parents=True)
        if has_key:
            run_world(2, lambda: launched(number), home)
        (home / ".parawrap").chmod(0o775)
        endings.append({"endings": run_world(2, lambda: launched(number), home), "files": files_below(home)})
    return endings


SCENARIOS |= {
    "a_key_that_others_may_read": launch_after_chmod(0o644),
    "a_key_that_others_may_write": launch_after_chmod(0o622),
}


def files_below(folder):
    """Return the mode and kind of each file and folder below a folder, by path."""
    return {
        str(path.relative_to(folder)): {"mode": stat.S_IMODE(path.stat().st_mode), "is_file": path.is_file()}
        for path in sorted(folder.rglob("*"))
    }


# -- tests


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of each scenario, by name."""
    folder = tmp_path_factory.mktemp("worlds")
    worlds = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "GROUP_", "SLURM", "OMPI", "PMI", SECRET)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(worlds)}
    from tests.helpers.processes import scripts  # this file also runs as a script, which cannot import tests

    with closing(scripts.start(HERE, [folder], folder, streams=1, environ=kept)) as script:
        output, _ = script.communicate(PATIENCE_S)
    assert script.returncode == 0, output
    return json.loads((folder / "results.json").read_text())


def assert_refused(ending):
    """Check that the error is a LaunchError that names the rank without a valid signature."""
    assert not ending["executed"]
    assert "LaunchError" in ending.get("bases", ()), ending
    assert re.search(r"rank 1|the rank that failed first", ending["text"])
    assert "signed" in ending["text"]
    assert ending["seconds"] < 20


@pytest.mark.parametrize(
    "name",
    [
        "a_forged_result",
        "a_forged_piece_of_a_result",
        "a_forged_failure",
        "a_forged_result_with_a_secret",
        "a_value_that_is_replaced",
    ],
)
def test_an_unsigned_value_is_refused(name, results):
    """An attacker's pickle is not loaded, and the error names the rank without a valid signature."""
    assert_refused(results[name])


@pytest.mark.parametrize("name", ["a_value_of_an_earlier_call", "a_value_of_an_earlier_world"])
def test_an_earlier_value_is_refused(name, results):
    """A signature is valid for one world, one call, and one rank only."""
    first, second = results[name]
    assert first == ["first", "first"]
    assert_refused(second | {"executed": False})


def test_different_secrets_raise(results):
    """Every rank raises an error that names PARAWRAP_SECRET."""
    for ending in results["ranks_with_different_secrets"]:
        assert "LaunchError" in ending.get("bases", ()), ending
        assert SECRET in ending["text"]
        assert ending["seconds"] < 20


def test_ranks_with_one_secret_need_no_key_file(results):
    """With PARAWRAP_SECRET, no key file is written; without it, a key file is."""
    found = results["ranks_with_one_secret"]
    assert found["endings"] == [{"result": [0, 10]}] * 2
    assert found["files"] == {}
    assert any(each["files"] for each in results["ranks_that_make_the_key_at_once"])


def test_the_rank_with_the_store_can_exit_first(results):
    """The other ranks still get their results after the rank with the store has exited."""
    assert results["the_rank_with_the_store_exits_first"] == [{"result": [0, 10]}] * 2


def assert_private(files):
    """Check that a key file exists, with mode 600 in a folder with mode 700."""
    keys = [Path(name) for name, each in files.items() if each["is_file"]]
    assert keys
    for key in keys:
        assert files[str(key)]["mode"] == 0o600
        assert files[str(key.parent)]["mode"] == 0o700


def test_ranks_that_create_the_key_at_once_agree(results):
    """Four ranks without a key create one key in ~/.parawrap and read each other's results."""
    for found in results["ranks_that_make_the_key_at_once"]:
        assert found["endings"] == [{"result": [0, 10, 20, 30]}] * 4
        assert_private(found["files"])
        assert sum(each["is_file"] for each in found["files"].values()) == 1
        assert {Path(name).parts[0] for name in found["files"]} == {".parawrap"}


def test_an_unwritable_home_is_replaced_by_the_temporary_folder(results):
    """The key is in a private folder in the temporary folder."""
    found = results["a_home_that_cannot_be_written"]
    assert found["endings"] == [{"result": [0, 10]}] * 2
    assert_private(found["files"])


def test_a_folder_that_others_may_write_is_mended(results):
    """The user's folder loses the access of others, and the launch works."""
    for found in results["a_folder_that_others_may_write"]:
        assert found["endings"] == [{"result": [0, 10]}] * 2
        assert_private(found["files"])


@pytest.mark.parametrize("name", ["a_key_that_others_may_read", "a_key_that_others_may_write"])
def test_a_key_that_other_users_know_is_not_used(name, results):
    """Ranks raise an error that names the file, or create a new private key."""
    found = results[name]
    assert found["keys"]
    if "result" in found["endings"][0]:
        assert found["endings"] == [{"result": [0, 10]}] * 2
        assert all(found["is_new"])
        assert set(found["modes"]) <= {0o600}
        return
    for ending in found["endings"]:
        assert "LaunchError" in ending["bases"]
        assert any(key in ending["text"] for key in found["keys"])
        assert "600" in ending["text"]


def main(folder):
    found = {}
    for name, function in SCENARIOS.items():
        place = folder / name
        place.mkdir()
        found[name] = function(place)
    (folder / "results.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
