"""Leave runs of every kind to the end of the interpreter."""

import atexit


def launch_late():
    try:
        launches()
    except Exception as error:
        print(type(error).__name__, "while the interpreter exits" in str(error))


atexit.register(launch_late)  # runs after the exit hook of parawrap, which is registered later
from parawrap import Platform, wrapper  # noqa: E402 (the order of exit hooks counts)

platform = Platform(device="cpu", n_cpus=1, verbose=False)
launches = wrapper(platform)(lambda: 1)
waits = wrapper(platform)(lambda seconds: __import__("time").sleep(seconds))
iterator = waits.map([600] * 4, max_parallel=2)
submitted = waits.submit(600)
opened = platform.open()
threading = __import__("threading")
threading.Thread(target=lambda: next(iterator), daemon=True).start()
print(*launches())
