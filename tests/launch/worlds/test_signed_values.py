"""In a torchrun world, a rank unpickles only values that a rank of the same user signed for the same use.

The store of such a world listens on every interface, and any local user can write into it.
"""

from __future__ import annotations

import pickle
import stat
import struct
import tempfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from parawrap import LaunchError, LaunchTimeoutError, Platform
from parawrap.launch._world import World
from parawrap.launch.worlds._exchange_outcomes import Exchange, agree_on_session
from parawrap.launch.worlds._signed_values import SignedStore, Signer
from tests.helpers.waiting import PATIENCE_S

WORLDS = [World("srun", rank, rank, 0, 4, 4, 1, "127.0.0.1", 1234, rank == 0) for rank in range(4)]
PAIR = [World("srun", rank, rank, 0, 2, 2, 1, "127.0.0.1", 1234, rank == 0) for rank in range(2)]
SIGNER = Signer(b"secret")


# -- sessions


def test_each_world_has_its_own_session():
    """All ranks of a world agree on its session, the next world has another one, and the store is left empty."""
    store = dist.HashStore()
    with ThreadPoolExecutor(4) as pool:
        first, second = (
            set(pool.map(lambda world: agree_on_session(store, world, SIGNER, PATIENCE_S), WORLDS)) for _ in range(2)
        )
    assert len(first | second) == 2
    assert store.num_keys() == 0


def test_the_list_of_an_earlier_world():
    """A rank that does not find its own number in the signed list raises LaunchError."""
    store, numbers = dist.HashStore(), {rank: bytes(16) for rank in range(4)}
    SignedStore(store, "parawrap/1/session", SIGNER).set("all", pickle.dumps(numbers))
    with pytest.raises(LaunchError, match=r"the value of rank 3 .* is not signed"):
        agree_on_session(store, WORLDS[3], SIGNER, PATIENCE_S)


def test_ranks_with_different_secrets():
    store = dist.HashStore()

    def agree(world):
        with pytest.raises(LaunchError, match="set PARAWRAP_SECRET to the same secret in all ranks"):
            agree_on_session(store, world, Signer(b"secret of rank %d" % world.global_rank), PATIENCE_S)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(agree, PAIR))


def test_a_rank_that_does_not_arrive():
    with pytest.raises(LaunchTimeoutError, match="rank 1 of 4 did not begin the call"):
        agree_on_session(dist.HashStore(), WORLDS[0], SIGNER, 0.05)


# -- outcomes


class Malice:
    """Creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


def forgeries(marker):
    """Return values that create a file when they are unpickled, by the keys of rank 1 that they replace."""
    pickled = pickle.dumps(Malice(marker))
    piece = struct.pack("<QQ", len(pickled), 0) + pickled
    returned = pickle.dumps(("returned", {"at": 0.0}, 1))
    raised = pickle.dumps(("raised", {"at": 0.0, "summary": "", "traceback": "", "is_echo": False}, 1))
    return [{"1": pickled}, {"1/0": piece, "1": returned}, {"1/0": piece, "1": raised, "failed": b"1"}, {"1/0": piece}]


def exchanges(store, call):
    """Return the part of each of two ranks in a call, after both have reported a result."""
    made = [Exchange(SignedStore(store, call, SIGNER), world, Platform(device="cpu")) for world in PAIR]
    for each in made:
        each.report_joined()
        each.report_result(list(range(100)))
    return made


def test_forged_values_are_refused(tmp_path):
    """Results, pieces of results, and failures: the error names the rank."""
    for forgery in forgeries(tmp_path / "executed"):
        store = dist.HashStore()
        first, _ = exchanges(store, "call")
        for key, value in forgery.items():
            store.set(f"call/{key}", value)
        with pytest.raises(LaunchError, match=r"(rank 1|the rank that failed first) in the world's store is not signed"):
            first.results(lambda: None)
        assert not (tmp_path / "executed").exists()


def test_values_of_an_earlier_call():
    """A signature is valid for one key of one call."""
    store = dist.HashStore()
    exchanges(store, "session/0")
    first, _ = exchanges(store, "session/1")
    for key in ("1/0", "1"):
        store.set(f"session/1/{key}", store.get(f"session/0/{key}"))
    with pytest.raises(LaunchError, match=r"rank 1 .* is not signed"):
        first.results(lambda: None)


# -- keys


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PARAWRAP_SECRET", raising=False)
    return tmp_path


def files_below(folder):
    """Return the mode of each file and folder below a folder, by path."""
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}


def test_ranks_make_the_key_at_once(home):
    """They make one private key. With PARAWRAP_SECRET, no key file is written."""
    with ThreadPoolExecutor(4) as pool:
        signed = {signer.signed("place", b"value") for signer in pool.map(lambda _: Signer(), range(4))}
    assert len(signed) == 1
    assert files_below(home) == {".parawrap": 0o700, ".parawrap/key": 0o600}


def test_a_secret_needs_no_key(home, monkeypatch):
    monkeypatch.setenv("PARAWRAP_SECRET", "secret")
    assert Signer().signed("place", b"value") == SIGNER.signed("place", b"value")
    assert not files_below(home)


def test_an_unwritable_home(tmp_path, home, monkeypatch):
    """The key is in a private folder in the temporary folder."""
    monkeypatch.setenv("HOME", "/proc/no-home")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert Signer().signed("place", b"value") == Signer().signed("place", b"value")
    assert sorted(files_below(tmp_path).values()) == [0o600, 0o700]


@pytest.mark.parametrize("has_key", [True, False])
def test_a_folder_that_others_may_write(has_key, home):
    """As with umask 002: the folder loses the access of others."""
    (home / ".parawrap").mkdir()
    if has_key:
        Signer()
    (home / ".parawrap").chmod(0o775)
    Signer()
    assert files_below(home) == {".parawrap": 0o700, ".parawrap/key": 0o600}


def test_a_key_that_others_know(home):
    """LaunchError names the file and the cure, also for a damaged key."""
    Signer()
    key = home / ".parawrap" / "key"
    for mode in 0o644, 0o622:
        key.chmod(mode)
        with pytest.raises(LaunchError, match=rf"other users have access to {key} .*with mode 600"):
            Signer()
    key.chmod(0o600)
    key.write_bytes(b"k" * 31)
    with pytest.raises(LaunchError, match="has 31 bytes instead of 32: delete it"):
        Signer()
