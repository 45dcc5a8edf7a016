"""Jobs over two hosts, namespaces of this machine: what ranks make there is what the unsharded model makes, and all end together."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import partc.cli
import pytest
import training_models as models
from equivalence import compiled, model, same, whole_outputs
from partc.cli.launch.launcher import Kind, find_launcher, launch_environment
from partc.compiler.pipeline import compile_model
from partc.runtime.checkpoint.checkpoint import Checkpoint
from partc.runtime.errors import UsageError
from training_equivalence import run, same_tensors, source_of
from two_hosts import TwoHosts, Unavailable, two_hosts
from waiting import LONG, until

BATCH, STEPS = 12, 3
GRID = """ranks: 4
mesh: {dp: 2, tp: 2}
dataset: data_parallel
symbols: {batch: {divisor: 2}}
sharding: {layers.0: colwise, layers.1: rowwise}
"""
SHARDED = "ranks: 4\nmesh: {dp: 4}\ndataset: data_parallel\nsymbols: {batch: {divisor: 4}}\n"
TRAIN = f"""train:
  loss: {{type: softmax_cross_entropy, logits: y, labels: labels}}
  optimizer: {{type: momentum, lr: 0.05, momentum: 0.9}}
  bucket_mb: 0.001
  data: data.npz
  shuffle: false
  batch: {BATCH}
  steps: {STEPS}
"""
LINEARS = """<ir_version: 10, opset_import: ["" : 21]>
net (float[n, 6] x, float[6, 8] w, float[8, 5] v) => (float[n, 5] y) {
  [up] h = MatMul(x, w)
  a = Relu(h)
  [down] y = MatMul(a, v)
}"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    try:
        assert find_launcher(2).kind is Kind.OPEN_MPI
    except (UsageError, AssertionError):
        pytest.skip("no Open MPI here, to whose launcher other hosts can be given by an agent")
    try:
        with two_hosts(tmp_path_factory.mktemp("hosts"), gbit=1.0, delay=1.0) as found:
            yield found
    except Unavailable as reason:
        pytest.skip(f"no two hosts here: {reason}")


