"""The commands of docs/security.md run as they stand, from top to bottom."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from producer import keys
from producer.connection import connect
from producer.embedded import free_port
from tests.support.processes import ROOT, until
from tests.support.shell import Shell, programs
from tests.support.tls import Pair, tls_in_front

TEXT = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
REDIS, WORKER, SUBMIT, LOG, CERTIFICATES, STATUS = range(6)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    np.save(tmp_path / "image.npy", np.zeros((1, 8, 8), np.float32))
    made = Shell(tmp_path, programs(tmp_path))
    yield made
    made.close()


def test_the_commands_run_as_they_stand(shell: Shell, tmp_path: Path) -> None:
    assert len(BLOCKS) == 6
    port = str(free_port())
    blocks = [block.replace("6379", port) for block in BLOCKS]
    shell.run(blocks[REDIS])
    root = (tmp_path / "secrets" / "root").read_text().strip()

    def answers() -> bool:
        try:
            return bool(admin.ping())
        except redis.exceptions.ConnectionError:
            return False

    with connect(f"redis://root:{root}@127.0.0.1:{port}/0") as admin:
        until(answers)
        shell.run(blocks[WORKER])
        until(lambda: admin.hexists(keys.MODELS, "digits"), 40)
    shell.run(blocks[SUBMIT])
    assert np.load(tmp_path / "scores.npy").shape == (10,)
    shell.run(blocks[LOG])
    shell.run(blocks[CERTIFICATES])
    server = Pair(tmp_path / "redis.pem", tmp_path / "redis.key")
    with tls_in_front(int(port), server) as tls_port:
        shell.run(blocks[STATUS].replace("6380", str(tls_port)))
    for file in (tmp_path / "secrets").iterdir():
        assert file.read_text().strip() not in shell.text


def test_linked_files_exist() -> None:
    for link in re.findall(r"\]\(([\w./-]+)\)", TEXT):
        assert (ROOT / "docs" / link).is_file()
