"""The page of `partc report` in a browser: it draws, loads nothing, and is used by mouse and by keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, chromium
from machines import machine
from partc.cli.main import invoke
from partc.cli.report.page import page_text
from partc.compiler.cost.machine_file import machine_text
from partc.compiler.pipeline import compile_model
from report_case import ROOT, lenet

PROGRAM = chromium()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here, in which the page is tried")
SIZES = ("--set", "batch=2", "--set", "seq=16")
HOSTILE = "</script><b id='hostile'>&quot;\"'\n"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests."""
    assert PROGRAM is not None
    with Browser(PROGRAM) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages of a GPT on five ranks, of LeNet against LeNet with a layer elsewhere, and of a pipeline with a trace."""
    folder = tmp_path_factory.mktemp("pages")
    gpt = ROOT / "samples" / "gpt"
    compile_model(gpt / "model.py", gpt / "stages.yaml", folder / "gpt")
    (folder / "machine.yaml").write_text(machine_text(machine()))
    before, after = lenet(folder, "before"), lenet(folder, "after", ("fc3: 2", "fc3: 1"))
    streamed, trace = ROOT / "samples" / "lenet" / "pipeline.yaml", folder / "x.trace.json"
    compile_model(ROOT / "samples" / "lenet" / "model.py", streamed, folder / "streamed")
    run = ["run", folder / "streamed", "--in-process", "--random", "7", "--set", "batch=8", "--repeat", "5"]
    assert invoke([*map(str, run), "--profile", str(trace), "-o", str(folder / "y.npz")]) == 0
    for arguments in (
        [folder / "streamed", "--trace", trace, "--set", "batch=8", "-o", folder / "streamed.html"],
        [folder / "gpt", "--machine", folder / "machine.yaml", *SIZES, "-o", folder / "gpt.html"],
        [after, "--against", before, "-o", folder / "lenets.html"],
    ):
        assert invoke(["report", *map(str, arguments)]) == 0
    return folder


def show(browser: Browser, page: Path, hash: str = "") -> None:
    """Opens a page, until it is drawn."""
    browser.open(page.as_uri() + hash, "document.documentElement?.dataset.drawn === 'yes'")


def box(name: str) -> str:
    return f'.box[data-path="{name}"]'


def test_a_module_opens_down_to_its_nodes(browser: Browser, pages: Path) -> None:
    show(browser, pages / "gpt.html")
    page = (pages / "gpt.html").as_uri()
    assert (browser.requests, browser.errors) == ([page], [])
    assert browser.evaluate("document.querySelectorAll('#summary .card').length") == 6
    browser.click("button[aria-label='Close all modules']")
    assert not browser.evaluate(f"!!document.querySelector('{box('layers.0')}')")
    for name in ("layers", "layers.0", "layers.0.attention"):
        browser.click(box(name))
        assert browser.evaluate(f"document.querySelector('{box(name)}').getAttribute('aria-expanded')") == "true"
    browser.click(box("layers.0.attention.Softmax"))
    shown = browser.evaluate("document.querySelector('.panel').innerText")
    assert "Softmax" in shown
    assert "1-2" in shown
    assert "stages.yaml" in shown  # the rule by which it is there
    assert "sharded" in shown
    assert browser.evaluate("location.hash") == "#node=layers.0.attention.Softmax"
    browser.click(box("layers"))
    assert not browser.evaluate(f"!!document.querySelector('{box('layers.0')}')")
    assert browser.errors == []


def test_a_transfer_leads_to_its_nodes(browser: Browser, pages: Path) -> None:
    show(browser, pages / "gpt.html")
    rows = browser.evaluate("document.querySelectorAll('#transfers .rows .row').length")
    assert rows == browser.evaluate("shown.data.communication.length") > 5
    browser.evaluate("document.querySelector('.filter').focus()")
    browser.write("layers.1.Add_1")
    assert 0 < browser.evaluate("document.querySelectorAll('#transfers .rows .row').length") < rows
    browser.click("#transfers .rows .row")
    shown = browser.evaluate("document.querySelector('.panel').innerText")
    assert "read by layers.2" in shown
    assert "768*batch*seq" in shown
    assert browser.evaluate("document.querySelector('.box.chosen').dataset.path") == "layers.1.Add_1"
    browser.evaluate(
        "[...document.querySelectorAll('.panel .ways button')].find((one) => one.innerText.includes('layers.2')).click()"
    )
    assert browser.evaluate("document.querySelector('.box.chosen').dataset.path").startswith("layers.2.")
    assert browser.errors == []


def test_search_and_keys(browser: Browser, pages: Path) -> None:
    show(browser, pages / "gpt.html")
    browser.press("/", "/")
    browser.write("3.mlp")
    assert browser.evaluate("document.querySelector('#found [aria-selected=true]').innerText") == "module layers.3.mlp"
    browser.press("Enter")
    assert browser.evaluate("document.querySelector('.box.chosen').dataset.path") == "layers.3.mlp"
    browser.evaluate("document.querySelector('.box.chosen').focus()")
    browser.press("Enter")
    assert browser.evaluate("document.querySelector('.box.chosen').getAttribute('aria-expanded')") == "true"
    browser.evaluate("document.getElementById('search').value = ''; document.getElementById('search').focus()")
    browser.write("no such thing")
    assert browser.evaluate("document.getElementById('found').innerText") == "nothing has this in its name"
    show(browser, pages / "gpt.html", "#node=layers.0.attention.Softmax")
    assert browser.evaluate("document.querySelector('.box.chosen').dataset.path") == "layers.0.attention.Softmax"
    assert browser.errors == []


def test_by_ranks_each_class_is_a_box(browser: Browser, pages: Path) -> None:
    show(browser, pages / "gpt.html")
    browser.evaluate(
        "(() => { const s = document.querySelector('#graph select'); s.value = 'ranks'; s.dispatchEvent(new Event('change')); })()"
    )
    names = browser.evaluate("[...document.querySelectorAll('.box')].map((one) => one.dataset.name)")
    assert {"rank 0", "ranks 1-2", "rank 3"} <= {*names}
    assert browser.evaluate("document.querySelectorAll('.edge.message').length") > 1
    assert browser.errors == []


def test_two_artifacts_are_side_by_side(browser: Browser, pages: Path) -> None:
    show(browser, pages / "lenets.html")
    changes = browser.evaluate("document.getElementById('changes').innerText")
    assert "-20.0 %" in changes
    assert "message relu.Relu_3: 1 to 2" in changes
    assert browser.evaluate("[...document.querySelectorAll('.box.changed')].map((one) => one.dataset.path)") == [
        "fc3.Gemm"
    ]
    sent = "document.querySelectorAll('#summary .card .value')[3].innerText"
    assert browser.evaluate(sent) == "6.66 KiB"
    browser.click(box("fc3.Gemm"))
    browser.evaluate(
        "(() => { const s = document.getElementById('side'); s.value = 1; s.dispatchEvent(new Event('change')); })()"
    )
    assert browser.evaluate(sent) == "6.99 KiB"
    assert "placement: 2 became 1" in browser.evaluate("document.querySelector('.panel').innerText")
    assert browser.evaluate("document.querySelector('.box.chosen').dataset.path") == "fc3.Gemm"
    new, gone = "message logits: 1 to 0", "message relu.Relu_3: 1 to 2"
    for name, side, shown in ((new, "0", "Send of logits"), (gone, "1", "Send of relu.Relu_3")):
        row = f"[...document.querySelectorAll('#changes .row')].find((one) => one.innerText.includes('{name}'))"
        browser.evaluate(f"{row}.click()")
        assert browser.evaluate("document.getElementById('side').value") == side  # the artifact that has it
        assert browser.evaluate("document.querySelector('.panel h3').innerText") == shown
    legend, canvas = (
        browser.evaluate(f"document.querySelector('#graph {name}').getBoundingClientRect().{edge}")
        for name, edge in ((".legend", "top"), (".canvas", "bottom"))
    )
    assert legend >= canvas  # no box is under it
    assert browser.errors == []


def test_a_pipeline_over_time(browser: Browser, pages: Path) -> None:
    """The tasks of its schedule, the curve of its memory, and a measured step above the simulated one."""
    show(browser, pages / "streamed.html")
    tasks = "[...document.querySelectorAll('.task text')].map((one) => one.textContent)"
    rows = browser.evaluate("shown.data.schedule.homes.map((one) => one.row).join(' ')")
    assert browser.evaluate(tasks) == rows.split()
    browser.click(".task rect")
    assert browser.evaluate("document.querySelectorAll('.task.faded').length") > 0
    assert browser.evaluate("document.querySelector('.chart canvas').width") > 300
    browser.evaluate("document.querySelector('.lanes canvas').scrollIntoView({block: 'center'})")
    place = browser.evaluate(
        "(() => { const r = document.querySelector('.lanes canvas').getBoundingClientRect(); return [r.x, r.y]; })()"
    )
    step = "shown.data.timeline.measured"
    span = browser.evaluate(f"{step}.ranks[0].spans.reduce((a, b) => (a[4] > b[4] ? a : b))")
    whole = browser.evaluate("Math.max(shown.data.timeline.simulated.seconds, shown.data.timeline.measured.seconds)")
    width = browser.evaluate("document.querySelector('.lanes canvas').clientWidth") - 132
    at = {"x": place[0] + 132 + width * (span[3] + span[4] / 2) / whole, "y": place[1] + 29}
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", **at)
    assert span[1] in browser.evaluate("document.querySelector('#timeline .under').innerText")
    assert "simulated" in browser.evaluate("document.querySelector('#timeline .title').innerText")
    assert browser.errors == []


def test_a_step_on_a_machine_alone(browser: Browser, pages: Path) -> None:
    show(browser, pages / "gpt.html")
    shown = browser.evaluate("document.getElementById('timeline').innerText")
    assert "simulated on the machine: a step takes" in shown
    assert "measured" not in shown
    assert "null" not in browser.evaluate("document.body.innerText")
    assert browser.errors == []


def test_sizes_and_colours(browser: Browser, pages: Path) -> None:
    grounds = set()
    for width, theme in ((800, "dark"), (1920, "light")):
        browser.resize(width, 800)
        browser.theme(theme)
        show(browser, pages / "lenets.html")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        grounds.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2
    browser.click(box("fc1.Gemm"))
    browser.click("#theme")
    assert browser.evaluate("document.documentElement.dataset.theme") == "dark"
    assert browser.evaluate("document.querySelector('.box.chosen').dataset.path") == "fc1.Gemm"
    browser.resize(1280, 800)
    browser.evaluate("shown.picture.zoom(3, 0, 0)")
    away = "document.querySelectorAll('.box.away').length"
    assert browser.evaluate(away) > 0  # those out of sight have no texts
    browser.evaluate("shown.picture.fit()")
    assert browser.evaluate(away) == 0
    browser.resize(1280, 560)
    browser.evaluate("new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))")
    assert browser.evaluate(away) > 0
    browser.resize(1280, 800)
    browser.evaluate("new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))")
    assert browser.evaluate(away) == 0
    assert browser.errors == []


def test_many_nodes_are_drawn_at_once(browser: Browser, pages: Path) -> None:
    """20,000 nodes, one after the other, on two classes of ranks, with a name that would end a script."""
    number = 20_000
    texts = ["Add", "", HOSTILE, *(f"b{k // 16}.n{k}" for k in range(number))]
    values = [[3 + k, 1, 0] for k in range(number)]
    nodes = [[0, 3 + k, 1, 1, 1, 2, 1, 1, -1, [k - 1] if k else [], [k]] for k in range(number)]
    columns = ["op", "path", "phase", "task", "target", "why", "cut", "bytes", "tag", "inputs", "outputs"]
    graph = {
        "columns": columns,
        "texts": texts,
        "classes": [{"ranks": "0-511", "size": 512, "first": 0, "nodes": nodes, "values": values}],
    }
    moved = {"bytes": 0, "text": "0", "unknown": 0}
    stats = {"nodes": number, "weights": 0, "sent": moved, "received": moved}
    artifact = {
        **{
            "folder": HOSTILE,
            "program": "infer",
            "model": HOSTILE,
            "plan": "",
            "ranks": 512,
            "mesh": {},
            "meshes": [],
            "sizes": {},
        },
        **{"given": [], "measures": {"messages": 0, "bytes": 0}, "communication": [], "graph": graph},
        "classes": [{"ranks": "0-511", "list": [*range(512)], "stats": stats, "memory": {"peak": 1, "targets": []}}],
        "memory": [{"kept": 1, "between": [], "inside": [], "what": [], "most": 0, "values": [], "others": 0}],
    }
    (pages / "many.html").write_text(page_text(HOSTILE, {"artifacts": [artifact], "difference": None}))
    show(browser, pages / "many.html")
    assert browser.errors == []
    assert not browser.evaluate("!!document.getElementById('hostile')")
    assert 1 < browser.evaluate("document.querySelectorAll('.box').length") <= 60
    assert browser.evaluate("shown.picture.tree.root.count") == number
    browser.click(".box")
    browser.evaluate("shown.showPath('b700.n11207')")
    assert HOSTILE.strip() in browser.evaluate("document.querySelector('.panel').innerText")
    browser.click("button[aria-label='Open all modules']")
    assert "boxes are too many for one picture" in browser.evaluate("document.querySelector('.note').innerText")
    assert browser.errors == []
