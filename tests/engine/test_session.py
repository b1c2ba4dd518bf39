"""A session: the four verbs alone, the calls that are made of them, and whole calls."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap.engine import Entry, Session
from parawrap.errors import GatherError, SessionError, VerifyError
from parawrap.lanes import here
from parawrap.shards import Cutter, JoinRules

CPU = torch.device("cpu")


class Open:
    """Sessions that are closed at the end of the test."""

    def __init__(self):
        self.sessions = []

    def __call__(self, target, lanes=2, *, verify=False, cutter=None, **rules):
        cutters = {None: cutter or Cutter()}
        session = Session(target, [CPU] * lanes, cutters=cutters, rules=JoinRules(**rules), verify=verify)
        self.sessions.append(session)
        return session


@pytest.fixture
def opened():
    opened = Open()
    yield opened
    for session in opened.sessions:
        session.close()


def call(session, *args, **kwargs):
    return session.call(Entry(session.target), args, kwargs)


def sizes(session):
    return session.stats().shards


# The four verbs


@pytest.mark.parametrize("tell", [False, True])
def test_the_four_verbs_make_a_call(opened, tell):
    """flatten, plan, replicate, scatter, apply, and gather in turn give what `call` gives."""
    model = nn.Linear(4, 2)
    session, x = opened(model, 3), torch.randn(12, 4)
    cutter = session.cutters[None]
    flat = cutter.flatten((x,), {})
    plan = cutter.plan(flat, 3, tell=tell)
    tasks, _ = session.scatter(Entry(model), session.replicate(), plan, flat, ())
    outputs = session.apply(tasks, in_turns=tell)
    assert [len(output) for output in outputs] == list(plan.sizes) == ([4, 4, 2, 2] if tell else [4, 4, 4])
    kind = session.kind(None, (x,), {})
    if tell:
        assert_close(session.gather(outputs, plan.sizes, None, None, kind.evidence), model(x))
        assert kind.evidence.complete
    else:
        with pytest.raises(GatherError, match="no earlier call of this kind"):
            session.gather(outputs, plan.sizes, None, None, kind.evidence)
    assert_close(call(session, x), model(x))


def test_every_lane_runs_a_replica(opened):
    """Replicas, that of lane 0 too, have the memory of the module's parameters and are not the module."""
    model = nn.Linear(4, 2)
    made = [replica.module for replica in opened(model, 3).replicate()]
    assert len({id(module) for module in (model, *made)}) == 4
    assert {type(module) for module in made} == {nn.Linear}
    assert {module.weight.data_ptr() for module in made} == {model.weight.data_ptr()}


def test_replicate_does_nothing_twice(opened):
    """Without a change the same replicas are returned, and nothing is counted."""
    session = opened(nn.BatchNorm1d(4).eval(), 3)
    assert [id(r.module) for r in session.replicate()] == [id(r.module) for r in session.replicate()]
    assert [replica.lane for replica in session.replicate(2)] == [0, 1]
    assert session.stats().refreshes == 0


def test_lanes_that_run_a_function_need_no_replicas(opened):
    """Every lane calls the function itself."""
    session = opened(torch.neg)
    assert [replica.module for replica in session.replicate()] == [torch.neg] * 2
    assert call(session, torch.ones(5)).tolist() == [-1] * 5


def test_apply_raises_the_first_error_with_notes(opened):
    """The error of the first failed lane has a note with its lane, device, and shard."""

    def fail():
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        opened(torch.neg, 3).apply([int, fail, fail])
    assert caught.value.__notes__ == [
        "in lane 1 on cpu, shard 1 of 3",
        "also in lane 2 on cpu, shard 2 of 3: ValueError: mine",
    ]


def test_tasks_without_a_kind_may_wait_for_each_other(opened):
    """`apply` without a kind runs every task in its own lane at the same time."""
    gate = threading.Barrier(3)
    assert opened(torch.neg, 3).apply([lambda: (gate.wait(20), here.lane.index)[1]] * 3) == [0, 1, 2]


