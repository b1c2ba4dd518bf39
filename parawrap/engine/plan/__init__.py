"""Measure, choose, show: in which way the calls of a block are run.

A `Way` is one of them, a `Race` finds out which is the fastest for one kind of call, a `Planner` keeps one race for each
kind of call of a session, and a `Plan` is what the user has of it: a table, and a file.
"""

from parawrap.engine.plan._plan import Plan, plan_of
from parawrap.engine.plan._planner import Planner, Turn
from parawrap.engine.plan._way import PLAIN, Way

__all__ = ["PLAIN", "Plan", "Planner", "Turn", "Way", "plan_of"]
