"""configs/kubernetes: valid, hardened, without secrets, and of one mind with compose.yaml."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import custom_resources
from tests.support.processes import ROOT
from tests.test_deployment import BEYOND_DRAIN_S, SERVICES

FOLDER = ROOT / "configs" / "kubernetes"
KUSTOMIZATIONS = sorted(FOLDER.rglob("kustomization.yaml"))
#: The lowest and the highest version that the manifests are checked against.
VERSIONS = ("1.31", "1.34")
Document = dict[str, Any]


def load(file: Path) -> list[Document]:
    """The file's documents."""
    return [found for found in yaml.safe_load_all(file.read_text(encoding="utf-8")) if found]


DOCUMENTS: list[Document] = [
    document
    for file in sorted(FOLDER.rglob("*.yaml"))
    if file.name != "kustomization.yaml"
    for document in load(file)
]
NATIVE = [one for one in DOCUMENTS if one["kind"] not in custom_resources.SCHEMAS]
CUSTOM = [one for one in DOCUMENTS if one["kind"] in custom_resources.SCHEMAS]
WORKLOADS = {
    one["metadata"]["name"]: one for one in NATIVE if one["kind"] in ("Deployment", "StatefulSet")
}
WORKERS = ["worker-cpu", "worker-gpu"]
#: Workload here -> service in compose.yaml.
COMPOSE_NAMES = {name: {"worker-gpu": "worker-gpu0"}.get(name, name) for name in WORKLOADS}


def named(document: Document) -> str:
    """For test ids and messages."""
    return f"{document['kind']}-{document['metadata']['name']}"


def of_kind(kind: str) -> dict[str, Document]:
    """Documents of a kind by name."""
    return {one["metadata"]["name"]: one for one in DOCUMENTS if one["kind"] == kind}


def pod(name: str) -> Document:
    """The pod's spec of a workload."""
    spec: Document = WORKLOADS[name]["spec"]["template"]["spec"]
    return spec


def container(name: str) -> Document:
    """The one container of a workload."""
    (found,) = pod(name)["containers"]
    return dict(found)


def environment(name: str) -> dict[str, str]:
    """A workload's variables."""
    return {entry["name"]: entry["value"] for entry in container(name).get("env", [])}


def service(name: str) -> Document:
    """The service of compose.yaml, its variables at their defaults."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", json.dumps(SERVICES[COMPOSE_NAMES[name]]))
    return dict(json.loads(text.replace("$$", "$")))


def gibibytes(text: str) -> float:
    """A quantity of memory."""
    found = re.fullmatch(r"(\d+)(Gi|Mi|gb)", text)
    assert found, text
    return int(found[1]) / (1024 if found[2] == "Mi" else 1)


def labels_of(name: str) -> dict[str, str]:
    """The labels of a workload's pods."""
    labels: dict[str, str] = WORKLOADS[name]["spec"]["template"]["metadata"]["labels"]
    return labels


def selects(selector: Document, labels: dict[str, str]) -> bool:
    """Whether a label selector takes pods with `labels`."""
    for expression in selector.get("matchExpressions", []):
        inside = labels.get(expression["key"]) in expression["values"]
        if inside != (expression["operator"] == "In"):
            return False
    return dict(selector.get("matchLabels", {})).items() <= labels.items()


