"""Interrupt launches twice at many moments of their start, and launch again after each."""

import os
import signal
import sys
import time

from parawrap import Platform, wrapper

os.environ["PARAWRAP_TEST_MARK"] = sys.argv[1]  # of the warm process and its ranks
two = Platform(device="cpu", n_cpus=2, grace_s=0.5, verbose=False)
launchable = wrapper(two)(lambda: time.sleep(600))
returns = wrapper(Platform(device="cpu", n_cpus=2, verbose=False))(lambda: 1)


def interrupt(*_):
    received.append(1)
    if len(received) == 1:
        signal.setitimer(signal.ITIMER_REAL, 0.05)  # the second Ctrl-C
    raise KeyboardInterrupt


def launch(delay_s):
    """Launch, with two Ctrl-C after a delay."""
    received.clear()
    signal.setitimer(signal.ITIMER_REAL, delay_s)
    launchable()


def catch(delay_s):
    """Keep the exceptions, and launch again."""
    try:
        try:
            launch(delay_s)
        except KeyboardInterrupt as error:
            kept.append(error)
        while len(received) < 2:
            time.sleep(0.01)
    except KeyboardInterrupt as error:
        kept.append(error)
    print(*returns(), flush=True)


kept, received = [], []
signal.signal(signal.SIGALRM, interrupt)
catch(0.2)  # the warm process starts
for number in range(int(sys.argv[2])):
    catch(0.001 + 0.002 * number)
launch(0.01)
