"""The collector never looks through what the imports of a command have made."""

import gc
import subprocess
import sys
import threading
from pathlib import Path

from partc.runtime.garbage_collection import importing, uncollected

LENET = Path(__file__).parents[2] / "samples" / "lenet"
COUNTED = """
import gc, sys
from partc.cli.main import invoke
looked_through = [0]
def count(phase, info):
    if phase == "start":
        looked_through.append(sum(len(gc.get_objects(generation)) for generation in range(info["generation"] + 1)))
gc.callbacks.append(count)
assert invoke(sys.argv[1:]) == 0
print(max(looked_through))
"""


def test_a_compile_looks_through_few_objects(tmp_path: Path) -> None:
    command = ["compile", str(LENET / "model.py"), "--plan", str(LENET / "plan.yaml"), "-o", str(tmp_path / "build")]
    result = subprocess.run([sys.executable, "-c", COUNTED, *command], capture_output=True, text=True, check=True)
    assert int(result.stdout.splitlines()[-1]) < 60_000, "imports of a compile alone make more than 150,000 objects"


def test_a_block_that_imports_nothing_new_keeps_nothing() -> None:
    kept = gc.get_freeze_count()
    with importing():
        import json  # noqa: F401
    assert gc.get_freeze_count() == kept
    assert gc.isenabled()


def test_a_block_that_ends_in_another_thread_does_not_collect_in_this_one() -> None:
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with uncollected():
            entered.set()
            left.wait()

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait()
    with uncollected():
        left.set()
        thread.join()
        assert not gc.isenabled()
    assert gc.isenabled()
