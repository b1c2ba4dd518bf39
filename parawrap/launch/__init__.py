"""Where processes start: a function runs once per rank, and what each rank returned comes back.

This room knows processes, the line to each of them, how they meet and how they end. It refuses to know modules, lanes and
whatever else a rank may do: what runs in it is any function.
"""

from parawrap.launch._devices import Device, rank_device
from parawrap.launch._job import Job, Preview
from parawrap.launch._launcher import launch, preview
from parawrap.launch._platform import Platform
from parawrap.launch._rank import Rank, below_a_rank, current_rank, inside_a_rank
from parawrap.launch._results import Launch, RankResults
from parawrap.launch._seeds import seed_all
from parawrap.launch.inline import run_inline

__all__ = [
    "Device",
    "Job",
    "Launch",
    "Platform",
    "Preview",
    "Rank",
    "RankResults",
    "below_a_rank",
    "current_rank",
    "inside_a_rank",
    "launch",
    "preview",
    "rank_device",
    "run_inline",
    "seed_all",
]
