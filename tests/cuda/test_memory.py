"""Memory: used neither before it is ready nor after it is another's, bounded, and given back.

A caching allocator hands out freed memory again at once, and a GPU comes to its work when it comes to it. So here streams
are kept busy while tensors that others have yet to read are let go of and their memory is taken and filled with NaN. That
this shows what is wrong is itself a test: with one precaution taken away, the answers are.
"""

from __future__ import annotations

import gc
import math
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

import pytest
import torch

from parawrap import parallel
from parawrap.backends import _transfer as backend_streams
from parawrap.engine import _session as engine_session
from parawrap.engine import _shard_task as bring_and_run
from parawrap.lanes import _lane_streams as lane_streams
from tests.cuda.gpus import HOME, KIND, LONG, ONE, TWICE, cuda, every, forget_workspaces, held, settle, sleep
from tests.cuda.zoo import SHAPE, Casting, Late
from tests.devices.zoo import mlp, rows

PATIENCE_S = 30
SPARE = 4  # tensors for which there is memory from the start: to ask the system for some may wait for all GPUs
ATTEMPTS = 6


def full(value, device=HOME):
    """A tensor of the shape that these tests are about."""
    return torch.full(SHAPE, value, dtype=torch.float64, device=device)


def poison():
    """Take all memory for such tensors that the current stream may be handed, and fill it with NaN."""
    return [full(math.nan) for _ in range(SPARE + 2)]


def is_all(tensor, value):
    """Whether every element is this one."""
    return bool((tensor == value).all())


def released(tensor):
    """An event that is set once nobody has the tensor any more."""
    gone = threading.Event()
    weakref.finalize(tensor, gone.set)
    return gone


# -- neither before nor after its time


def input_let_go_of(p, model, cycles):
    """The caller lets go of what it submitted, and takes the memory anew, before the lane's stream comes to it."""
    x = full(1.0)
    gone = released(x)
    model.keep_busy({0}, cycles)
    future = p.submit(x)
    del x
    assert gone.wait(PATIENCE_S)
    taken = poison()
    right = is_all(future.result(), 2.0)
    del taken
    return right


def input_for_another_gpu(p, model, cycles):
    """The same of an input that another GPU is to take over, and comes to late."""
    x = full(1.0)
    gone = released(x)
    with cuda.device(every()[-1]):
        sleep(cycles)
    future = p.submit(x)
    del x
    assert gone.wait(PATIENCE_S)
    taken = poison()
    right = is_all(future.result(), 2.0)
    del taken
    return right


def input_brought_over(p, model, cycles):
    """A batch is brought over into memory that was the last one's, before the lane's stream has come to that one."""
    batches = [full(float(index), "cpu") for index in range(4)]
    model.keep_busy({0}, cycles)
    return all(is_all(output, index + 1.0) for index, output in enumerate(list(p.map(batches))))


def result_used_elsewhere(p, model, cycles):
    """A thread lets go of a result that its stream has yet to read, and the lane takes the memory for further outputs."""
    futures, bad = [p.submit(full(1.0))], full(math.nan)

    def use():
        stream = cuda.Stream(HOME)
        with torch.no_grad(), cuda.stream(stream):
            result = futures.pop().result()
            sleep(cycles)
            return stream, result.sum()

    with ThreadPoolExecutor(1) as thread:
        stream, total = thread.submit(use).result()
    further = [p.submit(bad) for _ in range(SPARE)]
    wait(further)
    stream.synchronize()
    return total.item() == 2 * math.prod(SHAPE)


def parts_joined_elsewhere(p, model, cycles):
    """A caller's stream has yet to join the parts when another caller's call has the lanes take memory for new ones."""
    x, bad = full(1.0), full(math.nan)
    stream = cuda.Stream(HOME)
    stream.wait_stream(cuda.current_stream(HOME))
    model.keep_busy({1}, cycles)
    with cuda.stream(stream):
        output = model(x)
    model.keep_busy((), 0)
    other = model(bad)
    stream.synchronize()
    with cuda.stream(stream):
        right = is_all(output, 2.0)
    return right and bool(other.isnan().all())


