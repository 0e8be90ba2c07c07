"""What a deserialized plan takes and gives, in our terms."""

from __future__ import annotations

from typing import Any, NamedTuple

from producer.errors import EngineMismatch
from producer.spec import TensorSpec
from workers.engines.base import EngineSpec
from workers.tensorrt.profiles import Shape

_DTYPES = {
    "BOOL": "bool",
    "FLOAT": "float32",
    "HALF": "float16",
    "INT32": "int32",
    "INT64": "int64",
    "INT8": "int8",
    "UINT8": "uint8",
}


class ProfileBounds(NamedTuple):
    """One optimization profile: smallest and largest shape of each input, batch axis first."""

    number: int
    low: dict[str, Shape]
    high: dict[str, Shape]

    @property
    def max_batch(self) -> int:
        """Most rows that it takes."""
        return min(shape[0] for shape in self.high.values())

    def takes(self, shapes: dict[str, Shape]) -> bool:
        """True if every axis of every input lies inside."""
        return all(
            all(
                low <= size <= high
                for low, size, high in zip(self.low[name], shape, self.high[name], strict=True)
            )
            for name, shape in shapes.items()
        )


class Bindings(NamedTuple):
    """Inputs and outputs of a plan, and its profiles from the smallest batch to the largest."""

    spec: EngineSpec
    profiles: tuple[ProfileBounds, ...]

    @property
    def max_batch(self) -> int:
        """Most rows that any profile takes."""
        return max(profile.max_batch for profile in self.profiles)

    def profile_for(self, shapes: dict[str, Shape]) -> ProfileBounds | None:
        """The smallest profile that takes inputs of these shapes."""
        return next((profile for profile in self.profiles if profile.takes(shapes)), None)


def read_bindings(module: Any, engine: Any, where: str) -> Bindings:
    """Reads a plan's tensors through TensorRT's ICudaEngine.

    `module` is the TensorRT module, `where` names the plan in messages. Raises EngineMismatch for
    a dtype that cannot travel and for tensors without a batch axis.
    """
    inputs: list[TensorSpec] = []
    outputs: list[TensorSpec] = []
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        kind = engine.get_tensor_dtype(name).name
        shape = tuple(engine.get_tensor_shape(name))
        if kind not in _DTYPES:
            raise EngineMismatch(
                f"{where}: tensor {name!r} is {kind}, which cannot travel; cast it to one of "
                f"{sorted(_DTYPES.values())} in the model"
            )
        if not shape:
            raise EngineMismatch(f"{where}: tensor {name!r} has no batch axis; export it with one")
        row = tuple(None if size < 0 else int(size) for size in shape[1:])
        spec = TensorSpec(name=name, dtype=_DTYPES[kind], shape=row)
        is_input = engine.get_tensor_mode(name) == module.TensorIOMode.INPUT
        (inputs if is_input else outputs).append(spec)
    profiles = []
    for index in range(engine.num_optimization_profiles):
        bounds = {t.name: engine.get_tensor_profile_shape(t.name, index) for t in inputs}
        low = {name: tuple(shapes[0]) for name, shapes in bounds.items()}
        high = {name: tuple(shapes[2]) for name, shapes in bounds.items()}
        profiles.append(ProfileBounds(index, low, high))
    profiles.sort(key=lambda profile: profile.max_batch)
    return Bindings(EngineSpec(tuple(inputs), tuple(outputs)), tuple(profiles))