# The schemas.


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_follow_the_schemas_of_kubernetes(version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for document in NATIVE:
        validate.validate(document, version, strict=True)
    broken = copy.deepcopy(WORKLOADS["worker-gpu"])
    broken["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(validate.ValidationError, match="readynessProbe"):
        validate.validate(broken, version, strict=True)


@pytest.mark.parametrize("document", CUSTOM, ids=named)
def test_custom_resources_have_documented_fields_only(document: Document) -> None:
    assert custom_resources.errors(document) == []
    broken = copy.deepcopy(document)
    broken["spec"]["triger"] = []
    assert any("triger" in error for error in custom_resources.errors(broken))


def test_kustomizations_name_every_file_once() -> None:
    listed: list[Path] = []
    for file in KUSTOMIZATIONS:
        (document,) = load(file)
        allowed = {"apiVersion", "kind", "namespace", "resources", "images"}
        assert set(document) <= allowed, file
        assert document["kind"] == "Kustomization"
        assert document["namespace"] == "trtq"
        listed += [file.parent / name for name in document["resources"]]
    found = [file for file in FOLDER.rglob("*.yaml") if file.name != "kustomization.yaml"]
    assert sorted(listed) == sorted(found)


@pytest.mark.parametrize("file", KUSTOMIZATIONS, ids=lambda file: file.parent.name)
def test_kustomize_builds(file: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("needs kubectl")
    done = subprocess.run(
        [kubectl, "kustomize", str(file.parent)], capture_output=True, timeout=60, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    built = [one for one in yaml.safe_load_all(done.stdout) if one]
    (document,) = load(file)
    resources = [one for name in document["resources"] for one in load(file.parent / name)]
    assert sorted(map(named, built)) == sorted(map(named, resources))
    for one in built:
        if one["kind"] != "Namespace":
            assert one["metadata"]["namespace"] == "trtq"
        for image in re.findall(r"'image': '([^']*)'", str(one)):
            assert image.startswith(("registry.example/trtq-", "redis:")), image


def test_every_resource_has_a_name_of_its_own() -> None:
    base = [one for file in FOLDER.glob("*.yaml") for one in load(file)]
    names = [named(one) for one in base if one["kind"] != "Kustomization"]
    assert len(set(names)) == len(names)
    # kustomize puts them all into one namespace, so none says so itself.
    assert not [one for one in DOCUMENTS if "namespace" in one["metadata"]]


# The same as in compose.yaml.


@pytest.mark.parametrize("name", WORKLOADS)
def test_images_commands_and_environment_are_those_of_compose(name: str) -> None:
    ours, theirs = container(name), service(name)
    assert ours["image"] == theirs["image"]
    # `args` is what a compose file calls its command; the images' entry points stay.
    assert "command" not in ours
    assert ours.get("args") == theirs["command"]
    extra = {"TRTQ_PINNED_LIMIT_BYTES"} if name == "worker-gpu" else set()
    env = {key: value for key, value in environment(name).items() if key not in extra}
    assert env == theirs.get("environment", {})
    assert extra <= environment(name).keys()


def test_every_service_of_ours_has_a_workload() -> None:
    # Prometheus and Grafana are the cluster's own.
    ours = set(SERVICES) - {"prometheus", "grafana", "worker-gpu1"}
    assert set(COMPOSE_NAMES.values()) == ours


@pytest.mark.parametrize("name", WORKLOADS)
def test_secrets_and_volumes_are_where_compose_puts_them(name: str) -> None:
    mounts = {one["mountPath"]: one["name"] for one in container(name)["volumeMounts"]}
    volumes = {one["name"]: one for one in pod(name).get("volumes", [])}
    claimed = WORKLOADS[name]["spec"].get("volumeClaimTemplates", [])
    templates = {one["metadata"]["name"] for one in claimed}
    assert set(mounts.values()) == set(volumes) | templates
    sources = volumes[mounts["/run/secrets"]]["projected"]["sources"]
    paths = [item["path"] for one in sources for item in one["secret"]["items"]]
    assert sorted(paths) == sorted(service(name).get("secrets", []))
    for volume in service(name).get("volumes", []):
        source, target = volume.split(":")[:2]
        # The file of Redis' settings is a folder here; a worker on the CPU has its image's models.
        target = str(Path(target).parent) if target.endswith(".conf") else target
        assert target in mounts or (name == "worker-cpu" and source == "./configs/models"), target
    claims = {
        one["persistentVolumeClaim"]["claimName"]
        for one in volumes.values()
        if "persistentVolumeClaim" in one
    }
    assert claims <= set(of_kind("PersistentVolumeClaim"))


def test_the_settings_of_redis_are_the_same() -> None:
    text = (ROOT / "configs" / "redis" / "redis.conf").read_text(encoding="utf-8")
    assert of_kind("ConfigMap")["redis"]["data"] == {"redis.conf": text}


def test_images_have_the_version_of_the_package() -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version
    (document,) = load(FOLDER / "kustomization.yaml")
    built = {one["image"] for one in SERVICES.values() if "build" in one}
    assert {image["name"] for image in document["images"]} == built
    assert {image["newTag"] for image in document["images"]} == {version[1]}


def test_every_variable_is_documented() -> None:
    docs = ROOT / "docs"
    known = (docs / "configuration.md").read_text() + (docs / "operations.md").read_text()
    named_there = set(re.findall(r"`((?:TRTQ|FLOWER)_[A-Z_]+)`", known))
    for name in WORKLOADS:
        assert environment(name).keys() <= named_there, name


# How pods run and end.


@pytest.mark.parametrize("name", WORKLOADS)
def test_pods_are_hardened(name: str) -> None:
    spec, one = pod(name), container(name)
    security = spec["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] > 0
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert one["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["automountServiceAccountToken"] is False
    # Else a Service named `flower` gives Flower its FLOWER_PORT=tcp://...
    assert spec["enableServiceLinks"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC", "hostPath"} & set(
        re.findall(r"\w+", str(spec))
    )
    assert "memory" in one["resources"]["limits"]
    assert "/tmp" in {mount["mountPath"] for mount in one["volumeMounts"]}
    if "build" in service(name):
        dockerfile = (ROOT / service(name)["build"]["dockerfile"]).read_text()
        assert re.findall(r"^USER (\d+)$", dockerfile, re.M)[-1] == str(security["runAsUser"])


@pytest.mark.parametrize("name", WORKERS)
def test_workers_are_probed_on_their_own_port_and_paths(name: str) -> None:
    one, env = container(name), environment(name)
    (port,) = one["ports"]
    assert str(port["containerPort"]) == env["TRTQ_METRICS_PORT"]
    assert env["TRTQ_METRICS_HOST"] == "0.0.0.0"
    source = (ROOT / "workers" / "endpoint.py").read_text()
    for probe, path in (("startup", "/readyz"), ("readiness", "/readyz"), ("liveness", "/healthz")):
        assert one[f"{probe}Probe"]["httpGet"] == {"path": path, "port": port["name"]}
        assert f'"{path}"' in source
    startup = one["startupProbe"]
    patience_s = startup["periodSeconds"] * startup["failureThreshold"]
    assert patience_s >= {"worker-gpu": 30 * 60, "worker-cpu": 120}[name]
    assert WORKLOADS[name]["spec"].get("progressDeadlineSeconds", 600) > patience_s


@pytest.mark.parametrize("name", WORKERS)
def test_workers_may_finish_what_they_run(name: str) -> None:
    grace_s = float(environment(name)["TRTQ_DRAIN_GRACE_S"])
    assert pod(name)["terminationGracePeriodSeconds"] > grace_s + BEYOND_DRAIN_S
    # A hook's time counts as well; SIGTERM drains without one.
    assert "lifecycle" not in container(name)


@pytest.mark.parametrize("name", ["redis", "exporter", "flower"])
def test_the_others_are_probed_as_in_compose(name: str) -> None:
    one = container(name)
    (port,) = one["ports"]
    check = service(name)["healthcheck"]["test"]
    if name == "redis":
        assert one["readinessProbe"]["exec"]["command"] == ["sh", "-c", check[-1]]
        assert one["livenessProbe"]["tcpSocket"] == {"port": port["name"]}
        return
    path = f"/{check[-1].rpartition('/')[2]}"
    assert check[-1] == f"http://127.0.0.1:{port['containerPort']}{path}"
    for probe in ("readinessProbe", "livenessProbe"):
        assert one[probe]["httpGet"] == {"path": path, "port": port["name"]}


def test_a_worker_has_one_gpu_of_a_named_type() -> None:
    spec, one = pod("worker-gpu"), container("worker-gpu")
    assert one["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec[
        "tolerations"
    ]
    required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = required["nodeSelectorTerms"]
    (expression,) = term["matchExpressions"]
    assert expression["key"] == "nvidia.com/gpu.product"
    # No GPU is free for a second worker while the first one drains.
    assert WORKLOADS["worker-gpu"]["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0
    for name in WORKERS:
        assert "replicas" not in WORKLOADS[name]["spec"], "an autoscaler's number would be lost"


def test_memory_limits_hold_what_is_asked_for() -> None:
    args = container("redis")["args"]
    limit = gibibytes(container("redis")["resources"]["limits"]["memory"])
    assert limit >= 2 * gibibytes(args[args.index("--maxmemory") + 1])
    limits = container("worker-gpu")["resources"]["limits"]
    pinned = int(environment("worker-gpu")["TRTQ_PINNED_LIMIT_BYTES"]) / (1 << 30)
    (shm,) = (one for one in pod("worker-gpu")["volumes"] if one["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"
    assert pinned + gibibytes(shm["emptyDir"]["sizeLimit"]) < gibibytes(limits["memory"]) / 2


def test_budgets_and_services_select_the_pods() -> None:
    for name in WORKERS:
        budget = of_kind("PodDisruptionBudget")[name]["spec"]
        assert [one for one in WORKLOADS if selects(budget["selector"], labels_of(one))] == [name]
    for name, one in of_kind("Service").items():
        selector = {"matchLabels": one["spec"]["selector"]}
        assert [found for found in WORKLOADS if selects(selector, labels_of(found))] == [name]
        assert one["spec"].get("type", "ClusterIP") == "ClusterIP"
        ports = {port["name"] for port in container(name)["ports"]}
        assert {port["targetPort"] for port in one["spec"]["ports"]} <= ports
    for name, workload in WORKLOADS.items():
        assert selects(workload["spec"]["selector"], labels_of(name))


# Who may reach whom, and secrets.


def sources(policy: Document) -> list[Document]:
    """Those that a policy lets in."""
    return [source for rule in policy["spec"]["ingress"] for source in rule["from"]]


def test_only_those_with_business_there_reach_redis_and_metrics() -> None:
    policies = of_kind("NetworkPolicy")
    deny = policies["nothing-else"]["spec"]
    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    redis, metrics = policies["to-redis"], policies["to-metrics"]
    assert selects(redis["spec"]["podSelector"], labels_of("redis"))
    inside = [one["podSelector"] for one in sources(redis) if "namespaceSelector" not in one]
    for name in WORKLOADS:
        let_in = any(selects(selector, labels_of(name)) for selector in inside)
        assert let_in == (name != "redis"), name
    producer = {"trtq/producer": "true"}
    outside = [one for one in sources(redis) if "namespaceSelector" in one]
    assert [one["podSelector"]["matchLabels"] for one in outside] == [producer]
    assert any(selects(selector, producer) for selector in inside)
    assert not any(selects(selector, {}) for selector in inside)
    for name in WORKLOADS:
        chosen = selects(metrics["spec"]["podSelector"], labels_of(name))
        assert chosen == (name != "redis"), name
    (prometheus,) = sources(metrics)
    assert prometheus["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "prometheus"}
    ports = {port["port"] for rule in metrics["spec"]["ingress"] for port in rule["ports"]}
    assert ports == {
        port["name"] for name in WORKLOADS if name != "redis" for port in container(name)["ports"]
    }


def test_clients_of_redis_may_call_it() -> None:
    policy = of_kind("NetworkPolicy")["from-clients-of-redis"]["spec"]
    chosen = [name for name in WORKLOADS if selects(policy["podSelector"], labels_of(name))]
    assert chosen == [name for name in WORKLOADS if name != "redis"]
    to_redis, to_dns = policy["egress"]
    (target,) = to_redis["to"]
    assert selects(target["podSelector"], labels_of("redis"))
    assert to_redis["ports"] == [{"port": container("redis")["ports"][0]["containerPort"]}]
    assert {port["port"] for port in to_dns["ports"]} == {53}


def test_manifests_hold_no_secret_and_the_guide_makes_all() -> None:
    assert not of_kind("Secret")
    for name in WORKLOADS:
        for value in environment(name).values():
            assert not re.search(r"://[^@/]*:[^@/]*@", value)
    wanted = set()
    for document in DOCUMENTS:
        for found in re.findall(r'"secret": (\{.*?\]\})', json.dumps(document)):
            secret = json.loads(found)
            wanted |= {(secret["name"], item["key"]) for item in secret["items"]}
        for reference in document.get("spec", {}).get("secretTargetRef", []):
            wanted.add((reference["name"], reference["key"]))
    guide = (ROOT / "docs" / "kubernetes.md").read_text().replace("\\\n", " ")
    made = {
        (name, key)
        for name, rest in re.findall(r"create secret generic ([\w-]+)(.*)", guide)
        for key in re.findall(r"--from-(?:file|literal)=([\w.-]+)=", rest)
    }
    assert wanted == made


# Scaling.


@pytest.mark.parametrize("folder", ["scale-on-length", "scale-on-metrics"])
def test_scaled_objects_scale_what_is_there(folder: str) -> None:
    documents = load(FOLDER / folder / "scaled-object.yaml")
    (scaled,) = (one["spec"] for one in documents if one["kind"] == "ScaledObject")
    assert scaled["scaleTargetRef"]["name"] in WORKERS
    assert scaled["minReplicaCount"] <= scaled["fallback"]["replicas"] <= scaled["maxReplicaCount"]
    # KEDA refuses a fallback where no trigger is an average.
    assert any(trigger["metricType"] == "AverageValue" for trigger in scaled["triggers"])
    references = {
        trigger["authenticationRef"]["name"]
        for trigger in scaled["triggers"]
        if "authenticationRef" in trigger
    }
    there = {one["metadata"]["name"] for one in documents if one["kind"] == "TriggerAuthentication"}
    assert references == there
    assert all(before["name"] != after["name"] for before, after in pairwise(scaled["triggers"]))


def test_pod_monitors_find_the_pods_and_name_their_jobs() -> None:
    jobs = {}
    for monitor in of_kind("PodMonitor").values():
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        chosen = [one for one in WORKLOADS if selects(monitor["spec"]["selector"], labels_of(one))]
        assert chosen
        for name in chosen:
            assert endpoint["port"] in {port["name"] for port in container(name)["ports"]}
        relabelings = {one["targetLabel"]: one for one in endpoint["relabelings"]}
        jobs[relabelings["job"]["replacement"]] = chosen
    prometheus = yaml.safe_load((ROOT / "configs/prometheus/prometheus.yml").read_text())
    assert set(jobs) == {one["job_name"] for one in prometheus["scrape_configs"]}
    assert sorted(jobs["trtq-worker"]) == WORKERS