def test_evidence_that_another_thread_drops_during_a_call_still_joins_it(opened, monkeypatch):
    """A call joins its outputs by the evidence that its shard sizes were chosen by."""
    model = nn.Linear(4, 2)
    session, x = opened(model), torch.randn(6, 4)
    call(session, x)
    apply = session.apply

    def overtaken(*args, kind, **kwargs):
        outputs = apply(*args, kind=kind, **kwargs)
        kind.follow(kind.structure + 1)
        return outputs

    monkeypatch.setattr(session, "apply", overtaken)
    assert_close(call(session, x), model(x))


# Calls


def recording(shapes, threads=None):
    """Return a function that returns its rows and records them, and the threads that it runs in."""

    def run(x, *rest, **options):
        shapes.append(len(x))
        if threads is not None:
            threads.append(threading.get_ident())
        return x * 2

    return run


def test_the_first_call_of_a_kind_runs_in_turns_with_different_sizes(opened):
    """The first call shows which outputs follow the rows; later calls run balanced shards, each in its lane."""
    seen, threads = [], []
    session, x = opened(recording(seen, threads)), torch.arange(16.0)
    assert_close(call(session, x), x * 2)
    assert seen == [8, 4, 4]
    assert set(threads) == {threading.get_ident()}
    assert sizes(session) == (8, 8)
    seen.clear(), threads.clear()
    assert_close(call(session, x), x * 2)
    assert (seen, len(set(threads))) == ([8, 8], 2)
    assert sizes(session) == (8, 8)


def test_a_known_kind_may_wait_for_the_other_lanes(opened):
    """After the first call the lanes of a call run at the same time."""
    gate, waits = threading.Barrier(2), []

    def run(x):
        if waits:
            gate.wait(20)
        return x

    session = opened(run)
    call(session, torch.zeros(6))
    waits.append(True)
    assert call(session, torch.zeros(6)).shape == (6,)


@pytest.mark.parametrize(
    "other",
    [
        lambda session, x: call(session, x, 3),
        lambda session, x: call(session, x, x),
        lambda session, x: call(session, x, scale=1.0),
        lambda session, x: session.call(Entry(session.target, "other"), (x,), {}),
        lambda session, x: torch.no_grad()(call)(session, x),
        lambda session, x: torch.inference_mode()(call)(session, x),
        lambda session, x: torch.autocast("cpu")(call)(session, x),
    ],
    ids=["non-tensor", "structure", "keyword", "method", "no-grad", "inference", "autocast"],
)
def test_each_kind_of_call_learns_for_itself(opened, other):
    """A kind is the method, the structure, the non-tensor arguments, and the modes; each learns from its first call."""
    seen, x = [], torch.zeros(16)
    session = opened(recording(seen))
    session.cutters["other"] = Cutter()
    call(session, x)
    seen.clear()
    other(session, x)
    assert seen == [8, 4, 4]
    seen.clear()
    other(session, x)
    assert sorted(seen) == [8, 8]


@pytest.mark.parametrize(
    ("other", "shards"),
    [(torch.zeros(8), 2), (torch.zeros(16, dtype=torch.int64), 3), (torch.zeros(16, 3), 3)],
    ids=["size", "dtype", "dims"],
)
def test_sizes_make_no_new_kind(opened, other, shards):
    """Calls of other sizes rely on what the first call showed; those of another dtype or number of dims learn again."""
    seen = []
    session = opened(recording(seen))
    call(session, torch.zeros(16))
    seen.clear()
    call(session, other)
    assert len(seen) == shards


def test_another_non_tensor_value_is_another_kind(opened):
    """Values such as `return_dict=True` change the output, so each value has its own kind."""
    seen, x = [], torch.zeros(16)
    session = opened(recording(seen))
    for value in (True, False, 1, 1.0, "a", None, torch.float32):
        seen.clear()
        call(session, x, value)
        assert seen == [8, 4, 4], value
        seen.clear()
        call(session, x, value)
        assert sorted(seen) == [8, 8], value


