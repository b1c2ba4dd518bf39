"""Keep the Ray actors of ended blocks for later blocks: a new actor imports torch, which takes longer than most tests.

The actors run outside of the placement groups of the blocks. tests/workers/test_ray_workers.py tests how actors start and
end.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

from parawrap.workers._ray_actor import Actor

__all__ = ["KeptActors"]


class KeptActors:
    """The module `ray` as workers use it, except that `kill` keeps an idle actor, and a new actor may be a kept one."""

    def __init__(self, ray: Any) -> None:
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests
        self._ray = ray
        self._kept: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ray, name)

    def remote(self, actor_class: type) -> _Starter:
        """Return the class of actors as `ray.remote` does."""
        assert actor_class is Actor
        return _Starter(self)

    def start(self, *args: Any) -> _Calls:
        """Return an actor as new."""
        if self._kept:
            actor = self._kept.pop()
            actor.renew.remote(*args)
        else:
            actor = self._ray.remote(_Renewable).options(num_cpus=0, max_restarts=0, max_task_retries=0).remote(*args)
        return _Calls(actor)

    def kill(self, calls: _Calls) -> None:
        """Keep an actor that has answered its latest call; end one that is busy or dead. A second call has no effect."""
        if calls.has_ended:
            return
        calls.has_ended = True
        if self._has_answered(calls.latest):
            self._kept.append(calls.actor)
        else:
            self._ray.kill(calls.actor)

    def _has_answered(self, latest: Any) -> bool:
        if latest is None or not self._ray.wait([latest], timeout=0)[0]:
            return False
        try:
            self._ray.get(latest)
        except self._ray.exceptions.RayError:  # the actor is dead
            return False
        return True


class _Renewable(Actor):
    """An actor that can start again, as new."""

    def renew(self, *args: Any) -> None:
        with warnings.catch_warnings():
            pass  # Python shows warnings again that it has shown before
        Actor.__init__(self, *args)


class _Starter:
    def __init__(self, kept: KeptActors) -> None:
        self._kept = kept

    def options(self, **options: Any) -> _Starter:
        return self

    def remote(self, *args: Any) -> _Calls:
        return self._kept.start(*args)


class _Calls:
    """The handle of an actor. `latest` is the reference of its latest call."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.latest: Any = None
        self.has_ended = False

    def __getattr__(self, name: str) -> _Call:
        return _Call(self, getattr(self.actor, name))


class _Call:
    def __init__(self, calls: _Calls, method: Any) -> None:
        self._calls, self._method = calls, method

    def remote(self, *args: Any) -> Any:
        self._calls.latest = self._method.remote(*args)
        return self._calls.latest
