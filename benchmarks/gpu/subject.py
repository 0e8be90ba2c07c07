"""The models that are measured: their ONNX file, their plan, and what torch says of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from workers.tensorrt.cache import PlanCache
from workers.tensorrt.device import current_device
from workers.tensorrt.engine import TensorRTEngine
from workers.tensorrt.options import BuildOptions, Profile
from workers.tensorrt.provide import Plan, provide_plan

Array = npt.NDArray[Any]
_PINNED_BYTES = 32 << 30


class Subject:
    """One model: `row` is the shape of a row of input "x", `width` the length of output "y"."""

    def __init__(
        self,
        name: str,
        path: Path,
        module: Any,
        row: tuple[int, ...],
        dtype: str,
        width: int,
        batches: tuple[int, ...],
    ) -> None:
        self.name, self.path, self.module = name, path, module
        self.row, self.dtype, self.width, self.batches = row, dtype, width, batches
        self.row_bytes = int(np.prod(row)) * np.dtype(dtype).itemsize
        self.cache = PlanCache(path.parent / "plans", 8 << 30)
        self.plan: Plan | None = None

    def build(self) -> None:
        """Exports the ONNX file and builds the plan with one profile per batch size."""
        import torch

        sample = torch.zeros((2, *self.row), dtype=getattr(torch, self.dtype), device="cuda")
        with torch.no_grad():
            torch.onnx.export(
                self.module,
                (sample,),
                str(self.path),
                input_names=["x"],
                output_names=["y"],
                dynamic_axes={"x": {0: "N"}, "y": {0: "N"}},
                opset_version=17,
                dynamo=False,
            )
        profiles = tuple(Profile(min_batch=1, opt_batch=b, max_batch=b) for b in self.batches)
        options = BuildOptions(profiles=profiles)
        self.plan = provide_plan(
            self.path, max(self.batches), options, current_device(), self.cache
        )

    def engine(self, *, slots: int, graphs: bool, max_batch: int | None = None) -> TensorRTEngine:
        """A loaded engine; the caller closes it."""
        plan = self.plan
        assert plan is not None
        engine = TensorRTEngine(
            lambda: plan,
            max_batch=max_batch or max(self.batches),
            slots=slots,
            pinned_limit_bytes=_PINNED_BYTES,
            graphs=graphs,
            cache=self.cache,
        )
        engine.load()
        return engine

    def rows(self, count: int, seed: int) -> Array:
        """Random input rows."""
        random = np.random.default_rng(seed)
        if self.dtype == "uint8":
            return random.integers(0, 256, (count, *self.row), dtype=np.uint8)
        return random.standard_normal((count, *self.row), np.float32)

    def expected(self, rows: Array) -> Array:
        """What torch computes in the model's own precision."""
        import torch

        with torch.no_grad():
            found = self.module(torch.from_numpy(rows).cuda())
        return np.asarray(found.float().cpu().numpy())


def resnet50(folder: Path, batches: tuple[int, ...]) -> Subject:
    """ResNet-50, random weights, fp16, with (x / 255 - 0.45) / 0.225 of uint8 NHWC folded in."""
    import torch
    import torchvision

    torch.manual_seed(0)

    class Prepared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torchvision.models.resnet50(weights=None).eval().half()

        def forward(self, x: Any) -> Any:
            x = (x.to(torch.float16).permute(0, 3, 1, 2) / 255 - 0.45) / 0.225
            return self.net(x).to(torch.float32)

    module = Prepared().cuda().eval()
    return Subject(
        "resnet50", folder / "resnet50.onnx", module, (224, 224, 3), "uint8", 1000, batches
    )


def small(folder: Path, batches: tuple[int, ...]) -> Subject:
    """Three layers of 256 in float32: far under 0.3 ms a batch."""
    import torch

    torch.manual_seed(0)
    linear, relu = torch.nn.Linear, torch.nn.ReLU
    module = torch.nn.Sequential(linear(64, 256), relu(), linear(256, 256), relu(), linear(256, 16))
    return Subject(
        "small", folder / "small.onnx", module.cuda().eval(), (64,), "float32", 16, batches
    )


SUBJECTS: dict[str, Callable[[Path, tuple[int, ...]], Subject]] = {
    "resnet50": resnet50,
    "small": small,
}
