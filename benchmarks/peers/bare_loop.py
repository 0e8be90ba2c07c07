"""The model in a bare loop: ONNX Runtime and nothing else, over the rows of a .npy file."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from benchmarks.peers.loops import obey


def _session(path: str) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def main() -> None:
    batch = int(os.environ["BENCH_BATCH"])
    sessions: dict[str, Any] = {}

    def session(path: str) -> Any:
        if path not in sessions:
            sessions[path] = _session(path)
        return sessions[path]

    def batch_ms(model: str, seconds: float) -> float:
        """Median time of one batch of zeros."""
        run, x = session(model), None
        x = np.zeros((batch, run.get_inputs()[0].shape[1]), np.float32)
        samples = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            run.run(None, {"x": x})
            samples.append(1000 * (time.perf_counter() - start))
        return float(np.median(samples))

    def rate(model: str, data: str, seconds: float, warm_s: float) -> float:
        """Rows a second, going round the file, after `warm_s`."""
        run, rows = session(model), np.load(data, mmap_mode="r")
        batches = [rows[i : i + batch] for i in range(0, len(rows) - batch + 1, batch)]
        clock = time.perf_counter
        for limit_s in (warm_s, seconds):
            start, done = clock(), 0
            while clock() - start < limit_s:
                run.run(None, {"x": batches[done % len(batches)]})
                done += 1
        return done * batch / (clock() - start)

    def expect(model: str, data: str, output: str) -> None:
        """Writes every row's result to `output`."""
        run, rows = session(model), np.load(data, mmap_mode="r")
        results = [run.run(None, {"x": rows[i : i + batch]})[0] for i in range(0, len(rows), batch)]
        np.save(Path(output), np.concatenate(results))

    obey({"batch_ms": batch_ms, "rate": rate, "expect": expect})


if __name__ == "__main__":
    main()
