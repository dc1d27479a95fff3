"""`quire calibrate`: measures the constants of KV codecs, or the retrieval heads, of a model."""

import random
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.common import ABOUT_MODEL, json_option, refuse_no_name, threads_option, use_threads
from quire.cli.completion import complete_model
from quire.cli.report import envelope, prepare_folder, print_json, write_files
from quire.cli.settings import config_option, refuse_ignored, with_flags
from quire.cli.startup import fast_imports, status
from quire.errors import ConfigError
from quire.layout.options import option

if TYPE_CHECKING:
    from quire.eviction.calibration import LayerVectors
    from quire.models.loader import LoadedModel

MAX_TOKENS = 1 << 20  # queries, keys and values of all tokens are in memory at once
_OF_CODECS = ("text", "kv_codec", "tokens", "output")
PROMPT_TOKENS = 512  # of --retrieval-heads
LONGEST_TOKEN_CHARACTERS = 16  # bounds the text that is tokenized


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateFlags:
    """Options of `quire calibrate`."""

    text: Path | None = option(
        None,
        help="Text file with calibration data. Default: excerpts of books in the package.",
        common=True,
    )
    kv_codec: str = option(
        "int4; int4:equalise=1; int8_channel; kvquant4",
        help="Codecs as for quire serve, separated by semicolons; codecs without constants "
        "are measured for comparison.",
        common=True,
    )
    tokens: int = option(
        4096, help="Tokens of the text to use.", min_value=64, max_value=MAX_TOKENS, common=True
    )
    output: Path | None = option(
        None, help="Output folder. Default: the model's folder.", common=True
    )
    retrieval_heads: Path | None = option(
        None,
        help="Measure the retrieval scores of the KV heads for budget=(duo:scores=FILE), and write "
        "them to this file, instead of codecs.",
        common=True,
    )
    prompts: int = option(
        16, help="Synthetic prompts for --retrieval-heads, of about 512 tokens.", min_value=1
    )
    threads: int = threads_option()
    config: Path | None = config_option()
    as_json: bool = json_option()


@with_flags
def calibrate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help=ABOUT_MODEL, show_default=False, autocompletion=complete_model
        ),
    ],
    *,
    flags: CalibrateFlags,
) -> None:
    """Measure the constants that some KV codecs need and store them in the model's folder.

    With --retrieval-heads, scores of KV heads for the budget duo are measured instead.
    Channel scales, channel ranges and codebooks are fitted to three quarters of the text. The
    printed relative errors of query-key products and of values are measured on the other quarter.
    """
    refuse_no_name(model)
    with status("starting"), fast_imports():
        from quire.eviction.calibration import read_vectors
        from quire.layout.kv_format import fill_plain, read_format
        from quire.models.loader import load_model

    use_threads(flags.threads)
    texts = [part.strip() for part in flags.kv_codec.split(";") if part.strip()]
    if not texts:
        raise ConfigError(
            "expected --kv-codec with one or more codecs, got none; leave it out for the default"
        )
    for part in texts:  # before the model is loaded
        read_format(fill_plain(part, "float32"))
    if flags.retrieval_heads is None:
        refuse_ignored(flags, "prompts", because="without --retrieval-heads")
    else:
        refuse_ignored(flags, *_OF_CODECS, because="with --retrieval-heads")
        prepare_folder(flags.retrieval_heads.parent)
    with status(f"loading {model}"):
        loaded = load_model(model)
    if flags.retrieval_heads is not None:
        with status(f"measuring {flags.prompts} prompts"):
            heads = _retrieval_heads(loaded, flags.prompts, flags.retrieval_heads)
        if flags.as_json:
            config = {
                "model": model,
                "prompts": flags.prompts,
                "output": str(flags.retrieval_heads),
            }
            print_json(envelope("calibrate", {"kv_heads": heads}, {}, config))
        return
    folder = flags.output or loaded.folder
    with status(f"running {flags.tokens:,} tokens"):
        vectors = read_vectors(loaded.decoder, _token_ids(loaded, flags.text, flags.tokens))
    arms = {part: _one(part, loaded, vectors, folder) for part in texts}
    if flags.as_json:
        claims = {
            f"{name}_{what}": found[what]
            for name, found in arms.items()
            for what in ("product_error", "value_error")
        }
        config = {
            "model": model,
            "text": str(flags.text or "packaged"),
            "tokens": flags.tokens,
            "output": str(folder),
        }
        print_json(envelope("calibrate", claims, arms, config))


