"""Launch under variables that look like those of torchrun."""

import os

os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
from parawrap import Platform, current_rank, wrapper


def place():
    return current_rank().global_rank, os.environ["WORLD_SIZE"]


print(*wrapper(Platform(device="cpu", n_cpus=2, verbose=False))(place)())
with Platform(device="cpu", n_cpus=2, verbose=False).open() as opened:
    print(*opened(place))
del os.environ["MASTER_PORT"]
print(*wrapper(Platform(device="cpu", verbose=False))(place)())
os.environ["MASTER_PORT"] = "29511"
for launcher in "env", None:
    os.environ["WORLD_SIZE"] = "1" if launcher else "3"
    try:
        wrapper(Platform(device="cpu", n_cpus=2, launcher=launcher))(place)()
    except Exception as error:
        print(type(error).__name__, "WORLD_SIZE=" in str(error), "launcher='local'" in str(error))
