"""What a person sees in Flower, in a real browser, and what nobody may see there."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.ops.conftest import BURSTS, ROWS_IN_BURST, SHOTS, WORKERS, Running
from tests.support.http import fetch, probe
from tests.support.processes import until

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.ops

RESULT = ("tasks", "rows", "batches", "mean_batch", "failed", "expired", "seconds")
SECRETS = ("admin", "worker", "exporter", "flower", "operator", "client", "flower-login")
MAX_BATCH = 64
# In one step: the pages renew their tables by themselves.
CELLS = """return [...document.querySelectorAll(arguments[0])].map(
    row => [...row.cells].map(cell => cell.innerText.replaceAll('\\n', '').trim()))"""
CLICK = "document.querySelectorAll(arguments[0])[arguments[1]].click()"


def rows(browser: Chrome, table: str) -> list[list[str]]:
    """The cells of a table's body, once it has any: an empty one is a single cell."""

    def filled() -> list[list[str]]:
        found = browser.execute_script(CELLS, f"#{table} tbody tr")
        return [cells for cells in found if len(cells) > 1]

    found: list[list[str]] = until(filled)
    return found


def headers(browser: Chrome, table: str) -> list[str]:
    """The headings of a table."""
    (found,) = browser.execute_script(CELLS, f"#{table} thead tr")
    return [text.upper() for text in found]


def show(browser: Chrome, running: Running, path: str) -> None:
    """Opens a page of Flower."""
    browser.get(running.url("flower", path))


def shoot(browser: Chrome, name: str) -> None:
    """Keeps what the browser shows."""
    assert browser.save_screenshot(SHOTS / f"{name}.png")


def summary(text: str) -> dict[str, float]:
    """A turn's result as shown."""
    return {name: float(number) for name, _, number in (p.partition("=") for p in text.split(", "))}


def turns_in(running: Running, browser: Chrome) -> list[dict[str, str]]:
    """The rows of the tasks page by heading, once every turn has ended there."""
    show(browser, running, "/tasks")
    until(lambda: all(turn["state"] == "SUCCESS" for turn in running.turns()))
    shown = rows(browser, "tasks-table")
    names = headers(browser, "tasks-table")
    return [dict(zip(names, cells, strict=False)) for cells in shown]


def test_who_has_no_login_sees_nothing(running: Running) -> None:
    wrong = {"Authorization": "Basic b3BlcmF0b3I6d3Jvbmc="}
    for path in ("/", "/tasks", "/broker", "/api/workers", "/api/tasks"):
        assert fetch(running.url("flower", path))[0] == 401, path
        assert fetch(running.url("flower", path), **wrong)[0] == 401, path
        assert fetch(running.url("flower", path), **running.login)[0] == 200, path


def test_flower_answers_where_no_login_is_asked(running: Running) -> None:
    assert fetch(running.url("flower", "/healthcheck")) == (200, "OK")
    _, text = fetch(running.url("flower", "/metrics"))
    assert re.search(r'flower_events_total\{task="trtq.serve",type="task-succeeded"', text)


def test_the_workers_page(running: Running, browser: Chrome) -> None:
    show(browser, running, "/workers")
    found = until(
        lambda: len(shown := rows(browser, "workers-table")) == len(WORKERS) and shown, seconds=20
    )
    shoot(browser, "workers")
    by_name = {cells[0].partition("@")[0]: cells for cells in found}
    # Named by their container (here by their service) and their device.
    assert set(by_name) == {f"{worker}-cpu" for worker in WORKERS}
    assert all(cells[1] == "Online" for cells in found)
    columns = headers(browser, "workers-table")
    ran, failed = columns.index("PROCESSED"), columns.index("FAILED")
    assert sum(int(cells[ran]) for cells in found) == len(running.turns()) >= BURSTS
    assert all(cells[failed] == "0" for cells in found)


