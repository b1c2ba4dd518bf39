"""Tickets for short plain calls: who takes one, and that none outlives the word that there are to be none."""

from __future__ import annotations

import threading

import torch

from parawrap.engine._entry import Entry, Spared
from parawrap.engine.plan._spares import Spares
from parawrap.shards import FlatCall
from parawrap.tree import flatten_call

X = torch.zeros(2, 3)


def a_call():
    leaves, spec = flatten_call((X,), {})
    return Entry(torch.relu, None, Spared()), FlatCall(leaves, spec)


def test_a_grant_gives_tickets_to_calls_of_that_shape():
    """As many as were granted, counted as they are taken."""
    entry, flat = a_call()
    spares = Spares()
    spares.grant(entry, flat, training=False, took_ns=4_000_000)
    tickets = entry.spared.tickets[X.shape, True, False]
    assert len(list(tickets)) == 10
    assert spares.used() == 10


def test_no_ticket_where_such_calls_may_not_be_plain():
    """The answer may have changed since the call was looked at."""
    entry, flat = a_call()
    Spares().grant(entry, flat, training=False, may_be_plain=lambda: False)
    assert not entry.spared.tickets


def test_a_withdrawal_takes_back_what_another_thread_is_granting():
    """Whichever of the two comes first: no thread finds a ticket afterwards."""
    entry, flat = a_call()
    spares = Spares()
    withdrawing = threading.Thread(target=spares.withdraw)

    def may_be_plain():
        withdrawing.start()
        withdrawing.join(0.05)
        return True

    spares.grant(entry, flat, training=False, may_be_plain=may_be_plain)
    withdrawing.join()
    assert not entry.spared.tickets
    assert spares.used() == 0
