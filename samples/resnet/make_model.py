"""ResNet-18 with seeded weights, written as a file: `python make_model.py` makes `resnet18.onnx` and `resnet18.data`.

The network of K. He et al., "Deep Residual Learning for Image Recognition", 2015, with torchvision's names: 11.7 million
parameters, batch normalizations as after training, any batch and any image size. The paths of its modules are in the file,
in the nodes' metadata, so that a plan can say `layer3` or `layer4.0.downsample`. To compile it, the file is all that is needed;
this script is a legal `model.py` as well.
"""

from pathlib import Path

import onnx_ir
from partc.compiler import Input, nn
from partc.compiler.frontend import load

nn.seed(18)


def conv(in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> nn.Conv2d:
    he = nn.init.he_normal(mode="fan_out")
    return nn.Conv2d(in_channels, out_channels, kernel_size, stride, kernel_size // 2, bias=False, init=he)


class BatchNorm(nn.BatchNorm2d):
    """A normalization whose scale, shift and running statistics differ by channel, as those of a trained network do."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.weight = nn.Parameter([channels], "float32", init=nn.init.uniform(0.5, 1.0))
        self.bias = nn.Parameter([channels], "float32", init=nn.init.normal(0.1))
        self.running_mean = nn.Parameter([channels], "float32", init=nn.init.normal(0.2))
        self.running_var = nn.Parameter([channels], "float32", init=nn.init.uniform(0.5, 2.0))


class BasicBlock(nn.Module):
    """Two convolutions and the shortcut around them; where the shape changes, the shortcut is a 1x1 convolution."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(in_channels, out_channels, 3, stride)
        self.bn1 = BatchNorm(out_channels)
        self.relu = nn.ReLU()
        self.conv2 = conv(out_channels, out_channels, 3)
        self.bn2 = BatchNorm(out_channels)
        self.downsample = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(conv(in_channels, out_channels, 1, stride), BatchNorm(out_channels))

    def forward(self, op, x):
        shortcut = x if self.downsample is None else self.downsample(op, x)
        y = self.relu(op, self.bn1(op, self.conv1(op, x)))
        y = self.bn2(op, self.conv2(op, y))
        return self.relu(op, op.Add(y, shortcut))


def stage(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(BasicBlock(in_channels, out_channels, stride), BasicBlock(out_channels, out_channels, 1))


class ResNet18(nn.Module):
    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = conv(3, 64, 7, 2)
        self.bn1 = BatchNorm(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = stage(64, 64, 1)
        self.layer2 = stage(64, 128, 2)
        self.layer3 = stage(128, 256, 2)
        self.layer4 = stage(256, 512, 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(512, classes)

    def forward(self, op, x):
        x = self.maxpool(op, self.relu(op, self.bn1(op, self.conv1(op, x))))
        x = self.layer4(op, self.layer3(op, self.layer2(op, self.layer1(op, x))))
        return self.fc(op, self.flatten(op, self.avgpool(op, x)))


model = ResNet18()
inputs = {"x": Input(["batch", 3, "height", "width"], "float32")}
outputs = ["logits"]


if __name__ == "__main__":
    path = Path(__file__)
    onnx_ir.save(load(path).model, path.with_name("resnet18.onnx"), external_data="resnet18.data")