def test_the_tasks_page_counts_what_was_submitted(running: Running, browser: Chrome) -> None:
    turns = turns_in(running, browser)
    shoot(browser, "tasks")
    assert len(turns) == len(running.turns())
    for turn in turns:
        assert turn["NAME"] == "trtq.serve"
        assert re.fullmatch(r"model=digits, reason=[a-z ]+", turn["ARGS"]), turn
        assert turn["STATE"] == "SUCCESS"
        assert turn["WORKER"].partition("@")[0] in {f"{worker}-cpu" for worker in WORKERS}
        assert turn["RECEIVED"].endswith("ago")
    results = [summary(turn["RESULT"]) for turn in turns]
    assert all(set(RESULT) <= set(result) for result in results)
    total = {name: sum(result[name] for result in results) for name in RESULT}
    assert total["tasks"] == running.answered + running.expired
    assert total["rows"] == running.answered
    assert total["expired"] == total["failed"] == running.expired
    assert ROWS_IN_BURST * BURSTS / MAX_BATCH <= total["batches"] <= total["rows"]
    for result in results:
        assert 0 < result["seconds"] < 30
        if result["batches"]:
            mean = result["rows"] / result["batches"]
            assert mean <= MAX_BATCH
            assert result["mean_batch"] == pytest.approx(mean, abs=0.06)


def test_one_turns_page(running: Running, browser: Chrome) -> None:
    turns = turns_in(running, browser)
    row = next(i for i, turn in enumerate(turns) if summary(turn["RESULT"])["rows"])
    browser.execute_script(CLICK, "#tasks-table tbody a[href*='/task/']", row)
    until(lambda: browser.find_elements("id", "task-page"))
    fields = {
        field.find_element("tag name", "dt").text: field.find_element("tag name", "dd").text
        for field in browser.find_elements("css selector", ".detail-row")
    }
    shoot(browser, "task")
    assert fields["Name"] == "trtq.serve"
    assert fields["Status"] == "SUCCESS"
    assert fields["Arguments"] == turns[row]["ARGS"]
    assert summary(fields["Result"]) == summary(turns[row]["RESULT"])
    assert fields["Worker"].partition("@")[0] in {f"{worker}-cpu" for worker in WORKERS}
    # Looking is all that this page is for.
    assert not browser.find_elements("css selector", "#task-page .btn")


def test_nothing_can_be_stopped_from_flower(running: Running) -> None:
    name = next(turn["worker"] for turn in running.turns())
    status, _ = fetch(
        running.url("flower", f"/api/worker/shutdown/{name}"), method="POST", **running.login
    )
    assert status == 403


def test_the_broker_page(running: Running, browser: Chrome) -> None:
    show(browser, running, "/broker")
    queues = rows(browser, "queue-table")
    shoot(browser, "broker")
    assert ["trtq.digits", "0"] in [cells[:2] for cells in queues]
    assert "redis://flower:**@127.0.0.1" in browser.find_element("tag name", "body").text


def test_no_password_is_shown_or_logged(running: Running, browser: Chrome) -> None:
    _, workers = probe(running.url("flower", "/api/workers?refresh=1"), **running.login)
    (uuid, *_) = [turn["uuid"] for turn in running.turns()]
    pages = ["/", "/tasks", f"/task/{uuid}", "/broker", "/api/workers", "/api/tasks", "/metrics"]
    pages += [f"/worker/{name}" for name in workers]
    texts = {}
    for path in pages:
        status, texts[path] = fetch(running.url("flower", path), **running.login)
        assert status == 200, path
    for service in running.stack.services:
        texts[service.name] = running.stack.log(service.name).read_text(errors="replace")
        texts[f"command of {service.name}"] = " ".join(service.command)
    assert "redis://worker:" in texts["/api/workers"]
    passwords = [running.secret(name).rpartition(":")[2] for name in SECRETS]
    for place, text in texts.items():
        assert not [secret for secret in passwords if secret in text], place
