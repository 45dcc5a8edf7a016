"""Structure: packages match folders, imports point one way and in no circle, files and classes are small, heavy libraries are imported
only where needed."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from source_trees import nodes_of

ROOT = Path(__file__).parent.parent
FOR_THE_COMPILER = (
    "partc.runtime.artifact",
    "partc.runtime.errors",
    "partc.runtime.checker.structures",
    "partc.runtime.program.ort",
    "partc.runtime.data.npy",
    "partc.runtime.files",
    "partc.runtime.garbage_collection",
    "partc.runtime.options",
    "partc.runtime.spellings",
    "partc.runtime.units",
)
"""What the compiler knows of the runtime: the contract, the checker of what was written, how
files are opened and replaced, models of keys, and when garbage is collected."""
FOR_COSTS = (
    "partc.runtime.communication",
    "partc.runtime.devices",
    "partc.runtime.execution",
    "partc.runtime.program",
    "partc.runtime.updates",
)
"""What the models of a step's time and memory, in `compiler/cost` and `compiler/search`, also know: how the runtime runs a file."""
SUBSYSTEMS = ("compiler", "runtime", "cli")
MOST_LINES, MOST_ATTRIBUTES = 800, 16
LARGER = {
    "compiler/plan/rules.py:Plan": 19,
    "compiler/plan/schema.py:PlanEntries": 17,
    "compiler/tasks/reduce_gradients.py:GradientReduction": 18,
    "compiler/cost/play.py:_Player": 18,
    "compiler/pipelines/pipeline.py:_Rows": 18,
    "compiler/rewrite/generation/caches.py:_Caches": 18,
    "runtime/artifact/generation.py:GenerationRecord": 18,
    "runtime/communication/mpi.py:MpiTransport": 29,
    "runtime/execution/program.py:Program": 17,
    "runtime/training/trainer.py:Trainer": 20,
}
"""Classes with more attributes, and how many: a number may only become smaller."""

TIMES = re.compile(
    r"(?:monotonic|perf_counter|time\.time)\(\)|(?:time|asyncio)\.sleep\((?!0\))|"
    r"(?:(?:wait|join|alarm|Timer|settimeout)\(|timeout ?= ?)(?:0?\.\d+|[1-9]|[12]\d)(?![\w.])"
)
TIMED = {
    "artifact/test_trace.py": 1,
    "checkpoint/test_background_save.py": 1,
    "checkpoint/test_checkpoint_lock.py": 3,
    "cli/kill_case.py": 4,
    "cli/kill_job.py": 1,
    "cli/test_launch.py": 1,
    "cli/test_run_dir.py": 2,
    "communication/mpi_ranks_case.py": 1,
    "communication/test_leaving.py": 1,
    "communication/test_lingering.py": 3,
    "communication/test_pauses.py": 4,
    "communication/test_progress.py": 5,
    "communication/test_shared_memory.py": 1,
    "data/test_data_loader.py": 1,
    "execution/test_mpi_ranks.py": 2,
    "execution/test_turns.py": 2,
    "frontend/test_user_code.py": 1,
    "hosts/link.py": 2,
    "samples/guide_pages.py": 4,
    "search/test_search.py": 4,
    "search/test_several_stages_each.py": 1,
    "server/test_connections.py": 9,
    "server/test_server_ranks.py": 1,
    "training/runs/test_loop_stops.py": 1,
}
"""Files of tests that read the wall's clock, sleep, or wait for less than 30 seconds, and how often: a number may only become smaller."""


def sources() -> list[Path]:
    return [path for folder in SUBSYSTEMS for path in sorted((ROOT / folder).rglob("*.py"))]


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def attributes_of(node: ast.ClassDef) -> set[str]:
    """The attributes of a class's instances, wherever they are assigned: fields, and what methods assign to `self`."""
    fields = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    stored = (one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store))
    return fields | {one.attr for one in stored if isinstance(one.value, ast.Name) and one.value.id == "self"}


def test_classes_have_few_attributes() -> None:
    counts = {
        f"{path.relative_to(ROOT)}:{node.name}": len(attributes_of(node))
        for path in sources()
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
    }
    large = {name: count for name, count in counts.items() if count > MOST_ATTRIBUTES}
    assert large == LARGER


def test_packages_are_the_folders() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {".".join(("partc", *path.parent.relative_to(ROOT).parts)) for path in (*sources(), ROOT / "__init__.py")}
    assert sorted(listed) == sorted(folders)


def test_imports_point_one_way() -> None:
    allowed = {"runtime": ("runtime",), "compiler": ("compiler", "runtime"), "cli": SUBSYSTEMS}
    wrong = []
    for path in sources():
        subsystem, folder = path.relative_to(ROOT).parts[:2]
        known = (*FOR_THE_COMPILER, *(FOR_COSTS if folder in ("cost", "search") else ()))
        for name in sorted(name for name in imports_of(path) if name.startswith("partc.")):
            hidden = subsystem == "compiler" and name.startswith("partc.runtime.") and not name.startswith(known)
            if name.split(".")[1] not in allowed[subsystem] or hidden:
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert not wrong, "\n".join(wrong)


def modules() -> dict[str, Path]:
    names = {path: path.relative_to(ROOT).with_suffix("").parts for path in sources()}
    return {".".join(("partc", *(part for part in parts if part != "__init__"))): path for path, parts in names.items()}


def files_imported_by(name: str, files: dict[str, Path]) -> set[str]:
    """The files of a file's imports, wherever in it these stand: at the top, for types alone, in a function."""
    package = name if files[name].name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in nodes_of(files[name]):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            inside = {alias.name: f"{base}.{alias.name}" for alias in node.names}
            found.update(file if file in files else base for file in inside.values())
    return found & files.keys() - {name}


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [*reversed(error.args[1])]
    return []


