"""Checkpoints: written by some ranks and read by others, the same bits; what each rank writes; what does not fit."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from checkpoint_case import META, flip, held, layout, load_all, record, rewrite, save_all, tensors
from partc.runtime.artifact.tensors.boxes import Region, difference, intersection, overlap, remaining
from partc.runtime.artifact.tensors.dtypes import Array
from partc.runtime.checkpoint.checkpoint import Checkpoint
from partc.runtime.checkpoint.compatibility import check_compatible, is_weights_file, matching_weights
from partc.runtime.checkpoint.export import export_tensors
from partc.runtime.checkpoint.index import INDEX, read_index
from partc.runtime.checkpoint.newest import latest
from partc.runtime.checkpoint.ownership import owners
from partc.runtime.checkpoint.verification import _CHUNK, _THREADS, Verification
from partc.runtime.checkpoint.verify import verify
from partc.runtime.errors import CheckpointError, DamagedError, UsageError
from partc.runtime.training.finite import is_finite
from safetensors.numpy import load_file, save_file


def same(one: Array, other: Array) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def written(tmp_path: Path, ranks: int = 6, step: int = 120) -> Checkpoint:
    paths = save_all(tmp_path / "checkpoints", step, ranks, tensors())
    assert paths == [tmp_path / "checkpoints" / f"step_{step:08d}"] * ranks
    return Checkpoint.open(paths[0])  # type: ignore[arg-type]


def test_eight_ranks_to_six_to_one_to_eight_keep_every_bit(tmp_path: Path) -> None:
    whole = tensors()
    now = whole
    for step, ranks in enumerate((8, 6, 1, 8)):
        assert set(save_all(tmp_path, step, ranks, now, keep=2)) == {tmp_path / f"step_{step:08d}"}
        checkpoint = Checkpoint.open(tmp_path)
        assert (checkpoint.index.step, checkpoint.index.ranks, checkpoint.index.meta) == (step, ranks, META)
        assert verify(checkpoint.path) == []
        for to in (8, 6, 1):
            records = layout(whole, to)
            check_compatible(checkpoint, records)
            for rank, own in enumerate(load_all(checkpoint, records, to)):
                for (one, wanted), found in zip(held(records, rank, whole), own, strict=True):
                    assert same(found, wanted), (one.value, rank)
        now = {name: checkpoint.read(name) for name in whole}
        assert all(same(now[name], whole[name]) for name in whole)


def test_each_element_is_written_once_by_the_lowest_rank_that_holds_it(tmp_path: Path) -> None:
    whole = tensors()
    checkpoint = written(tmp_path, 8)
    total = sum(len(file.read_bytes()) for file in checkpoint.path.glob("*.safetensors"))
    assert total < sum(array.nbytes for array in whole.values()) + 8 * 2048
    assert [piece.file for piece in checkpoint.index.tensors["embed.weight"].pieces] == ["rank_0000.safetensors"]
    pieces = checkpoint.index.tensors["fc.weight"].pieces
    assert [(piece.file[5:9], piece.key) for piece in pieces][:2] == [
        ("0000", "fc.weight[6:12, 18:24]"),
        ("0001", "fc.weight[6:12, 12:18]"),
    ]
    assert checkpoint.index.tensors["fc.bias"].pieces[0].file == "rank_0007.safetensors"
    assert checkpoint.index.tensors["nothing"].pieces == ()


def test_a_layout_adds_what_others_leave_out() -> None:
    array = np.empty((6, 4), np.float32)
    rows = record("w", array, [1, 2], (2, 1), value="rows")
    columns = record("w", array, [3, 0], (1, 2), value="columns")
    found = [(one.rank, one.value, str(one.region)) for one in owners([rows, columns])["w"]]
    assert found == [(0, "columns", "[0:6, 2:4]"), (1, "rows", "[0:3, 0:2]"), (2, "rows", "[3:6, 0:2]")]


def test_owners_names_all_that_is_wrong() -> None:
    array = np.empty((6, 4), np.float32)
    half = record("half", array, [0], (2, 1))
    small = record("small", np.empty(3, np.complex64), [0])
    uneven = record("uneven", array, [0, 1, 2, 3], (1, 4))
    twins = [record("twin", array, [0]), record("twin", array.T, [1], value="turned")]
    with pytest.raises(ValueError, match="'half': the ranks hold 12 of its 24") as caught:
        owners([half, small, uneven.model_copy(update={"shape": [6, 5]}), *twins])
    text = str(caught.value)
    assert "'small' is tensor(complex64), which the safetensors format lacks" in text
    assert "'uneven': axis 1 of 5 has no element edges at 0/4 and 1/4" in text
    assert "'twin' is parameter tensor(float) [6, 4] as 'twin' and parameter tensor(float) [4, 6] as 'turned'" in text


def test_boxes_without_others_are_disjoint_and_whole() -> None:
    random = np.random.default_rng(3)
    for _ in range(200):
        begin = random.integers(0, 5, (4, 3))
        boxes = [
            Region(tuple(low), tuple(low + size))
            for low, size in zip(begin, random.integers(1, 4, (4, 3)), strict=True)
        ]
        count = np.zeros((9, 9, 9), int)
        everything = Region((0, 0, 0), (9, 9, 9))
        for part in [*remaining([boxes[0]], boxes[1:]), *remaining([everything], boxes)]:
            count[part.inside(everything)] += 1
        wanted = np.ones_like(count)
        for box in boxes[1:]:
            wanted[box.inside(everything)] = 0
        assert (count == wanted).all()
    assert difference(Region((), ()), Region((), ())) == []


def test_any_box_is_read_alone(tmp_path: Path) -> None:
    checkpoint, whole = written(tmp_path), tensors()
    assert same(checkpoint.read("fc.weight", (5, 7), (7, 18)), whole["fc.weight"][5:7, 7:18])
    assert same(checkpoint.read("fc.cube", (1, 7, 0), (5, 17, 2)), whole["fc.cube"][1:5, 7:17, 0:2])
    assert checkpoint.read("fc.bias", (4,), (4,)).shape == (0,)
    with pytest.raises(ValueError, match=r"'fc.bias' of \[13\] has no elements from \[4\] to \[14\]"):
        checkpoint.read("fc.bias", (4,), (14,))
    with pytest.raises(CheckpointError, match=r"has no tensor 'fc.bais'"):
        checkpoint.read("fc.bais")


def test_neither_save_nor_read_nor_export_holds_more_than_one_tensor(tmp_path: Path) -> None:
    whole = {f"w{k}": np.full((64, 1 << 15), k, np.float32) for k in range(4)}
    records = [record(name, array, range(2), (2, 1)) for name, array in whole.items()]
    one = whole["w0"].nbytes
    ready = [held(records, rank, whole) for rank in range(2)]
    tracemalloc.start()
    try:
        from checkpoint_case import Ranks
        from partc.runtime.checkpoint.save import save

        Ranks(2).run(lambda rank, share: save(tmp_path, 1, rank, ready[rank], records, {}, share))
        assert tracemalloc.get_traced_memory()[1] < one
        checkpoint = Checkpoint.open(tmp_path)
        tracemalloc.reset_peak()
        checkpoint.read("w3", (31, 5), (33, 9))
        assert tracemalloc.get_traced_memory()[1] < one // 2
        tracemalloc.reset_peak()
        export_tensors(checkpoint, tmp_path / "all.safetensors")
        assert one < tracemalloc.get_traced_memory()[1] < 1.5 * one + _THREADS * _CHUNK
    finally:
        tracemalloc.stop()
    assert (load_file(tmp_path / "all.safetensors")["w3"] == 3).all()


def test_a_tensor_is_read_written_and_looked_at_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partc.runtime.checkpoint.checkpoint._AT_ONCE", 200)
    for module in ("artifact.tensors.safetensors_stream", "checkpoint.verification"):
        monkeypatch.setattr(f"partc.runtime.{module}.PART", 96)
    monkeypatch.setattr("partc.runtime.training.finite._AT_ONCE", 5)
    whole = tensors()
    checkpoint = written(tmp_path, 8)
    for rank, own in enumerate(load_all(checkpoint, records := layout(whole, 6), 6)):
        assert all(same(found, wanted) for (_, wanted), found in zip(held(records, rank, whole), own, strict=True))
    export_tensors(checkpoint, tmp_path / "all.safetensors")
    exported = load_file(tmp_path / "all.safetensors")
    assert all(same(exported[name], whole[name]) for name in exported if exported[name].dtype.kind != "V")
    assert len(list(checkpoint.blocks("embed.weight"))) == 4
    assert all(map(is_finite, whole.values()))
    whole["fc.weight"][3, 1] = np.nan
    assert not is_finite(whole["fc.weight"])


def test_files_are_those_of_the_library(tmp_path: Path) -> None:
    checkpoint, whole = written(tmp_path, 6), tensors()
    for name, tensor in checkpoint.index.tensors.items():
        for piece in tensor.pieces:
            box = tuple(slice(*edge) for edge in zip(piece.begin, piece.end, strict=True))
            assert same(load_file(checkpoint.path / piece.file)[piece.key], whole[name][box])
    out = tmp_path / "out" / "w.safetensors"
    assert export_tensors(checkpoint, out) == sorted(name for name in whole if not name.endswith("exp_avg"))
    assert all(same(array, whole[name]) for name, array in load_file(out).items())
    export_tensors(checkpoint, out, ("optimizer",))
    assert list(load_file(out)) == ["embed.weight.exp_avg"]
    with pytest.raises(CheckpointError, match="is inside the checkpoint itself"):
        export_tensors(checkpoint, checkpoint.path / "w.safetensors")


def test_the_index_is_read_without_trust(tmp_path: Path) -> None:
    folder = written(tmp_path).path
    text = (folder / INDEX).read_text()

    def refusal(old: str, new: str) -> str:
        (folder / INDEX).write_text(text)
        rewrite(folder, old, new)
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.open(folder)
        return str(caught.value)

    assert "is not JSON" in refusal("{", "[")
    assert "is of format 9, this partc reads format 2" in refusal('"format": 2', '"format": 9')
    assert "\\x1b[31mfc.bias' is of type 'float61'" in refusal(
        '"fc.bias": {"dtype": "float16"', '"\\u001b[31mfc.bias": {"dtype": "float61"'
    )
    assert "the path '../rank_0000.safetensors' leaves the folder" in refusal('"rank_0000.', '"../rank_0000.')
    assert "'fc.bias' has a shard in rank_0009.safetensors, which is not listed" in refusal(
        '"pieces": [{"file": "rank_0005.safetensors", "key": "fc.bias"',
        '"pieces": [{"file": "rank_0009.safetensors", "key": "fc.bias"',
    )
    assert "'fc.bias' has 14 elements, and its shards 13" in refusal('"shape": [13]', '"shape": [14]')
    assert "'fc.bias' of [12] has a shard [0] to [13]" in refusal('"shape": [13]', '"shape": [12]')
    assert "is of type 'text'" in refusal('"float16"', '"text"')
    assert "steps: Extra inputs" in refusal('"step": 120', '"step": 120, "steps": 1')
    assert "'fc.bias' has a shape of 1 dims" in refusal('"shape": [13]', f'"shape": [{10**400}]')
    assert "the folder has the name of another step: it holds step 121" in refusal('"step": 120', '"step": 121')
    (folder / INDEX).write_text(text.replace('"step": 120', '"step": 121'))
    with pytest.raises(DamagedError, match="was changed: its last line is not the SHA-256 of the lines before it"):
        Checkpoint.open(folder)
    (folder / INDEX).unlink()
    with pytest.raises(DamagedError, match=r"checkpoint\.json: is missing"):
        Checkpoint.open(folder)
    with pytest.raises(UsageError, match="there is no such folder"):
        Checkpoint.open(tmp_path / "nowhere")


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path).path
    os.rename(folder / "rank_0000.safetensors", tmp_path / "away")
    (folder / "rank_0000.safetensors").symlink_to(tmp_path / "away")
    with pytest.raises(CheckpointError, match="points outside the folder"):
        Checkpoint.open(folder)


def proven(checkpoint: Checkpoint, rank: int = 0, ranks: int = 1) -> list[str]:
    """What one of some ranks finds changed."""
    with Verification(checkpoint, rank, ranks) as proof:
        return proof.problems()


def test_damage_is_found(tmp_path: Path) -> None:
    checkpoint = written(tmp_path)
    file = checkpoint.path / "rank_0001.safetensors"
    sound = file.read_bytes()
    file.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    found = [problem for rank in range(3) for problem in proven(checkpoint, rank, 3)]
    assert found == proven(checkpoint)
    (thorough,) = verify(checkpoint.path)
    assert (
        f"'norm.mask' [1:2, 0:11] was changed: the SHA-256 of bytes {len(sound) - 11} to {len(sound)} is " in thorough
    )
    (problem,) = found
    assert (
        f"{file}: 'norm.mask' [1:2, 0:11] was changed: the CRC-32 of bytes {len(sound) - 11} to {len(sound)}" in problem
    )
    with pytest.raises(DamagedError, match=r"'norm\.mask'"):
        export_tensors(checkpoint, tmp_path / "w.safetensors")
    assert not (tmp_path / "w.safetensors").exists()
    file.write_bytes(sound.replace(b"{", b"[", 1))
    assert "its header is not JSON" in verify(checkpoint.path)[0]
    file.write_bytes(sound)
    flip(file, sound.index(b'":"') + 5, 0)
    assert "its header is not the one that was written" in proven(Checkpoint.at(checkpoint.path))[0]
    file.write_bytes(sound[:-1])
    assert latest(tmp_path / "checkpoints") is None
    with pytest.raises(CheckpointError, match=f"has {len(sound) - 1} bytes, the index says {len(sound)}"):
        Checkpoint.open(checkpoint.path)
    with pytest.raises(CheckpointError, match="none of its checkpoints is intact"):
        Checkpoint.open(tmp_path / "checkpoints")
    file.unlink()
    (checkpoint.path / "stranger").touch()
    assert verify(checkpoint.path) == [f"{file}: is missing", f"{checkpoint.path / 'stranger'}: is not in the index"]


def test_the_index_has_every_element_once(tmp_path: Path) -> None:
    folder = written(tmp_path).path
    rewrite(folder, '"begin": [6, 16], "end": [12, 24]', '"begin": [6, 8], "end": [12, 16]')
    (problem,) = verify(folder)
    assert problem == f"{folder / INDEX}: tensor 'fc.weight' has the elements [6:12, 8:16] in two shards"
    with pytest.raises(DamagedError, match="in two shards"):
        Checkpoint.open(folder)
    rewrite(folder, '"begin": [6, 8], "end": [12, 16]', '"begin": [6, 16], "end": [12, 24]')
    rewrite(folder, '"key": "fc.weight[6:12, 16:24]"', '"key": "fc.bias"')
    found = "\n".join(verify(folder))
    assert "'fc.bias' of 'fc.weight': is not there" in found
    assert "'fc.weight[6:12, 16:24]' is not in the index" in found
    with pytest.raises(DamagedError, match=r"'fc.bias' of 'fc.weight' is not there; the index says bfloat16 \[6, 8\]"):
        Checkpoint.open(folder).read("fc.weight", (7, 17), (9, 20))


def test_overlaps_of_many_boxes() -> None:
    random = np.random.default_rng(5)
    for _ in range(100):
        begin = random.integers(0, 9, (7, 2))
        boxes = [
            Region(tuple(low), tuple(low + size))
            for low, size in zip(begin, random.integers(1, 4, (7, 2)), strict=True)
        ]
        pairs = [intersection(one, other) for at, one in enumerate(boxes) for other in boxes[:at]]
        assert (overlap(boxes) is None) == (not any(pairs))
    assert overlap([Region((), ()), Region((), ())]) == Region((), ())


def test_all_that_does_not_fit_is_one_error(tmp_path: Path) -> None:
    checkpoint, whole = written(tmp_path), tensors()
    other = {name.replace("fc.weight", "fc.wieght"): array for name, array in whole.items()}
    other["fc.bias"] = np.zeros(15, np.float16)
    other["norm.count"] = np.zeros((), np.int32)
    records = [record(name, array, [0]) for name, array in other.items() if name != "embed.weight.exp_avg"]
    slots = ("exp_avg", "exp_avg_sq")
    adam = [record(f"fc.bias.{slot}", other["fc.bias"], [0], kind="optimizer", parameter="fc.bias") for slot in slots]
    with pytest.raises(CheckpointError) as caught:
        check_compatible(checkpoint, records + adam, "adamw")
    where = checkpoint.path
    assert str(caught.value).splitlines() == [
        f"{where}: has no 'fc.wieght' bfloat16 [12, 24]; the nearest is 'fc.weight'",
        f"{where}: has 'fc.weight' bfloat16 [12, 24], which the program lacks; the nearest is 'fc.wieght'",
        f"{where}: 'fc.bias' is float16 [13]; the program's is float16 [15]",
        f"{where}: 'norm.count' is int64 []; the program's is int32 []",
        f"{where}: was written with the optimizer 'adam', which keeps exp_avg; "
        "the program has the optimizer 'adamw', which keeps exp_avg, exp_avg_sq",
        f"  help: start from its weights alone with --init {where}, or compile with the same optimizer",
    ]
    with pytest.raises(
        CheckpointError, match=r"the program has the optimizers adamw, sgd, which keep exp_avg, exp_avg_sq"
    ):
        check_compatible(checkpoint, records + adam, "adamw, sgd")
    with pytest.raises(
        CheckpointError, match=r"'adam', which keeps exp_avg; the program has an optimizer that keeps nothing"
    ):
        check_compatible(checkpoint, [record(name, whole[name], [0]) for name in whole if not name.endswith("exp_avg")])
    frozen = [one for one in layout(whole, 1) if one.kind != "optimizer"]
    elsewhere = record("fc.bias.exp_avg", whole["fc.bias"], [0], kind="optimizer", parameter="fc.bias")
    with pytest.raises(CheckpointError) as caught:
        check_compatible(checkpoint, [*frozen, elsewhere])
    assert str(caught.value).splitlines()[:2] == [
        f"{where}: has no 'fc.bias.exp_avg' float16 [13]",
        f"{where}: has 'embed.weight.exp_avg' float32 [24, 7], which the program lacks",
    ]


def test_initial_weights_come_from_anywhere(tmp_path: Path) -> None:
    checkpoint, whole = written(tmp_path), tensors()
    records = layout(whole, 6)
    names = {name for name in whole if not name.endswith("exp_avg")}
    assert matching_weights(Checkpoint.open(tmp_path / "checkpoints"), records) == names
    file = tmp_path / "any.safetensors"
    save_file({name: whole[name] for name in ("fc.bias", "fc.weight")}, file)
    source = Checkpoint.of_file(file)
    assert same(source.read("fc.weight", (1, 2), (7, 9)), whole["fc.weight"][1:7, 2:9])
    assert matching_weights(source, records, strict=False) == {"fc.bias", "fc.weight"}
    with pytest.raises(CheckpointError, match=r"any.safetensors: has no 'embed.weight' float32") as caught:
        matching_weights(source, records)
    assert "norm.count" not in str(caught.value), "statistics may be absent"
    save_file({f"model.{name}": array for name, array in whole.items()}, file)
    with pytest.raises(CheckpointError, match=r"has no 'fc.bias' float16 .*; the nearest is 'model.fc.bias'"):
        matching_weights(Checkpoint.of_file(file), records)
    with pytest.raises(CheckpointError, match="none of its 8 tensors has the name of one of the program's"):
        matching_weights(Checkpoint.of_file(file), records, strict=False)
    save_file({"fc.bias": np.zeros(12, np.float16)}, file)
    with pytest.raises(CheckpointError, match=r"'fc.bias' is float16 \[12\]; the program's is float16 \[13\]"):
        matching_weights(Checkpoint.of_file(file), records, strict=False)
    file.write_bytes(b"nonsense, and more of it")
    with pytest.raises(CheckpointError, match="is not a safetensors file:  its header would end at byte"):
        Checkpoint.of_file(file)
    with pytest.raises(UsageError, match="there is no such file"):
        is_weights_file(tmp_path / "none.safetensors")
    assert read_index(checkpoint.path).step == 120


def test_a_rank_loads_only_what_has_its_shape(tmp_path: Path) -> None:
    checkpoint, whole = written(tmp_path), tensors()
    one = layout(whole, 6)[3]
    with pytest.raises(CheckpointError, match=r"'fc.weight' is bfloat16 \[12, 24\]; rank 2 has float32 \[6, 8\]"):
        checkpoint.load_into(one, 2, np.zeros((6, 8), np.float32))
