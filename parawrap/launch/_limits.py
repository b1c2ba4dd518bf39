"""Limits of the system, named in the errors of launches that reach them."""

from __future__ import annotations

import errno
import resource

__all__ = ["explained", "open_files_limit"]


def open_files_limit() -> str:
    """Describe the limit of open files, and how to raise it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"this process may open {soft} files (RLIMIT_NOFILE; the hard limit is {hard}): raise it with `ulimit -n`"


def explained(error: OSError | RuntimeError) -> str:
    """Describe an error of the system, with the limit that was reached where it is one."""
    number = getattr(error, "errno", None)
    if number == errno.EMFILE:
        return f"{error}; {open_files_limit()}"
    if number == errno.EAGAIN or "start new thread" in str(error):
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        most = "unlimited" if soft == resource.RLIM_INFINITY else soft
        return (
            f"{error}; this user may run {most} processes and threads (RLIMIT_NPROC), and a container may allow fewer "
            "(pids.max of its cgroup): end some, or raise the limit with `ulimit -u`"
        )
    return str(error)
