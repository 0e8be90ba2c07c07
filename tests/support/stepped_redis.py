"""A real Redis whose wall clock can be stepped, where there is a C compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from producer.embedded import EmbeddedRedis, server_binary

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


def stepped_redis(clock: Path) -> EmbeddedRedis:
    """A started server that adds the seconds in file `clock` to its wall clock.

    Builds its shim beside `clock`. Raises NotImplementedError without a C compiler.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise NotImplementedError("no C compiler (cc) to build the clock's shim with")
    clock.write_text("0")
    source, library = clock.with_suffix(".c"), clock.with_suffix(".so")
    source.write_text(_SHIM)
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    binary = clock.with_suffix(".redis-server")
    binary.write_text(
        f'#!/bin/sh\nLD_PRELOAD={library} CHAOS_CLOCK={clock} exec {server_binary()} "$@"\n'
    )
    binary.chmod(0o755)
    before = os.environ.get("TRTQ_REDIS_SERVER")
    os.environ["TRTQ_REDIS_SERVER"] = str(binary)
    try:
        return EmbeddedRedis().start()
    finally:
        if before is None:
            del os.environ["TRTQ_REDIS_SERVER"]
        else:
            os.environ["TRTQ_REDIS_SERVER"] = before
