"""Train or continue quire-tiny: `python -m training.train --books FILE --out FOLDER`.

Run the same command again to resume. Seed and step determine a batch, so a resumed run
equals an uninterrupted one bit for bit on the same machine, torch version and thread count.
"""

import argparse
import json
import signal
import time
from dataclasses import fields
from importlib.resources import files
from pathlib import Path

import torch
from tokenizers import Tokenizer

from training.books import Books, load_books
from training.config import SMOKE_MODEL, ModelConfig, Recipe
from training.data import BatchMaker
from training.export import load_pretrained, save_pretrained
from training.measure import Judge
from training.model import Decoder
from training.schedule import parse_mixture
from training.structured_init import structured_init
from training.tokenizer import train_tokenizer
from training.trainer import Trainer

_SHIPPED = Path(str(files("quire") / "assets"))
_SMOKE_PLAN = "64:12:512,128:6:512"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; every field of the recipe is an option."""
    parser = argparse.ArgumentParser(prog="training.train", description=__doc__)
    add = parser.add_argument
    add("--books", type=Path, default=_SHIPPED / "haystack.txt", help="text with <|doc|> marks")
    add("--out", type=Path, default=Path("out/quire-tiny"), help="Hugging Face checkpoint folder")
    add("--from-pretrained", type=Path, help="continue from the weights of this folder")
    add("--minutes", type=float, help="save and stop after this time; run again to resume")
    add("--save-minutes", type=float, default=5.0, help="time between saves")
    add("--log-every", type=int, default=20, help="steps between log lines")
    add("--judge", type=int, default=20, help="held-out prompts per task and length; 0: none")
    add("--threads", type=int, default=2, help="number of torch threads")
    add("--device", default="cpu", help="cpu or cuda")
    add("--compile", action="store_true", help="use torch.compile (needs a C++ compiler)")
    add("--smoke", action="store_true", help="a tiny model and plan, under a minute")
    for field in fields(Recipe):
        name, default = "--" + field.name.replace("_", "-"), field.default
        if isinstance(default, bool):
            add(name, action=argparse.BooleanOptionalAction, default=default)
        else:
            add(name, type=type(default), default=default)
    options = parser.parse_args(arguments)
    if options.smoke:
        options.plan, options.judge, options.log_every = _SMOKE_PLAN, 5, 6
    return options


def _recipe(options: argparse.Namespace) -> Recipe:
    return Recipe(**{field.name: getattr(options, field.name) for field in fields(Recipe)})


def _tokenizer_file(options: argparse.Namespace, books: Books, work: Path) -> Path:
    """The existing tokenizer if there is one, else a new one."""
    if options.from_pretrained:
        return Path(options.from_pretrained) / "tokenizer.json"
    if options.smoke:
        return _SHIPPED / "quire-tiny" / "tokenizer.json"
    path = work / "tokenizer.json"
    if not path.exists():
        train_tokenizer(path, books.train, ModelConfig().vocab_size)
    return path


def _model(options: argparse.Namespace, recipe: Recipe) -> Decoder:
    torch.manual_seed(recipe.seed)
    if options.from_pretrained:
        return load_pretrained(options.from_pretrained)
    model = Decoder(SMOKE_MODEL if options.smoke else ModelConfig())
    if recipe.structured:
        structured_init(model, recipe.seed)
    return model


class Run:
    """Training in one process: steps, log lines, saves."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out
        self.work: Path = self.out.with_name(self.out.name + ".work")
        self.work.mkdir(parents=True, exist_ok=True)
        recipe = _recipe(options)
        books = load_books(options.books)
        self.tokenizer_file = _tokenizer_file(options, books, self.work)
        tokenizer = Tokenizer.from_file(str(self.tokenizer_file))
        model = _model(options, recipe).to(options.device)
        maker = BatchMaker(
            tokenizer, "\n\n\n".join(books.train), parse_mixture(recipe.mixture), recipe.seed
        )
        self.judge = Judge(model, tokenizer, books.held_out)
        self.trainer = Trainer(model, maker, recipe, compiled=options.compile)
        if self.state_file.exists():
            self.trainer.load(self.state_file)

    @property
    def state_file(self) -> Path:
        """Path of the resumable state."""
        return self.work / "state.pt"

    def train(self) -> None:
        """Train until the end of the plan, the time limit, or the first interrupt; then save."""
        stop: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, _frame: stop.append(received))
        started = saved = time.monotonic()
        limit_s = self.options.minutes * 60 if self.options.minutes else float("inf")
        while not (self.trainer.finished or stop or time.monotonic() - started > limit_s):
            loss = self.trainer.advance()
            if self.trainer.step % self.options.log_every == 0:
                self._log(loss, time.monotonic() - started)
            if self._stage_ended():
                self._judge()
            if time.monotonic() - saved > self.options.save_minutes * 60:
                self.save()
                saved = time.monotonic()
        self.save()

    def save(self) -> None:
        """Write the resumable state and the checkpoint."""
        self.trainer.save(self.state_file)
        save_pretrained(self.trainer.model, self.tokenizer_file, self.out)

    def _stage_ended(self) -> bool:
        trainer = self.trainer
        before = trainer.plan.stage(trainer.step - 1)
        return trainer.finished or trainer.plan.stage(trainer.step) is not before

    def _judge(self) -> None:
        if self.options.judge:
            length = self.trainer.plan.stage(self.trainer.step - 1).length
            scores = self.judge.report(max(128, length), self.options.judge)
            self._write({"step": self.trainer.step, "held_out": scores})

    def _log(self, loss: float, seconds: float) -> None:
        trainer = self.trainer
        self._write(
            {
                "step": trainer.step,
                "tokens": trainer.tokens,
                "minutes": round(seconds / 60, 2),
                "loss": round(loss, 4),
                "accuracy": {k: round(v, 3) for k, v in sorted(trainer.accuracy.items())},
            }
        )

    def _write(self, row: dict[str, object]) -> None:
        """Print one JSON object per line to the terminal and to the log."""
        print(json.dumps(row), flush=True)
        with (self.work / "log.jsonl").open("a") as log:
            log.write(json.dumps(row) + "\n")


def main() -> None:
    """Parse the command line and train."""
    options = parse()
    torch.set_num_threads(options.threads)
    Run(options).train()


if __name__ == "__main__":
    main()
