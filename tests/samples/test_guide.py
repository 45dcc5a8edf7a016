"""The guide, `samples/README.md` and the pages in `samples/guide`: each page shows what happens to a reader who begins with it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from equivalence import whole_outputs
from guide_pages import INDEX, ROOT, SAMPLES, Command, blocks, commands, course
from partc.cli.launch.launcher import Kind, find_launcher
from partc.cli.machine import measure
from partc.cli.main import invoke
from partc.compiler.frontend import load
from partc.compiler.frontend.python import INSTEAD
from partc.compiler.ops.registry import entries
from partc.compiler.pipeline import compile_model
from partc.compiler.plan.dataset import KEYS
from partc.compiler.plan.read import parse_plan, read_plan
from partc.runtime import load_local
from sample_scripts import run_script

PAGES = sorted((SAMPLES / "guide").rglob("*.md"))
MOST_WORDS, WORDS_PER_MINUTE, COURSE_MINUTES = 1500, 200, 20
LINK = re.compile(r"\]\(([^)#:]*)(?:#([^)]*))?\)")
IN_PROCESS = re.compile(r"partc (run|train|eval|generate)\b(?!.* (-n|--hostfile|--in-process) ?)")
"""Commands of the guide whose ranks are threads of this test: to start processes takes long, and the tests of each command start them."""
CALLED = re.compile(
    r"partc (plan|export|compile|inspect|check|verify|checkpoint|simulate|diff|report|measure|run (--in-process|-n 4|--hostfile))"
    r"\b(?!.*(--mpi| [>|]))"
)
"""Commands that this test calls: that of a file of hosts starts processes for its ranks."""
SCRIPT = re.compile(r"python (\w+\.py)((?: [\w-]+)*)")
MEASURED = {
    "ranks": 2,
    "threads": 1,
    "session": 2e-5,
    "step": 2e-4,
    "products": {"matmul": [[1e6, 2e-5], [1e9, 2e-2]]},
    "kernels": {name: [[4096, 2e-6], [1 << 24, 8e-3]] for name in sorted({entry.work.kernel for entry in entries()})},
    "links": [
        {
            "overlap": 1.0,
            "wake": 1e-5,
            "send": [[8, 1e-5], [1 << 24, 1e-2]],
            "collectives": {"AllReduce": [[8, 2e-5], [1 << 24, 2e-2]]},
        }
    ],
    "segments": {},
}
"""What the ranks of `partc measure` might have found: a test of that command has them measure, for ten seconds."""
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


def ended(line: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and words of a command: called where no shell is needed, and so are scripts. Others run in a shell."""
    capfd.readouterr()
    if script := SCRIPT.fullmatch(line):
        run_script(folder / script[1], script[2].split())
        return 0, "".join(capfd.readouterr())
    here = IN_PROCESS.match(line) is not None
    if here or CALLED.match(line):
        with contextlib.chdir(folder):
            code = invoke([*shlex.split(line)[1:], *["--in-process"] * here])
        return code, "".join(capfd.readouterr())
    shell = ["bash", "-o", "pipefail", "-c", line]
    done = subprocess.run(shell, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def run(command: Command, folder: Path, trouble: list[str], capfd: pytest.CaptureFixture[str]) -> Path:
    """Runs a command in the folder; gives the folder where the next one runs."""
    line = command.line
    if line.startswith("cd "):
        return (folder / line[3:]).resolve(strict=True)
    if find_launcher(1).kind is not Kind.OPEN_MPI:
        line = line.replace(" --oversubscribe", "")
    code, told = ended(line, folder, capfd)
    if code != command.exit_code or not command.matches(told):
        trouble.append(f"$ {command.line}\n{told}exit code {code}")
    return folder


def shown(page: Path, folder: Path, capfd: pytest.CaptureFixture[str]) -> list[str]:
    """What a page shows otherwise than it happens, begun in the folder."""
    trouble: list[str] = []
    for language, name, text in blocks(page):
        if language == "console":
            for command in commands(text):
                folder = run(command, folder, trouble, capfd)
        elif name:
            (folder / name).write_text(text)
    return trouble


def name_of(page: Path) -> str:
    return str(page.relative_to(SAMPLES / "guide").with_suffix(""))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", [page for page in PAGES if "\n$ " in page.read_text()], ids=name_of)
def test_a_page_shows_what_happens(
    page: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in a fresh copy of the samples; `--durations=0` prints the time of each, `guide_pages.py` follows them elsewhere."""
    if page.name == "huggingface.md":
        pytest.importorskip("transformers", "5.0", reason='needs transformers: pip install "partc[transformers]"')
    if page.name == "fine_tuning.md":
        pytest.importorskip("torch", reason="its models are torch modules")
    if page.name == "data.md":
        pytest.importorskip("torch", reason='needs torch, whose DataLoader it shows: pip install "partc[torch]"')
    monkeypatch.setattr(measure, "_run", lambda folder, ranks, request: MEASURED)
    folder = tmp_path / "samples"
    shutil.copytree(SAMPLES, folder, ignore=shutil.ignore_patterns("build*", "resnet18.*", "__pycache__"))
    trouble = shown(page, folder, capfd)
    assert not trouble, "\n".join(trouble)
    if page.name == "training.md":
        evaluate = "partc eval --plan train.yaml --checkpoint runs --json"
        assert json.loads(ended(evaluate, folder / "lenet", capfd)[1])["step"] == 20
    if page.name == "huggingface.md":
        (quoted,) = (text for language, _, text in blocks(page) if language == "yaml")
        told = parse_plan(f"ranks: 2\nmesh: {{tp: 2}}\n{quoted}", page.name)
        styles = {rule.pattern: rule.style for rule in read_plan(folder / "plan.yaml").sharding}
        assert {rule.pattern: rule.style for rule in told.sharding} == styles


MODELS = SAMPLES / "guide/models.md"


@pytest.mark.parametrize("name", [name for _, name, text in blocks(MODELS) if "model = " in text])
def test_the_models_of_the_guide(tmp_path: Path, name: str) -> None:
    if "torch" in name:
        pytest.importorskip("torch")
    (text,) = (text for _, other, text in blocks(MODELS) if other == name)
    (tmp_path / name).write_text(text)
    (tmp_path / "plan.yaml").write_text('ranks: 2\nplacement: {"**": 1}\n')
    report = compile_model(tmp_path / name, tmp_path / "plan.yaml", tmp_path / "build")
    (port,) = report.manifest.inputs
    assert port.shape is not None
    assert port.shape[0] == "batch"
    x = np.random.default_rng(0).standard_normal((16, *port.shape[1:])).astype(np.float32)
    with load_local(report.out) as program:
        (have,) = program({port.name: x}).values()
    (want,) = whole_outputs(ir.to_proto(load(tmp_path / name).model), {port.name: x}).values()
    assert np.abs(want).max() > 1e-2
    np.testing.assert_allclose(have, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("page", "sample", "quoted"),
    [
        ("placement.md", "lenet", r"`(placement: \{conv1.*?\})`"),
        ("placement.md", "resnet", r'^```yaml\n(placement:\n  "layer.*?)^```$'),
    ],
    ids=["lenet", "resnet"],
)
def test_the_plans_that_the_guide_quotes(page: str, sample: str, quoted: str) -> None:
    real = read_plan(SAMPLES / sample / "plan.yaml")
    (text,) = re.findall(quoted, (SAMPLES / "guide" / page).read_text(), re.DOTALL | re.MULTILINE)
    told = parse_plan(f"ranks: {real.ranks}\n{text}\n", page)
    assert [replace(rule, where="") for rule in told.placement] == [replace(rule, where="") for rule in real.placement]


def test_pages_are_short_and_the_index_has_their_minutes() -> None:
    """Words are counted as `wc -w` does, with those of commands and outputs; the course is the index's first table."""
    words = {page: len(page.read_text().split()) for page in [INDEX, *PAGES]}
    long = {page for page, number in words.items() if number > MOST_WORDS and page.parent.name != "reference"}
    assert not long
    index = INDEX.read_text()
    rows = re.findall(r"^\| \[.*?\]\((guide/.*?)\) \| (\d+) \|", index, re.MULTILINE)
    minutes = {SAMPLES / path: int(number) for path, number in rows}
    read = [page for page in PAGES if page.parent.name != "reference"]
    assert minutes == {page: math.ceil(words[page] / WORDS_PER_MINUTE) for page in read}
    assert sum(minutes[page] for page in course()) <= COURSE_MINUTES
    assert all(f"(guide/{name_of(page)}.md)" in index for page in PAGES)


def test_every_option_of_a_context_is_told() -> None:
    """`from_other_systems.md` has each option that a global of a `model.py` is known by, once, in its table."""
    page = (SAMPLES / "guide/from_other_systems.md").read_text()
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    told = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert {name: told.count(name) for name in (*INSTEAD, *KEYS[1:])} == dict.fromkeys((*INSTEAD, *KEYS[1:]), 1)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    named = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "compiler/README.md", "runtime/README.md")
    wrong = []
    for page in [INDEX, *PAGES, *(ROOT / name for name in named)]:
        for path, anchor in LINK.findall(re.sub(r"`[^`\n]*`", "", page.read_text())):
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                wrong.append(f"{page.relative_to(ROOT)}: {path}#{anchor}")
    assert not wrong, "\n".join(wrong)
