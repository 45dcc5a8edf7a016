"""LeNet-5 for 32x32 digits, as a single-device model; `plan.yaml` beside it says what runs where."""

from partc.compiler import Input, Symbol, nn

nn.seed(1)

# The batch is a dynamic dim: one compile serves all sizes. `Symbol(divisor=8)` would allow 8, 16, 24, ... only.
batch = Symbol()


def weights() -> nn.init.Initializer:
    return nn.init.truncated_normal(0.02)


def conv(in_channels: int, out_channels: int) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel_size=5, padding="valid", bias=False, init=weights())


def dense(in_features: int, out_features: int) -> nn.Linear:
    return nn.Linear(in_features, out_features, init=weights(), bias_init=weights())


class LeNet(nn.Module):
    def __init__(self, classes: int = 10, channels: int = 1) -> None:
        super().__init__()
        self.conv1 = conv(channels, 6)
        self.conv2 = conv(6, 16)
        self.fc1 = dense(16 * 5 * 5, 120)
        self.fc2 = dense(120, 84)
        self.fc3 = dense(84, classes)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(kernel_size=2)
        self.flatten = nn.Flatten()

    def forward(self, op, x):
        x = self.pool(op, self.relu(op, self.conv1(op, x)))
        x = self.pool(op, self.relu(op, self.conv2(op, x)))
        x = self.flatten(op, x)
        x = self.relu(op, self.fc1(op, x))
        x = self.relu(op, self.fc2(op, x))
        return self.fc3(op, x)


model = LeNet()
inputs = {"x": Input([batch, 1, 32, 32], "float32")}
outputs = ["logits"]
