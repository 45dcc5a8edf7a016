"""What partc removes and renames: in one module alone, what it made alone, and never a link."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from partc.runtime.files.replace import make_folder, move_folder, remove, remove_file, remove_inside, take_place

ROOT = Path(__file__).parents[2]
HOME = "runtime/files/replace.py"
ALONE = {
    "cli/launch/guard.py": "a process of its own, without partc: it removes the two folders of a job that partc told it of",
}
"""Where else something is removed, and why."""
OF_SYSTEM = {"unlink", "remove", "removedirs", "rmdir", "rename", "renames", "replace", "rmtree", "move"}
"""Names of os, posix and shutil."""
OF_PATHS = {"unlink": (0, 1), "rmdir": (0, 0), "rename": (1, 1), "replace": (1, 1), "rmtree": (1, 9)}
"""Methods of paths, and how many operands they have: `replace` of texts has two, of dataclasses named ones."""
TEXTS = {"unlink", "rmtree", "rmdir", "removedirs", "renameat2", "unlinkat", "rm", "mv"}
"""Names by which they are found otherwise: `getattr(os, "unlink")`, `["rm", path]`."""
MODULES = {"os", "posix", "shutil"}
MAY_REMOVE = re.compile(rf"\b({'|'.join(MODULES)})\b|\.({'|'.join(OF_PATHS)})\(|[\"']({'|'.join(TEXTS)})[\"']")
"""What a source has that removes something; others need not be parsed."""


def removals(source: str) -> list[int]:
    """The lines where files are removed or renamed."""
    if not MAY_REMOVE.search(source):
        return []
    nodes = [*ast.walk(ast.parse(source))]
    modules, found = set(MODULES), []
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {one.asname for one in node.names if one.name in MODULES and one.asname}
        if isinstance(node, ast.ImportFrom) and node.module in MODULES and OF_SYSTEM & {one.name for one in node.names}:
            found.append(node.lineno)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in TEXTS:
            found.append(node.lineno)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            found += [node.lineno] if node.attr in OF_SYSTEM else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in OF_PATHS:
            least, most = OF_PATHS[node.func.attr]
            if least <= len(node.args) <= most and all(one.arg == "missing_ok" for one in node.keywords):
                found.append(node.lineno)
    return sorted(set(found))


def test_files_are_removed_and_renamed_in_one_module() -> None:
    files = [path for part in ("compiler", "runtime", "cli") for path in sorted((ROOT / part).rglob("*.py"))]
    found = {path.relative_to(ROOT).as_posix(): removals(path.read_text()) for path in files}
    lines = {name: where for name, where in found.items() if where}
    assert lines.keys() == {HOME, *ALONE}, f"remove and rename by {HOME}: {lines}"
    assert len(lines[HOME]) >= 6


@pytest.mark.parametrize(
    "line",
    [
        "os.unlink(path)",
        "os.remove(path)",
        "os.replace(one, other)",
        "path.unlink(missing_ok=True)",
        "(folder / name).unlink()",
        "path.rename(other)",
        "path.replace(other)",
        "folder.rmdir()",
        "shutil.rmtree(folder, ignore_errors=True)",
        "atexit.register(os.remove, path)",
        "from os import unlink",
        "from shutil import rmtree as away",
        "import os as system\nsystem.rename(one, other)",
        'getattr(os, "unlink")(path)',
        'subprocess.run(["rm", "-r", folder])',
        "shutil.move(one, other)",
    ],
)
def test_a_planted_removal_is_found(line: str) -> None:
    assert removals(line) == [len(line.splitlines())]


@pytest.mark.parametrize(
    "line", ["text.replace('a', 'b')", "dataclasses.replace(job, steps=3)", "names.remove(one)", "comm.rename(a, b, c)"]
)
def test_what_removes_no_file_is_none(line: str) -> None:
    assert removals(line) == []


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Path]:
    """A folder of the user's, with two files, which nothing may change."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("rank_0000.safetensors", "notes.txt"):
        (folder / name).write_text(name)
    yield folder
    assert {one.name: one.read_text() for one in folder.iterdir()} == {
        name: name for name in ("rank_0000.safetensors", "notes.txt")
    }


def test_nothing_behind_a_link_is_removed(tmp_path: Path, mine: Path) -> None:
    link = tmp_path / ".step_00000003.saving"
    link.symlink_to(mine)
    remove_inside(link, lambda name: True, "notes.txt")
    remove(link)
    assert not remove_file(link)
    with pytest.raises(OSError, match="is a link to"):
        move_folder(link, tmp_path / "step_00000003")
    for exist_ok in (False, True):
        with pytest.raises(OSError, match="is a link to"):
            make_folder(link, exist_ok)
    assert link.is_symlink()


def test_a_link_inside_stays_and_so_does_what_it_leads_to(tmp_path: Path, mine: Path) -> None:
    folder = tmp_path / "made"
    make_folder(folder)
    (folder / "rank_0000.safetensors").symlink_to(mine / "rank_0000.safetensors")
    (folder / "inner").symlink_to(mine)
    (folder / "own").write_text("own")
    for last in ("", "rank_0000.safetensors"):
        remove_inside(folder, lambda name: True, last)
        assert sorted(path.name for path in folder.iterdir()) == ["inner", "rank_0000.safetensors"]
    remove(folder)  # what partc made for itself goes with the links in it
    assert not folder.exists()


def test_only_listed_files_are_removed_and_the_last_one_last(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    for name in ("manifest.json", "weights/a", "weights/mine", "ir/a"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    listed = ("manifest.json", "weights/a", "ir/a")
    remove_inside(folder, listed.__contains__, "manifest.json")
    assert sorted(path.name for path in folder.rglob("*")) == ["manifest.json", "mine", "weights"]
    (folder / "weights" / "mine").unlink()
    remove_inside(folder, listed.__contains__, "manifest.json")
    assert not folder.exists()


def test_what_another_process_removes_meanwhile_does_not_end_a_removal(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    names = [f"rank_{rank:04}.safetensors" for rank in range(4)]

    def both(name: str) -> bool:
        if name != names[2]:
            (folder / name).unlink()
        return True

    for last in ("", names[2]):
        folder.mkdir()
        for name in names:
            (folder / name).write_text(name)
        remove_inside(folder, both, last)
        assert not folder.exists()


def test_no_link_and_no_folder_is_replaced_by_a_file(tmp_path: Path, mine: Path) -> None:
    made, link = tmp_path / "made", tmp_path / "link"
    made.write_text("new")
    link.symlink_to(mine / "notes.txt")
    for place in (link, mine):
        with pytest.raises(OSError, match="is not replaced"):
            take_place(made, place)
    assert link.is_symlink()
    take_place(made, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "new"


def test_a_folder_behind_the_users_own_link_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    runs = tmp_path / "runs"
    runs.symlink_to(tmp_path / "disk")
    make_folder(runs / "scratch")
    (runs / "scratch" / "own").write_text("own")
    move_folder(runs / "scratch", runs / "step")
    remove_inside(runs / "step", lambda name: True)
    assert list((tmp_path / "disk").iterdir()) == []
