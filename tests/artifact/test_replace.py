"""Files and folders take the place of old ones whole or not at all, and nothing is touched that partc did not write."""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from partc.compiler.errors import CompileError
from partc.compiler.pipeline import compile_model
from partc.runtime.artifact.replace_folder import replacing_folder
from partc.runtime.errors import UsageError
from partc.runtime.files import replace
from partc.runtime.files.replace import (
    WriteError,
    hidden_files,
    hidden_name,
    locked_folder,
    remove_abandoned,
    replacing,
    replacing_together,
    write_text,
)
from partc.runtime.files.writers import new_file
from replaced_anywhere import artifact, tree
from rows import of_today

HERE = Path(__file__).parent


@contextmanager
def mask(bits: int) -> Iterator[None]:
    """A umask within."""
    before = os.umask(bits)
    try:
        yield
    finally:
        os.umask(before)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "y.txt"
    write_text(path, "old")
    with pytest.raises(TypeError), replacing(path) as out:
        out.writelines([b"half", None])  # type: ignore[list-item]
    assert tree(tmp_path) == {"new/y.txt": "old"}
    write_text(path, "new")
    assert tree(tmp_path) == {"new/y.txt": "new"}


def test_links_are_not_followed(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "y.txt"
    victim.write_text("precious")
    (tmp_path / ".y.txt.partial").symlink_to(victim)
    write_text(path, "new")
    assert (victim.read_text(), path.read_text()) == ("precious", "new")
    path.unlink()
    path.symlink_to(victim)
    with pytest.raises(UsageError, match=r"y.txt: is a link to .*victim, and is not replaced"):
        write_text(path, "new")
    with pytest.raises(UsageError, match="is a link"), replacing_together(path):
        pass
    assert victim.read_text() == "precious"
    assert hidden_files(path) == []


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    for name, make, what in (("f", os.mkfifo, r"a pipe \(FIFO\)"), ("d", os.mkdir, "a folder")):
        make(tmp_path / name)
        with pytest.raises(UsageError, match=f"{name}: is {what}, and is not replaced"):
            write_text(tmp_path / name, "text")
    with pytest.raises(UsageError, match="/dev/null: is a device"):
        write_text(Path("/dev/null"), "text")


def test_the_mask_of_new_files_is_kept(tmp_path: Path) -> None:
    with mask(0o027):
        write_text(tmp_path / "y.txt", "")
        with replacing_folder(tmp_path / "build") as folder:
            artifact(folder, "new")
        with replacing_together(tmp_path / "m.onnx") as folder:
            (folder / "m.onnx").write_text("")
    modes = {path.relative_to(tmp_path).as_posix(): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert {modes[name] for name in ("y.txt", "m.onnx", "build/manifest.json")} == {0o640}
    assert {modes[name] for name in ("build", "build/weights")} == {0o750}


def test_a_full_disk_and_a_folder_that_is_none_are_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "y.txt"
    write_text(path, "old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    text = (
        r"y.txt: cannot be written: No space left on device; what was there is unchanged\n  help: make room on the disk"
    )
    with pytest.raises(WriteError, match=text):
        write_text(path, "new")
    assert tree(tmp_path) == {"y.txt": "old"}
    with pytest.raises(WriteError, match=r"z: cannot be written: (Not a directory|File exists)"):
        write_text(path / "z", "new")
    with pytest.raises(FileNotFoundError), replacing(path):
        (tmp_path / "read").read_bytes()  # what is wrong with another file is not told as this one's


def test_what_dead_writers_left_is_removed_and_what_others_write_is_not(tmp_path: Path) -> None:
    path, other = tmp_path / "y.txt", tmp_path / "x.y.txt"
    for _ in range(2):
        hidden_name(path).write_text("half")
    with locked_folder(dead := hidden_name(path)):
        (dead / "file").write_text("half")
    (others := hidden_name(other)).write_text("half")
    with (alive := hidden_name(path)).open("wb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        write_text(path, "new")
        assert hidden_files(path) == [alive]
        assert hidden_files(other) == [others]
    write_text(path, "newer")
    assert hidden_files(path) == []


def test_a_writer_that_is_not_locked_yet_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer of the path looks for dead writers between the creation of a file or folder and its lock."""
    path, created = tmp_path / "y.txt", list[Path]()

    def removed_once(create: Callable[[Path], Any]) -> Callable[[Path], Any]:
        def creating(place: Path) -> Any:
            result = create(place)
            created.append(place)
            if created.count(place) == 1:
                remove_abandoned(path)
                assert not place.exists()
            return result

        return creating

    monkeypatch.setattr(replace, "new_file", removed_once(new_file))
    write_text(path, "new")
    assert tree(tmp_path) == {"y.txt": "new"}
    monkeypatch.setattr(os, "mkdir", removed_once(os.mkdir))
    with locked_folder(hidden := hidden_name(path)):
        remove_abandoned(path)
        assert hidden.is_dir()
    assert len(created) == 4


def test_files_that_belong_together_are_replaced_together(tmp_path: Path) -> None:
    for text in ("old", "new"):
        with replacing_together(tmp_path / "m.onnx") as folder:
            (folder / "m.onnx").write_text(text)
            (folder / "m.onnx.data").write_text(text)
    assert tree(tmp_path) == {"m.onnx": "new", "m.onnx.data": "new"}


def test_an_artifact_an_empty_folder_and_nothing_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "none", "deep/none"):
        for text in ("old", "new"):
            with replacing_folder(tmp_path / name) as folder:
                artifact(folder, text)
        assert set(tree(tmp_path / name).values()) > {"new"}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("app.js", "exists and is not an artifact of partc, so it is not replaced; it has 'app.js', 'manifest.json'"),
        ("notes.txt", "is not replaced: it has what partc did not write there, 'notes.txt'"),
        ("runs/step_00000010/checkpoint.json", "did not write there, 'runs/'"),
        ("weights/mine", "did not write there, 'weights/mine'"),
    ],
)
def test_what_is_the_user_s_is_refused_and_stays(tmp_path: Path, file: str, named: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    if file == "app.js":
        (out / "manifest.json").write_text('{"name": "My app", "files": {}}')
    else:
        artifact(out, "old")
    (out / file).parent.mkdir(parents=True, exist_ok=True)
    (out / file).write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(CompileError) as caught:  # before the model is looked for
        compile_model(tmp_path / "none.onnx", None, out)
    assert named in str(caught.value)
    with pytest.raises(UsageError, match="not replaced"), replacing_folder(out):
        pass
    assert tree(tmp_path) == before


def test_links_and_what_is_no_folder_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, link, inside = tmp_path / "real", tmp_path / "link", tmp_path / "inside"
    for folder in (real, inside):
        folder.mkdir()
        artifact(folder, "old")
    link.symlink_to(real)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "victim").write_text("mine")
    (inside / "rank_0000.onnx").unlink()
    (inside / "rank_0000.onnx").symlink_to(tmp_path / "victim")
    (inside / "weights").rename(tmp_path / "moved")
    (inside / "weights").symlink_to(tmp_path / "moved")
    monkeypatch.chdir(real)
    before = tree(tmp_path)
    for out, fact in (
        (link, f"is a link to {real}, and links are not replaced\n  help: give -o {real} itself"),
        (inside, "did not write there, 'rank_0000.onnx', 'weights/'"),
        (tmp_path / "file", "is a file, and is not replaced"),
        (Path(), "is the current folder"),
        (Path("/dev"), "is a mounted file system"),
    ):
        with pytest.raises(UsageError) as caught, replacing_folder(out):
            pass
        assert fact in str(caught.value)
    assert tree(tmp_path) == before


def test_what_comes_while_it_is_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with replacing_folder(out) as folder:
        artifact(folder, "old")
    with pytest.raises(UsageError, match=r"'notes.txt'"), replacing_folder(out) as folder:
        artifact(folder, "new", late=out / "notes.txt")
    assert tree(out)["rank_0000.onnx"] == "old"
    monkeypatch.setattr("partc.runtime.artifact.replace_folder.refuse_obstacle", lambda out: None)
    law = "is written; what came into the old folder meanwhile lies in"
    with pytest.raises(WriteError, match=law) as caught, replacing_folder(out) as folder:
        artifact(folder, "new")
    assert tree(out)["rank_0000.onnx"] == "new"
    left = Path(str(caught.value).rpartition(" ")[2])
    assert tree(left)["notes.txt"] == "mine"


@pytest.mark.parametrize(("way", "what"), of_today([("exchange", "full"), ("two renames", "kill")], 1))
def test_a_writer_that_ends_anywhere_leaves_the_old_or_the_new(tmp_path: Path, way: str, what: str) -> None:
    command = [sys.executable, HERE / "replaced_anywhere.py", tmp_path, way, what]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    moments, old, new, none = map(int, told.stdout.split())
    assert moments > 20
    assert old > 10
    assert new > 1
    assert (none > 0) == (way == "two renames" and what == "kill")
