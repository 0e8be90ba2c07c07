"""Wall clocks that jump by an hour: those of workers and clients, and that of Redis."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.chaos.judge import check, judge
from benchmarks.chaos.rig import Rig
from producer.embedded import EmbeddedRedis, server_binary

_STEP_S = 3600
_SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long offset(void) {
  char text[32] = {0};
  const char *path = getenv("CHAOS_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return 0;
  long found = read(file, text, sizeof text - 1) > 0 ? atol(text) : 0;
  close(file);
  return found;
}
int gettimeofday(struct timeval *now, void *zone) {
  struct timespec real;
  int (*ask)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  ask(CLOCK_REALTIME, &real);
  now->tv_sec = real.tv_sec + offset();
  now->tv_usec = real.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *into) {
  struct timeval now;
  gettimeofday(&now, 0);
  if (into) *into = now.tv_sec;
  return now.tv_sec;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
  int (*ask)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  int result = ask(clock, now);
  if (clock == CLOCK_REALTIME) now->tv_sec += offset();
  return result;
}
"""


def clock_stepped(folder: Path, seconds: float) -> dict[str, Any]:
    """`time.time` of all workers and clients goes an hour on, then an hour back from the start."""
    clock = folder / "clock"
    clock.write_text("0")
    env = {"CHAOS_CLOCK": str(clock)}
    with Rig(folder, env=env, client_env=env) as rig:
        rig.load(seconds)
        _step(clock, seconds)
        clients = rig.loaded(seconds)
        row = judge("clocks of workers and clients step 1 h", clients, seconds, **rig.counters())
        check(row, row["reclaimed"] == 0, f"{row['reclaimed']} tasks were taken for abandoned")
        check(row, row["max_ms"] < 5000, "tasks waited")
        row["exit_codes"] = rig.stop_workers()
        check(row, row["exit_codes"] == [0, 0], f"exit codes {row['exit_codes']}")
        return row


def redis_clock_stepped(folder: Path, seconds: float) -> dict[str, Any]:
    """The same step of the clock of Redis' machine, a worker killed after each."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise NotImplementedError("no C compiler (cc) to build the clock's shim with")
    clock, binary = folder / "clock", folder / "redis-server-stepped"
    clock.write_text("0")
    (folder / "clock.c").write_text(_SHIM)
    library = folder / "clock.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, folder / "clock.c", "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    binary.write_text(
        f'#!/bin/sh\nLD_PRELOAD={library} CHAOS_CLOCK={clock} exec {server_binary()} "$@"\n'
    )
    binary.chmod(0o755)
    os.environ["TRTQ_REDIS_SERVER"] = str(binary)
    try:
        server = EmbeddedRedis().start()
    finally:
        del os.environ["TRTQ_REDIS_SERVER"]
    with Rig(folder, server=server) as rig:
        rig.load(seconds)
        offsets_s: list[int] = []
        for step_s in (0, _STEP_S, -_STEP_S):
            clock.write_text(str(step_s))
            time.sleep(seconds / 4)
            offsets_s.append(round(rig.raw.time()[0] - time.time()))
            rig.kill_busy(rig.supervisors[0])
        clients = rig.loaded(seconds)
        # By Redis' clock every open task is an hour old after the step on.
        row = judge(
            "clock of Redis steps 1 h, a worker killed",
            clients,
            seconds,
            allowed=("deadline_exceeded",),
            redis_offsets_s=offsets_s,
            **rig.counters(),
        )
        stepped = [abs(offset_s) > _STEP_S / 2 for offset_s in offsets_s]
        check(row, stepped == [False, True, True], f"Redis' clock was off by {offsets_s} s")
        row["exit_codes"] = rig.stop_workers()
        check(row, row["exit_codes"] == [0, 0], f"exit codes {row['exit_codes']}")
        return row


def _step(clock: Path, seconds: float) -> None:
    for step_s in (_STEP_S, -_STEP_S):
        time.sleep(seconds / 3)
        clock.write_text(str(step_s))
