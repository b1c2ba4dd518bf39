"""What a parallel call costs beyond the model's own work, against the ways that others have published."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks._measure import Row, take_turns
from parawrap import parallel

LANES = 4
_POOL_WORKERS = 8
_LINGER_S = 200e-6


def rows() -> list[Row]:
    """Identity on 64x16, identity that takes 200 us, one lane, and a call with one row."""
    x = torch.randn(64, 16)
    return [
        _against_peers("identity, 64x16, 4 lanes", torch.nn.Identity(), x, own_us=0.0),
        _against_peers("identity that sleeps 200 us, 4 lanes", _Lingering(), x, own_us=_LINGER_S * 1e6),
        _against_plain("one lane", 1, x),
        _against_plain("one row on 4 lanes: bypassed", LANES, x[:1]),
    ]


class _Lingering(torch.nn.Module):
    """Gives the lanes something to wait for, so that their threads are woken."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(_LINGER_S)
        return x


def _against_peers(name: str, model: torch.nn.Module, x: torch.Tensor, own_us: float) -> Row:
    plain = model.forward  # the block rewrites model.forward: the peers are given the method itself
    with parallel(model, ["cpu"] * LANES, plan="lanes"):
        arms = take_turns(
            {
                "plain": lambda: plain(x),
                "parawrap": lambda: model(x),
                "a pool per call": lambda: _pool_per_call(plain, x),
                "a thread per lane per call": lambda: _thread_per_lane(plain, x),
            },
            rounds=400,
            calls=5,
        )
    slept = arms["plain"].median_us if own_us else 0.0
    ours = arms["parawrap"].median_us - slept
    ratios = {peer: (arms[peer].median_us - slept) / ours for peer in list(arms)[2:]}
    verdict = ", ".join(f"{ratio:.1f} times less than {peer}" for peer, ratio in ratios.items())
    wanted = "at least 4 times less than either" if not own_us else "reported: threads must wake up here"
    held = bool(own_us) or min(ratios.values()) >= 4
    return Row(
        f"overhead: {name}",
        arms,
        verdict,
        wanted,
        held,
        peers=f"the methods of torch_neuronx.DataParallel and torch {torch.__version__}",
    )


def _against_plain(name: str, lanes: int, x: torch.Tensor) -> Row:
    model = torch.nn.Identity()
    untouched = torch.nn.Identity()
    with parallel(model, ["cpu"] * lanes):
        arms = take_turns({"plain": lambda: untouched(x), "parawrap": lambda: model(x)}, rounds=400, calls=50)
    added = arms["parawrap"].median_us - arms["plain"].median_us
    return Row(f"overhead: {name}", arms, f"{added:.1f} us more", "under 5 us more", added < 5)


def _pool_per_call(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    with ThreadPoolExecutor(_POOL_WORKERS) as pool:
        return torch.cat(list(pool.map(model, x.chunk(LANES))))


def _thread_per_lane(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    shards = x.chunk(LANES)
    outputs: list[torch.Tensor] = list(shards)

    def work(lane: int) -> None:
        outputs[lane] = model(shards[lane])

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(LANES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat(outputs)
