"""Runs TensorRT plans on the GPU: one slot is one thread, stream and execution context."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from producer.errors import ConfigError, EngineFailed, OutOfDeviceMemory
from workers.engines.base import Array, EngineSpec
from workers.ranges import NO_RANGES, Ranges
from workers.tensorrt.bindings import Bindings, ProfileBounds, read_bindings
from workers.tensorrt.cache import PlanCache, default_cache
from workers.tensorrt.context import PlanContext
from workers.tensorrt.cuda import Driver, PyCudaDriver, current
from workers.tensorrt.device import current_device
from workers.tensorrt.flavor import Flavor, find_flavor
from workers.tensorrt.graphs import Capture, find_capture
from workers.tensorrt.kernels import KernelCache
from workers.tensorrt.loading import Loaded, load_plan
from workers.tensorrt.memory import Budget
from workers.tensorrt.outputs import OutputAllocator
from workers.tensorrt.padding import padded, padded_sizes
from workers.tensorrt.provide import Plan, provide_plan
from workers.tensorrt.slot import SlotParts, TensorRTSlot

if TYPE_CHECKING:
    from workers.models import ModelConfig

log = logging.getLogger("trtq.tensorrt")

#: Pinned memory cannot be swapped: a fifth of the machine's memory at most, if nothing is said.
_PINNED_SHARE = 0.2
#: Device memory that the estimate leaves for what it does not know (kernels, other contexts).
_DEVICE_MARGIN = 0.95


class TensorRTEngine:
    """A plan on the process' first GPU. Slots run at once, each on a stream of its own.

    `read_plan` runs in `load`, with the CUDA context current. `slots` is how many will be made,
    for the estimate of device memory. `graphs` lets repeated kinds of batches run as CUDA graphs.
    `cache` keeps what TensorRT for RTX compiles, which makes the next start faster.
    """

    def __init__(
        self,
        read_plan: Callable[[], Plan],
        *,
        max_batch: int,
        slots: int,
        pinned_limit_bytes: int,
        graphs: bool = True,
        cache: PlanCache | None = None,
        driver: Driver | None = None,
        flavor: Flavor | None = None,
        ranges: Ranges = NO_RANGES,
    ) -> None:
        self._read_plan = read_plan
        self._max_batch = max_batch
        self._slots = slots
        self._graphs = graphs
        self._cache = cache
        self._pinned = Budget(pinned_limit_bytes)
        self._driver: Driver = driver or PyCudaDriver()
        self._flavor = flavor
        self._ranges = ranges
        self._plan: Loaded | None = None
        self._bindings: Bindings | None = None
        self._slot_rows = max_batch
        self._sizes: Sequence[int] = ()
        self._kernels: KernelCache | None = None
        self._capture: Capture | None = None
        self._opened = False
        # TensorRT makes contexts of one engine one at a time, and not while a stream is captured:
        # it waits for the whole device then, which CUDA refuses.
        self._making = threading.Lock()

    def load(self) -> None:
        """Opens the device and reads the plan.

        Raises MissingExtra, NoDevice, EngineMismatch (the plan is corrupt, or was built for
        another TensorRT or GPU), OutOfDeviceMemory, and what `read_plan` raises.
        """
        flavor = self._flavor = self._flavor or find_flavor()
        self._driver.open()
        self._opened = True
        with current(self._driver):
            plan = self._read_plan()
            where = str(plan.path)
            self._plan = load_plan(flavor, plan.data, where)
            self._bindings = read_bindings(flavor.module, self._plan.engine, where)
            self._slot_rows = min(self._max_batch, self._bindings.max_batch)
            self._sizes = padded_sizes(self._slot_rows) if self._graphs else ()
            self._check_memory(where)
            if flavor.is_rtx and self._cache is not None:
                self._kernels = KernelCache(self._cache, plan.key)
            if self._graphs:
                self._capture = find_capture()
        log.info("%s loaded by %s %s", where, flavor.name, flavor.version)

    @property
    def spec(self) -> EngineSpec:
        """Inputs and outputs of the plan; raises EngineFailed before `load`."""
        return self._loaded.spec

    @property
    def capacity(self) -> int | None:
        """Most rows that a profile of the plan takes."""
        return self._loaded.max_batch

    @property
    def pinned_bytes(self) -> int:
        """Pinned memory that all slots hold now."""
        return self._pinned.taken_bytes

    def warm_sizes(self, max_batch: int) -> list[int]:
        """The sizes that batches are filled up to: kernels and graphs are made for each."""
        return padded_sizes(max_batch) if self._graphs else sorted({1, max_batch})

    def padded_rows(self, rows: int) -> int:
        """The size that a batch of `rows` rows is filled up to."""
        return padded(rows, self._sizes)

    def make_slot(self) -> TensorRTSlot:
        """A slot; it allocates in `activate`, which its own thread calls."""
        assert self._flavor is not None
        bindings, module = self._loaded, self._flavor.module
        parts = SlotParts(
            self._driver,
            bindings,
            self._pinned,
            self._new_context,
            lambda buffer: OutputAllocator(module, buffer),
            self._keep_kernels,
            self._ranges,
        )
        return TensorRTSlot(parts, self._slot_rows, self._sizes)

    def run(self, slot: TensorRTSlot, rows: int) -> Mapping[str, Array]:
        """Runs `rows` rows of the slot's inputs; see Engine.run."""
        if rows < 1:
            raise EngineFailed(f"a batch has at least one row, not {rows}")
        return slot.run(rows)

    def close(self) -> None:
        """Frees the plan and lets go of the device."""
        if not self._opened:
            return
        self._opened = False
        assert self._flavor is not None
        self._keep_kernels()
        with current(self._driver), self._flavor.calls:
            self._plan = self._bindings = self._kernels = None
        self._driver.close()

    @property
    def _loaded(self) -> Bindings:
        if self._bindings is None:
            raise EngineFailed("the TensorRT engine is not loaded: call load first")
        return self._bindings

    def _new_context(self, profile: ProfileBounds, stream: int) -> PlanContext:
        assert self._flavor is not None
        spec, calls = self._loaded.spec, self._flavor.calls
        with self._making, calls:
            context = self._make_context(self._flavor, profile, stream)
        inputs, outputs = (tuple(t.name for t in tensors) for tensors in spec)
        return PlanContext(context, inputs, outputs, calls, self._capture, self._making)

    def _make_context(self, flavor: Flavor, profile: ProfileBounds, stream: int) -> Any:
        assert self._plan is not None
        engine = self._plan.engine
        if flavor.is_rtx:
            options, module = engine.create_runtime_config(), flavor.module
            if self._capture is not None:
                # Lazily compiled kernels come after the capture, which would keep slower ones.
                kernels = module.DynamicShapesKernelSpecializationStrategy.EAGER
                options.dynamic_shapes_kernel_specialization_strategy = kernels
            elif self._graphs:
                options.cuda_graph_strategy = module.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            if self._kernels is not None:
                self._kernels.use(options)
            context = engine.create_execution_context(options)
        else:
            context = engine.create_execution_context()
        if context is None:
            raise OutOfDeviceMemory(
                "no device memory for another execution context: lower the model's slots or "
                f"max_batch ({self._plan.logger.last_errors()})"
            )
        if not context.set_optimization_profile_async(profile.number, stream):
            raise EngineFailed(f"TensorRT refused optimization profile {profile.number}")
        return context

    def _keep_kernels(self) -> None:
        if self._kernels is not None and self._flavor is not None:
            with self._making, self._flavor.calls:
                self._kernels.keep()

    def _check_memory(self, where: str) -> None:
        free_bytes, _ = self._driver.memory_bytes()
        assert self._plan is not None
        context_bytes = int(self._plan.engine.device_memory_size_v2)
        wanted_bytes = context_bytes * self._slots
        if wanted_bytes > free_bytes * _DEVICE_MARGIN:
            raise OutOfDeviceMemory(
                f"{where}: {self._slots} slots need {wanted_bytes >> 20} MiB for their contexts, "
                f"the GPU has {free_bytes >> 20} MiB free: lower slots or the largest profile"
            )


def make_engine(config: ModelConfig, *, ranges: Ranges = NO_RANGES) -> TensorRTEngine:
    """The engine of a model configuration, not yet loaded.

    A path that ends in .engine or .plan is a finished plan; an .onnx file is built first, or
    found in the cache. Raises ConfigError for a bad TRTQ_PINNED_LIMIT_BYTES or
    TRTQ_PLAN_CACHE_BYTES.
    """

    cache = default_cache()

    def read_plan() -> Plan:
        return provide_plan(config.path, config.max_batch, config.build, current_device(), cache)

    return TensorRTEngine(
        read_plan,
        max_batch=config.max_batch,
        slots=config.slots,
        pinned_limit_bytes=pinned_limit_bytes(),
        cache=cache,
        ranges=ranges,
    )


def pinned_limit_bytes() -> int:
    """TRTQ_PINNED_LIMIT_BYTES, or a fifth of the machine's memory."""
    given = os.environ.get("TRTQ_PINNED_LIMIT_BYTES")
    if given is None:
        pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return int(pages * page_bytes * _PINNED_SHARE)
    if not given.isdigit() or int(given) < 1:
        raise ConfigError(f"TRTQ_PINNED_LIMIT_BYTES is {given!r}: give a number of bytes")
    return int(given)
