"""Every decoder of bytes that others wrote, fed with bytes that nobody would write.

`python -m tests.fuzz --seconds 300` runs all targets, guided by coverage where atheris is
installed; tests/test_fuzz.py runs a few hundred inputs of each in every test run.
"""
