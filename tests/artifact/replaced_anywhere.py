"""Replaces an artifact again and again, ending the writer before each of its file operations: `FOLDER exchange|... kill|full`.

Says how many moments there were, and after how many of them the old artifact, the new one, or for a moment none was there.
"""

import errno
import json
import os
import sys
from pathlib import Path

from partc.runtime.artifact import replace_folder
from partc.runtime.artifact.replace_folder import replacing_folder
from partc.runtime.errors import UsageError
from partc.runtime.files.replace import WriteError, hidden_files

OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "exchange")
ENDED, DONE, NOT_REACHED = 9, 0, 7


def artifact(folder: Path, text: str, late: Path | None = None) -> None:
    """The files of an artifact that are `text`, with a second program, and the manifest, which is last; and a `late` file."""
    files = ["rank_0000.onnx", "weights/rank_0000.safetensors", "evaluate_rank_0000.onnx", "ir/evaluate/rank_0000.ir"]
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    records = {name: {"bytes": len(text), "sha256": text} for name in files}
    manifest = {"format": 2, "partc": "0", "ranks": 1, "files": records, "text": text}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    if late is not None:
        late.write_text("mine")


def tree(folder: Path) -> dict[str, str]:
    """Every file of a folder with its text; links with where they lead."""
    return {
        path.relative_to(folder).as_posix(): f"-> {path.readlink()}" if path.is_symlink() else path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


class Moment:
    """Counts file operations, and ends the writer at one of them."""

    def __init__(self) -> None:
        self.left, self.kill = -1, True

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.left < 0 or event not in OPERATIONS:
            return
        self.left -= 1
        if self.left < 0:
            if self.kill:
                os._exit(ENDED)
            raise OSError(errno.ENOSPC, "No space left on device")


def write(out: Path, text: str) -> None:
    with replacing_folder(out) as folder:
        artifact(folder, text)


def main(folder: Path, way: str, what: str) -> None:
    moment, out, really = Moment(), folder / "out", replace_folder.exchange
    moment.kill = what == "kill"
    sys.addaudithook(moment)

    def exchange(one: Path, other: Path) -> bool:
        if way != "exchange":
            return False
        moment("exchange", ())
        done = really(one, other)
        moment("exchange", ())
        return done

    replace_folder.exchange = exchange
    found = {"old": 0, "new": 0, "none": 0}
    moments = 0
    code = DONE
    while code in (DONE, ENDED):
        write(out, "old")
        whole = tree(out)
        child = os.fork()
        if child == 0:
            moment.left = moments
            try:
                write(out, "new")
            except (UsageError, WriteError, OSError):
                os._exit(ENDED)
            os._exit(DONE if moment.left < 0 else NOT_REACHED)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        ended = code == ENDED
        state = (tree(out)["rank_0000.onnx"] if out.exists() else "none") if ended else "new"
        found[state] += ended
        if state != "none":
            assert tree(out) == {name: text.replace("old", state) for name, text in whole.items()}, (moments, tree(out))
        try:
            with replacing_folder(out):
                if ended:
                    assert tree(out) == whole or state == "new", "the next writer gives the old one back"
                raise InterruptedError
        except InterruptedError:
            pass
        assert hidden_files(out) == [], moments
        moments += 1
    print(moments, *found.values())


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
