"""Linux futexes by ctypes: sleep in the kernel until a 32-bit word in shared memory has changed (futex(2)).

ctypes releases Python's lock during the call, so that other threads of the process run on. The kernel compares the word with
what the caller expects before it sleeps: a wake between the caller's look and its sleep is not lost.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys

_NUMBERS = {"x86_64": 202}
"""Maps each machine to the number of the system call. What `Parking` needs of the order of stores holds on x86 alone."""
_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF


class Futex:
    """The system call; OSError where this system has none, or forbids it."""

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
        """A time for `wait`, made once."""
        whole = int(seconds)
        return (ctypes.c_long * 2)(whole, int((seconds - whole) * 1e9))

    def wait(self, address: int, expected: int, timeout: ctypes.Array[ctypes.c_long]) -> None:
        """Sleeps while the word is `expected`, until woken, for a signal, or for the time; the caller looks again in every case."""
        self._syscall(self._number, address, _WAIT, expected, ctypes.addressof(timeout), None, 0)

    def wake(self, address: int) -> None:
        """Wakes all that sleep on the word."""
        self._syscall(self._number, address, _WAKE, _ALL, None, None, 0)
