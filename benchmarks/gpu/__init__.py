"""Speed of the TensorRT executor on a GPU: `python -m benchmarks.gpu --json FILE`."""
