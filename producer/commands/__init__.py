"""The commands of `trtq`, a file per subject; producer/cli.py lists them.

They import what they need when they run, so that `trtq --help` stays fast.
"""
