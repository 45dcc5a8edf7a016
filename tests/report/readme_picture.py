"""The picture of README.md: the page of `partc report` for the plan `samples/gpt/stages.yaml`, as a headless Chromium draws it.

python tests/report/readme_picture.py      # writes samples/report.png
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from browser import Browser, chromium
from partc.cli.main import invoke
from PIL import Image

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "samples/report.png"
WIDTH, HEIGHT, COLOURS = 1180, 1060, 96
SIZES = ("--set", "batch=8", "--set", "seq=64")


def main() -> int:
    """Compiles, reports, and takes the picture of the graph: the table of tokens on rank 0, four blocks over two groups of ranks."""
    program = chromium()
    if program is None:
        print("there is no Chromium here")
        return 1
    gpt = ROOT / "samples/gpt"
    with tempfile.TemporaryDirectory() as place:
        build, page = Path(place) / "gpt", Path(place) / "gpt.html"
        compiled = invoke(["compile", str(gpt / "model.py"), "--plan", str(gpt / "stages.yaml"), "-o", str(build)])
        if compiled or invoke(["report", str(build), *SIZES, "-o", str(page)]):
            return 1
        with Browser(program, WIDTH, HEIGHT) as browser:
            browser.theme("light")
            browser.open(page.as_uri(), "document.documentElement?.dataset.drawn === 'yes'")
            browser.screenshot(PICTURE)
    Image.open(PICTURE).quantize(COLOURS).save(PICTURE, optimize=True)
    print(f"wrote {PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