def caller_before_lanes(p, model, cycles):
    """The caller's stream has yet to write the input when it calls."""
    x = full(0.0)
    settle()
    sleep(cycles)
    x.add_(1)
    return is_all(model(x), 2.0)


def lanes_before_caller(p, model, cycles):
    """The lanes' streams have yet to compute when the caller is given the output."""
    model(full(0.0))
    x = full(1.0)
    settle()
    model.keep_busy({0, 1}, cycles)
    return is_all(model(x), 2.0)


class Story(NamedTuple):
    """What happens, on which lanes, and the precaution without which it ends badly: whose attribute it is, and its name.

    Without lanes it happens on one of another GPU than the model's.
    """

    happens: object
    devices: list | None
    owner: object
    precaution: str


STORIES = [
    Story(input_let_go_of, ONE, bring_and_run, "record_use"),
    Story(input_for_another_gpu, None, backend_streams, "_record"),
    Story(input_brought_over, ONE, bring_and_run, "record_use"),
    Story(result_used_elsewhere, ONE, lane_streams, "record_use"),
    Story(parts_joined_elsewhere, TWICE, engine_session, "record_use"),
    Story(caller_before_lanes, TWICE, lane_streams.LaneStreams, "_following"),
    Story(lanes_before_caller, TWICE, lane_streams.LaneStreams, "be_waited_for"),
]


def ends_well(story):
    """Tell it in a block of its own; once before, in no haste, so that memory and kernels are there."""
    model = Late().to(HOME)
    gc.collect()
    settle()
    cuda.empty_cache()
    with torch.no_grad(), parallel(model, story.devices or every()[-1:]) as p:
        for cycles in (0, LONG):
            spare = [full(0.0) for _ in range(SPARE)]
            del spare
            settle()
            right = story.happens(p, model, cycles)
            model.keep_busy((), 0)
            settle()
    return right


@pytest.fixture(params=STORIES, ids=lambda story: story.happens.__name__)
def story(request):
    """One of the stories, where there are GPUs enough for it."""
    if request.param.devices is None:
        request.getfixturevalue("several")
    return request.param


def test_nothing_is_used_before_or_after_its_time(story):
    """However late the streams are, the answers are right."""
    assert ends_well(story)


def _nothing(*_, **__):
    return None


def _without_waiting(self, device, mark):
    """A lane's stream, which does not wait for what the caller had queued."""
    return mark.stream if mark.event is None else self._own_on(device)


def test_each_precaution_is_needed(story, monkeypatch):
    """With the precaution taken away the answers are wrong.

    A GPU has fewer queues than streams, and work in one queue may wait for what is before it: so it is tried on several.
    """
    instead = _without_waiting if story.precaution == "_following" else _nothing
    monkeypatch.setattr(story.owner, story.precaution, instead)
    ended = []
    for _ in range(ATTEMPTS):
        ended.append(ends_well(story))
        if not ended[-1]:
            break
        cuda.Stream(HOME)  # the next lanes are given other streams than they would have been
    assert not ended[-1]


def test_no_lane_uses_what_another_is_yet_to_cast():
    """Under autocast, which keeps the casts of parameters for all threads, each lane's are there when it comes to them."""
    model = Casting().to(HOME)
    x = torch.ones(8, 64, device=HOME)
    with torch.no_grad(), parallel(model, TWICE):
        for value in (1.0, 2.0, 3.0):  # so that no cast is what the last one was
            model.weight.fill_(value)
            model.queued.clear()
            settle()
            with torch.autocast(KIND, dtype=torch.bfloat16):
                output = model(x)
            assert is_all(output, 64 * value)


# -- the host's memory


@pytest.mark.parametrize("pinned", [True, False])
def test_the_host_may_let_go_of_an_input(pinned, devices):
    """The host lets go of what it submitted, and takes the memory anew, before the copy of it could have begun."""
    model = Late().to(HOME)

    def on_host(value):
        return full(value, "cpu").pin_memory() if pinned else full(value, "cpu")

    with torch.no_grad(), parallel(model, devices) as p:
        for cycles in (0, LONG):
            x = on_host(1.0)
            gone = released(x)
            sleep(cycles)
            future = p.submit(x)
            del x
            assert gone.wait(PATIENCE_S)
            taken = [on_host(math.nan) for _ in range(3)]
            assert is_all(future.result(), 2.0)
            del taken


