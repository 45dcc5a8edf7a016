"""The server over MPI: its tokens, and its end: asked for, by a rank that is killed, or before a rank begins."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from decoders import Unsharded, decoder
from partc.cli.job.job import Job
from partc.cli.launch import serve as launch_serve
from partc.cli.launch.launcher import Hosts, find_launcher
from partc.cli.launch.serve import _ServerJob
from partc.cli.launch.supervise import Outcome
from partc.cli.main import invoke
from partc.cli.server.settings import ServerSettings
from partc.compiler.pipeline import compile_model
from partc.runtime.job.status_board import states
from server_case import LETTERS, MpiServer, write_tokenizer
from waiting import until

COMPLETIONS = "/v1/completions"
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7], [*range(1, 40)], [11, 12], [60, 2, 33, 4]]
PLAN = """ranks: 2
sharding: {"layers.*.q": colwise, "layers.*.k": colwise, "layers.*.v": colwise, "layers.*.o": rowwise, head: colwise}
generate: {slots: 2, length: 256, chunk: 8}
"""


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    onnx.save(decoder(), folder / "model.onnx")
    (folder / "plan.yaml").write_text(PLAN)
    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
    return folder / "build"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where jobs make their files."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def test_ranks_that_fail_are_started_again_and_a_signal_ends_the_server(build: Path, temporary: Path) -> None:
    model, many = Unsharded(decoder()), {"prompt": [1], "max_tokens": 255, "n": 16}
    wanted = [model.tokens(prompt, 20) for prompt in PROMPTS]
    with MpiServer(folder=build, options=("--restart", "--drain", "0.1")) as server:
        with ThreadPoolExecutor() as pool:
            found = [*pool.map(lambda prompt: server.complete(prompt, max_tokens=20)["token_ids"], PROMPTS)]
        assert found == wanted
        ranks = server.ranks()
        with server.streaming(COMPLETIONS, many) as events:
            next(events)
            os.kill(ranks[1], signal.SIGKILL)
            kind, data = [*events][-1]
        assert kind == "error"
        assert "rank 1 was killed by signal 9 (SIGKILL)" in json.loads(data)["error"]["message"]
        server.await_ready()
        assert server.complete(PROMPTS[0], max_tokens=20)["token_ids"] == wanted[0]
        assert server.metrics()["partc_restarts_total"] == 1
        ranks = server.ranks()
        with server.streaming(COMPLETIONS, many) as events:
            next(events)
            os.kill(ranks[1], signal.SIGSTOP)  # else the server may end before it is asked whether it does
            os.kill(server.process.pid, signal.SIGTERM)
            until(lambda: server.get("/health")[0] == 503)
            assert server.post(COMPLETIONS, many)[0] == 503
            os.kill(ranks[1], signal.SIGCONT)
            last = [json.loads(data) for _, data in events if data != "[DONE]"][-1]
        assert last["choices"][0]["finish_reason"] in ("shutdown", "length")
        code, lines = server.ended()
    assert code == 0
    assert [line.partition(":")[0] for line in lines.splitlines() if not line.startswith(("rank 1", "  help"))] == [
        "starts the ranks again; 4 more times at most",
        "ends",
    ]
    assert {path.name for path in temporary.iterdir()} <= {".ses"}  # onnxruntime leaves it


def test_a_server_whose_rank_0_is_killed_ends_with_its_message(build: Path, temporary: Path) -> None:
    with MpiServer(folder=build) as server:
        ranks = server.ranks()
        with server.streaming(COMPLETIONS, {"prompt": [1], "max_tokens": 255, "n": 16}) as events:
            next(events)
            os.kill(ranks[0], signal.SIGKILL)
            kind, data = [*events][-1]
        assert (kind, json.loads(data)["error"]["code"]) == ("error", "ranks_failed")
        code, lines = server.ended()
    assert code == 1
    assert "rank 0 was killed by signal 9" in lines
    assert {path.name for path in temporary.iterdir()} <= {".ses"}  # onnxruntime leaves it


def test_what_is_wrong_is_reported_before_a_rank_begins(
    build: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert invoke(["serve", str(build), "--port", str(taken.getsockname()[1])]) == 2
    told = capsys.readouterr().err
    assert told.splitlines()[0].startswith("cannot listen on 127.0.0.1, port ")
    assert "--port" in told
    tokenizer = write_tokenizer(tmp_path, LETTERS + "!")
    assert invoke(["serve", str(build), "--port", "0", "--tokenizer", str(tokenizer)]) == 2
    assert "its tokens are 0 to 64, and those of the model 0 to 63" in capsys.readouterr().err
    shutil.copytree(build, tmp_path / "damaged")
    weights = next(iter((tmp_path / "damaged").glob("rank_*.onnx")))
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(bytes(data))
    assert invoke(["serve", str(tmp_path / "damaged"), "--port", "0", "--in-process"]) == 1
    assert weights.name in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # as where it is not installed
    assert invoke(["serve", str(build), "--port", "0"]) == 2
    assert 'needs the package uvicorn\n  help: pip install "partc[serve]"' in capsys.readouterr().err


def test_no_command_of_a_rank_has_the_key_of_the_server(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All users of a machine see the commands of its processes."""
    commands = list[list[str]]()
    monkeypatch.setattr(launch_serve, "supervise", lambda command, *rest: commands.append(command) or Outcome(0))
    front: Any = SimpleNamespace(listen=lambda path: None)
    job = Job(folder="", serving=ServerSettings(api_key="a-secret", name="a-name"))
    nothing: Any = None
    assert _ServerJob(job, front, nothing).run(find_launcher(2), 2, Hosts(), ()) == 0
    assert "a-name" in str(commands)
    assert "a-secret" not in str(commands)


def test_a_rank_that_is_stopped_for_long_is_killed_and_so_described() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as rank:
        os.kill(rank.pid, signal.SIGSTOP)
        until(lambda: states([rank.pid]) == ["T"])
        run_dir: Any = SimpleNamespace(pids=lambda: [rank.pid], ended={})
        nothing: Any = None
        job = _ServerJob(Job(folder="", stall=0.0), nothing, nothing)
        until(lambda: job._end_stopped(run_dir) or run_dir.ended)
        assert rank.wait(60) == -signal.SIGKILL
    assert run_dir.ended[0][0] == f"(process {rank.pid}) was stopped for 0 s and is killed,"
