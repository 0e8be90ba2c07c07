"""The cache of plans: checked when read, one builder at a time, the oldest removed first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from producer.errors import ConfigError, EngineBuildFailed
from tests.support.processes import ROOT
from workers.tensorrt.cache import PlanCache, default_cache

FACTS = {"flavor": "tensorrt_rtx", "version": "1", "gpu": "any"}

BUILDER = """
import sys, time
from pathlib import Path
from workers.tensorrt.cache import PlanCache

folder = Path(sys.argv[1])

def build():
    with (folder / "builds").open("a") as file:
        file.write("built\\n")
    time.sleep(0.5)  # long enough that the other process meets the lock
    return b"plan"

data, found = PlanCache(folder / "cache", 100, wait_s=60).get_or_build("k", {}, build)
print(data.decode(), found)
"""


def test_truncated_changed_and_stale_plans_are_not_used(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path, 100)
    path = cache.put("k", b"plan", FACTS)
    assert cache.get("k", FACTS) == b"plan"
    assert cache.get("k", {**FACTS, "version": "2"}) is None
    path.write_bytes(b"pla")
    assert cache.get("k", FACTS) is None
    assert cache.get_or_build("k", FACTS, lambda: b"fresh") == (b"fresh", False)
    assert cache.get("k", FACTS) == b"fresh"
    (tmp_path / "k.json").write_text("{")
    assert cache.get("k", FACTS) is None


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path, 10)
    for age, key in enumerate(("new", "old")):
        os.utime(cache.put(key, b"1234", FACTS), (100 - age, 100 - age))
    cache.get("old", FACTS)
    cache.put("third", b"1234", FACTS)
    assert sorted(file.name for file in tmp_path.glob("*.plan")) == ["old.plan", "third.plan"]
    assert not (tmp_path / "new.json").exists()
    cache.put("large", b"x" * 50, FACTS)
    assert [file.stem for file in tmp_path.glob("*.plan")] == ["large"]


def test_of_two_processes_one_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILDER, str(tmp_path)]
    both = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    shown = sorted(process.communicate(timeout=60)[0].strip() for process in both)
    assert shown == ["plan False", "plan True"]
    assert (tmp_path / "builds").read_text() == "built\n"


def test_waiting_for_another_builder_ends(tmp_path: Path) -> None:
    def outer() -> bytes:
        with pytest.raises(EngineBuildFailed, match="another process"):
            PlanCache(tmp_path, 100, wait_s=0.1).get_or_build("k", FACTS, lambda: b"inner")
        return b"outer"

    assert PlanCache(tmp_path, 100).get_or_build("k", FACTS, outer) == (b"outer", False)


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path, 100)

    def fails() -> bytes:
        raise EngineBuildFailed("no")

    with pytest.raises(EngineBuildFailed):
        cache.get_or_build("k", FACTS, fails)
    assert not list(tmp_path.glob("*.plan"))
    assert cache.get_or_build("k", FACTS, lambda: b"plan") == (b"plan", False)


def test_the_environment_names_folder_and_limit(tmp_path: Path) -> None:
    names = {"TRTQ_PLAN_CACHE": str(tmp_path), "TRTQ_PLAN_CACHE_BYTES": "3"}
    assert default_cache(names).put("k", b"plan", FACTS) == tmp_path / "k.plan"
    with pytest.raises(ConfigError, match="'many'"):
        default_cache({"TRTQ_PLAN_CACHE_BYTES": "many"})