def test_training_is_part_of_the_kind(opened):
    """A model that switches to eval mode, also in a submodule alone, learns again."""
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity()))
    session, x = opened(model), torch.zeros(16)
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(len(output)))
    call(session, x)
    assert seen == [8, 4, 4]
    model[1][0].eval()
    seen.clear()
    call(session, x)
    assert seen == [8, 4, 4]


def test_declared_outputs_are_not_learned(opened):
    """With `out_dims` the first call runs balanced shards."""
    seen = []
    session = opened(recording(seen), out_dims=0)
    call(session, torch.zeros(16))
    assert seen == [8, 8]


@pytest.mark.parametrize("rows", [0, 1])
def test_calls_of_at_most_one_row_run_plainly(opened, rows):
    """A call without rows to share runs once, in the caller, outside any lane."""
    seen, lanes = [], []
    session = opened(lambda x: (seen.append(len(x)), lanes.append(here.lane), x)[2])
    assert call(session, torch.zeros(rows)).shape == (rows,)
    assert (seen, lanes, session.stats().plain) == ([rows], [None], 1)


def test_a_call_without_tensors_runs_plainly(opened):
    """There is nothing to cut, so the function is called once."""
    session = opened(lambda number: number + 1)
    assert call(session, 2) == 3
    assert session.stats().plain == 1


@pytest.mark.parametrize("first", range(2, 12))
@pytest.mark.parametrize("lanes", [2, 3, 4])
def test_any_two_row_counts_give_the_plain_answer(opened, lanes, first):
    """Whatever the rows of the first calls, a row-wise function has its plain answer in every call."""
    for second in range(1, 12):
        session = opened(lambda x: (x * 2, {"l": list(map(str, x.tolist()))}), lanes)
        for rows in (first, second, second, first):
            x = torch.arange(float(rows))
            y, others = call(session, x)
            assert_close(y, x * 2)
            assert others["l"] == list(map(str, x.tolist()))
        session.close()


@pytest.mark.parametrize("rows", [2, 4, 5, 6, 16])
def test_a_table_of_the_model_is_returned_in_every_call(opened, rows):
    """A tensor that every lane holds is returned once, whether the first call is cut or runs whole."""
    table = torch.ones(3)
    session, x = opened(lambda x: (x * 2, table)), torch.arange(float(rows))
    for _ in range(3):
        y, found = call(session, x)
        assert_close(y, x * 2)
        assert found is table


def test_counts_that_are_equal_by_luck_are_refused(opened):
    """Two lanes that both count 2 have counted 4."""
    session = opened(lambda x: (x, (x > 3).sum(0)))
    x = torch.tensor([[9.0], [0.0], [9.0], [0.0], [9.0], [9.0]])
    for _ in range(2):
        with pytest.raises(GatherError, match=r"output\[1\] cannot be joined.*out_dims=0.*None for one value"):
            call(session, x)


def test_two_whole_calls_are_no_cut_call(opened):
    """Two lanes with one or two rows each allow no different sizes: such a call runs whole, and the next one is cut."""
    seen = []
    session = opened(recording(seen))
    call(session, torch.zeros(4))
    assert seen == [4]
    seen.clear()
    call(session, torch.zeros(4))
    assert seen == [2, 2]
    call(session, torch.zeros(4))
    assert sizes(session) == (2, 2)


def test_a_whole_call_with_other_sizes_is_no_evidence(opened):
    """A whole call counts as evidence only for calls with the same sizes on the other dims."""
    seen = []
    session = opened(recording(seen))
    call(session, torch.zeros(4, 3))
    call(session, torch.zeros(4, 5))
    assert seen == [4, 4]


@pytest.mark.parametrize("rows", [4, 5, 16])
@pytest.mark.parametrize("reduce", ["stack", torch.numel])
def test_a_stack_has_one_value_per_lane_in_every_call(opened, reduce, rows):
    """The first call of a kind stacks as many values as later calls."""
    session = opened(lambda x: x.sum(), reduce=reduce)
    found = [torch.as_tensor(call(session, torch.ones(rows))).tolist() for _ in range(3)]
    assert found == [found[-1]] * 3


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_a_reduction_is_the_same_in_every_call(opened, reduce):
    """The mean is weighted by the rows of each shard, so uneven shards have the same mean."""
    x = torch.arange(16.0)
    session = opened(lambda x: getattr(x, reduce)(), reduce=reduce)
    for _ in range(3):
        assert_close(call(session, x), getattr(x, reduce)())


