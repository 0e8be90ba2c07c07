"""`--devices` and TRTQ_DEVICE: which device a text names, and whether this process may use it."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import NamedTuple

from producer.errors import ConfigError, MissingExtra, NoDevice
from workers.pinning import Gpu, find_gpus

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ORDER = "CUDA_DEVICE_ORDER"
_BY_BUS = "PCI_BUS_ID"
_UUID_STARTS = ("GPU-", "MIG-")


class WorkerDevice(NamedTuple):
    """The device of one worker process."""

    #: Its TRTQ_DEVICE: "cpu", the index of a GPU in bus order, or the UUID of a MIG device.
    device: str
    #: Its part of the node name: cpu, gpu0, or for a MIG device gpu-1f2e3d4c.
    node: str
    #: What shows the process this GPU and no other.
    cuda_env: Mapping[str, str] = {}
    #: CPU cores near it, of those that this process may use; empty if not known.
    cores: frozenset[int] = frozenset()


CPU = WorkerDevice("cpu", "cpu")


def parse_devices(
    text: str, *, option: str = "--devices", environ: Mapping[str, str] = os.environ
) -> list[WorkerDevice]:
    """The devices that `text` names: `cpu`, `all`, or indices and UUIDs like `0,GPU-8932f937`.

    Indices count as NVML and nvidia-smi do, by PCI bus. A UUID may be cut short while it is one
    device's alone. `all` is every GPU, or its MIG devices where MIG is on. CUDA_VISIBLE_DEVICES
    of `environ` limits what may be named.

    Without the package nvidia-ml-py indices alone are taken, and nobody checks that they exist.
    Raises ConfigError for what cannot be used, NoDevice without a GPU, MissingExtra.
    """
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if names != ["all"] and not _is_name(name):
            raise ConfigError(
                f"{option} {text!r}: use cpu, all, GPU indices like 0,1 or UUIDs like GPU-8932f937"
            )
    if names == ["cpu"]:
        return [CPU]
    gpus = find_gpus()
    if gpus is None:
        devices = [_unchecked(name, option, environ) for name in names]
    else:
        devices = _Choice(gpus, option, environ).devices(names)
    if len({device.device for device in devices}) < len(devices):
        raise ConfigError(f"{option} {text!r} names a device twice")
    return devices


def limit_to_device(text: str, environ: MutableMapping[str, str] = os.environ) -> str:
    """Shows this process the one device that TRTQ_DEVICE=`text` names; returns its full name.

    Call it before CUDA is initialised. Raises as parse_devices.
    """
    devices = parse_devices(text, option="TRTQ_DEVICE", environ=environ)
    if len(devices) > 1 or text.strip() == "all":
        raise ConfigError(
            f"TRTQ_DEVICE {text!r}: a process uses one device; `trtq worker --devices {text}` "
            "starts one for each"
        )
    environ.update(devices[0].cuda_env)
    return devices[0].device


def _is_name(name: str) -> bool:
    return name == "cpu" or _is_index(name) or name.startswith(_UUID_STARTS)


def _is_index(name: str) -> bool:
    return name.isascii() and name.isdigit()


def _unchecked(name: str, option: str, environ: Mapping[str, str]) -> WorkerDevice:
    if name == "cpu":
        return CPU
    if not _is_index(name):
        raise MissingExtra(
            f"{option} {name} needs NVIDIA's management library: pip install 'trtq[gpu]'"
        )
    index, visible = str(int(name)), environ.get(_VISIBLE)
    if visible is not None and index not in [part.strip() for part in visible.split(",")]:
        raise ConfigError(
            f"{option} {name}: {_VISIBLE}={visible!r} does not let this process use it (UUIDs in "
            "there are understood with NVIDIA's management library: pip install 'trtq[gpu]')"
        )
    return WorkerDevice(index, f"gpu{index}", {_VISIBLE: index, _ORDER: _BY_BUS})


class _Choice:
    """Finds devices among `gpus`, within CUDA_VISIBLE_DEVICES of `environ`."""

    def __init__(self, gpus: Sequence[Gpu], option: str, environ: Mapping[str, str]) -> None:
        self._gpus = gpus
        self._option = option
        self._environ = environ

    def devices(self, names: Sequence[str]) -> list[WorkerDevice]:
        """Each name's device; `all` alone for every one that may be used."""
        visible = self._visible()
        if not self._gpus and names != ["cpu"]:
            raise NoDevice(f"{self._option}: this machine has no NVIDIA GPU; use --devices cpu")
        if names == ["all"]:
            return self._all(visible)
        return [self._device(name, visible) for name in names]

    def _all(self, visible: list[str] | None) -> list[WorkerDevice]:
        usable = [
            _worker_device(gpu, uuid)
            for gpu in self._gpus
            for uuid in gpu.usable_uuids
            if visible is None or uuid in visible
        ]
        if not usable:
            limit = "" if visible is None else f" within {self._limit()}"
            raise NoDevice(f"{self._option} all: none{limit} can be used of {self._known()}")
        return usable

    def _device(self, name: str, visible: list[str] | None) -> WorkerDevice:
        if name == CPU.device:
            return CPU
        gpu, uuid = self._find(name, f"{self._option} {name}")
        if visible is not None and uuid not in visible:
            raise ConfigError(
                f"{self._option} {name}: {self._limit()} does not let this process use it; it may "
                f"use {', '.join(visible) or 'none'} of {self._known()}"
            )
        return _worker_device(gpu, uuid)

    def _visible(self) -> list[str] | None:
        """UUIDs that CUDA_VISIBLE_DEVICES leaves; None if it is not set."""
        text = self._environ.get(_VISIBLE)
        if text is None:
            return None
        names = [part.strip() for part in text.split(",")]
        by_speed = self._environ.get(_ORDER) != _BY_BUS
        if by_speed and any(map(_is_index, names)) and len({gpu.name for gpu in self._gpus}) > 1:
            raise ConfigError(
                f"{self._limit()} counts GPUs by speed, and this machine has several kinds "
                f"({self._known()}): set {_ORDER}={_BY_BUS} or name them by UUID"
            )
        found = []
        for name in names:
            try:
                found.append(self._find(name, _VISIBLE)[1])
            except ConfigError:
                break  # as CUDA: what follows a name that is none is not visible
        return found

    def _find(self, name: str, asked: str) -> tuple[Gpu, str]:
        if _is_index(name):
            gpus = [gpu for gpu in self._gpus if gpu.index == int(name)]
        elif name.startswith("GPU-"):
            gpus = [gpu for gpu in self._gpus if gpu.uuid.startswith(name)]
        else:
            start = name if name.startswith("MIG-") else "no device"
            pairs = [(gpu, uuid) for gpu in self._gpus for uuid in gpu.mig_uuids or ()]
            found = [(gpu, uuid) for gpu, uuid in pairs if uuid.startswith(start)]
            return self._one(found, asked)
        gpu, uuid = self._one([(gpu, gpu.uuid) for gpu in gpus], asked)
        if gpu.mig_uuids is not None:
            raise ConfigError(
                f"{asked}: GPU {gpu.index} has MIG on and is used by its MIG devices: "
                f"{', '.join(gpu.mig_uuids) or 'none was made yet'}"
            )
        return gpu, uuid

    def _one(self, found: list[tuple[Gpu, str]], asked: str) -> tuple[Gpu, str]:
        if not found:
            raise ConfigError(f"{asked}: there is no such device; there are {self._known()}")
        if len(found) > 1:
            several = ", ".join(uuid for _, uuid in found)
            raise ConfigError(f"{asked} may be any of {several}: give more of the UUID")
        return found[0]

    def _limit(self) -> str:
        return f"{_VISIBLE}={self._environ.get(_VISIBLE, '')!r}"

    def _known(self) -> str:
        texts = []
        for gpu in self._gpus:
            mig = "" if gpu.mig_uuids is None else f", MIG: {' '.join(gpu.mig_uuids) or 'none'}"
            texts.append(f"{gpu.index} ({gpu.name}, {gpu.uuid}{mig})")
        return "; ".join(texts)


def _worker_device(gpu: Gpu, uuid: str) -> WorkerDevice:
    env = {_VISIBLE: uuid}
    if uuid == gpu.uuid:
        return WorkerDevice(str(gpu.index), f"gpu{gpu.index}", env, gpu.cores)
    # MIG-<uuid>, or from older drivers MIG-GPU-<uuid>/<GPU instance>/<compute instance>.
    first, *instances = uuid.removeprefix("MIG-").removeprefix("GPU-").split("/")
    return WorkerDevice(uuid, "-".join(["gpu", first[:8], *instances]), env, gpu.cores)
