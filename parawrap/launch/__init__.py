"""Run a function once per rank, in processes on this machine or a cluster, and return every rank's result.

This package starts processes, connects them, and ends them. It does not depend on modules or lanes.
"""

from parawrap.launch._devices import Device, make_current, rank_device
from parawrap.launch._launcher import launch, launch_array, preview, runs_here
from parawrap.launch._packed_call import DECORATED, Job, Preview, check_function, check_signature
from parawrap.launch._platform import Platform
from parawrap.launch._rank import Rank, below_a_rank, current_rank, inside_a_rank
from parawrap.launch._rank_results import RankResults
from parawrap.launch._seeds import seed_all
from parawrap.launch.coordinator._launch import Launch, cancel_all, cancel_launches
from parawrap.launch.coordinator._ranks import OneRank, Ranks
from parawrap.launch.inline import run_inline
from parawrap.launch.messages._line import Arrival, Line, Message, pickle_value
from parawrap.launch.messages._pack_exception import pack_exception, traceback_of
from parawrap.launch.messages._pickle_values import memory_file, packed, pickle_apart, unpack, unpack_from
from parawrap.launch.ray._reservation import Reservation, join_cluster

__all__ = [
    "DECORATED",
    "Arrival",
    "Device",
    "Job",
    "Launch",
    "Line",
    "Message",
    "OneRank",
    "Platform",
    "Preview",
    "Rank",
    "RankResults",
    "Ranks",
    "Reservation",
    "below_a_rank",
    "cancel_all",
    "cancel_launches",
    "check_function",
    "check_signature",
    "current_rank",
    "inside_a_rank",
    "join_cluster",
    "launch",
    "launch_array",
    "make_current",
    "memory_file",
    "pack_exception",
    "packed",
    "pickle_apart",
    "pickle_value",
    "preview",
    "rank_device",
    "run_inline",
    "runs_here",
    "seed_all",
    "traceback_of",
    "unpack",
    "unpack_from",
]