# Refusals


def test_a_refused_output_is_learned_again(opened):
    """After a GatherError the next call of the kind has shards of different sizes again."""
    seen, doubles = [], []

    def run(x):
        seen.append(len(x))
        return torch.cat([x, x]) if doubles else x

    session = opened(run)
    call(session, torch.zeros(16))
    doubles.append(True)
    with pytest.raises(GatherError, match="out_dims"):
        call(session, torch.zeros(16))
    doubles.clear(), seen.clear()
    assert call(session, torch.zeros(16)).shape == (16,)
    assert seen == [8, 4, 4]


@pytest.mark.parametrize("rows", [5, 16])
def test_an_output_that_does_not_follow_the_rows_is_refused_in_every_call(opened, rows):
    """Neither the first call nor a later one returns an output that sizes show to be wrong."""
    session = opened(lambda x: torch.cat([x, x]))
    for _ in range(4):
        with pytest.raises(GatherError, match="out_dims"):
            call(session, torch.arange(float(rows)))


def test_a_whole_first_call_returns_the_plain_answer_and_later_calls_are_refused(opened):
    """A call with too few rows to be cut unevenly runs whole; the next call shows that the output does not follow."""
    session, x = opened(lambda x: torch.cat([x, x])), torch.arange(4.0)
    assert_close(call(session, x), torch.cat([x, x]))
    for _ in range(3):
        with pytest.raises(GatherError, match="out_dims"):
            call(session, x)


@pytest.mark.parametrize("rows", [2, 4, 5, 16])
def test_a_number_without_a_reduction_is_refused_in_every_call(opened, rows):
    """A loss needs `reduce`, from the first call on."""
    session = opened(lambda x: x.sum())
    for _ in range(3):
        with pytest.raises(GatherError, match="reduce"):
            call(session, torch.arange(float(rows)))


def test_a_model_that_fails_in_its_first_call_has_taught_nothing(opened):
    """An error of the model leaves the kind unknown, and the next call learns."""
    seen, fails = [], [True]

    def run(x):
        seen.append(len(x))
        if fails:
            raise KeyError(len(x))
        return x

    session = opened(run)
    with pytest.raises(KeyError):
        call(session, torch.zeros(16))
    fails.clear(), seen.clear()
    assert call(session, torch.zeros(16)).shape == (16,)
    assert seen == [8, 4, 4]


def test_verify_compares_the_first_call_of_each_kind(opened):
    """A function that mixes rows differs from the plain call; a row-wise one does not."""
    with pytest.raises(VerifyError):
        call(opened(lambda x: x - x.mean(), verify=True), torch.arange(16.0))
    runs = []
    session = opened(lambda x: (runs.append(len(x)), x * 2)[1], verify=True)
    for _ in range(2):
        call(session, torch.arange(16.0))
    assert sorted(runs) == [4, 4, 8, 8, 8, 16]


# Random numbers


@pytest.mark.parametrize("rows", [4, 5, 16])
def test_a_kind_that_draws_random_numbers_runs_in_turns_every_time(opened, rows):
    """Lanes that share a generator draw in lane order, so a seed gives the same numbers in every call."""
    threads = []

    def noise(x):
        threads.append(threading.get_ident())
        return torch.rand_like(x)

    session, found = opened(noise), []
    for _ in range(3):
        torch.manual_seed(7)
        found.append(call(session, torch.zeros(rows)))
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])
    assert set(threads) == {threading.get_ident()}


def test_a_generator_among_the_arguments_counts_too(opened):
    """A generator that the caller passes is watched like the default generator."""
    session, found = opened(lambda x, generator: torch.rand(len(x), generator=generator)), []
    for _ in range(3):
        found.append(call(session, torch.zeros(16), torch.Generator().manual_seed(3)))
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])


