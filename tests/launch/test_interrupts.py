"""Promise 4: two Ctrl-C during the start of a launch leave no process behind and cause no hang.

A moment is a call or return within parawrap. A profile function counts the moments and sends the first SIGINT at a chosen
moment, so even very short moments are tested. The second SIGINT follows after GAP_S seconds.
"""

from __future__ import annotations

import json
import os

from tests.helpers.processes import run_script

ROUNDS = int(os.environ.get("PARAWRAP_CHAOS", "12"))

SCRIPT = """
import contextlib, faulthandler, json, os, pathlib, signal, sys, time
import psutil
import parawrap
from parawrap import Platform, wrapper

PACKAGE = os.path.dirname(parawrap.__file__)
GRACE_S, GAP_S = 0.5, 0.05
BOUND_S = GRACE_S + 20  # a first launch imports torch, and other tests may keep the processor busy

launchable = wrapper(Platform(device="cpu", n_cpus=2, grace_s=GRACE_S, verbose=False))(lambda: time.sleep(600))
returns = wrapper(Platform(device="cpu", n_cpus=2, verbose=False))(lambda: 1)
signal.signal(signal.SIGALRM, signal.default_int_handler)  # the second Ctrl-C

class Moments:
    '''A profile function that counts moments, and sends SIGINT at one of them.'''

    def __init__(self, at=None):
        self.at, self.count, self.last_count = at, 0, {}

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return
        self.count += 1
        place = (os.path.basename(frame.f_code.co_filename), frame.f_lineno, event)
        self.last_count[place] = self.count
        if self.count == self.at:
            signal.setitimer(signal.ITIMER_REAL, GAP_S)
            os.kill(os.getpid(), signal.SIGINT)

def moments():
    '''Return a moment for each place in the code that the start of a launch passes, latest first.'''
    returns()  # starts the warm process
    counted = Moments()
    sys.setprofile(counted)
    launch = launchable.submit()
    sys.setprofile(None)
    launch.cancel()
    return sorted(((count, place) for place, count in counted.last_count.items()), reverse=True)

def interrupt(at):
    '''Launch with two Ctrl-C, the first at this moment.'''
    sys.setprofile(Moments(at))
    try:
        launchable()
    finally:
        sys.setprofile(None)

def interrupt_first_launch(delay_s):
    '''Launch without a warm process, with two Ctrl-C, the first after `delay_s` seconds.'''
    def first(*_):
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, GAP_S)
        raise KeyboardInterrupt
    signal.signal(signal.SIGALRM, first)
    signal.setitimer(signal.ITIMER_REAL, delay_s)
    launchable()

def bounded(step, began):
    '''Return the value of `step()` once it is true, or its last value after BOUND_S seconds.'''
    while not (value := step()) and time.monotonic() < began + BOUND_S:
        time.sleep(0.01)
    return value
"""

CONTINUES = """
def only_the_warm_process_runs():
    '''True if this process has no running descendant except one warm process.'''
    others = psutil.Process().children(recursive=True)
    with contextlib.suppress(psutil.NoSuchProcess):
        running = [each for each in others if each.status() != psutil.STATUS_ZOMBIE]
        warm = [each for each in running if each.ppid() == os.getpid() and "from parawrap" in " ".join(each.cmdline())]
        return len(running) == len(warm) <= 1
    return False

reports, kept = [], []
for at, place in moments()[::5][:int(sys.argv[1])]:
    faulthandler.dump_traceback_later(4 * BOUND_S, exit=True)
    began = time.monotonic()
    try:
        try:
            interrupt(at)
        except KeyboardInterrupt as error:
            kept.append(error)
        time.sleep(2 * GAP_S)  # the second Ctrl-C arrives here at the latest
    except KeyboardInterrupt as error:
        kept.append(error)
    seconds = time.monotonic() - began
    is_over = bounded(only_the_warm_process_runs, began)
    began = time.monotonic()
    results = list(returns())
    seconds = max(seconds, time.monotonic() - began)
    reports.append({"place": place, "seconds": seconds, "is_over": is_over, "next": results})
    if seconds > BOUND_S or not is_over or results != [1, 1]:
        break
print(json.dumps(reports), flush=True)
faulthandler.dump_traceback_later(2 * BOUND_S, exit=True)  # fail if the interpreter does not exit
"""

EXITS = """
def survivors(mark):
    '''Return the processes that have this mark in their environment.'''
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if each.status() != psutil.STATUS_ZOMBIE and each.environ().get("PARAWRAP_TEST_MARK") == mark:
                found.append(each)
    return found

gate, opener = os.pipe()
scripts = {}
for index in (2, 5, 9, 13, None):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:  # a script that ends with KeyboardInterrupt
        os.environ["PARAWRAP_TEST_MARK"] = str(os.getpid())
        os.close(opener)
        at, place = (None, "first launch") if index is None else moments()[index]
        os.write(writer, json.dumps(place).encode())
        os.close(writer)
        os.read(gate, 1)
        interrupt_first_launch(0.2) if at is None else interrupt(at)
        sys.exit()
    os.close(writer)
    scripts[pid] = reader

places = {pid: json.loads(pathlib.Path(f"/proc/self/fd/{reader}").read_bytes()) for pid, reader in scripts.items()}
os.close(opener)  # starts all scripts at once
began, reports = time.monotonic(), []
for pid, place in places.items():
    has_ended = bounded(lambda: os.waitpid(pid, os.WNOHANG) != (0, 0), began)
    is_over = bounded(lambda: not survivors(str(pid)), began)
    reports.append({"place": place, "has_ended": has_ended, "is_over": is_over})
    for each in survivors(str(pid)):
        each.kill()
    if not has_ended:
        os.kill(pid, signal.SIGKILL)
print(json.dumps(reports))
"""


def test_a_script_that_catches_two_interrupts_can_launch_again(tmp_path):
    """The ranks end although the script keeps the exceptions, the next launch works, and the interpreter exits."""
    for report in json.loads(run_script(tmp_path, SCRIPT + CONTINUES, ROUNDS)):
        assert report["is_over"], report
        assert report["seconds"] < 20.5, report
        assert report["next"] == [1, 1]


def test_a_script_that_is_interrupted_twice_ends_soon(tmp_path):
    """Even if the second Ctrl-C arrives while the interpreter exits, no process of the launch survives."""
    for report in json.loads(run_script(tmp_path, SCRIPT + EXITS)):
        assert report["has_ended"], report
        assert report["is_over"], report
