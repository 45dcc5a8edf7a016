"""Writes the GPT of `model.py` as a file, `gpt.onnx` with `gpt.data`, in sizes of one's choice; without any, in its own:

    python make_model.py --layers 12 --width 768 --heads 12

The paths of its modules are in the file, in the nodes' metadata, so that the same plans speak of it. To compile it, the file is
all that is needed.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx_ir
from partc.compiler.frontend import load

FOLDER = Path(__file__).parent
SIZES = ("layers", "width", "heads", "vocabulary", "context")
SIZED = """
from model import GPT, Sizes
from partc.compiler import Input, Symbol

sizes = Sizes(**{chosen})
batch, seq = Symbol(), Symbol(max=sizes.context)
model = GPT(sizes)
inputs = {{"ids": Input([batch, seq], "int64")}}
outputs = ["logits"]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a GPT as gpt.onnx with gpt.data.")
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, default=argparse.SUPPRESS, help="default as in model.py")
    chosen = vars(parser.parse_args())
    with TemporaryDirectory() as folder:
        path = Path(folder) / "sized.py"
        path.write_text(SIZED.format(chosen=chosen))
        onnx_ir.save(load(path).model, FOLDER / "gpt.onnx", external_data="gpt.data")


if __name__ == "__main__":
    main()
