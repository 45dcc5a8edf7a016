"""What happens in the worker processes of a `DataLoader`, told as if it had happened here.

torch sends an exception of a worker as text; a worker that is gone has sent nothing.

    records.py:6: KeyError: 'images'
      while reading batch 3 of epoch 0 of its DataLoader, in worker process 1
      File "/home/me/records.py", line 6, in __getitem__
        return self.arrays["images"][at]
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from traceback import clear_frames

from ...user_code import UserCodeError, fact, is_of_user

_FRAME = re.compile(r'^ *File "(.*)", line (\d+), in (.*)$')
_CAUGHT = re.compile(r"^Caught \w+ in DataLoader worker process (\d+)\.$")


def of_process(error: UserCodeError, where: str, doing: str, workers: int) -> UserCodeError:
    """The error of a worker that an error of a loader with `workers` stands for; the same where it stands for none."""
    cause, text = error.__cause__, str(error.__cause__)
    if cause is not None and workers:
        # torch's frames and its failure refer to each other, and by these the failure to the workers: they would end when the garbage
        # collector finds them, in whatever runs then, and torch waits 5 seconds for each there.
        clear_frames(cause.__traceback__)
    first, _, trace = text.partition("\n")
    is_gone = isinstance(cause, RuntimeError) and "DataLoader worker" in text and "exited unexpectedly" in text
    if cause is not None and workers and (is_gone or isinstance(cause, ConnectionError | EOFError)):
        help = (
            "  help: a worker ends like this where it is killed, for want of memory or of /dev/shm, or by os._exit; "
            "num_workers=0 shows what its code does"
        )
        return UserCodeError(
            f"{where}: a worker process of its DataLoader has ended: {fact(cause)}", (f"while {doing}",), (help,)
        )
    caught = _CAUGHT.match(first)
    if caught is None or not trace:
        return error
    lines = trace.rstrip().splitlines()
    frames = [*_frames(lines)]
    place = f"{frames[-1][0]}:{frames[-1][1]}" if frames else where
    shown = [
        line for file, number, name, code in frames for line in (f'  File "{file}", line {number}, in {name}', code)
    ]
    return UserCodeError(
        f"{place}: {lines[-1]}",
        (f"while {doing}, in worker process {caught[1]}",),
        tuple(line for line in shown if line),
    )


def _frames(lines: list[str]) -> Iterator[tuple[str, str, str, str]]:
    """The frames of the user's code: file, line, function and what stands there."""
    for number, line in enumerate(lines):
        found = _FRAME.match(line)
        if found is not None and is_of_user(found[1]):
            code = lines[number + 1].strip() if number + 1 < len(lines) else ""
            yield found[1], found[2], found[3], f"    {code}" if code and not _FRAME.match(lines[number + 1]) else ""
