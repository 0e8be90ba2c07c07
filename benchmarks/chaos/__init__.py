"""Fault injection under load: `python -m benchmarks.chaos --json chaos.json`."""
