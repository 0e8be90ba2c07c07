"""The stack of compose.yaml as processes, with traffic, and a browser that looks at it."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from examples.stack import Stack, stack
from producer import Client
from producer.errors import DeadlineExceeded
from tests.support.http import probe, scrape, value
from tests.support.processes import ROOT, until

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

WORKERS = ("worker-cpu-1", "worker-cpu-2")
BURSTS = 3
ROWS_IN_BURST = 200
EXPIRED = 2
#: Where a person finds what the browser saw.
SHOTS = ROOT / "build" / "ops"


@dataclass
class Running:
    """The stack, where its secrets are, and what was submitted to the model `digits`."""

    stack: Stack
    secrets: Path
    answered: int
    expired: int

    def url(self, service: str, path: str = "") -> str:
        """A page of a service."""
        return f"http://127.0.0.1:{self.stack.service(service).port}{path}"

    def redis_url(self, user: str) -> str:
        """Redis for one of its users."""
        port = self.stack.service("redis").port
        return f"redis://{user}:{self.secret(user)}@127.0.0.1:{port}/0"

    def secret(self, name: str) -> str:
        """The text of a secret's file."""
        return (self.secrets / name).read_text().strip()

    @property
    def login(self) -> dict[str, str]:
        """The header of Flower's login."""
        token = base64.b64encode(self.secret("flower-login").encode()).decode()
        return {"Authorization": f"Basic {token}"}

    def turns(self) -> list[dict[str, Any]]:
        """The turns of which Flower knows, by its API."""
        _, tasks = probe(self.url("flower", "/api/tasks?taskname=trtq.serve"), **self.login)
        return list(tasks.values())


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Redis, two workers, the exporter and Flower; tasks have been submitted and answered."""
    folder = tmp_path_factory.mktemp("ops")
    secrets = folder / "secrets"
    with pytest.MonkeyPatch.context() as patch, ExitStack() as opened:
        patch.setenv("TRTQ_SECRETS", str(secrets))
        started = opened.enter_context(
            stack(folder, scale={"worker-cpu": len(WORKERS)}, free_ports=True)
        )
        made = Running(started, secrets, BURSTS * ROWS_IN_BURST, EXPIRED)
        _submit(made)
        yield made


def _submit(running: Running) -> None:
    images = np.zeros((ROWS_IN_BURST, 1, 8, 8), np.float32)
    with Client(running.redis_url("client")) as client:
        for burst in range(1, BURSTS + 1):
            assert len(list(client.map("digits", images))) == ROWS_IN_BURST
            # The turn ends, so that the next burst is another one.
            until(lambda done=burst: _finished(running, done * ROWS_IN_BURST))
        late = [client.submit("digits", images[0], deadline=1e-6) for _ in range(EXPIRED)]
        for ticket in late:
            assert isinstance(ticket.exception(timeout=20), DeadlineExceeded)
    until(lambda: _finished(running, running.answered + running.expired))


def _finished(running: Running, tasks: int) -> bool:
    pages = [scrape(running.url(worker, "/metrics")) for worker in WORKERS]
    queue = scrape(running.url("exporter", "/metrics"))
    try:
        answered = sum(value(page, "trtq_tasks_answered_total", model="digits") for page in pages)
        return answered == tasks and value(queue, "trtq_queue_turns", model="digits") == 0
    except KeyError:
        # A look at Redis that took too long leaves its samples out.
        return False


@pytest.fixture(scope="session")
def browser(running: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """A headless Chromium that is logged in to Flower."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "headless=new",
        "no-sandbox",
        "disable-dev-shm-usage",
        "no-proxy-server",
        "window-size=1720,800",
        f"user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(f"--{argument}")
    SHOTS.mkdir(parents=True, exist_ok=True)
    with webdriver.Chrome(options, webdriver.ChromeService(driver)) as opened:
        opened.set_page_load_timeout(30)
        opened.get(
            running.url("flower", "/").replace("://", f"://{running.secret('flower-login')}@")
        )
        yield opened
