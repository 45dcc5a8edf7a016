"""The process of `partc`, also as `python -m partc.cli`: it installs signal handlers before it imports anything else.

As `python -m partc.cli` it imports nothing from the folder where it is started.

`generate` and `serve` begin anew with glibc's huge pages (`glibc.malloc.hugetlb`), which its allocator reads from the environment as a
process begins: weights that onnxruntime packs then lie in pages of 2 MB from the load on. Without it, steps move them there
(`runtime/execution/memory/huge_pages.py`).
"""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` has put the current folder first
    del sys.path[0]

try:
    from partc.cli.interruption import run
except KeyboardInterrupt:  # by Python's own handler, before partc installs its own
    os.write(2, b"stopped by SIGINT\n")
    os._exit(130)


_TUNABLES, _HUGE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
_LEAST_GLIBC = 2, 35


def _begin_with_huge_pages() -> None:
    """Begins this process anew with huge pages, unless it has them, the system gives them to no process that asks, or glibc knows none."""
    tunables = os.environ.get(_TUNABLES, "")
    makes_tokens = bool(sys.executable) and sys.argv[1:2] in (["generate"], ["serve"])
    if makes_tokens and _HUGE not in tunables and _asks_for_huge_pages():
        os.environ[_TUNABLES] = f"{tunables}:{_HUGE}=1".removeprefix(":")
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _asks_for_huge_pages() -> bool:
    """Whether the system gives huge pages to processes that ask for them, and glibc's allocator can ask."""
    from partc.runtime.files.regular import text_of_system

    try:
        is_asked = "[madvise]" in text_of_system("/sys/kernel/mm/transparent_hugepage/enabled")
        _, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        return is_asked and tuple(map(int, version.split("."))) >= _LEAST_GLIBC
    except (OSError, ValueError):  # another system, or another C library
        return False


def _command(arguments: list[str]) -> int:
    _begin_with_huge_pages()
    from partc.cli.main import invoke

    return invoke(arguments)


def main() -> None:
    """The entry point of the console script."""
    run(_command)


if __name__ == "__main__":
    main()
