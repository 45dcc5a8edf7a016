"""Planning, compiling and quantizing a folder of real size: CPU seconds, peak memory and disk; the first time and the second.

    python tests/benchmarks/real_size/real_compile.py [--shape 1b] [--files FOLDER] [--generate 1024]

Makes a Llama with random weights (`1b`: the shape of Llama-3.2-1B) in bfloat16, which the other scripts of this folder share, and begins
with an empty cache of exports. Compiled are a decoder in float32 on one rank, twice, on 2 ranks tensor parallel, and in four bits.
Disk is that of the artifact over that of the folder.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from large_folder import disk_of, measured
from real_generation import made
from real_models import SHAPES

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()) / "partc-real-size")
    parser.add_argument("--generate", type=int, default=1024, metavar="LENGTH")
    options = parser.parse_args()
    options.files.mkdir(parents=True, exist_ok=True)
    folder = made(options.files / options.shape, sys.executable, str(HERE / "real_models.py"), "folder", options.shape)
    with tempfile.TemporaryDirectory(dir=options.files) as name:
        root = Path(name)
        os.environ["PARTC_CACHE"] = str(root / "cache")
        generate = ["--generate", str(options.generate), "--slots", "8", "-q", "-o"]
        for title, own, times in (
            ("float32", "", ("first", "second")),
            ("tp 2", "--tp 2", ("",)),
            ("4 bits", "--quantize 4", ("",)),
        ):
            for time in times:
                plan, build = root / "plan.yaml", root / "build"
                plan.unlink(missing_ok=True)
                measured(f"{title}: plan {time}", "plan", str(folder), *own.split(), *generate, str(plan))
                compiled = ["compile", str(folder), "--plan", str(plan), "-q", "--no-compare", "-o", str(build)]
                measured(f"{title}: compile {time}", *compiled)
            print(f"{title + ': disk':24} {disk_of(build) / disk_of(folder):8.2f} of the folder", flush=True)
            shutil.rmtree(build)


if __name__ == "__main__":
    main()
