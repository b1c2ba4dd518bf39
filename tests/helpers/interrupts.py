"""Ctrl-C at every moment at which Python handles signals."""

from __future__ import annotations

import dis
import sys
from pathlib import Path

import parawrap

PACKAGE = f"{Path(parawrap.__file__).parent}/"


class Known:
    """What the tracer needs of a code object. Python makes `co_code` anew at each look.

    Python looks for signals when a function begins, when a loop goes back, and after a call. Never
    between a lock and the block of its `with`, or between two assignments.

    Attributes:
        code: The code object, which is kept alive, so that no other one gets its id.
        begins: The offsets of instructions at which Python looks for signals.
        calls: The offsets of instructions after which it does.
        handlers: Where an exception at an offset goes.
    """

    def __init__(self, code):
        self.code = code
        instructions = code.co_code
        names = {at: dis.opname[instructions[at]] for at in range(0, len(instructions), 2)}
        self.begins = {at for at, name in names.items() if name in ("RESUME", "JUMP_BACKWARD")}
        self.calls = {at for at, name in names.items() if name.startswith("CALL")}
        self.handlers = {
            offset: entry.target
            for entry in reversed(dis._parse_exception_table(code))  # the first entry counts
            for offset in range(entry.start, entry.end, 2)
        }


_known = {}  # by the id of a code object: to hash a code object takes long


def known(code):
    found = _known.get(id(code))
    if found is None:
        found = _known[id(code)] = Known(code)
    return found


class Interrupts:
    """Raises KeyboardInterrupt in this thread at one moment in code of parawrap, counted from 0."""

    def __init__(self, moment):
        self.left = moment
        self.where = None
        self._last = {}

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, kind, error, at):
        sys.settrace(self._before)
        return kind is KeyboardInterrupt

    def _trace(self, frame, event, _):
        """Trace a new frame, or one that goes on, by its instructions."""
        if self.where is not None or not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._last.pop(id(frame), None)  # another frame may have had this id before
        return self._look

    def _look(self, frame, event, _):
        """Raise before an instruction if its moment has come."""
        if event != "opcode" or self.where is not None:
            return self._look
        code, at = known(frame.f_code), frame.f_lasti
        before = self._last.get(id(frame))
        self._last[id(frame)] = at
        is_moment = at in code.begins
        # Python raises at the call, and a tracer after it. These differ if the call is the last one
        # of a `with` or `try`, as in `return f()`
        if before in code.calls and code.handlers.get(before) == code.handlers.get(at):
            is_moment = True
        # Without a line: a generator that is being thrown away, in which Python ignores errors
        if is_moment and frame.f_lineno is not None:
            if self.left == 0:
                file = Path(frame.f_code.co_filename).name
                self.where = f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
                raise KeyboardInterrupt
            self.left -= 1
        return self._look


def moments_of(work, step=1):
    """Run `work` again and again, with an interrupt at each moment in turn.

    Yield the place of each.
    """
    moment = 0
    while True:
        interrupts = Interrupts(moment)
        with interrupts:
            work()
        if interrupts.where is None:
            return
        yield interrupts.where
        moment += step
