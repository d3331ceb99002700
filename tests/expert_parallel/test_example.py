"""examples/expert_parallel.py runs as it says, and is what the README shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "expert_parallel.py"


def test_example_runs_on_two_cpu_ranks() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = dict(re.findall(r"rank (\d): \d tokens, \|y\| = ([\d.]+)", done.stdout))
    assert set(found) == {"0", "1"}
    assert all(5 < float(norm) < 100 for norm in found.values())


def test_readme_shows_the_example() -> None:
    body = EXAMPLE.read_text().split('"""\n\n', 1)[1]
    assert f"```python\n{body}```" in (ROOT / "README.md").read_text()
