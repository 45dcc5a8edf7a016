"""Linux futexes (futex(2)), called by ctypes: a thread sleeps in the kernel until a 32-bit word in shared memory has changed.

ctypes releases Python's lock during the call, so that other threads of the process continue. The kernel compares the word with the caller's
expected value before the thread sleeps, so a wake between the caller's check and its sleep is not lost.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys

_NUMBERS = {"x86_64": 202}
"""Maps each machine to the number of the system call. Only x86: the order of stores on which `Parking` relies holds there alone."""
_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF


class Futex:
    """The system call; OSError where the system lacks it or forbids it."""

    def __init__(self) -> None:
        number = _NUMBERS.get(platform.machine().lower()) if sys.platform == "linux" else None
        if number is None:
            raise OSError("no futex on this system")
        self._number = number
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        number_type, word = ctypes.c_long, ctypes.c_void_p
        self._syscall.argtypes = [number_type, word, ctypes.c_int, ctypes.c_uint32, word, word, ctypes.c_uint32]
        own = ctypes.c_uint32()
        if self._syscall(number, ctypes.addressof(own), _WAKE, 0, None, None, 0) < 0:
            raise OSError(ctypes.get_errno(), f"futex: {os.strerror(ctypes.get_errno())}")

    def timeout(self, seconds: float) -> ctypes.Array[ctypes.c_long]:
        """Converts seconds to a timeout for `wait`, which can be reused."""
        whole = int(seconds)
        return (ctypes.c_long * 2)(whole, int((seconds - whole) * 1e9))

    def wait(self, address: int, expected: int, timeout: ctypes.Array[ctypes.c_long]) -> None:
        """Sleeps while the word is `expected`, until a wake, a signal or the timeout; the caller must then check its condition again."""
        self._syscall(self._number, address, _WAIT, expected, ctypes.addressof(timeout), None, 0)

    def wake(self, address: int) -> None:
        """Wakes all threads that sleep on the word."""
        self._syscall(self._number, address, _WAKE, _ALL, None, None, 0)
