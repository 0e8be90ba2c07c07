"""Every metric and label of alerts and dashboards is one that workers and the exporter expose."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any, cast

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.ops.conftest import WORKERS, Running
from tests.support.http import fetch
from tests.support.processes import ROOT
from tests.support.promql import TARGET_LABELS, UnknownName, matchers, outputs
from workers.collector import WorkerCollector
from workers.gpu import GpuReader, GpuState

pytestmark = pytest.mark.ops

FOLDER = ROOT / "configs" / "prometheus"
ALERTS = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))
CONFIG = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
DASHBOARD = json.loads((ROOT / "configs/grafana/dashboards/trtq.json").read_text(encoding="utf-8"))
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
#: Families that show no sample here: no engine on a CPU has pinned memory, and no task was refused.
WITHOUT_SAMPLES = {
    "trtq_pinned_bytes": ("trtq_pinned_bytes", {"model"}),
    "trtq_queue_events": ("trtq_queue_events_total", {"model", "event", "reason"}),
}

Exposed = dict[str, set[str]]


class Gpu:
    """A GPU that gives every reading."""

    def read(self) -> GpuState:
        """All of them."""
        return GpuState("GPU-1", "H200", 0.5, 1, 2, 300.0, 40.0)


@pytest.fixture(scope="module")
def exposed(running: Running) -> Exposed:
    """Labels by sample name: a live worker's, the exporter's, and those of a GPU."""
    found: Exposed = {"up": set(TARGET_LABELS)}
    families: list[Any] = []
    for service in (*WORKERS, "exporter"):
        families += text_string_to_metric_families(fetch(running.url(service, "/metrics"))[1])
    families += WorkerCollector(lambda: None, "0", cast(GpuReader, Gpu())).collect()
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
        if not family.samples and family.name in WITHOUT_SAMPLES:
            name, labels = WITHOUT_SAMPLES[family.name]
            found[name] = labels
    return found


def panels() -> Iterator[dict[str, Any]]:
    """The dashboard's panels, those in rows too."""
    for panel in DASHBOARD["panels"]:
        yield from (panel, *panel.get("panels", []))


def queries() -> dict[str, tuple[str, str]]:
    """Expression and legend of each query of the dashboard, with Grafana's variables filled in."""
    return {
        f"{panel['title']} {target['refId']}": (
            target["expr"].replace("$__rate_interval", "5m").replace("$model", ".*"),
            target.get("legendFormat", ""),
        )
        for panel in panels()
        for target in panel.get("targets", [])
    }


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alert_asks_for_what_there_is(rule: dict[str, Any], exposed: Exposed) -> None:
    labels = outputs(rule["expr"], exposed)
    said = "".join(rule["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", said)) <= labels
    assert set(rule["annotations"]) == {"summary", "action"}
    assert rule["labels"]["severity"] in ("warning", "critical")


@pytest.mark.parametrize("name", queries())
def test_panel_asks_for_what_there_is(name: str, exposed: Exposed) -> None:
    expression, legend = queries()[name]
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= outputs(expression, exposed)


def test_names_and_labels_that_are_not_there_are_found(exposed: Exposed) -> None:
    for wrong in (
        "trtq_queue_depth",
        'trtq_queue_tasks{queue="x"}',
        "sum by (device) (trtq_queue_rows)",
        "trtq_queue_rows / on (priority) trtq_queue_max_rows",
        "histogram_quantile(0.5, sum by (model) (rate(trtq_batch_rows_bucket[5m])))",
        "rate(trtq_tasks_answered[5m])",
    ):
        with pytest.raises(UnknownName):
            outputs(wrong, exposed)
    assert outputs("sum without (priority) (trtq_queue_tasks)", exposed) == {
        "model",
        *TARGET_LABELS,
    }


def test_jobs_of_alerts_and_panels_are_those_of_the_configuration() -> None:
    jobs = {job["job_name"] for job in CONFIG["scrape_configs"]}
    expressions = [rule["expr"] for rule in RULES] + [query for query, _ in queries().values()]
    asked = {value for text in expressions for _, label, value in matchers(text) if label == "job"}
    assert asked == {"trtq-worker", "trtq-exporter"} <= jobs


def test_variables_of_the_dashboard_exist(exposed: Exposed) -> None:
    (variable,) = DASHBOARD["templating"]["list"]
    found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"])
    assert found
    assert found[2] in exposed[found[1]]
    assert len({panel["id"] for panel in panels()}) == len(list(panels()))


def test_targets_are_compose_services() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
    for job in CONFIG["scrape_configs"]:
        for search in job.get("dns_sd_configs", []):
            for name in search["names"]:
                assert str(search["port"]) in compose[name]["expose"]
        for static in job.get("static_configs", []):
            for target in static["targets"]:
                name, _, port = target.partition(":")
                assert f"127.0.0.1:{port}:{port}" in compose[name]["ports"]
    workers = {name for name in compose if name.startswith("worker-")}
    assert workers == set(CONFIG["scrape_configs"][0]["dns_sd_configs"][0]["names"])


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
    folder = ROOT / "configs" / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert {panel["datasource"]["uid"] for panel in panels() if "targets" in panel} == {
        source["uid"]
    }
    (provider,) = yaml.safe_load((folder / "dashboards/trtq.yaml").read_text())["providers"]
    mounts = [volume.split(":")[:2] for volume in compose["grafana"]["volumes"]]
    assert ["./configs/grafana/dashboards", provider["options"]["path"]] in mounts


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_agrees(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=FOLDER, capture_output=True, timeout=60, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_to_fire() -> None:
    tests = yaml.safe_load((FOLDER / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    fired = {
        case["alertname"]
        for test in tests
        for case in test.get("alert_rule_test", [])
        if case["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in RULES}
