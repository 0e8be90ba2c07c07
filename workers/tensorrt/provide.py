"""The plan that a worker needs: read as it is, found in the cache, or built."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from producer.errors import EngineBuildFailed, ModelFileError
from workers.tensorrt.builder import build_plan
from workers.tensorrt.cache import PlanCache
from workers.tensorrt.flavor import Flavor, find_flavor
from workers.tensorrt.options import BuildOptions
from workers.tensorrt.precision import to_half
from workers.tensorrt.prepare import prepare_model
from workers.tensorrt.source import Source, digest, import_onnx, read_source

if TYPE_CHECKING:
    from workers.tensorrt.device import Device

_PLAN_SUFFIXES = (".engine", ".plan")
#: Part of every key: raise it when the same inputs would give another plan.
_KEY_FORMAT = 1


class Plan(NamedTuple):
    """A serialized plan, its file, its key (sha256 as hex), and whether nothing was built."""

    data: bytes
    path: Path
    key: str
    from_cache: bool


def provide_plan(
    path: Path, max_batch: int, options: BuildOptions, device: Device | None, cache: PlanCache
) -> Plan:
    """The plan for `path`: an ONNX file is built unless cached, .engine and .plan read as is.

    With `device` it is built for that GPU, else for all GPUs that the flavor knows. Raises
    ModelFileError, EngineBuildFailed and MissingExtra.
    """
    if path.suffix.lower() in _PLAN_SUFFIXES:
        return read_plan(path)
    flavor = find_flavor()
    source = read_source(path)
    facts = plan_facts(flavor, device)
    key = plan_key(source, max_batch, options, facts)
    timing = "-".join(facts.values()).replace(" ", "_").replace("/", "_")

    def build() -> bytes:
        built = build_plan(
            flavor,
            _changed(source, options),
            options.profiles_for(max_batch),
            options,
            target=None if device is None else "CURRENT",
            timing_cache=cache.timing_cache(timing) if options.timing_cache else b"",
        )
        if built.timing_cache is not None:
            cache.keep_timing_cache(timing, built.timing_cache)
        return built.plan

    data, from_cache = cache.get_or_build(key, facts, build)
    return Plan(data, cache.path(key), key, from_cache)


def plan_facts(flavor: Flavor, device: Device | None) -> dict[str, str]:
    """What a plan depends on beside model and options."""
    return {
        "flavor": flavor.name,
        "version": flavor.version,
        "gpu": "any" if device is None else device.name,
        "compute_capability": (
            "any" if device is None else ".".join(map(str, device.compute_capability))
        ),
    }


def plan_key(source: Source, max_batch: int, options: BuildOptions, facts: dict[str, str]) -> str:
    """sha256, as hex, over all that the plan depends on; equal content gives an equal key."""
    profiles = [profile.model_dump() for profile in options.profiles_for(max_batch)]
    content = {
        "format": _KEY_FORMAT,
        "model": digest(source),
        "facts": facts,
        "options": options.model_dump(mode="json"),
        "profiles": profiles,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_plan(path: Path) -> Plan:
    """A finished plan's file; raises ModelFileError."""
    try:
        data = path.read_bytes()
    except OSError as failure:
        raise ModelFileError(f"plan {path} cannot be read: {failure}") from failure
    if not data:
        raise ModelFileError(f"plan {path} is empty: build it again")
    return Plan(data, path, hashlib.sha256(data).hexdigest(), True)


def _changed(source: Source, options: BuildOptions) -> Source:
    if not options.fp16 and not options.prepare:
        return source
    model = import_onnx().load(source.path)
    if options.fp16:
        model = to_half(model)
    # After the conversion, so that the preparation itself is computed in float32.
    model = prepare_model(model, options.prepare)
    try:
        data = model.SerializeToString()
    except Exception as failure:
        raise EngineBuildFailed(
            f"{source.path} cannot be changed for build.fp16 or build.prepare: it is larger "
            f"than 2 GiB ({failure}): export it that way"
        ) from failure
    return Source(source.path, data, ())
