"""Promise 5: in a world of torchrun's, a rank unpickles only values that a rank of the same user signed.

The store of such a world listens on every interface, and any local user may write into it. This file is also the script
that plays the scenarios: it forks the ranks of each world, which saves an import of torch per rank.
"""

from __future__ import annotations

import json
import os
import pickle
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
LONGEST_S = 15  # for one rank in one world; then the kernel ends it
KILLED = b'{"error": "killed", "bases": [], "text": "the rank did not end"}'
PLATFORM = Platform(device="cpu", ipc_groups=None, timeout_min=0.1, verbose=False)
SECRET = "PARAWRAP_SECRET"
SCENARIOS = {}


def scenario(function):
    """Add a function of a folder to the scenarios that the script plays."""
    SCENARIOS[function.__name__] = function
    return function


# -- worlds


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def world(count, play, home, *, leaves_at_once=False, **variables):
    """Play a function in each of `count` forked ranks; return what it gave in each, or the error that it raised.

    The processes live until all endings are there, unless `leaves_at_once` is True.
    """
    places = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    gate, opener = os.pipe()
    started = []
    for rank in range(count):
        ranks_own = {"RANK": rank, "LOCAL_RANK": rank, "HOME": home}
        started.append(_forked(play, places | ranks_own | variables, None if leaves_at_once else (gate, opener)))
    endings = [json.loads(Path(f"/proc/self/fd/{reader}").read_bytes() or KILLED) for _, reader in started]
    for file in (gate, opener, *(reader for _, reader in started)):
        os.close(file)
    for pid, _ in started:
        os.waitpid(pid, 0)
    return endings


def _forked(play, variables, gate):
    """A new process with these variables, and a pipe that gives how the function ended there."""
    reader, writer = os.pipe()
    if pid := os.fork():
        os.close(writer)
        return pid, reader
    try:
        signal.alarm(LONGEST_S)
        os.environ.update({name: str(value) for name, value in variables.items()})
        tempfile.tempdir = None
        os.write(writer, json.dumps(ending_of(play)).encode())
        os.close(writer)
        if gate is not None:
            os.close(gate[1])
            os.read(gate[0], 1)
    finally:
        os._exit(0)


def ending_of(call):
    """What a call gave; or the name, text, bases and duration of what it raised."""
    began = time.monotonic()
    try:
        return {"given": call()}
    except BaseException as error:
        return {
            "error": type(error).__name__,
            "bases": [each.__name__ for each in type(error).__mro__],
            "text": "\n".join([str(error), *getattr(error, "__notes__", ())]),
            "seconds": time.monotonic() - began,
            "trace": traceback.format_exc(),
        }


def launched(function):
    """A call of this function as one of the ranks of the surrounding world."""
    return list(wrapper(PLATFORM)(function)())


def number():
    return 10 * current_rank().global_rank


# -- an attacker, who can reach the store and has no key


class Malice:
    """Creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


def line_to_the_store():
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)


def packed_malice(marker):
    """A packed value that creates a file when it is opened: no buffers, and a pickle."""
    pickled = pickle.dumps(Malice(marker))
    return struct.pack("<QQ", len(pickled), 0) + pickled


def forge(header, piece, *, failed=False):
    """Write rank 1's ending into the store, for each of the first calls of the world."""
    store = line_to_the_store()
    for call in range(4):
        store.set(f"parawrap/0/{call}/1/0", piece)
        store.set(f"parawrap/0/{call}/1/place", "here")
        store.set(f"parawrap/0/{call}/1", header)
        store.add(f"parawrap/0/{call}/readers", 1)
        if failed:
            store.set(f"parawrap/0/{call}/failed", "1")


def attacked(folder, play, **variables):
    """How the call of rank 0 ended in a world whose other rank is the attacker, and whether the attacker's code ran."""
    (ending,) = world(1, play, folder / "home", WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, **variables)
    return ending | {"executed": (folder / "executed").exists()}


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


@scenario
def a_forged_result(folder):
    return attacked(folder, lambda: launched(lambda: _forged_result(folder)))


@scenario
def a_forged_piece_of_a_result(folder):
    return attacked(folder, lambda: launched(lambda: _forged_piece(folder)))


