"""Run a function once per rank, on this machine or a cluster, and return every rank's result.

This package starts processes, connects them, and ends them. It does not depend on modules or lanes.
"""

from parawrap.launch._devices import Device, make_current
from parawrap.launch._job import DECORATED, Job, check_function, check_signature
from parawrap.launch._launcher import launch, launch_array, launcher_name
from parawrap.launch._platform import Platform
from parawrap.launch._platform_fields import PlatformFields, rank_count_field, resolve_device
from parawrap.launch._rank import Rank, current_rank, inside_a_rank
from parawrap.launch._rank_results import RankResults
from parawrap.launch._seeds import preserved_generators, seed_all
from parawrap.launch._world import RankPlace
from parawrap.launch.inline import run_inline
from parawrap.launch.launch import Launch, cancel_launches, report_launches
from parawrap.launch.preview import describe_device, preview
from parawrap.launch.ranks import OneRank, Ranks
from parawrap.launch.run import cancel_runs, report_places, running
from parawrap.launch.shares import Share, share_out

__all__ = [
    "DECORATED",
    "Device",
    "Job",
    "Launch",
    "OneRank",
    "Platform",
    "PlatformFields",
    "Rank",
    "RankPlace",
    "RankResults",
    "Ranks",
    "Share",
    "cancel_launches",
    "cancel_runs",
    "check_function",
    "check_signature",
    "current_rank",
    "describe_device",
    "inside_a_rank",
    "launch",
    "launch_array",
    "launcher_name",
    "make_current",
    "preserved_generators",
    "preview",
    "rank_count_field",
    "report_launches",
    "report_places",
    "resolve_device",
    "run_inline",
    "running",
    "seed_all",
    "share_out",
]
