"""ONNX -> plan, with the installed TensorRT."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from producer.errors import EngineBuildFailed, MissingExtra
from workers.tensorrt.flavor import Flavor, make_logger
from workers.tensorrt.options import BuildOptions, Profile
from workers.tensorrt.profiles import DYNAMIC, shape_ranges
from workers.tensorrt.source import Source


class Built(NamedTuple):
    """A serialized plan, and the timing cache for the next build (None: there is none)."""

    plan: bytes
    timing_cache: bytes | None


def build_plan(
    flavor: Flavor,
    source: Source,
    profiles: tuple[Profile, ...],
    options: BuildOptions,
    *,
    target: str | None = None,
    timing_cache: bytes = b"",
) -> Built:
    """Builds a strongly typed network; precisions are those of the ONNX model.

    `target`: a name of ComputeCapability such as "CURRENT" or "SM89" (TensorRT for RTX only;
    None leaves the choice to it: all GPUs that it knows). `timing_cache` as an earlier build
    returned it. Raises EngineBuildFailed with the parser's or builder's own messages, and
    MissingExtra where the flavor has no builder.
    """
    if not flavor.can_build:
        raise MissingExtra(
            f"{flavor.name} {flavor.version} cannot build {source.path}: build the plan with "
            "`trtq build` where trtq[gpu] or trtq[tensorrt-rtx] is installed"
        )
    trt = flavor.module
    logger = make_logger(flavor)
    builder = trt.Builder(logger)
    network = builder.create_network(_network_flags(trt))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(source.data, str(source.path)):
        raise EngineBuildFailed(
            f"{flavor.name} {flavor.version} cannot take {source.path}: {_parser_errors(parser)}"
        )
    config = builder.create_builder_config()
    _configure(flavor, config, options, target)
    _add_profiles(builder, config, network, profiles)
    cache = _use_timing_cache(flavor, config, options, timing_cache)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise EngineBuildFailed(
            f"{flavor.name} {flavor.version} could not build {source.path}: "
            f"{logger.last_errors() or 'it gave no reason'}"
        )
    return Built(bytes(plan), bytes(cache.serialize()) if cache is not None else None)


def _network_flags(trt: Any) -> int:
    # Later major versions know strongly typed networks only and need no flag.
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _configure(flavor: Flavor, config: Any, options: BuildOptions, target: str | None) -> None:
    trt = flavor.module
    if options.workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if target is None or not flavor.is_rtx:
        return
    capability = getattr(trt.ComputeCapability, target, None)
    if capability is None:
        known = sorted(set(trt.ComputeCapability.__members__) - {"NONE"})
        raise EngineBuildFailed(
            f"{flavor.name} {flavor.version} has no target {target!r}; it has {', '.join(known)}"
        )
    config.num_compute_capabilities = 1
    if not config.set_compute_capability(capability, 0):
        raise EngineBuildFailed(f"{flavor.name} {flavor.version} refused the target {target!r}")


def _add_profiles(builder: Any, config: Any, network: Any, profiles: tuple[Profile, ...]) -> None:
    tensors = [network.get_input(index) for index in range(network.num_inputs)]
    for tensor in tensors:
        if tensor.is_shape_tensor and DYNAMIC in tuple(tensor.shape):
            raise EngineBuildFailed(
                f"input {tensor.name!r} gives the shape of other tensors, which cannot be batched: "
                "make it a constant of the model"
            )
    ranges = shape_ranges({tensor.name: tuple(tensor.shape) for tensor in tensors}, profiles)
    for number, shapes in enumerate(ranges):
        if not shapes:
            continue
        profile = builder.create_optimization_profile()
        for name, (low, best, high) in shapes.items():
            profile.set_shape(name, low, best, high)
        if config.add_optimization_profile(profile) < 0:
            raise EngineBuildFailed(f"TensorRT refused profile {number}: {shapes}")


def _use_timing_cache(
    flavor: Flavor, config: Any, options: BuildOptions, content: bytes
) -> Any | None:
    # TensorRT for RTX times nothing when it builds: its timing cache does nothing.
    if flavor.is_rtx or not options.timing_cache:
        return None
    cache = config.create_timing_cache(content)
    if not config.set_timing_cache(cache, False):
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache


def _parser_errors(parser: Any) -> str:
    return "; ".join(_parser_error(error) for error in _errors(parser)) or "no reason was given"


def _errors(parser: Any) -> Iterator[Any]:
    for index in range(parser.num_errors):
        yield parser.get_error(index)


def _parser_error(error: Any) -> str:
    code = str(error.code()).rpartition(".")[2]
    operator = error.node_operator()
    where = f" at node {error.node_name()!r} ({operator})" if operator else ""
    return f"{code}{where}: {error.desc()}"
