"""All targets by name."""

from __future__ import annotations

from importlib.util import find_spec

from tests.fuzz import files, messages
from tests.fuzz.judge import Target


def targets() -> dict[str, Target]:
    """All that can run here: column files need pyarrow."""
    found = [*messages.TARGETS, *files.TARGETS]
    if find_spec("pyarrow") is not None:
        found += files.column_targets()
    return {target.name: target for target in found}
