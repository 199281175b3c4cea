"""Ties between processes: none of ours outlives the one that started it, however that one ends."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent_pid: int) -> None:
    """Have this process killed when `parent_pid`, its parent, ends: also by SIGKILL, and also if it has ended already.

    On Linux the kernel does it, so a rank that hangs in a collective goes too. The kernel means the parent's thread:
    start children from a thread that stays. Elsewhere a thread watches.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        watch(lambda: os.getppid() != parent_pid, lambda: os.kill(os.getpid(), signal.SIGKILL))


def alive(pid: int) -> bool:
    """Whether a process of this number exists (a zombie counts)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def watch(over: Callable[[], bool], then: Callable[[], None], interval_s: float = 0.5) -> None:
    """Call `then` once `over()` is true, from a daemon thread that looks every `interval_s`."""

    def look() -> None:
        while not over():
            time.sleep(interval_s)
        then()

    threading.Thread(target=look, name="process-watch", daemon=True).start()
