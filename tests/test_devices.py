"""Which device a text names, what CUDA_VISIBLE_DEVICES leaves of it, and what a worker gets."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from producer.cli import app
from producer.embedded import free_port
from producer.errors import ConfigError, MissingExtra, NoDevice
from producer.keys import check_name
from tests.support import models as onnx_models
from tests.support.fake_nvml import FakeGpu, FakeNvml
from tests.support.http import scrape, value
from tests.support.processes import ROOT, children, start_worker, until
from workers import devices as devices_module
from workers import launch
from workers.devices import CPU, WorkerDevice, limit_to_device, parse_devices
from workers.gpu import gpu_reader
from workers.launch import Plan
from workers.pinning import Gpu, find_gpus, list_gpus

A, B, C = "GPU-aaaa1111-0", "GPU-aaaa2222-0", "GPU-cccc3333-0"
M, N = "MIG-11112222-3333", "MIG-11114444-5555"
TWO = (FakeGpu(A, frozenset({0})), FakeGpu(B, frozenset({1})))
#: The third has MIG on.
THREE = (*TWO, FakeGpu(C, frozenset({0, 1}), mig=(M, N)))

Install = Callable[..., FakeNvml]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a fake driver in pynvml's place; every init must have its shutdown."""
    made: list[FakeNvml] = []

    def put(*gpus: FakeGpu, driver: bool = True) -> FakeNvml:
        made.append(FakeNvml(gpus, driver=driver))
        monkeypatch.setitem(sys.modules, "pynvml", made[-1])
        return made[-1]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield put
    assert all(nvml.opened == 0 for nvml in made)