def _one(
    text: str, loaded: "LoadedModel", vectors: "list[LayerVectors]", folder: Path | None
) -> dict[str, float]:
    """Measure one codec, store its constants and print its mean errors over all layers."""
    from quire.eviction.calibration import errors_of, measure
    from quire.kv.coded_layers import write_constants
    from quire.layout.kv_format import fill_plain, read_format

    form = read_format(fill_plain(text, "float32", latent=loaded.spec.latent is not None))
    measured = measure(vectors, form)
    errors = errors_of(vectors, form, measured)
    product = sum(error.product for error in errors) / len(errors)
    value = sum(error.value for error in errors) / len(errors)
    typer.echo(f"{text}: relative error of query-key products {product:.4f}, of values {value:.4f}")
    if measured.layers and folder is not None:
        notes = {"model": loaded.name, "tokens": str(vectors[0].key.shape[1])}
        for path in write_constants(folder, form, measured, notes):
            typer.echo(f"written: {path}")
    return {"product_error": product, "value_error": value}


def _retrieval_heads(loaded: "LoadedModel", prompts: int, file: Path) -> int:
    """Write a file of the retrieval scores of a model, for `budget=duo`; return how many."""
    from quire.evals.tasks.base import Setting
    from quire.evals.tasks.needles import Needles, Passkey
    from quire.eviction.calibration import LONGEST_SEQUENCE_TOKENS, retrieval_scores
    from quire.models.tokenizer import encode_prompt

    if loaded.tokenizer is None:
        raise ConfigError(f"{loaded.name} has no tokenizer, which --retrieval-heads needs")
    encode = partial(encode_prompt, loaded.tokenizer)
    context = min(LONGEST_SEQUENCE_TOKENS, loaded.spec.max_positions)
    tokens = min(PROMPT_TOKENS, context)
    setting = Setting(
        tokens=tokens, measure=lambda text: len(encode(text)), split="train", queries=2
    )
    texts = []
    for number in range(prompts):
        family = (Needles(needles=4), Passkey())[number % 2]
        spans = family.build(random.Random(number), setting).training_spans()
        ids = encode("".join(text for text, _ in spans))  # one text, as a prompt
        cut, written, answers, before = max(0, len(ids) - context), "", list[int](), 0
        for text, weight in spans:
            written += text
            same = (one == other for one, other in zip(encode(written), ids, strict=False))
            first, before = before, sum(takewhile(bool, same))
            answers += range(max(first, cut + 1), before) if weight == 1 else ()
        texts.append((ids[cut:], [answer - cut for answer in answers]))
    rows = retrieval_scores(loaded.decoder, texts)
    lines = ("\t".join(f"{score:.4f}" for score in row) for row in rows)
    write_files(file.parent, {file.name: ("\n".join(lines) + "\n").encode()})
    typer.echo(f"written: {file}")
    return sum(map(len, rows))


def _token_ids(loaded: "LoadedModel", text: Path | None, tokens: int) -> list[int]:
    from quire.evals.tasks.words import book_text

    if loaded.tokenizer is None:
        raise ConfigError(f"{loaded.name} has no tokenizer, which --text needs")
    try:
        written = book_text() if text is None else text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {text} cannot be read: {error}") from error
    some = written[: tokens * LONGEST_TOKEN_CHARACTERS]
    ids: list[int] = loaded.tokenizer.encode(some, add_special_tokens=False, verbose=False)
    return ids[:tokens]