def test_a_call_that_draws_unexpectedly_warns_and_draws_in_turns_from_then_on(opened):
    """A kind that did not draw in its first call warns once it does, and its later calls run in turns."""
    draws, threads = [], []

    def run(x):
        threads.append(threading.get_ident())
        return torch.rand_like(x) if draws else x

    session, x = opened(run), torch.zeros(16)
    call(session, x)
    draws.append(True)
    with pytest.warns(UserWarning, match="a seed does not reproduce this call"):
        call(session, x)
    threads.clear()
    call(session, x)
    assert set(threads) == {threading.get_ident()}


# Whole calls, and the end


def test_submitted_calls_run_whole(opened):
    """A submitted call is not cut and nothing is learned from it."""
    seen = []
    session = opened(recording(seen))
    doubled = session.submit(Entry(session.target), (torch.ones(16),), {}).result(20)
    assert session.stats().lanes[0].rows + session.stats().lanes[1].rows == 16
    assert (seen, doubled.sum().item()) == ([16], 32)
    call(session, torch.zeros(16))
    assert seen == [16, 8, 4, 4]


def test_a_submitted_call_may_hold_more_than_tensors(opened):
    """Keywords and containers are passed on as they are."""
    session = opened(lambda batch, scale: batch["x"] * scale)
    output = session.submit(Entry(session.target), ({"x": torch.ones(3)},), {"scale": 2}).result(20)
    assert (sum(lane.rows for lane in session.stats().lanes), output.tolist()) == (3, [2, 2, 2])


def test_cancel_drops_calls_that_have_not_started(opened):
    """Calls that lanes have started go on."""
    release, began = threading.Event(), threading.Event()
    session = opened(lambda x: (began.set(), release.wait(20), x)[2], 1 + 1)
    entry = Entry(session.target)
    running = [session.submit(entry, (torch.zeros(1),), {}) for _ in range(2)]
    assert began.wait(20)
    waiting = [session.submit(entry, (torch.zeros(1),), {}) for _ in range(8)]
    session.cancel()
    release.set()
    session.close()
    assert all(future.done() for future in (*running, *waiting))
    assert sum(future.cancelled() for future in waiting) >= 7


def test_a_call_inside_a_lane_runs_plainly(opened):
    """A function that calls its own session gets the plain answer, in its lane."""
    lanes = []

    def run(x):
        lanes.append(here.lane)
        return call(session, x[:, 0]) if x.ndim > 1 else x * 2

    session, x = opened(run), torch.randn(16, 3)
    for _ in range(2):
        lanes.clear()
        assert_close(call(session, x), x[:, 0] * 2)
        assert None not in lanes


def test_a_closed_session_runs_plainly(opened):
    """After `close` a call is the plain call, and `submit` raises."""
    model = nn.Linear(4, 2)
    session = opened(model)
    session.close()
    session.close()
    x = torch.randn(3, 4)
    assert_close(call(session, x), model(x))
    with pytest.raises(SessionError, match="closed"):
        session.submit(Entry(model), (x,), {})


def test_calls_that_never_repeat_warn_once(opened):
    """A number that changes with each call makes each call the first of its kind; a 0-d tensor does not."""
    session, x = opened(lambda x, step: x + step), torch.ones(4, 2)
    for step in range(63):
        call(session, x, step)
    with pytest.warns(UserWarning, match=r"64 calls differed in arguments .*as a 0-d tensor"):
        call(session, x, 63)
    for step in range(64, 200):
        call(session, x, step)
        call(session, x, torch.tensor(step))


def test_a_session_holds_no_objects_of_its_callers(opened):
    """Objects that are equal to themselves alone are one kind per class."""

    class Context:
        pass

    session, x = opened(lambda x, context: x * 2), torch.ones(4, 2)
    contexts = [Context() for _ in range(3)]
    held = [weakref.ref(each) for each in contexts]
    for each in contexts:
        call(session, x, each)
    del contexts, each
    gc.collect()
    assert [reference() for reference in held] == [None] * 3
