"""The demo, as a user runs it, but into a folder of the test's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.support.processes import ROOT

_INTO = """
import sys
from pathlib import Path
from examples import demo
demo.OUTPUT = Path(sys.argv[1])
sys.exit(demo.main())
"""


def test_the_demo_reads_digits(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _INTO, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"accuracy +([0-9.]+)", done.stdout)
    assert found is not None
    assert float(found[1]) >= 0.97
    assert np.load(tmp_path / "digits-scores.npy").shape == (899, 10)
    assert re.search(r"mean batch +[0-9.]+", done.stdout)
