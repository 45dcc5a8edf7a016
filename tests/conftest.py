"""Golden texts: `golden(name, text)` compares with tests/golden/<name>; `pytest --update-golden` writes what it finds."""

from __future__ import annotations

import copy
import difflib
import functools
import gc
import os
import sys
import tempfile
import threading
import typing
import zlib
from collections.abc import Callable, Iterator
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

_CACHE = tempfile.TemporaryDirectory(prefix="partc-tests-")
os.environ["PARTC_CACHE"] = _CACHE.name  # of each test a folder of its own: none begins with what another one exported
os.environ.setdefault("PARTC_FILL_FREED", "1")  # memory that no value has holds no number
os.environ.setdefault("PARTC_TEST_DAY", str(date.today().toordinal()))  # all workers test the same rows of `of_today`
os.environ.setdefault("OMP_NUM_THREADS", "1")  # else threads of torch and BLAS in started processes spin on all cores
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process that a test starts compiles all modules anew
sys.dont_write_bytecode = False
gc.disable()  # until all tests are collected: what modules make stays
Golden: TypeAlias = Callable[[str, str], None]
_VERIFY_PASSES = "PARTC_VERIFY_PASSES"
_REQUESTED = os.environ.get(_VERIFY_PASSES)
_VERIFIED = ("tests/emit/", "tests/ops/")
"""Folders whose compiles verify after every pass."""
_TURNS = 4
"""Of all other tests so large a part does on one day, another one on the next; the rest verify after the last pass."""
_DECODERS = ("tests/generation/", "tests/sampling/", "tests/server/", "tests/checker/")
_NARROW = ("tests/generation/test_narrow_programs.py", "tests/sampling/test_draws_over_ranks.py")
"""Modules of `_DECODERS` whose decoders have narrow programs each day; of the others, so large a part has them as verifies all passes."""
_GENERATORS: dict[str, list[tuple[np.random.Generator, dict[str, Any]]]] = {}
"""By module of tests its random numbers, and their state before the first test."""
_SHOWN = 40
"""Lines of a difference that a failure shows."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Hypothesis takes no examples from the constants of modules: these are others on each worker, and parsing them took a second."""
    providers: Any = sys.modules.get("hypothesis.internal.conjecture.providers")
    if providers is not None and hasattr(providers, "_local_constants"):
        providers._get_local_constants = lambda: providers._local_constants
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        of_module = [value for value in vars(module).values() if isinstance(value, np.random.Generator)]
        if of_module:
            _GENERATORS[module.__name__] = [(value, value.bit_generator.state) for value in of_module]


def pytest_collection_finish() -> None:
    """What of the work around tests is done once, or less often."""
    if "torch" in sys.modules:
        _read_torch_ops_once()
    _compute_with_one_thread()
    _keep_small_pages()
    if sys.version_info < (3, 12):  # later ones keep the members of a protocol themselves
        typing._get_protocol_attrs = functools.cache(typing._get_protocol_attrs)  # type: ignore[attr-defined]
    _collect_seldom()


def _compute_with_one_thread() -> None:
    """Workers of xdist share the cores: a second thread of a small tensor's op waits for its part in a loop, which was a tenth of the time.

    It is the default that changes, for ranks in this process, other sessions and torch; a test that asks for threads has them.
    """
    onnxruntime: Any = sys.modules.get("onnxruntime")
    in_process: Any = sys.modules.get("partc.runtime.communication.in_process")
    torch: Any = sys.modules.get("torch")
    if onnxruntime is not None:

        class SessionOptions(onnxruntime.SessionOptions):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.intra_op_num_threads = 1

        onnxruntime.SessionOptions = SessionOptions
    if in_process is not None:
        in_process.core_limit = lambda: 1
    if torch is not None:
        torch.set_num_threads(1)


def _keep_small_pages() -> None:
    """This process keeps the memory of all its tests: a look through it for huge pages takes 20 ms for each generator.

    Processes that tests start have huge pages, and so has the test of them.
    """
    generator: Any = sys.modules.get("partc.runtime.generation.generator")
    if generator is not None:
        generator.huge_pages = lambda: iter(())


