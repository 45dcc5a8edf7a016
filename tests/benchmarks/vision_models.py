"""From a model of torchvision or timm to ranks that run: the commands, their seconds, and what a step sends.

    python tests/benchmarks/vision_models.py [--models resnet50,vit]

Needs torch, torchvision and timm; nothing is fetched, weights are random. Each model is a `model.py` of a few lines, and taken through
`partc plan --tp 2`, compile, verify and run; then the same again from the file that `partc export` writes, with the same communication.
An AllReduce is one for each two products of which ranks share the first one's outputs: two a layer of a ViT, one a block of a ConvNeXt.
"""

import argparse
import sys
from pathlib import Path

from through_commands import both_ways

MODEL = """import sys

import torch

# Operators of torchvision in C++ may be of another build of torch. These models have none, but an import asks for their schemas.
try:
    import torchvision
except RuntimeError:
    for name in [*sys.modules]:
        if name.partition(".")[0] == "torchvision":
            del sys.modules[name]
    schemas = torch.library.Library("torchvision", "FRAGMENT")
    for name in {operators}:
        schemas.define(name + "(Tensor x) -> Tensor")
    import torchvision
import timm

model = {model}.eval()
"""
OPERATORS = (
    "nms", "qnms", "roi_align", "_roi_align_backward", "roi_pool", "_roi_pool_backward", "ps_roi_align",
    "_ps_roi_align_backward", "ps_roi_pool", "_ps_roi_pool_backward", "deform_conv2d", "_deform_conv2d_backward",
)  # fmt: skip
ZOO = {
    "resnet50": "torchvision.models.resnet50(weights=None)",
    "convnext": "torchvision.models.convnext_tiny(weights=None)",
    "vit": 'timm.create_model("vit_small_patch16_224", pretrained=False)',
}
COLLECTIVES = {"resnet50": 20, "convnext": 18, "vit": 24}
"""The AllReduce of a step."""


def made(name: str, folder: Path) -> str:
    """The file of a model with random weights."""
    (folder / f"{name}.py").write_text(MODEL.format(model=ZOO[name], operators=OPERATORS))
    return f"{name}.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(ZOO))
    return both_ways(parser.parse_args().models.split(","), made, COLLECTIVES)


if __name__ == "__main__":
    sys.exit(main())