@scenario
def a_forged_failure(folder):
    return attacked(folder, lambda: launched(lambda: _forged_failure(folder)))


@scenario
def a_forged_result_with_a_secret(folder):
    return attacked(folder, lambda: launched(lambda: _forged_result(folder)), **{SECRET: "known to this user alone"})


@scenario
def a_value_that_is_replaced(folder):
    """Rank 1 is real; the attacker replaces a part of what it wrote, before rank 0 reads it."""

    def returns():
        if current_rank().global_rank == 1:
            return list(range(100))
        store = line_to_the_store()
        store.wait(["parawrap/0/0/1"])
        store.set("parawrap/0/0/1/0", packed_malice(folder / "executed"))
        return 0

    endings = world(2, lambda: launched(returns), folder / "home")
    return endings[0] | {"executed": (folder / "executed").exists()}


@scenario
def a_value_of_an_earlier_call(folder):
    """The attacker writes what rank 1 had signed for the first call into the place of the second."""

    def play():
        stolen = {}

        def steals():
            if current_rank().global_rank == 0:
                store = line_to_the_store()
                store.wait(["parawrap/0/0/1"])
                stolen.update({name: store.get(f"parawrap/0/0/{name}") for name in ("1", "1/0")})
                return "first"
            return "first"

        def replays():
            store = line_to_the_store()
            if current_rank().global_rank == 0:
                store.wait(["parawrap/0/1/1"])
                for name in ("1/0", "1"):
                    store.set(f"parawrap/0/1/{name}", stolen[name])
            return "second"

        return [launched(steals), ending_of(lambda: launched(replays))]

    return world(2, play, folder / "home")[0]["given"]


# -- keys


@scenario
def ranks_with_different_secrets(folder):
    def play():
        os.environ[SECRET] = f"secret of rank {os.environ['RANK']}"
        return launched(number)

    return world(2, play, folder / "home")


@scenario
def ranks_with_one_secret(folder):
    endings = world(2, lambda: launched(number), folder / "home", **{SECRET: "the same"})
    return {"endings": endings, "files": files_below(folder)}


@scenario
def a_rank_that_keeps_the_store_and_leaves(folder):
    """Rank 0, which keeps the store, ends as soon as its call has returned; rank 1 has a slow line to the store."""

    def play():
        if os.environ["RANK"] == "1":
            for name in ("add", "check", "delete_key", "get"):
                setattr(dist.PrefixStore, name, slow(getattr(dist.PrefixStore, name)))
        return launched(number)

    return world(2, play, folder / "home", leaves_at_once=True)


def slow(method):
    def delayed(*args):
        time.sleep(0.02)
        return method(*args)

    return delayed


@scenario
def ranks_that_make_the_key_at_once(folder):
    """Four ranks begin at the same moment, in three new homes."""
    rounds = []
    for home in map(str, range(3)):
        begin = time.time() + 0.1

        def play(begin=begin):
            while time.time() < begin:
                pass
            return launched(number)

        (folder / home).mkdir()
        rounds.append({"endings": world(4, play, folder / home), "files": files_below(folder / home)})
    return rounds


@scenario
def a_home_that_cannot_be_written(folder):
    endings = world(2, lambda: launched(number), "/proc/no-home", TMPDIR=folder)
    return {"endings": endings, "files": files_below(folder)}


def after_change(mode):
    """Make a key, change the mode of its file, and launch again."""

    def play(folder):
        world(2, lambda: launched(number), folder)
        keys = [folder / name for name, each in files_below(folder).items() if each["is_file"]]
        before = [key.read_bytes() for key in keys]
        for key in keys:
            key.chmod(mode)
        endings = world(2, lambda: launched(number), folder)
        return {
            "keys": list(map(str, keys)),
            "endings": endings,
            "modes": [stat.S_IMODE(key.stat().st_mode) for key in keys if key.exists()],
            "is_new": [not key.exists() or key.read_bytes() != old for key, old in zip(keys, before, strict=True)],
        }

    return play


SCENARIOS |= {"a_key_that_others_may_read": after_change(0o644), "a_key_that_others_may_write": after_change(0o622)}


def files_below(folder):
    """By path, the mode and kind of everything below this folder."""
    return {
        str(path.relative_to(folder)): {"mode": stat.S_IMODE(path.stat().st_mode), "is_file": path.is_file()}
        for path in sorted(folder.rglob("*"))
    }