def _read_torch_ops_once() -> None:
    """torch reads the sources of its 500 ops for ONNX at each export, for a second: once in this process. Each export has its own copy.

    It also looks up each op of C++ that is made of others, for each of its namespaces, twice: a sixth of the export of a small model. Here
    it does so where their number has changed.
    """
    try:
        import torch
        from torch._export import utils
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        read = functools.cache(ONNXRegistry.from_torchlib)
        look_up, registered = utils._materialize_cpp_cia_ops, torch._C._dispatch_get_registrations_for_dispatch_key
    except (ImportError, AttributeError):  # another version of torch
        return

    def look_up_new() -> None:
        nonlocal known
        if (now := len(registered("CompositeImplicitAutograd"))) != known:
            look_up()
            known = now

    known = -1
    utils._materialize_cpp_cia_ops = look_up_new

    def from_torchlib(**version: int) -> ONNXRegistry:
        registry = copy.copy(read(**version))
        registry.functions = {target: [*found] for target, found in registry.functions.items()}
        return registry

    ONNXRegistry.from_torchlib = staticmethod(from_torchlib)


def _collect_seldom() -> None:
    """The collector of cycles looks at what tests make, not at modules, and less often: it was a sixth of the suite's time.

    A compile makes 100,000 objects, most of which its end frees: whoever looks each time looks at the same ones again. A million wait for
    some 100 MB of memory.
    """
    gc.freeze()
    gc.set_threshold(1_000_000, 5, 20)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Compiles of this test, of its fixtures and of the processes that it starts verify what the passes make.

    The finished programs of all tests are verified. `PARTC_VERIFY_PASSES=1` has all tests verify after every pass.

    Random numbers of a module are the same whichever of its tests have run before on this worker.
    """
    if os.environ["PARTC_CACHE"].startswith(_CACHE.name):  # else a fixture has chosen it
        os.environ["PARTC_CACHE"] = str(Path(_CACHE.name) / str(zlib.crc32(item.nodeid.encode())))
    if isinstance(item, pytest.Function):
        for generator, state in _GENERATORS.get(item.module.__name__, ()):
            generator.bit_generator.state = state
    if _REQUESTED is None:
        is_due = zlib.crc32(item.nodeid.encode()) % _TURNS == int(os.environ["PARTC_TEST_DAY"]) % _TURNS
        os.environ[_VERIFY_PASSES] = "1" if is_due or item.nodeid.startswith(_VERIFIED) else "last"
    module = item.nodeid.partition("::")[0]
    is_narrow = (
        module in _NARROW
        or bool(os.environ.get("PARTC_TEST_ALL"))
        or zlib.crc32(module.encode()) % _TURNS == int(os.environ["PARTC_TEST_DAY"]) % _TURNS
    )
    _compile_narrow_programs(is_narrow or not module.startswith(_DECODERS))


def _compile_narrow_programs(yes: bool) -> None:
    """Decoders are compiled with their narrow programs, which are most of the programs of a generating plan, or without them."""
    caches: Any = sys.modules.get("partc.compiler.rewrite.generation.caches")
    forms: Any = sys.modules.get("partc.compiler.rewrite.generation.step_form")
    if caches is not None and forms is not None:
        caches.narrow_rows = forms.narrow_rows if yes else lambda rules, runs: []
        caches.narrow_chunks = forms.narrow_chunks if yes else lambda rules: []


def pytest_sessionfinish() -> None:
    """One look for what objects in cycles raise when they go; pytest looks five times, at all that there is."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden instead of comparing with it")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """The comparison of a text with the golden one of a name."""
    update = bool(request.config.getoption("--update-golden"))
    accept = f"where this is meant, accept it: pytest {request.node.nodeid} --update-golden; then read the diff"

    def compare(name: str, text: str) -> None:
        path = Path(__file__).parent / "golden" / name
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        if not path.exists():
            pytest.fail(f"there is no golden text {path}\n{accept}", pytrace=False)
        held = path.read_text(encoding="utf-8").splitlines()
        if text.splitlines() != held:
            changed = difflib.unified_diff(held, text.splitlines(), f"golden/{name}", "now", lineterm="", n=2)
            pytest.fail("\n".join([*islice(changed, _SHOWN), "...", accept]), pytrace=False)

    return compare


@pytest.fixture(autouse=True)
def _no_reader_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test of data closes what it opens: no thread that reads ahead is left."""
    before = {*threading.enumerate()}
    yield
    if request.path.parent.name != "data":
        return
    left = [one for one in threading.enumerate() if one.name == "partc data" and one not in before]
    for one in left:  # one that was in code of the test when it was closed ends a moment later
        one.join(60)
    assert not any(one.is_alive() for one in left), "a reader of data is not closed"