@pytest.mark.parametrize("pinned", [True, False])
def test_a_large_input_of_the_host_s_keeps_nobody_waiting(pinned, devices):
    """A call with it returns while the stream that the copy comes after is still busy; what is pageable is staged."""
    model = Late().to(HOME)
    x = full(1.0, "cpu").pin_memory() if pinned else full(1.0, "cpu")
    with torch.no_grad(), parallel(model, devices):
        for _ in range(3):  # pinned memory is there after this: to ask for some may wait for all GPUs
            model(x)
            settle()
        sleep()
        busy = cuda.current_stream(HOME).record_event()
        output = model(x)
        assert not busy.query()
        assert is_all(output, 2.0)


# -- map


@pytest.mark.parametrize("place", ["pageable", "pinned", HOME, "the last GPU"])
def test_map_of_batches_that_are_let_go_of(place, devices):
    """Batches that nobody else keeps are whole when a lane comes to them, wherever they lie; outputs come in order."""
    model = Late().to(HOME)
    device = {"pageable": "cpu", "pinned": "cpu", "the last GPU": every()[-1]}.get(place, place)

    def source():
        for index in range(6):
            batch = full(float(index), device)
            yield batch.pin_memory() if place == "pinned" else batch
            del batch
            full(math.nan, device)  # what was freed may be handed out here

    with torch.no_grad(), parallel(model, devices) as p:
        model.keep_busy(range(len(devices)), LONG // 20)
        for index, output in enumerate(p.map(source())):
            assert is_all(output, index + 1.0)


@pytest.mark.parametrize("lanes", [ONE, TWICE], ids=["one lane", "two lanes on a GPU"])
def test_map_takes_no_more_memory_for_more_batches(lanes):
    """What is taken at most over a hundred batches is at most a few batches more than over ten; all come in order."""
    model = Late().to(HOME)
    batch = torch.zeros(1024, SHAPE[1], dtype=torch.float64)

    def peak(p, count):
        settle()
        cuda.empty_cache()
        cuda.reset_peak_memory_stats(HOME)
        firsts = [output[0, 0].clone() for output in p.map(batch + index for index in range(count))]
        assert torch.stack(firsts).tolist() == [index + 1.0 for index in range(count)]
        # Blocks that wait for a stream count too, as they cannot be used.
        return cuda.memory_stats(HOME)["active_bytes.all.peak"]

    with torch.no_grad(), parallel(model, lanes) as p:
        few, many = peak(p, 10), peak(p, 100)
    assert many - few <= 8 * 2 * batch.nbytes


# -- afterwards


def test_memory_is_given_back(devices):
    """After a block nothing is held of replicas, inputs and outputs."""
    model = Late().to(HOME)
    before = held()
    with parallel(model, devices) as p:
        with torch.no_grad():
            model(full(1.0))
            for output in p.map(full(float(index), "cpu") for index in range(4)):
                del output
            p.submit(full(1.0))  # nobody asks for it
        model(full(1.0)).sum().backward()
    model.zero_grad()
    del p
    assert held() == before


def test_memory_is_given_back_after_an_error(devices):
    """Also when the block ended by an exception, while lanes had work."""
    model = Late().to(HOME)
    before = held()
    with pytest.raises(RuntimeError), torch.no_grad(), parallel(model, devices) as p:  # noqa: PT012
        futures = [p.submit(full(1.0)) for _ in range(4)]
        model(rows())
    del p, futures
    assert held() == before


def test_blocks_in_turn_take_no_more_memory():
    """Many blocks one after the other hold what few do: torch keeps memory for each stream that multiplied a matrix."""
    model = mlp().to(HOME)
    x = rows(8).to(HOME)
    forget_workspaces()

    def held_after_blocks(count):
        for _ in range(count):
            with torch.no_grad(), parallel(model, TWICE):
                model(x)  # in the caller's thread
                model(x)  # in the lanes' threads
        return held()

    few = held_after_blocks(2)
    assert held_after_blocks(8) <= few
