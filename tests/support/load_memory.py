"""Resident memory of a load: `python -m support.load_memory FOLDER IMPL,CODEC,DTYPE ...`.

A test process holds freed memory and threads of the tests before. The last line of the output is a
JSON list with one object per load.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")

GLIBC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Freed tensors return to the system at once, also those of the loader's threads."""


@dataclass(frozen=True, slots=True)
class LoadMemory:
    """Bytes of one load.

    Attributes:
        peak_bytes, added_bytes: resident memory during and after the load, above that before.
        weight_bytes: as the loaded model counts them.
        stored_bytes: of the checkpoint, at two bytes per parameter.
    """

    peak_bytes: int
    added_bytes: int
    weight_bytes: int
    stored_bytes: int


def measure_loads(folder: Path, cases: Sequence[tuple[str, str, str]]) -> list[LoadMemory]:
    """Load a model once per case (implementation, weight codec, dtype) in a new process."""
    command = [sys.executable, "-m", "support.load_memory", str(folder), *map(",".join, cases)]
    environment = os.environ | GLIBC | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [LoadMemory(**each) for each in json.loads(run.stdout.splitlines()[-1])]


def resident_bytes(name: str) -> int:
    """Resident memory in bytes: VmRSS, or the peak VmHWM."""
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def _measure(folder: str, impl: str, codec: str, dtype: str) -> LoadMemory:
    from quire.models.loader import load_model
    from quire.models.packing import trim_free_memory

    gc.collect()
    trim_free_memory()
    before = resident_bytes("VmRSS")
    RESET.write_text("5")
    options = {"dtype": dtype, "model_impl": impl, "weight_codec": codec, "verify": False}
    loaded = load_model(folder, device="cpu", **options)
    return LoadMemory(
        peak_bytes=resident_bytes("VmHWM") - before,
        added_bytes=resident_bytes("VmRSS") - before,
        weight_bytes=loaded.weight_bytes,
        stored_bytes=loaded.spec.weight_bytes(2),
    )


def _main(folder: str, *cases: str) -> None:
    from quire.models.loader import load_model

    load_model("quire-tiny", device="cpu")  # code and tables of the first load
    print(json.dumps([asdict(_measure(folder, *case.split(","))) for case in cases]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
