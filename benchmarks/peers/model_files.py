"""Model folders: random weights in Hugging Face format, and each engine's own format."""

import tempfile
from pathlib import Path

from benchmarks.peers.config import MODELS, PeersConfig, Shape
from benchmarks.peers.engines import Engine
from benchmarks.peers.jobs import build_job
from benchmarks.peers.processes import Failure, run_worker


def make_model(name: str, files: Path) -> Path:
    """Write a model with random bfloat16 weights, unless its folder exists; return the folder."""
    import torch

    from benchmarks.common.models import random_weights

    folder = files / name
    if not folder.exists():
        files.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=files) as made:
            model = random_weights(MODELS[name](), dtype=torch.bfloat16)
            model.save_pretrained(f"{made}/model")
            (Path(made) / "model").rename(folder)
    return folder


def prepare(config: PeersConfig, model: str, shape: Shape, engine: Engine) -> Failure | None:
    """Convert a model to the engine's own format, unless that is done; return the error, if any."""
    if not engine.prepares:
        return None
    job = build_job(config, model, shape, engine, 0)
    folder = Path(job["prepared"])
    if folder.exists():
        return None
    with tempfile.TemporaryDirectory(dir=config.files) as made:
        job["task"], job["prepared"] = "prepare", f"{made}/model"
        found = run_worker(engine, job, config)
        if isinstance(found, Failure):
            return found
        (Path(made) / "model").rename(folder)
    return None
