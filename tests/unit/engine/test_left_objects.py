"""Generated tokens leave no Python objects: requests arrive, are preempted and cancelled."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
MIN_OBJECT_BYTES = 24  # size of one float per token


@pytest.mark.slow
def test_generated_tokens_leave_no_python_objects():
    ran = subprocess.run(
        [sys.executable, "-m", "support.left_objects"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent)))},
    )
    found = json.loads(ran.stdout.splitlines()[-1])

    assert len(found) == 2
    for memory in found:
        settled = memory["bytes_per_token"][9:]  # until then the log of finished requests fills
        assert memory["preemptions"] > 0
        assert statistics.median(settled) < MIN_OBJECT_BYTES / 2, memory
