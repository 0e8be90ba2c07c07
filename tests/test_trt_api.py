"""Every attribute of TensorRT that our code names exists in the installed modules."""

from __future__ import annotations

from typing import Any

import pytest

BUILD = [
    "Builder.create_network",
    "Builder.create_builder_config",
    "Builder.create_optimization_profile",
    "Builder.build_serialized_network",
    "INetworkDefinition.get_input",
    "INetworkDefinition.num_inputs",
    "ITensor.is_shape_tensor",
    "ITensor.name",
    "ITensor.shape",
    "IBuilderConfig.add_optimization_profile",
    "IBuilderConfig.builder_optimization_level",
    "IBuilderConfig.create_timing_cache",
    "IBuilderConfig.set_memory_pool_limit",
    "IBuilderConfig.set_timing_cache",
    "ITimingCache.serialize",
    "IOptimizationProfile.set_shape",
    "MemoryPoolType.WORKSPACE",
    "OnnxParser.get_error",
    "OnnxParser.num_errors",
    "OnnxParser.parse",
    "ParserError.code",
    "ParserError.desc",
    "ParserError.node_name",
    "ParserError.node_operator",
]
RTX = [
    "ComputeCapability.CURRENT",
    "IBuilderConfig.num_compute_capabilities",
    "IBuilderConfig.set_compute_capability",
    "CudaGraphStrategy.WHOLE_GRAPH_CAPTURE",
    "DynamicShapesKernelSpecializationStrategy.EAGER",
    "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy",
    "ICudaEngine.create_runtime_config",
    "IRuntimeCache.deserialize",
    "IRuntimeCache.serialize",
    "IRuntimeConfig.create_runtime_cache",
    "IRuntimeConfig.cuda_graph_strategy",
    "IRuntimeConfig.set_runtime_cache",
]
RUN = [
    "ICudaEngine.create_engine_inspector",
    "ICudaEngine.create_execution_context",
    "ICudaEngine.device_memory_size_v2",
    "ICudaEngine.get_tensor_dtype",
    "ICudaEngine.get_tensor_mode",
    "ICudaEngine.get_tensor_name",
    "ICudaEngine.get_tensor_profile_shape",
    "ICudaEngine.get_tensor_shape",
    "ICudaEngine.num_io_tensors",
    "ICudaEngine.num_layers",
    "ICudaEngine.num_optimization_profiles",
    "EngineInspector.get_engine_information",
    "IExecutionContext.execute_async_v3",
    "IExecutionContext.get_tensor_shape",
    "IExecutionContext.set_input_shape",
    "IExecutionContext.set_output_allocator",
    "IExecutionContext.set_optimization_profile_async",
    "IExecutionContext.set_tensor_address",
    "ILogger.Severity",
    "LayerInformationFormat.JSON",
    "Runtime.deserialize_cuda_engine",
    "TensorIOMode.INPUT",
]


def missing(module: Any, names: list[str]) -> list[str]:
    found = []
    for name in names:
        kind, _, attribute = name.partition(".")
        if not hasattr(getattr(module, kind, None), attribute):
            found.append(name)
    return found


def test_a_wrong_name_is_seen() -> None:
    assert missing(pytest, ["Item.add_marker", "Item.nothing", "Nothing.x"]) == [
        "Item.nothing",
        "Nothing.x",
    ]


def test_tensorrt_rtx() -> None:
    module = pytest.importorskip("tensorrt_rtx", reason="needs trtq[tensorrt-rtx]")
    assert not missing(module, BUILD + RTX + RUN)


def test_tensorrt_lean() -> None:
    module = pytest.importorskip("tensorrt_lean", reason="needs trtq[tensorrt-lean]")
    assert not missing(module, RUN)