def test_no_files_import_each_other_in_a_circle() -> None:
    """Not for types alone either: which of two files is read first is then no question, and each can be taken by itself."""
    files = modules()
    assert circle({name: files_imported_by(name, files) for name in files}) == []


def test_a_circle_is_found_wherever_its_imports_stand(tmp_path: Path) -> None:
    texts = {
        "partc.a.__init__": "",
        "partc.a.top": "from partc.a.types import Type\n",
        "partc.a.types": "if TYPE_CHECKING:\n    from .inside import function\n",
        "partc.a.inside": "def function():\n    from . import top\n",
        "partc.b": "import partc.a.top\n",
    }
    files = {}
    for name, text in texts.items():
        path = tmp_path / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        files[name.removesuffix(".__init__")] = path
    graph = {name: files_imported_by(name, files) for name in files}
    assert graph["partc.b"] == {"partc.a.top"}
    assert graph["partc.a.inside"] == {"partc.a.top"}
    found = circle(graph)
    assert found[0] == found[-1]
    assert {*found} == {"partc.a.top", "partc.a.types", "partc.a.inside"}
    assert circle(graph | {"partc.a.types": set()}) == []


def test_files_are_one_idea() -> None:
    files = [*sources(), *sorted((ROOT / "tests").rglob("*.py"))]
    wrong = []
    for path in files:
        lines = path.read_text().splitlines()
        if len(lines) > MOST_LINES:
            wrong.append(f"{path.relative_to(ROOT)}: {len(lines)} lines")
        if not lines or not lines[0].startswith('"""'):
            wrong.append(f"{path.relative_to(ROOT)}: begins without a docstring")
    assert not wrong, "\n".join(wrong)


def test_names_of_test_modules_are_unique() -> None:
    """The folders of tests are no packages: of two modules with one name pytest imports the first."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py"))
    assert [name for name, number in names.items() if number > 1] == []


def test_what_tests_share_is_in_no_test_file() -> None:
    """A test file may change, or go, without another one: what several use is in a module of its own."""
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.parent.name != "benchmarks"]
    found = {path.name: sorted(name for name in imports_of(path) if re.match(r"test_\w+$", name)) for path in files}
    assert not {name: modules for name, modules in found.items() if modules}


def test_pages_list_the_folders() -> None:
    pages = {"compiler": "compiler/README.md", "runtime": "runtime/README.md", "cli": "CONTRIBUTING.md"}
    for subsystem, page in pages.items():
        rows = [line.split("|")[1] for line in (ROOT / page).read_text().splitlines() if line.startswith("| `")]
        folders = {path.parent.relative_to(ROOT / subsystem).parts[0] for path in (ROOT / subsystem).glob("*/*.py")}
        missing = [name for name in sorted(folders) if not any(re.search(rf"`(cli/)?{name}/`", row) for row in rows)]
        assert not missing, f"{page} has no row for {missing}"


def test_help_is_light() -> None:
    heavy = (
        "onnx",
        "onnxruntime",
        "onnx_ir",
        "onnxscript",
        "numpy",
        "pydantic",
        "sympy",
        "mpi4py",
        "torch",
        *OF_SERVERS,
    )
    code = (
        f"import sys, partc.cli.main, partc.runtime, partc.compiler; print([m for m in {heavy!r} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


OF_SERVERS = ("starlette", "uvicorn", "jinja2", "tokenizers")


def test_packages_of_a_server_are_imported_by_its_folders_alone() -> None:
    found = {
        str(path.parent.relative_to(ROOT))
        for path in sources()
        if any(name.split(".")[0] in OF_SERVERS for name in imports_of(path))
    }
    assert found == {"cli/server", "cli/text"}


def test_a_plan_that_does_not_train_imports_no_training() -> None:
    heavy = (
        "onnxscript",
        "partc.compiler.autodiff.engine",
        "partc.compiler.schedulers.choose",
        "partc.compiler.tasks.update",
    )
    code = f"import sys, partc.compiler.pipeline; print([m for m in {heavy!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


BLOCKING = {
    *("Barrier", "Bcast", "Allreduce", "Allgather", "Alltoall", "Reduce", "Gather", "Scatter", "Reduce_scatter_block"),
    *("barrier", "bcast", "allreduce", "allgather", "alltoall", "Dup", "Split", "Split_type", "Create_group", "Free"),
    *("Send", "Recv", "send", "recv", "Sendrecv", "Probe", "Wait", "Waitall", "Finalize", "Init_thread", "Abort"),
}


def test_calls_of_mpi_that_may_block_stand_in_one_file() -> None:
    found = {
        str(path.relative_to(ROOT)): sorted(names)
        for path in sources()
        if "mpi4py" in path.read_text()
        and any(name.split(".")[0] == "mpi4py" for name in imports_of(path))
        and (names := BLOCKING & {node.attr for node in nodes_of(path) if isinstance(node, ast.Attribute)})
    }
    assert list(found) == ["runtime/communication/mpi_calls.py"]
    assert {"Dup", "Create_group", "Free", "Allreduce", "Recv", "Abort"} <= set(
        found["runtime/communication/mpi_calls.py"]
    )


def test_tests_wait_for_conditions() -> None:
    """A bound of seconds is missed on a machine that does much else: `tests/support/waiting.py` waits for what must come."""
    own = [
        path
        for path in (ROOT / "tests").rglob("*.py")
        if path.parent.name not in ("benchmarks", "fuzz", "simulation", "real_size")
    ]
    found = {str(path.relative_to(ROOT / "tests")): len(TIMES.findall(path.read_text("utf-8"))) for path in own}
    del found["support/waiting.py"], found["test_structure.py"]
    assert {name: number for name, number in found.items() if number > TIMED.get(name, 0)} == {}
