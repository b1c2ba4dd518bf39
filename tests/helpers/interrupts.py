"""Ctrl-C at every moment at which Python handles signals."""

from __future__ import annotations

import dis
import sys
from pathlib import Path

import parawrap

PACKAGE = f"{Path(parawrap.__file__).parent}/"

# Python looks for signals when a function begins, when a loop goes back, and after a call. Never
# between a lock and the block of its `with`, or between two assignments
_BEFORE = {"RESUME", "JUMP_BACKWARD"}
_AFTER = ("CALL",)


# By the id of a code object, which is kept alive: to hash a code object takes long
_handlers = {}


def handlers_of(code):
    """Return, for each offset of a code object, where an exception at this offset goes."""
    if id(code) not in _handlers:
        targets = {
            offset: entry.target
            for entry in reversed(dis._parse_exception_table(code))  # the first entry counts
            for offset in range(entry.start, entry.end, 2)
        }
        _handlers[id(code)] = code, targets
    return _handlers[id(code)][1]


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
        if not frame.f_code.co_filename.startswith(PACKAGE) or self.where is not None:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "call":  # another frame may have had this id before
            self._last.pop(id(frame), None)
        if event == "opcode":
            name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            before, offset = self._last.get(id(frame), ("", -1))
            self._last[id(frame)] = name, frame.f_lasti
            # Python raises at the call, and a tracer after it. These differ if the call is the last
            # one of a `with` or `try`, as in `return f()`
            is_moment = name in _BEFORE
            if before.startswith(_AFTER):
                handlers = handlers_of(frame.f_code)
                is_in_block = handlers.get(offset) == handlers.get(frame.f_lasti)
                is_moment = is_moment or is_in_block
            # Without a line: a generator that is being thrown away, in which Python ignores errors
            if is_moment and frame.f_lineno is not None:
                if self.left == 0:
                    self.where = (
                        f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} "
                        f"{frame.f_code.co_name}"
                    )
                    raise KeyboardInterrupt
                self.left -= 1
        return self._trace


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