def begun(hosts: TwoHosts, slots: int, folder: Path, *words: str) -> subprocess.Popen[str]:
    """The command on the first host, with so many ranks on each."""
    begin = [*hosts.inside(0), "env", f"--chdir={folder}", sys.executable, "-m", "partc.cli"]
    return subprocess.Popen(
        [*begin, *words, "--hostfile", str(hosts.file(slots)), "--threads", "1", "--", *hosts.options],
        env=hosts.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(hosts: TwoHosts, process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code, and what went to stderr but for what Open MPI says where the agent begins before its process group is set.

    A job that has not ended is killed on both hosts, so that no later test meets its ranks.
    """
    try:
        _, err = process.communicate(timeout=LONG)
    except subprocess.TimeoutExpired:
        waiting = _killed(hosts)
        _, err = process.communicate(timeout=LONG)
        raise AssertionError(f"it has not ended; what ran on both hosts:\n{waiting}\nstderr:\n{err}") from None
    return process.returncode, "".join(line for line in err.splitlines(True) if "plm:ssh: Warning: setpgid" not in line)


def _killed(hosts: TwoHosts) -> str:
    """What each process of a job waits in, on both hosts; they are killed."""
    look = (
        "for p in $(grep -laE 'partc[.]cli|/prt[e]' /proc/[0-9]*/cmdline); do p=${p%/cmdline}; "
        'echo "${p#/proc/} $(cat $p/wchan) $(tr "\\0" " " < $p/cmdline | cut -c 1-200)"; kill -9 ${p#/proc/}; done'
    )
    shown = [subprocess.run([*hosts.inside(host), "sh", "-c", look], capture_output=True, text=True) for host in (0, 1)]
    return "\n".join(one.stdout for one in shown)


def ranks_on(hosts: TwoHosts, host: int) -> list[int]:
    """Process ids, of the host, of the ranks there."""
    look = "grep -la partc[.]cli[.]job /proc/[0-9]*/cmdline"
    found = subprocess.run([*hosts.inside(host), "sh", "-c", look], capture_output=True, text=True)
    return [int(Path(path).parent.name) for path in found.stdout.split()]


def test_messages_and_sums_between_hosts_are_right(hosts: TwoHosts) -> None:
    """Exchanges and large sums, begun early and waited for at once: the script compares what arrives; its times are not asked here."""
    script = Path(__file__).parents[1] / "benchmarks" / "both_directions.py"
    words = [str(script), "--bytes", str(4 << 20), "--rank"]
    command = hosts.over_both([find_launcher(2).path, "-n", "2", sys.executable, *words], 2)
    told = subprocess.run(command, env=hosts.environment, capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    names = [line.split()[0] for line in told.stdout.splitlines()]
    assert names == ["exchange", "AllReduce", "AllReduce-at-once", "ReduceScatter"]


@pytest.mark.parametrize("plan", [GRID, SHARDED])
def test_ranks_of_two_hosts_learn_what_one_learns(hosts: TwoHosts, plan: str, tmp_path: Path) -> None:
    one = models.mlp(width=12, inputs=7)
    source = source_of(one)
    records = one.feeds(np.random.default_rng(1), batch=BATCH * STEPS)
    np.savez(tmp_path / "data.npz", **records)
    ir.save(source.model, tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text(plan + (TRAIN.replace("0.9}", "0.9, shard: dp}") if plan is SHARDED else TRAIN))
    compile_model(tmp_path / "model.onnx", tmp_path / "plan.yaml", tmp_path / "build")
    steps = [{key: array[k * BATCH : (k + 1) * BATCH] for key, array in records.items()} for k in range(STEPS)]
    whole = run(source, f"ranks: 1\n{TRAIN}", tmp_path / "whole", steps)
    words = ("train", "build", "--plan", "plan.yaml", "--checkpoint", "kept", "--save", str(STEPS))
    assert finished(hosts, begun(hosts, 2, tmp_path, *words)) == (0, "")
    kept = Checkpoint.open(tmp_path / "kept")
    same_tensors({tensor: kept.read(tensor) for tensor in kept.index.tensors}, whole.after, whole.before, 5e-4)


def linears(folder: Path) -> dict[str, np.ndarray]:
    """A model of two linears over four ranks, and what it makes of `in.npz`."""
    random = np.random.default_rng(5)
    proto = model(LINEARS)
    given = {
        name: random.normal(size=size).astype(np.float32)
        for name, size in (("w", (6, 8)), ("v", (8, 5)), ("x", (9, 6)))
    }
    compiled(
        proto, "ranks: 4\nsharding: {up: {in: [[1, 1], [1, 4]]}, down: {in: [[1, 4], [4, 1]]}}\n", folder / "build"
    )
    np.savez(folder / "in.npz", **given)
    return whole_outputs(proto, given)


def test_outputs_of_two_hosts_are_those_of_the_unsharded_model(hosts: TwoHosts, tmp_path: Path) -> None:
    want = linears(tmp_path)
    assert finished(hosts, begun(hosts, 2, tmp_path, "run", "build", "--input", "in.npz", "-o", "out.npz")) == (0, "")
    with np.load(tmp_path / "out.npz") as have:
        same(have["y"], want["y"], "y", 1e-5, 1e-5)


def test_hosts_that_lose_each_other_for_a_while_wait_and_continue(hosts: TwoHosts, tmp_path: Path) -> None:
    want = linears(tmp_path)
    words = ("run", "build", "--input", "in.npz", "-o", "out.npz", "--repeat", "3000", "--stall", "1", "--quiet")
    process = begun(hosts, 2, tmp_path, *words)
    until(lambda: process.poll() is not None or _stepping(hosts))
    assert process.stderr is not None
    with hosts.cut_off():
        report = next((line for line in process.stderr if "has waited" in line), "")
    assert re.match(r"partc: rank \d has waited \d+ s: ", report), report
    assert finished(hosts, process)[0] == 0
    with np.load(tmp_path / "out.npz") as have:
        same(have["y"], want["y"], "y", 1e-5, 1e-5)


def test_a_rank_killed_on_the_other_host_ends_the_job(hosts: TwoHosts, tmp_path: Path) -> None:
    linears(tmp_path)
    process = begun(hosts, 2, tmp_path, "run", "build", "--input", "in.npz", "--repeat", str(10**9))
    until(lambda: process.poll() is not None or (len(ranks_on(hosts, 1)) == 2 and _stepping(hosts)))
    assert process.poll() is None, process.communicate()
    ranks = ranks_on(hosts, 1)
    subprocess.run([*hosts.inside(1), "kill", f"-{signal.SIGKILL.value}", str(ranks[0])], check=True)
    code, err = finished(hosts, process)
    assert code == 1
    assert "has waited" not in err  # no rank counts as stalled before
    # Which is told depends on what comes first: the word of Open MPI's daemon there, or the end of a connection.
    daemon = "was killed by signal 9 (SIGKILL) on another host"
    peers = ("a rank on host second ended with no message", "a rank on another host ended with no message")
    assert [text in err for text in (daemon, *peers)].count(True) == 1, err
    assert "Traceback" not in err
    assert ranks_on(hosts, 0) == ranks_on(hosts, 1) == []


@pytest.mark.parametrize("lacks", [Path(partc.cli.__path__[0]), Path(sys.executable).parent], ids=["partc", "Python"])
def test_a_host_without_partc_is_named_with_the_remedy(hosts: TwoHosts, lacks: Path, tmp_path: Path) -> None:
    linears(tmp_path)
    subprocess.run([*hosts.inside(1), "mount", "-t", "tmpfs", "tmpfs", str(lacks)], check=True)
    try:
        code, err = finished(hosts, begun(hosts, 2, tmp_path, "run", "build", "--input", "in.npz"))
    finally:
        subprocess.run([*hosts.inside(1), "umount", str(lacks)], check=True)
    assert code == 1
    assert f"help: each host needs Python and partc at the path of this one, {sys.executable}" in err


def test_jobs_of_processes_that_end_at_once_end(hosts: TwoHosts) -> None:
    """Without the launcher's environment about one in ten of these jobs does not end."""
    launcher = find_launcher(2)
    environment = launch_environment(launcher) | {"TMPDIR": str(hosts.temporary)}
    for _ in range(20):
        told = subprocess.run(
            hosts.over_both([launcher.path, "-n", "4", "hostname"], 4),
            env=environment,
            stdout=subprocess.PIPE,
            timeout=LONG,
        )
        assert sorted(told.stdout.split()) == [b"first", b"first", b"second", b"second"]


def _stepping(hosts: TwoHosts) -> bool:
    from partc.runtime.job.status_board import read_board

    return any(
        min(step for step, _ in read_board(board)[:2]) > 2 for board in hosts.temporary.glob("partc-run-*/board")
    )
