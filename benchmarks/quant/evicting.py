"""Part `eviction`: fewer tokens or fewer bits, in the same bytes of a sequence.

A rule with a cap in bytes retains as many tokens as fit with a codec, so every row of a table has
the same bytes: few tokens in plain KV, many quantized tokens, or slightly fewer quantized tokens
with a finer codec for the tokens that the rule scores highest.
"""

from collections.abc import Mapping, Sequence

from benchmarks.common.result import Cell, Chart, Numbers, PartResult, Table
from benchmarks.eviction.texts import RunningText, cut_texts
from benchmarks.quant.config import PLAIN, EvictingConfig
from benchmarks.quant.text_scores import CodecTexts, score_texts
from quire.models.loader import LoadedModel

ByShare = Mapping[float, Mapping[str, CodecTexts]]


def run_evicting(model: LoadedModel, config: EvictingConfig, running: RunningText) -> PartResult:
    """Run the part."""
    texts = cut_texts(model, running, config.texts.tokens, config.texts.texts)
    whole = model.spec.kv_bytes(config.texts.tokens, model.decoder.dtype.itemsize)
    found = {
        share: score_texts(
            model,
            config.texts,
            config.texts.codecs,
            texts,
            evict=config.evict(int(share * whole)),
        )
        for share in config.shares
    }
    return PartResult(
        claims=claims(found),
        tables=tuple(_table(config, running.name, share, of) for share, of in found.items()),
        charts=(_chart(found),),
        raw={
            "texts": [
                {"share": share} | one.to_json()
                for share, of in found.items()
                for one in of.values()
            ]
        },
    )


def claims(found: ByShare) -> Numbers:
    """KL of mixed codecs over the best uniform codec's KL, in the same bytes.

    mixed_over_uniform_SHARE: below 1 if a finer codec for important tokens pays.
    mixed_over_CODEC_SHARE: the same, compared with that codec for all tokens.
    int8_over_plain_SHARE: below 1 if more tokens with fewer bits pay.
    """
    made: Numbers = {}
    for share, of in found.items():
        label = f"{round(100 * share)}"
        uniform = [one.mean_kl for codec, one in of.items() if not is_mixed(codec)]
        mixed = [one.mean_kl for codec, one in of.items() if is_mixed(codec)]
        made[f"mixed_over_uniform_{label}"] = min(mixed) / min(uniform)
        coded = [one.mean_kl for codec, one in of.items() if codec.startswith("int8")]
        made[f"int8_over_plain_{label}"] = coded[0] / of[PLAIN].mean_kl
        for body, one in _pairs(of):
            made[f"mixed_over_{body}_{label}"] = one.mean_kl / _of_body(of, body).mean_kl
    return made


def is_mixed(codec: str) -> bool:
    """Whether some tokens have a finer codec."""
    return "promoted" in codec


def _pairs(of: Mapping[str, CodecTexts]) -> Sequence[tuple[str, CodecTexts]]:
    """The best mixed codec of each base codec that is also measured alone."""
    best: dict[str, CodecTexts] = {}
    for codec, one in of.items():
        body = codec.partition("+")[0]
        if is_mixed(codec) and (body not in best or one.mean_kl < best[body].mean_kl):
            best[body] = one
    return list(best.items())


def _of_body(of: Mapping[str, CodecTexts], body: str) -> CodecTexts:
    [alone] = [
        one for codec, one in of.items() if codec.partition("+")[0] == body and not is_mixed(codec)
    ]
    return alone


def _table(config: EvictingConfig, name: str, share: float, of: Mapping[str, CodecTexts]) -> Table:
    texts = config.texts
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            codec,
            one.request_bytes / 1024,
            one.mean_kl,
            sum(one.top_1) / len(one.top_1),
            one.perplexity,
        )
        for codec, one in of.items()
    )
    return Table(
        name=f"quant-eviction-{round(100 * share)}",
        caption=(
            f"{texts.texts} texts of {texts.tokens:,} tokens from {name} under `{config.rule}`, "
            f"whose cap is {100 * share:g} % of the bytes of all tokens in plain KV; scored "
            f"from token {texts.first} on, compared with all tokens in plain KV."
        ),
        columns=("codec", "KV KiB", "KL", "top-1", "perplexity"),
        rows=rows,
    )


def _chart(found: ByShare) -> Chart:
    codecs = next(iter(found.values()))
    return Chart(
        name="quant-eviction",
        title="Fewer tokens or fewer bits, in equal bytes",
        x_label="% of the bytes of all tokens in full precision",
        y_label="KL, nats",
        lines={
            codec: tuple((100 * share, of[codec].mean_kl) for share, of in sorted(found.items()))
            for codec in codecs
        },
        log_y=True,
    )