# -- what must hold


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """How each scenario went, by its name."""
    folder = tmp_path_factory.mktemp("worlds")
    worlds = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "GROUP_", "SLURM", "OMPI", "PMI", SECRET)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(worlds)}
    from tests.launch.processes import scripts  # the scenarios, which are a script, find no tests to import

    with closing(scripts.start(HERE, [folder], folder, streams=1, environ=kept)) as script:
        said, _ = script.communicate(PATIENCE_S)
    assert script.returncode == 0, said
    return json.loads((folder / "played.json").read_text())


def assert_refused(ending):
    """The ending is a LaunchError that says whose value was not signed."""
    assert not ending["executed"]
    assert "LaunchError" in ending.get("bases", ()), ending
    assert "rank 1" in ending["text"]
    assert "signed" in ending["text"]
    assert ending["seconds"] < 5


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
def test_a_value_that_no_rank_signed_is_refused(name, played):
    """An attacker's pickle does not run, and the error names the rank whose value was not signed."""
    assert_refused(played[name])


def test_a_value_of_an_earlier_call_is_refused(played):
    """A signature holds for one call and one rank: an old value written again is no result."""
    first, second = played["a_value_of_an_earlier_call"]
    assert first == ["first", "first"]
    assert_refused(second | {"executed": False})


def test_ranks_with_different_secrets_are_told_of_the_variable(played):
    """Every rank raises an error that names PARAWRAP_SECRET."""
    for ending in played["ranks_with_different_secrets"]:
        assert "LaunchError" in ending.get("bases", ()), ending
        assert SECRET in ending["text"]
        assert ending["seconds"] < 5


def test_ranks_with_one_secret_need_no_key_file(played):
    """The variable is enough: nothing is written into the home folder; without the variable, a key file is."""
    told = played["ranks_with_one_secret"]
    assert told["endings"] == [{"given": [0, 10]}] * 2
    assert told["files"] == {}
    assert any(each["files"] for each in played["ranks_that_make_the_key_at_once"])


def test_the_rank_that_keeps_the_store_may_leave_first(played):
    """The other ranks still get their results: a rank that leaves its last call breaks no other rank's."""
    assert played["a_rank_that_keeps_the_store_and_leaves"] == [{"given": [0, 10]}] * 2


def assert_private(files):
    """There is a key file that only its owner may read, in a folder that only its owner may enter."""
    keys = [Path(name) for name, each in files.items() if each["is_file"]]
    assert keys
    for key in keys:
        assert files[str(key)]["mode"] == 0o600
        assert files[str(key.parent)]["mode"] == 0o700


def test_ranks_that_make_the_key_at_once_agree(played):
    """Four ranks without a key make one, in ~/.parawrap, and read each other's results."""
    for told in played["ranks_that_make_the_key_at_once"]:
        assert told["endings"] == [{"given": [0, 10, 20, 30]}] * 4
        assert_private(told["files"])
        assert sum(each["is_file"] for each in told["files"].values()) == 1
        assert {Path(name).parts[0] for name in told["files"]} == {".parawrap"}


def test_a_home_that_cannot_be_written_is_replaced_by_a_temporary_folder(played):
    """The key lies in a private folder there."""
    told = played["a_home_that_cannot_be_written"]
    assert told["endings"] == [{"given": [0, 10]}] * 2
    assert_private(told["files"])


@pytest.mark.parametrize("name", ["a_key_that_others_may_read", "a_key_that_others_may_write"])
def test_a_key_that_other_users_know_is_not_used(name, played):
    """Ranks raise an error that names the file; or they make a new key that only its owner may read."""
    told = played[name]
    assert told["keys"]
    if "given" in told["endings"][0]:
        assert told["endings"] == [{"given": [0, 10]}] * 2
        assert all(told["is_new"])
        assert set(told["modes"]) <= {0o600}
        return
    for ending in told["endings"]:
        assert "LaunchError" in ending["bases"]
        assert any(key in ending["text"] for key in told["keys"])
        assert "600" in ending["text"]


def main(folder):
    told = {}
    for name, play in SCENARIOS.items():
        place = folder / name
        place.mkdir()
        told[name] = play(place)
    (folder / "played.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