def seen(text: str, **environ: str) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each device that `text` names."""
    found = parse_devices(text, environ=environ)
    return [device.cuda_env.get("CUDA_VISIBLE_DEVICES", "") for device in found]


def test_every_nvml_name_that_the_code_calls_is_the_real_modules_and_the_fakes() -> None:
    real = pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    text = "".join((ROOT / "workers" / f"{name}.py").read_text() for name in ("pinning", "gpu"))
    called = set(re.findall(r"nvml\.(\w+)", text)) - {"NVMLError"}
    assert len(called) > 10
    for name in called:
        theirs, ours = getattr(real, name), getattr(FakeNvml(), name)
        if callable(theirs):
            known = list(inspect.signature(theirs).parameters.values())
            needed = [p.name for p in known if p.default is p.empty]
            assert list(inspect.signature(ours).parameters) == needed, name
        else:
            assert theirs == ours, name
    assert issubclass(real.NVMLError, Exception)


def test_the_real_module_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pytest.importorskip("pynvml", reason="needs nvidia-ml-py")

    def refuse(flags: int) -> None:
        raise real.NVMLError(real.NVML_ERROR_DRIVER_NOT_LOADED)

    monkeypatch.setattr(real, "nvmlInitWithFlags", refuse)
    with pytest.raises(NoDevice, match=r"no NVIDIA driver answers \(Driver Not Loaded\)"):
        parse_devices("0")


def test_gpus_with_near_cores_and_mig_devices() -> None:
    nvml = FakeNvml(
        [
            FakeGpu("GPU-a", frozenset({0, 63, 64, 65, 200})),
            FakeGpu("GPU-lost", lost=True),
            FakeGpu("GPU-c", None, mig=(M, N)),
            FakeGpu("GPU-d", frozenset({7}), mig=()),
        ]
    )
    nvml.nvmlInit()
    none: frozenset[int] = frozenset()
    name = "NVIDIA H200"
    assert list_gpus(nvml, {1, 63, 65, 200}) == [
        Gpu(0, "GPU-a", name, frozenset({63, 65, 200}), None),
        Gpu(2, "GPU-c", name, none, (M, N)),
        Gpu(3, "GPU-d", name, none, ()),
    ]


def test_near_cores_are_cores_that_this_process_may_use(install: Install) -> None:
    allowed = os.sched_getaffinity(0)
    install(FakeGpu(A, frozenset(allowed | {4000})), FakeGpu(B, frozenset({4001})))
    gpus = find_gpus()
    assert gpus is not None
    assert [gpu.cores for gpu in gpus] == [allowed, frozenset()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpu", [""]),
        ("0", [A]),
        ("1, 0", [B, A]),
        ("cpu,1", ["", B]),
        ("all", [A, B, M, N]),
        (A, [A]),
        ("GPU-aaaa2", [B]),
        (f"{M},0", [M, A]),
        ("MIG-11114", [N]),
    ],
)
def test_devices(install: Install, text: str, expected: list[str]) -> None:
    install(*THREE)
    assert seen(text) == expected


def test_what_a_worker_is_told(install: Install) -> None:
    install(*(FakeGpu(gpu.uuid, None, gpu.mig) for gpu in THREE))
    assert parse_devices(f"cpu,1,{N}") == [
        CPU,
        WorkerDevice("1", "gpu1", {"CUDA_VISIBLE_DEVICES": B}),
        WorkerDevice(N, "gpu-11114444", {"CUDA_VISIBLE_DEVICES": N}),
    ]


def test_mig_names_of_older_drivers_make_node_names(install: Install) -> None:
    old = tuple(f"MIG-{C}/{instance}/0" for instance in (7, 8))
    install(FakeGpu(C, mig=old))
    found = parse_devices("all", environ={})
    assert [device.node for device in found] == ["gpu-cccc3333-7-0", "gpu-cccc3333-8-0"]
    assert [device.device for device in found] == list(old)
    assert all(check_name(device.node) for device in found)


@pytest.mark.parametrize("text", ["", "gpu", "0,all", "all,all", "-1", "0,", "GPU", "1.0", "²"])
def test_what_is_no_device(install: Install, text: str) -> None:
    install(*THREE)
    with pytest.raises(ConfigError, match=re.escape(f"--devices {text!r}: use cpu, all")):
        parse_devices(text)


@pytest.mark.parametrize("text", ["3", "GPU-bbbb", "MIG-9", "0,17"])
def test_an_unknown_device_is_answered_with_the_known_ones(install: Install, text: str) -> None:
    install(*THREE)
    with pytest.raises(ConfigError, match=rf"no such device; .*0 \(NVIDIA H200, {A}\).*MIG: {M}"):
        parse_devices(text)


@pytest.mark.parametrize("text", ["0,0", "0,GPU-aaaa1", f"{M},{M}", "cpu,cpu", "1,01"])
def test_a_device_named_twice(install: Install, text: str) -> None:
    install(*THREE)
    with pytest.raises(ConfigError, match="twice"):
        parse_devices(text)


@pytest.mark.parametrize(("text", "several"), [("GPU-aaaa", f"{A}, {B}"), ("MIG-1", f"{M}, {N}")])
def test_a_start_that_several_share(install: Install, text: str, several: str) -> None:
    install(*THREE)
    with pytest.raises(ConfigError, match=f"{text} may be any of {several}"):
        parse_devices(text)


@pytest.mark.parametrize("text", ["2", "GPU-cccc"])
def test_a_gpu_with_mig_on_is_used_by_its_mig_devices(install: Install, text: str) -> None:
    install(*THREE)
    with pytest.raises(ConfigError, match=f"GPU 2 has MIG on.*{M}, {N}"):
        parse_devices(text)


def test_no_gpu_and_no_driver(install: Install) -> None:
    install()
    with pytest.raises(NoDevice, match="no NVIDIA GPU"):
        parse_devices("all")
    install(FakeGpu(C, mig=()))
    with pytest.raises(NoDevice, match="none can be used"):
        parse_devices("all")
    nvml = install(driver=False)
    with pytest.raises(NoDevice, match="no NVIDIA driver answers"):
        parse_devices("0")
    assert parse_devices("cpu") == [CPU]
    assert nvml.opened == 0


def test_without_nvml_indices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    by_bus = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert parse_devices("cpu,01", environ={}) == [CPU, WorkerDevice("1", "gpu1", by_bus)]
    assert seen("1", CUDA_VISIBLE_DEVICES="0, 1") == ["1"]
    for text in ("all", A, M):
        with pytest.raises(MissingExtra, match=r"trtq\[gpu\]"):
            parse_devices(text, environ={})
    for visible in ("0,2", "", A):
        with pytest.raises(ConfigError, match=f"CUDA_VISIBLE_DEVICES='{visible}'"):
            seen("1", CUDA_VISIBLE_DEVICES=visible)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("1", [B]),
        (f"{M}, 0", [A, M]),
        ("GPU-aaaa2", [B]),
        # As CUDA: what follows a name that is none does not count.
        ("0,9,1", [A]),
        ("0,-1,1", [A]),
        ("1,2,0", [B]),
    ],
)
def test_all_within_what_the_process_may_see(
    install: Install, visible: str, expected: list[str]
) -> None:
    install(*THREE)
    assert seen("all", CUDA_VISIBLE_DEVICES=visible) == expected


@pytest.mark.parametrize("visible", ["", "-1", "2", "none", "GPU-aaaa"])
def test_a_process_that_may_see_nothing(install: Install, visible: str) -> None:
    install(*THREE)
    with pytest.raises(NoDevice, match=f"none within CUDA_VISIBLE_DEVICES='{visible}'"):
        seen("all", CUDA_VISIBLE_DEVICES=visible)
    with pytest.raises(ConfigError, match="may use none of"):
        seen("0", CUDA_VISIBLE_DEVICES=visible)
    assert seen("cpu", CUDA_VISIBLE_DEVICES=visible) == [""]


def test_a_device_outside_is_refused_with_what_is_inside(install: Install) -> None:
    install(*THREE)
    assert seen("1", CUDA_VISIBLE_DEVICES="1,0") == [B]
    with pytest.raises(ConfigError, match=rf"--devices 1: CUDA_VISIBLE_DEVICES='0' .* use {A} of"):
        seen("0,1", CUDA_VISIBLE_DEVICES="0")


def test_indices_that_count_by_speed_on_a_machine_of_several_kinds(install: Install) -> None:
    install(TWO[0], FakeGpu(B, name="NVIDIA A2"))
    assert seen("all", CUDA_VISIBLE_DEVICES=B) == [B]
    assert seen("all", CUDA_VISIBLE_DEVICES="1", CUDA_DEVICE_ORDER="PCI_BUS_ID") == [B]
    with pytest.raises(ConfigError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        seen("all", CUDA_VISIBLE_DEVICES="1")


def test_a_process_limits_itself_and_a_second_time_changes_nothing(install: Install) -> None:
    install(*THREE)
    environ = {"CUDA_VISIBLE_DEVICES": f"0,{M}"}
    assert limit_to_device("MIG-11112", environ) == M
    assert environ == {"CUDA_VISIBLE_DEVICES": M}
    assert limit_to_device(M, environ) == M
    assert environ == {"CUDA_VISIBLE_DEVICES": M}
    with pytest.raises(ConfigError, match="TRTQ_DEVICE 1: CUDA_VISIBLE_DEVICES="):
        limit_to_device("1", environ)
    for text in ("all", f"{M},cpu"):
        with pytest.raises(ConfigError, match="a process uses one device"):
            limit_to_device(text, environ)
    environ = {"CUDA_VISIBLE_DEVICES": "0"}
    assert limit_to_device("cpu", environ) == "cpu"
    assert environ == {"CUDA_VISIBLE_DEVICES": "0"}


def test_readings_of_a_gpu_and_of_a_mig_device(install: Install) -> None:
    nvml = install(*THREE)
    for device in ("0", A):
        reader = gpu_reader(device)
        assert reader is not None
        state = reader.read()
        assert state is not None
        assert (state.uuid, state.utilization_ratio, state.power_watts) == (A, 0.5, 250.5)
        reader.close()
    reader = gpu_reader(N)
    assert reader is not None
    state = reader.read()
    assert state is not None
    assert (state.uuid, state.memory_total_bytes) == (N, (140 << 30) // 7)
    assert state.utilization_ratio is state.power_watts is state.temperature_celsius is None
    reader.close()
    assert gpu_reader("cpu") is gpu_reader("9") is gpu_reader("MIG-no") is None
    assert nvml.opened == 0


def fake_driver(folder: Path, gpus: str) -> str:
    """A PYTHONPATH on which `import pynvml` finds a fake driver with `gpus`."""
    (folder / "pynvml.py").write_text(
        "from tests.support.fake_nvml import FakeGpu, FakeNvml\n"
        f"_nvml = FakeNvml([{gpus}])\n"
        "def __getattr__(name):\n    return getattr(_nvml, name)\n"
    )
    return os.pathsep.join([str(folder), str(ROOT)])


def environment(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if pair)


def cores_of_threads(pid: int) -> set[frozenset[int]]:
    return {
        frozenset(os.sched_getaffinity(int(task.name)))
        for task in Path(f"/proc/{pid}/task").iterdir()
    }


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    onnx_models.checksum_model(folder / "checksum.onnx", 16)
    onnx_models.write_config(folder, "checksum", max_batch=8, threads=1)
    return folder


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPU cores")
@pytest.mark.parametrize("affinity", [True, False])
def test_real_workers_on_their_devices_and_cores(
    redis_url: str, tmp_path: Path, models: Path, affinity: bool
) -> None:
    allowed = frozenset(os.sched_getaffinity(0))
    first, second, *_ = sorted(allowed)
    path = fake_driver(
        tmp_path,
        f"FakeGpu({A!r}, frozenset({{{first}}})), FakeGpu({B!r}, frozenset({{4000}})), "
        f"FakeGpu({C!r}, frozenset({{{second}}}), mig=({M!r},))",
    )
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, "-m", "producer.cli", "worker", "--devices", f"0,1,{M[:8]}"]
    command += ["--models", str(models), "--metrics-port", str(port)]
    environ = {**os.environ, "TRTQ_REDIS_URL": redis_url, "PYTHONPATH": path}
    environ |= {} if affinity else {"TRTQ_AFFINITY": "0"}
    environ.pop("CUDA_VISIBLE_DEVICES", None)
    with log.open("wb") as output:
        supervisor = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        until(lambda: log.read_text(errors="replace").count(" ready.") == 4, 90)
        assert frozenset(os.sched_getaffinity(supervisor.pid)) == allowed
        found = {
            (env["TRTQ_DEVICE"], env.get("CUDA_VISIBLE_DEVICES")): cores_of_threads(pid)
            for pid in children(supervisor.pid)
            if (env := environment(pid))
        }
        near = {"0": {first}, M: {second}} if affinity else {}
        # B's near cores are none that this process may use.
        assert found == {
            (device, cuda): {frozenset(near.get(device, allowed))}
            for device, cuda in (("0", A), ("1", B), (M, M), ("cpu", None))
        }
        text = log.read_text(errors="replace")
        assert all(f"{node}@" in text for node in ("gpu0", "gpu1", "gpu-11112222", "infer"))
        samples = scrape(f"http://127.0.0.1:{port + 2}/metrics")
        labels = {"name": "NVIDIA H200 MIG 1g.18gb", "gpu": M}
        assert value(samples, "trtq_worker_healthy", device=M) == 1
        assert samples["trtq_gpu_memory_used_bytes", tuple(sorted(labels.items()))] == 5 << 20
        assert not [name for name, _ in samples if name == "trtq_gpu_power_watts"]
        supervisor.terminate()
        assert supervisor.wait(30) == 0
    finally:
        supervisor.kill()
        supervisor.wait(10)


@pytest.mark.parametrize(
    ("options", "cores"), [(["--affinity"], {0}), ([], {0}), (["--no-affinity"], set())]
)
def test_the_option_for_affinity(
    install: Install,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    redis_url: str,
    options: list[str],
    cores: set[int],
) -> None:
    install(FakeGpu(A, frozenset({0})))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    launched: list[Plan] = []
    monkeypatch.setattr(launch, "launch", lambda plans: launched.extend(plans) or 0)
    command = ["worker", "--devices", "all", "--models", str(models), "--redis-url", redis_url]
    command += options
    assert CliRunner().invoke(app, command).exit_code == 0
    assert [plan.cores for plan in launched] == [cores, set()]


def test_the_command_names_the_known_devices(tmp_path: Path, models: Path) -> None:
    path = fake_driver(tmp_path, f"FakeGpu({A!r})")
    command = [sys.executable, "-m", "producer.cli", "worker", "--devices", "1"]
    done = subprocess.run(
        [*command, "--models", str(models)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 78
    assert f"no such device; there are 0 (NVIDIA H200, {A})" in " ".join(done.stderr.split())


def test_a_worker_of_plain_celery_limits_itself(
    redis_url: str, tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fake_driver(tmp_path, f"FakeGpu({A!r}), FakeGpu({B!r})")
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    worker = start_worker(redis_url, models, device="1", wait=False)
    assert worker.process.wait(60) == 78
    assert "TRTQ_DEVICE 1: CUDA_VISIBLE_DEVICES='0' does not let this process" in worker.text


@pytest.mark.parametrize(
    ("device", "visible", "message"),
    [
        ("cpu", "0", r"models \['net'\] have `engine: tensorrt`, and this worker has no GPU"),
        ("0", "", "CUDA_VISIBLE_DEVICES='' does not let this process use it"),
    ],
    ids=["cpu", "none visible"],
)
def test_tensorrt_without_a_gpu_is_refused_at_start(
    redis_url: str,
    tmp_path: Path,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    visible: str,
    message: str,
) -> None:
    monkeypatch.setenv("PYTHONPATH", fake_driver(tmp_path, f"FakeGpu({A!r})"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (models / "net.yaml").write_text("path: checksum.onnx\nengine: tensorrt\n")
    worker = start_worker(redis_url, models, device=device, wait=False)
    assert worker.process.wait(60) == 78
    assert re.search(message, worker.text)


def test_models_of_another_workers_device_are_no_hindrance(redis_url: str, models: Path) -> None:
    (models / "net.yaml").write_text("path: checksum.onnx\nengine: tensorrt\n")
    worker = start_worker(redis_url, models, queues="trtq.checksum")
    assert worker.stop() == 0


def test_no_pool_that_forks_and_no_gpu_library_before_it_is_needed(
    redis_url: str, models: Path
) -> None:
    code = (
        "import sys, workers.launch, workers.devices, workers.app;"
        "workers.launch.make_plans(workers.devices.parse_devices('cpu'), redis_url='r', models=[]);"
        "print(sorted({'pycuda', 'pynvml', 'tensorrt', 'nvtx'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
    worker = start_worker(redis_url, models, pool="prefork")
    try:
        assert children(worker.process.pid) == []
    finally:
        worker.stop()


def test_the_environment_is_read_when_asked(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(*TWO)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [device.device for device in devices_module.parse_devices("all")] == ["1"]
