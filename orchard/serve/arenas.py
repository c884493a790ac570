"""Memory that many threads take and give back goes back to where others find it.

glibc gives threads heaps of their own (arenas, eight for each core). What an answer's thread frees stays in its arena, where the
next thread may never look: under schemas that take megabytes for a moment, a server with 32 threads grew by 6 % in four minutes,
and by 2 % with two arenas. Threads hardly allocate at the same time here, so there is nothing to lose.
"""

from __future__ import annotations

import ctypes
import sys

ARENAS = 2
_M_ARENA_MAX = -8


def few_arenas() -> bool:
    """For this process, from now on; whether the C library knows how."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_ARENA_MAX, ARENAS))
    except (OSError, AttributeError):  # another C library
        return False
