"""The agreement of ranks that no pool watches, in threads of one process that share a store."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from parawrap.launch.agreement import Agreement
from tests.helpers.waiting import eventually


class Store:
    """A store that ends with the world."""

    def __init__(self):
        self._store = dist.HashStore()
        self.is_gone = False

    def check(self, keys):
        if self.is_gone:
            raise dist.DistNetworkError
        return self._store.check(keys)

    def __getattr__(self, name):
        return getattr(self._store, name)


class Requests:
    """Requests for stacks, and the answers of a rank."""

    number = 0

    def __init__(self):
        self.answers = []

    def last(self):
        return Requests.number

    def answer(self, number, text):
        self.answers.append((number, text))


@pytest.fixture
def store():
    store = Store()
    yield store
    store.is_gone = True


@pytest.mark.parametrize("is_requested_before", [False, True])
def test_every_rank_answers_with_its_stack(is_requested_before, store, monkeypatch):
    """A rank answers after its function has returned, and after the ranks have agreed on a step:
    others may wait for it.
    """
    monkeypatch.setattr(Requests, "number", 0)
    requests = [Requests(), Requests()]
    ranks = [Agreement(lambda: store, rank, 2, requests[rank]) for rank in range(2)]
    with ranks[1], ExitStack() as first:
        first.enter_context(ranks[0])
        if is_requested_before:
            ranks[1].request()
            eventually(lambda: all(rank.preemption.is_due() for rank in ranks), "the agreement")
        first.close()
        for count, number in (1, 3), (2, 5):
            Requests.number = number
            eventually(
                lambda count=count: all(len(each.answers) == count for each in requests), "answers"
            )
        assert [[number for number, _ in each.answers] for each in requests] == [[3, 5]] * 2
        assert threading.current_thread().name in requests[1].answers[0][1]


def test_the_thread_ends_with_the_function(store):
    with Agreement(lambda: store, 0, 1):
        assert "parawrap-rank-agreement" in {each.name for each in threading.enumerate()}
    assert "parawrap-rank-agreement" not in {each.name for each in threading.enumerate()}
