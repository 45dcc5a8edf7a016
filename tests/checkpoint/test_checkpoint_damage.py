"""Damaged checkpoints: refused by all ranks alike with file and tensor, with the newest whole one in their place or on offer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkpoint_case import flip
from partc.cli.main import invoke
from partc.runtime import Trainer, UsageError
from partc.runtime.checkpoint.newest import take_newest_intact
from partc.runtime.checkpoint.verification import Verification
from partc.runtime.errors import DamagedError
from trainer_case import PARALLEL, batch, built, on_all

HALF = (slice(0, 4), slice(4, 8))


def kept(trainer: Trainer) -> dict[str, bytes]:
    return {record.tensor: array.tobytes() for record, array in trainer.program.state.arrays()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of two ranks, and its checkpoints of three steps."""
    folder = tmp_path_factory.mktemp("trained")
    built(folder / "build", PARALLEL)

    def train(trainer: Trainer) -> None:
        for step in range(3):
            trainer.train(batch(step, HALF[trainer.rank]))
            trainer.save(folder / "runs")

    on_all(folder / "build", 2, train)
    return folder


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained / "runs", tmp_path / "runs")
    return tmp_path / "runs"


def test_a_flipped_bit_is_refused_by_all_ranks_alike_and_changes_nothing(trained: Path, runs: Path) -> None:
    file = runs / "step_00000003" / "rank_0000.safetensors"
    flip(file, file.stat().st_size - 3)

    def load(trainer: Trainer) -> str:
        before = kept(trainer)
        with pytest.raises(DamagedError) as caught:
            trainer.load(runs / "step_00000003", "--resume")
        assert kept(trainer) == before
        return str(caught.value)

    first, second = on_all(trained / "build", 2, load)
    assert first == second
    problem, help = first.splitlines()
    assert problem.startswith(f"{file}: 'w.momentum' was changed: the CRC-32 of bytes ")
    assert help == f"  help: the newest intact one is {runs / 'step_00000002'}: --resume {runs / 'step_00000002'}"


