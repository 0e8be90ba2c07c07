"""Trains digits.onnx on the first half of scikit-learn's handwritten digits.

The file it makes is in the repository, so nobody needs to run this. To make it again:

    pip install torch scikit-learn onnx
    python configs/models/train_digits.py

The second half of the data, which other writers wrote, is only measured at the end. The net takes
`image`, float32 [N, 1, 8, 8] of raw pixels 0..16, and gives `logits`, float32 [N, 10].
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

SEED = 7
EPOCHS = 60
MEMBERS = 3
BATCH = 64
FLOOR = 0.975
HERE = Path(__file__).resolve().parent


def member() -> nn.Sequential:
    """One convolutional net, float32 [N, 1, 8, 8] in 0..1 to logits [N, 10]."""

    def block(channels_in: int, channels_out: int, padding: int = 1) -> list[nn.Module]:
        return [
            nn.Conv2d(channels_in, channels_out, 3, padding=padding, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
        ]

    return nn.Sequential(
        *block(1, 16),
        *block(16, 24),
        nn.MaxPool2d(2),
        *block(24, 32),
        nn.Dropout2d(0.1),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


class Digits(nn.Module):
    """The members' mean logits of raw pixels, float32 [N, 1, 8, 8] of 0..16."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(member() for _ in range(MEMBERS))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [N, 10]."""
        scaled = image / 16.0
        return torch.stack([net(scaled) for net in self.members]).mean(0)


def augmented(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The images slightly rotated, sheared, scaled and shifted, each by its own draw."""
    count = len(images)

    def draw(width: float) -> torch.Tensor:
        return (torch.rand(count, generator=generator) * 2 - 1) * width

    angle, shear, scale_x, scale_y = draw(0.25), draw(0.2), 1 + draw(0.15), 1 + draw(0.15)
    cos, sin = torch.cos(angle), torch.sin(angle)
    rows = torch.stack(
        [
            torch.stack([cos * scale_x, -sin * scale_y + shear, draw(0.2)], 1),
            torch.stack([sin * scale_x, cos * scale_y, draw(0.2)], 1),
        ],
        1,
    )
    grid = functional.affine_grid(rows, list(images.shape), align_corners=False)
    moved = functional.grid_sample(images, grid, align_corners=False)
    contrast = 1 + draw(0.15).view(-1, 1, 1, 1)
    noise = torch.randn(images.shape, generator=generator) * 0.4
    return (moved * contrast + noise).clamp(0, 16)


def train(net: nn.Module, images: torch.Tensor, labels: torch.Tensor, seed: int) -> None:
    """Trains one member in place."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-2)
    steps = EPOCHS * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    net.train()
    for _ in range(EPOCHS):
        order = torch.randperm(len(images), generator=generator)
        for start in range(0, len(images) // BATCH * BATCH, BATCH):
            chosen = order[start : start + BATCH]
            logits = net(augmented(images[chosen], generator) / 16.0)
            loss = functional.cross_entropy(logits, labels[chosen], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    net.eval()


def main() -> None:
    """Trains, writes digits.onnx beside this file, and prints its accuracy on the test half."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    data = load_digits()
    images = torch.from_numpy(data.images.astype(np.float32)).unsqueeze(1)
    labels = torch.from_numpy(data.target.astype(np.int64))
    half = len(images) // 2
    model = Digits()
    for number, net in enumerate(model.members):
        train(net, images[:half], labels[:half], SEED + number)
    model.eval()
    with torch.no_grad():
        right = model(images[half:]).argmax(1) == labels[half:]
    accuracy = right.float().mean().item()
    print(f"accuracy on the test half: {accuracy:.4f}")
    if accuracy < FLOOR:
        raise SystemExit(f"below {FLOOR}; nothing written")
    path = HERE / "digits.onnx"
    torch.onnx.export(
        model,
        (images[:2],),
        str(path),
        input_names=["image"],
        output_names=["logits"],
        dynamic_axes={"image": {0: "rows"}, "logits": {0: "rows"}},
        opset_version=17,
        dynamo=False,
    )
    onnx.checker.check_model(str(path))
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
