"""`partc inspect --format`: boxes and messages of the graph as text for Graphviz and Mermaid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from partc.cli.main import invoke
from partc.cli.report.graph_text import _labelled, _quoted
from partc.compiler.pipeline import compile_model
from partc.runtime.artifact.manifest import open_artifact
from report_case import ROOT, Capture, lenet


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LeNet on five ranks."""
    return lenet(tmp_path_factory.mktemp("texts"), "build")


def text_of(capsys: Capture, *arguments: object) -> str:
    capsys.readouterr()
    assert invoke(["inspect", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_each_message_is_a_thick_arrow_with_its_bytes(build: Path, capsys: Capture) -> None:
    sent = sorted(one.bytes for one in open_artifact(build, trust=True).manifest.transfers)
    mermaid, dot = (text_of(capsys, build, "--format", format) for format in ("mermaid", "dot"))
    assert sorted(re.findall(r'==>\|"(.*?)"\|', mermaid)) == sent
    assert sorted(re.findall(r'\[label="(.*?)", penwidth=2', dot)) == sent
    for text, frame in ((mermaid, r"subgraph r\d+\["), (dot, r"subgraph cluster_\d+ ")):
        assert len(re.findall(frame, text)) == 5
        assert text.count("1 node") == 12
    named = dict(re.findall(r'(b\d+)\["(.*?)(?:<br>.*)?"\]', mermaid))
    arrows = [(named[one], named[other]) for one, other in re.findall(r"(b\d+) (?:-->|==>\S*) (b\d+)", mermaid)]
    assert ("pool.MaxPool", "conv2.Conv") in arrows
    assert ("fc3.Gemm", "output logits") in arrows
    assert len(arrows) == 12


def test_modules_of_a_depth_and_of_a_rank(tmp_path: Path, capsys: Capture) -> None:
    gpt = ROOT / "samples" / "gpt"
    compile_model(gpt / "model.py", gpt / "dp_tp.yaml", tmp_path / "build")
    text = text_of(capsys, tmp_path / "build", "--format", "mermaid", "--depth", "2", "--rank", "1")
    assert re.findall(r'subgraph r0\["(.*?)"\]', text) == ["ranks 0-3"]
    (layer,) = re.findall(r'\["(layers\.3<br>.*?)"\]', text)
    assert layer.endswith("<br>2 AllReduce: 768*batch*seq bytes")
    assert "layers.3.mlp" not in text


def test_names_cannot_end_their_label() -> None:
    assert _labelled(['a"]<b>#&']) == '"a#quot;]#lt;b#gt;#35;#amp;"'
    assert _quoted(['a"\\', "b"]) == '"a\\"\\\\\\nb"'


def test_options_that_do_not_fit(build: Path, capsys: Capture) -> None:
    for arguments in (["--format", "dot", "--node", "fc1"], ["--depth", "1"]):
        assert invoke(["inspect", str(build), *arguments]) == 2
        assert "help:" in capsys.readouterr().err
