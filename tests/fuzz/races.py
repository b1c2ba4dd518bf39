"""Calls, streams, and submitted calls of one block in four threads, while a fifth changes the
model.

``python -m tests.fuzz.races --seconds 600`` prints what ran. Each output shows what the call has
read of the model, and must be that of one moment: no row from before a change next to one from
after it, no change that a finished one forgets.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import threading
import time
import traceback
import warnings

import torch
from torch import nn

from parawrap import parallel
from parawrap.errors import ReplicaError

COLUMNS = ("weight", "scale", "buffer", "hooks")


class Shown(nn.Module):
    """Its output has one column for each part of the model that is changed:
    ``x`` times its value.
    """

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.register_buffer("buffer", torch.zeros(1))
        self.scale = 0.0
        self.inner = nn.ModuleList([nn.Identity() for _ in range(4)])

    def forward(self, x):
        hooked = x
        for layer in self.inner:
            hooked = layer(hooked)
        return torch.cat([x * self.weight, x * self.scale, x * self.buffer, hooked - x], 1)


class Shared:
    """A lock that any number of readers hold, or one writer."""

    def __init__(self):
        self._readers = 0
        self._changed = threading.Condition()
        self._writer = threading.Lock()

    def __enter__(self):
        with self._writer, self._changed:
            self._readers += 1

    def __exit__(self, *_):
        with self._changed:
            self._readers -= 1
            self._changed.notify_all()

    def write(self, work):
        with self._writer, self._changed:
            self._changed.wait_for(lambda: not self._readers)
            work()


class Race:
    """The threads of one race. `errors` are the first failures, `counts` what ran."""

    def __init__(self, lanes, seed):
        self.model = Shown().eval()
        self.lanes = lanes
        self.counts = collections.Counter()
        self.errors = []
        self._is_over = False
        self._counting = threading.Lock()
        self._loading = Shared()
        self._seed = seed
        # Each is written before the model has the value, or after: a call finds a value in between
        self._begun = dict.fromkeys(COLUMNS, 0)
        self._ended = dict.fromkeys(COLUMNS, 0)

    def run(self, seconds):
        """Race for that long, and return the failures."""
        jobs = [self._call, self._call, self._submit, self._stream, self._change]
        with parallel(self.model, ["cpu"] * self.lanes, out_dims=0) as p:
            threads = [
                threading.Thread(target=self._repeat, args=(job, p, at))
                for at, job in enumerate(jobs)
            ]
            for thread in threads:
                thread.start()
            until = time.monotonic() + seconds
            while time.monotonic() < until and not self.errors:
                time.sleep(0.05)
            self._is_over = True
            for thread in threads:
                thread.join(60)
                if thread.is_alive():
                    self.errors.append(f"{thread.name} does not end")
        return self.errors

    def _repeat(self, job, p, at):
        draw = random.Random(self._seed * 10 + at)
        with torch.inference_mode():
            while not self._is_over:
                try:
                    job(p, draw)
                except ReplicaError as error:
                    # The only refusal: a stream or a submitted call met a change
                    if "changed while" not in str(error) and "was written during" not in str(error):
                        self.errors.append(repr(error))
                    self._count(f"{job.__name__.strip('_')} refused")
                except BaseException:
                    self.errors.append(f"{job.__name__}: {traceback.format_exc()}")
                else:
                    self._count(job.__name__.strip("_"))

    def _count(self, what):
        with self._counting:
            self.counts[what] += 1

    def _call(self, p, draw):
        x = torch.ones(draw.choice([4, 5, 7, 9]), 1)
        with self._loading:
            before = dict(self._ended)
            output = self.model(x) if draw.random() < 0.5 else p(x)
            self._check(output, before, dict(self._begun))

    def _submit(self, p, draw):
        with self._loading:  # the model is read here, whole
            before = dict(self._ended)
            futures = [p.submit(torch.ones(draw.choice([1, 2, 3]), 1)) for _ in range(4)]
        found, refused = [], None
        for future in futures:
            try:
                found.append(future.result(60))
            except ReplicaError as error:
                refused = error
        for output in found:
            self._check(output, before, dict(self._begun), is_together=False)
        if refused is not None:
            raise refused

    def _stream(self, p, draw):
        batches = [torch.ones(3, 1)] * draw.choice([3, 20])
        stream = p.map(batches, ordered=draw.random() < 0.5)
        with self._loading:
            before = dict(self._ended)
            outputs = [next(stream)]
        outputs += stream
        assert len(outputs) == len(batches)
        for output in outputs:
            self._check(output, before, dict(self._begun))
        # The stream did not meet a change of a parameter, so all of it has one value
        weights = {output[0, 0].item() for output in outputs}
        assert len(weights) == 1, f"a stream with the weights {weights} was not refused"

    def _check(self, output, before, after, *, is_together=True):
        for at, name in enumerate(COLUMNS):
            values = {*output[:, at].tolist()}
            assert len(values) == 1, f"{name} differs from row to row: {values}"
            (value,) = values
            if name == "hooks":
                assert value in (0, 1), f"{value} hooks"
                continue
            assert before[name] <= value <= after[name], (
                f"{name}: {before[name]} <= {value} <= {after[name]}"
            )
        if is_together:
            assert output[0, 0] == output[0, 2], (
                f"weight {output[0, 0]} and buffer {output[0, 2]} are of two moments"
            )

    def _change(self, p, draw):
        model, kind = self.model, draw.random()
        if kind < 0.5:
            number = self._begun["scale"] + 1
            self._begun["scale"] = number
            model.scale = float(number)
            self._ended["scale"] = number
        elif kind < 0.6:
            number = self._begun["weight"] + 1
            self._begun.update(weight=number, buffer=number)
            state = {
                "weight": torch.full((1,), float(number)),
                "buffer": torch.full((1,), float(number)),
            }
            with torch.inference_mode(False):
                self._loading.write(lambda: model.load_state_dict(state))
            self._ended.update(weight=number, buffer=number)
        elif kind < 0.9:
            layer = model.inner[draw.randrange(len(model.inner))]
            handle = layer.register_forward_hook(lambda _module, _args, output: output + 1)
            if draw.random() < 0.5:
                time.sleep(0.001 * draw.random())
            handle.remove()
        else:
            model.note = object()
            del model.note
        time.sleep(draw.choice([0, 0, 0.0005, 0.005]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    lock = "with" if has_lock else "without"
    print(
        f"Python {sys.version.split()[0]} {lock} the interpreter lock, torch {torch.__version__}",
        flush=True,
    )
    failures = []
    for lanes in (2, 3):
        race = Race(lanes, arguments.seed)
        failures += race.run(arguments.seconds / 2)
        print(
            f"{lanes} lanes: {dict(sorted(race.counts.items()))}",
            *race.errors[:5],
            sep="\n",
            flush=True,
        )
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