def test_of_a_folder_the_newest_whole_one_is_taken_and_said(
    trained: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(runs / "step_00000003" / "checkpoint.json", 40)
    wanted = on_all(trained / "build", 2, lambda trainer: (trainer.load(runs / "step_00000002"), kept(trainer)))
    capsys.readouterr()

    def load(trainer: Trainer) -> object:
        meta = trainer.load(runs)
        assert (trainer.step, trainer.source) == (2, runs / "step_00000002")
        return meta, kept(trainer)

    assert on_all(trained / "build", 2, load) == wanted
    assert capsys.readouterr().err == (
        f"warning: {runs / 'step_00000002'} is used, the newest intact one; damaged and skipped: "
        f"{runs / 'step_00000003' / 'checkpoint.json'}: was changed: its last line is not the SHA-256 of the lines before it\n"
    )
    for step in (1, 2):
        (runs / f"step_0000000{step}" / "rank_0000.safetensors").unlink()

    def refused(trainer: Trainer) -> str:
        with pytest.raises(DamagedError, match="none of its checkpoints is intact") as caught:
            trainer.load(runs)
        return str(caught.value)

    first, second = on_all(trained / "build", 2, refused)
    assert first == second
    assert first.count("rank_0000.safetensors: is missing") == 2
    with pytest.raises(UsageError, match="there is no such folder"):
        on_all(trained / "build", 2, lambda trainer: trainer.load(runs / "none"))


def test_one_that_a_training_removes_meanwhile_is_no_damage(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tried = []

    def act(place: Path) -> int:
        tried.append(place.name[-1])
        if len(tried) == 1:
            (runs / "step_00000002").rename(runs / "step_00000004")
            for step in (1, 3):
                shutil.rmtree(runs / f"step_0000000{step}")
            raise DamagedError(["it is gone"])
        return len(tried)

    assert take_newest_intact(runs, act) == (runs / "step_00000004", 2)
    assert tried == ["3", "4"]
    assert capsys.readouterr().err == ""


def test_hashing_begins_before_the_programs_are_loaded(
    trained: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proofs: list[object] = []
    begun: list[int] = []
    first = Verification.__init__
    monkeypatch.setattr(Verification, "__init__", lambda self, *words: (proofs.append(self), first(self, *words))[1])

    def load(trainer: Trainer) -> str:
        trainer.program.all_gather_text("")
        if trainer.rank == 0:
            begun.append(len(proofs))
            if damaged:
                flip(runs / "step_00000003" / "checkpoint.json", 70)
        trainer.program.all_gather_text("")
        trainer.load(runs)
        return str(trainer.source)

    for damaged in (False, True):
        found = on_all(trained / "build", 2, load, ahead=runs)
        assert found == [str(runs / f"step_0000000{2 if damaged else 3}")] * 2
        assert (begun.pop(), len(proofs)) == (2, 4 if damaged else 2), (
            "what was summed ahead is not again, unless it has changed"
        )
        proofs.clear()


def test_weights_to_begin_with_are_proven_too(trained: Path, runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    assert invoke(["checkpoint", "export", str(runs), "-o", str(file)]) == 0
    assert on_all(trained / "build", 2, lambda trainer: trainer.load_weights(file)) == [{"w", "v"}] * 2
    flip(file, file.stat().st_size - 3)
    flip(runs / "step_00000003" / "rank_0000.safetensors", 900)

    def begin(trainer: Trainer) -> tuple[str, frozenset[str]]:
        with pytest.raises(DamagedError) as caught:
            trainer.load_weights(file, option="--init")
        return str(caught.value), trainer.load_weights(runs)

    (text, names), other = on_all(trained / "build", 2, begin)
    assert (text, names) == other
    assert text.startswith(f"{file}: 'w' was changed: the CRC-32 of bytes ")


@pytest.mark.parametrize("words", [["export"], ["export", "--model", "net.onnx"]])
def test_an_export_of_a_damaged_one_writes_nothing(
    trained: Path, runs: Path, capsys: pytest.CaptureFixture[str], words: list[str], tmp_path: Path
) -> None:
    import onnx

    onnx.save(onnx.parser.parse_model(MODEL), tmp_path / "net.onnx")
    model = len(words) > 1
    options = ["--model", str(tmp_path / "net.onnx")] if model else []
    out = tmp_path / ("out.onnx" if model else "out.safetensors")
    flip(runs / "step_00000003" / "rank_0000.safetensors", -9)
    assert invoke(["checkpoint", "export", str(runs / "step_00000003"), *options, "-o", str(out)]) == 1
    said = capsys.readouterr().err
    assert "rank_0000.safetensors: 'w.momentum' was changed" in said
    assert (
        f"help: the newest intact one is {runs / 'step_00000002'}: partc checkpoint export {runs / 'step_00000002'}"
        in said
    )
    assert not list(tmp_path.glob("out*"))
    assert invoke(["checkpoint", "export", str(runs), *options, "-o", str(out)]) == 0
    captured = capsys.readouterr()
    assert "of step 2" in captured.out
    assert f"warning: {runs / 'step_00000002'} is used" in captured.err


MODEL = """
<ir_version: 10, opset_import: ["" : 21]>
m (float[B, 6] x) => (float[B, 4] y) <float[6, 8] w = {0}, float[8, 4] v = {0}> { a = MatMul (x, w)  b = Tanh (a)  y = MatMul (b, v) }
"""
MODEL = MODEL.replace("[6, 8] w = {0}", f"[6, 8] w = {{{','.join(['0'] * 48)}}}")
MODEL = MODEL.replace("[8, 4] v = {0}", f"[8, 4] v = {{{','.join(['0'] * 32)}}}")


def test_ranks_that_fail_otherwise_are_named() -> None:
    from checkpoint_case import Ranks
    from partc.runtime.errors import RankError
    from partc.runtime.training.checkpoints import together

    def act(rank: int, share: object) -> object:
        def fail() -> int:
            if rank == 1:
                raise ZeroDivisionError("by nothing")
            return 7

        return together(fail, share)  # type: ignore[arg-type]

    first, second, third = Ranks(3).run(act)
    assert isinstance(first, RankError)
    assert str(first) == str(third) == "rank 1 failed: ZeroDivisionError: by nothing"
    assert isinstance(second, ZeroDivisionError)


def test_nothing_is_allocated_for_a_file_that_lies(tmp_path: Path) -> None:
    from partc.runtime.checkpoint.checkpoint import Checkpoint
    from partc.runtime.checkpoint.index import CheckpointError

    def refusal(header: bytes, length: int | None = None, data: bytes = b"") -> str:
        file = tmp_path / "w.safetensors"
        file.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.of_file(file)
        return str(caught.value)

    def tensor(**said: object) -> bytes:
        import json

        return json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **said}}).encode()

    assert f"its header would end at byte {8 + 2**60}" in refusal(b"{}", 2**60)
    assert "is not JSON" in refusal(b"[" * 100_000)
    assert "holds no JSON object" in refusal(b"[]")
    assert "'w' lies at 4 to 8; the one before it ends at 0" in refusal(tensor(data_offsets=[4, 8]), data=bytes(8))
    assert "'w' lies at 0 to -4" in refusal(tensor(data_offsets=[0, -4]))
    assert "its tensors end at byte" in refusal(tensor(data_offsets=[0, 2**70]), data=bytes(4))
    assert "'w' has no data_offsets" in refusal(tensor(data_offsets=[False, 4]), data=bytes(4))
    assert "'w' has 4 bytes; its type and shape need" in refusal(tensor(shape=[2**50]), data=bytes(4))
    assert "no shape of at most 64 whole numbers" in refusal(tensor(shape=[2**70]), data=bytes(4))
    assert "no shape of at most 64 whole numbers" in refusal(tensor(shape=[1] * 65), data=bytes(4))
    assert "is of type ['F32']" in refusal(tensor(dtype=["F32"]), data=bytes(4))
    told = refusal(tensor().replace(b'"w"', b'"\\u001b[2J\\nx"').replace(b"F32", b"F9"), data=bytes(4))
    assert "\x1b" not in told
    assert len(told.splitlines()) == 2
