"""Redis' address from settings and files: contradictions are refused, secrets are never shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from producer import Client
from producer.address import complete, read_secret
from producer.config import ProducerSettings
from producer.connection import connect
from producer.errors import ConfigError, InvalidInput
from tests.support.processes import ROOT
from workers.broker import broker_of
from workers.devices import CPU
from workers.launch import make_plans
from workers.models import load_models
from workers.settings import WorkerSettings

SECRET = "s3/cr?e@t:%"
ESCAPED = "s3%2Fcr%3Fe%40t%3A%25"


def secret_file(folder: Path, text: str) -> str:
    path = folder / "secret"
    path.write_text(text)
    return str(path)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TRTQ_REDIS_")]:
        if name != "TRTQ_REDIS_SERVER":
            monkeypatch.delenv(name)


def test_the_url_comes_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTQ_REDIS_URL_FILE", secret_file(tmp_path, "redis://:pw@far:1/2\n"))
    assert ProducerSettings().redis_url == "redis://:pw@far:1/2"
    assert WorkerSettings().redis_url == "redis://:pw@far:1/2"
    assert ProducerSettings(redis_url="redis://near").redis_url == "redis://near"
    monkeypatch.setenv("TRTQ_REDIS_URL", "redis://other")
    with pytest.raises(ConfigError, match="both set"):
        ProducerSettings()


def test_the_password_comes_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTQ_REDIS_PASSWORD_FILE", secret_file(tmp_path, SECRET + "\n"))
    monkeypatch.setenv("TRTQ_REDIS_URL", "redis://alice@h:7/0")
    settings = WorkerSettings()
    assert settings.redis_url == f"redis://alice:{ESCAPED}@h:7/0"
    assert connect(settings.redis_url).get_connection_kwargs()["password"] == SECRET
    assert ProducerSettings(redis_url="redis://h").redis_url == f"redis://:{ESCAPED}@h"
    assert settings.url_for("redis://bob@h") == f"redis://bob:{ESCAPED}@h"
    # What is complete already, as a child's or another client's, stays as it is.
    assert ProducerSettings(redis_url=settings.redis_url).redis_url == settings.redis_url
    monkeypatch.setenv("TRTQ_REDIS_URL", "redis://alice:pr1vate@h:7/0")
    with pytest.raises(ConfigError, match="keep one") as refused:
        ProducerSettings()
    assert "pr1vate" not in str(refused.value)


def test_secret_files_that_are_none(tmp_path: Path) -> None:
    assert read_secret(secret_file(tmp_path, "one line\r\n"), "X") == "one line"
    for text in ("", "\n", "two\nlines\n", "x" * 100_000):
        with pytest.raises(ConfigError, match=r"X=.*exactly one line"):
            read_secret(secret_file(tmp_path, text), "X")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_secret(str(tmp_path / "binary"), "X")
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(str(tmp_path / "none"), "X")
    path = secret_file(tmp_path, "pw")
    os.chmod(path, 0o444)
    assert read_secret(path, "X") == "pw"
    os.chmod(path, 0o646)
    with pytest.raises(ConfigError, match="chmod o-w"):
        read_secret(path, "X")


@pytest.mark.parametrize(
    "query",
    [
        "ssl_cert_reqs=none",
        "ssl_cert_reqs=CERT_NONE",
        "ssl_cert_reqs=optional",
        "ssl_check_hostname=false",
        "db=1&ssl_check_hostname=No",
        "ssl_exclude_verify_flags=VERIFY_X509_STRICT",
    ],
)
def test_verification_cannot_be_switched_off(query: str) -> None:
    url = f"rediss://:{ESCAPED}@h:1/0?{query}"
    for use in (connect, Client, lambda url: ProducerSettings(redis_url=url)):
        with pytest.raises(ConfigError, match="TRTQ_REDIS_CA") as refused:
            use(url)
        assert ESCAPED not in str(refused.value)


def test_files_of_tls_need_tls(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rediss://"):
        complete("redis://h", ca="/ca.pem")
    with pytest.raises(ConfigError, match=r"CA file '/no/ca.pem'.*No such file"):
        complete("rediss://h", ca="/no/ca.pem")
    with pytest.raises(ConfigError, match="cannot be used"):
        complete("rediss://h", ca=secret_file(tmp_path, "no certificate"))
    with pytest.raises(ConfigError, match="keep one"):
        complete("rediss://h?ssl_ca_certs=/a.pem", ca="/b.pem")


def test_celery_gets_the_same_address() -> None:
    assert broker_of("redis://h") == ("redis://h:6379/0", None)
    assert broker_of(f"redis://a:{ESCAPED}@h:1?db=3") == (f"redis://a:{ESCAPED}@h:1/3", None)
    assert broker_of("redis://[::1]:5/2").url == "redis://[::1]:5/2"
    url, options = broker_of("rediss://:pw@h/1?ssl_ca_certs=/a%20b.pem")
    assert url == "rediss://:pw@h:6379/1"
    assert options is not None
    assert options["ssl_ca_certs"] == "/a b.pem"
    assert options["ssl_cert_reqs"].name == "CERT_REQUIRED"
    assert options["ssl_check_hostname"] is True
    with pytest.raises(ConfigError, match="TCP"):
        broker_of("unix:///tmp/redis.sock")


@pytest.mark.parametrize("url", ["redis://u:s3/cret@h", "redis://:s3#cret@h", "ftp://:s3cret@h"])
def test_an_unreadable_url_shows_no_password(url: str) -> None:
    for use in (lambda: connect(url), lambda: broker_of(url)):
        with pytest.raises(ConfigError) as refused:
            use()
        assert "s3" not in f"{refused.value!r} {refused.value.__cause__!r}"


def test_client_names(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ProducerSettings()
    assert settings.name_at("redis://h", "client") == "client"
    assert settings.name_at("redis://default:x@h", "cli") == "cli"
    assert settings.name_at("redis://alice:x@h", "cli") == "alice"
    assert settings.name_at("redis://al.ice%40home@h", "cli") == "alicehome"
    monkeypatch.setenv("TRTQ_CLIENT_NAME", "web")
    assert ProducerSettings().name_at("redis://alice:x@h", "cli") == "web"
    for name in ("alice.b", "a:b", "a*", "", "-a", "a" * 65):
        with pytest.raises(InvalidInput, match="client name"):
            Client(name=name, settings=ProducerSettings(client_name="fallback.wrong"))


def test_the_password_of_an_option_reaches_children_by_environment_only(tmp_path: Path) -> None:
    for plan in make_plans([CPU], redis_url=f"redis://:{ESCAPED}@h", models=[tmp_path]):
        assert plan.env["TRTQ_REDIS_URL"] == f"redis://:{ESCAPED}@h"
        assert plan.env["TRTQ_REDIS_PASSWORD_FILE"] == ""
        assert not [part for part in plan.command if ESCAPED in part]
    for plan in make_plans([CPU], redis_url=None, models=[tmp_path]):
        assert not [name for name in plan.env if name.startswith("TRTQ_REDIS_")]


def test_a_password_on_the_command_line_is_warned_of() -> None:
    command = [sys.executable, "-m", "producer.cli", "status", "--redis-url"]
    with_password = subprocess.run(
        [*command, "redis://:s3cret@127.0.0.1:1/0"], cwd=ROOT, capture_output=True, text=True
    )
    assert "warning" in with_password.stderr
    assert "TRTQ_REDIS_PASSWORD_FILE" in with_password.stderr
    assert "s3cret" not in with_password.stderr + with_password.stdout
    without = subprocess.run(
        [*command, "redis://127.0.0.1:1/0"], cwd=ROOT, capture_output=True, text=True
    )
    assert "warning" not in without.stderr
    assert "redis_unavailable" in without.stderr


def test_no_settings_show_a_password(tmp_path: Path) -> None:
    for kind in (ProducerSettings, WorkerSettings):
        made = kind(redis_url="redis://:s3cret@h/0?ssl_password=t0p")
        assert "s3cret" not in f"{made!r} {made}"
        assert "t0p" not in f"{made!r} {made}"
    assert "s3cret" not in repr(Client("redis://:s3cret@h/0"))


@pytest.mark.parametrize("key", ["password", "redis_url", "redis_password"])
def test_a_models_configuration_takes_no_secret(tmp_path: Path, key: str) -> None:
    (tmp_path / "m.yaml").write_text(f"path: m.onnx\n{key}: redis://:s3cret@h/0\n")
    with pytest.raises(ConfigError, match=f"unknown key '{key}'") as refused:
        load_models([tmp_path])
    assert "s3cret" not in str(refused.value)
