"""Error texts that name the system limit that a launch has reached."""

from __future__ import annotations

import errno
import resource

__all__ = ["explain_error", "open_files_limit"]


def open_files_limit() -> str:
    """Describe the limit on open files and how to raise it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"this process may open {soft} files (RLIMIT_NOFILE; the hard limit is {hard}): raise it with `ulimit -n`"


def explain_error(error: OSError | RuntimeError) -> str:
    """Describe a system error. If a limit caused it, name the limit and how to raise it."""
    number = getattr(error, "errno", None)
    if number == errno.EMFILE:
        return f"{error}; {open_files_limit()}"
    if number == errno.EAGAIN or "start new thread" in str(error):
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        most = "an unlimited number of" if soft == resource.RLIM_INFINITY else soft
        return (
            f"{error}; this user may run {most} processes and threads (RLIMIT_NPROC), and a container may allow fewer "
            "(pids.max of its cgroup): end some of them, or raise the limit with `ulimit -u`"
        )
    return str(error)
