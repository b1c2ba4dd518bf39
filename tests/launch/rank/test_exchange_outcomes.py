"""The ranks of a world agree on a session, for which all their values are signed."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from parawrap import LaunchError, LaunchTimeoutError
from parawrap.launch._world import World
from parawrap.launch.rank._exchange_outcomes import agree_on_session
from parawrap.launch.rank._signed_values import SignedStore, Signer
from tests.helpers.waiting import PATIENCE_S

WORLDS = [World("srun", rank, rank, 0, 4, 4, 1, "127.0.0.1", 1234, rank == 0) for rank in range(4)]


def test_each_world_has_its_own_session():
    """All ranks of a world agree on its session, the next world has another one, and the store is left empty."""
    store, signer = dist.HashStore(), Signer(b"secret")
    with ThreadPoolExecutor(4) as pool:
        first, second = (
            set(pool.map(lambda world: agree_on_session(store, world, signer, PATIENCE_S), WORLDS)) for _ in range(2)
        )
    assert len(first | second) == 2
    assert store.num_keys() == 0


def test_the_list_of_an_earlier_world_is_refused():
    """A rank that does not find its own number in the signed list raises LaunchError."""
    store, signer = dist.HashStore(), Signer(b"secret")
    numbers = {rank: bytes(16) for rank in range(4)}
    SignedStore(store, "parawrap/1/session", signer).set("all", pickle.dumps(numbers))
    with pytest.raises(LaunchError, match=r"the value of rank 3 .* is not signed"):
        agree_on_session(store, WORLDS[3], signer, PATIENCE_S)


def test_a_rank_that_does_not_arrive_is_named():
    with pytest.raises(LaunchTimeoutError, match="rank 1 of 4 did not begin the call"):
        agree_on_session(dist.HashStore(), WORLDS[0], Signer(b"secret"), 0.05)
