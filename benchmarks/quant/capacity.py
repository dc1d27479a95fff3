"""Part `capacity`: tokens that fit in the same bytes, for each codec, counted in three ways.

codes       bytes that the codec stores for a vector, with scales and outliers
pages       whole pages, with alignment and their page table entries
with kept   the same, and the full-precision tokens of each lane
"""

from math import ceil

from benchmarks.common.attention import PLAIN
from benchmarks.common.result import Chart, Numbers, PartResult
from benchmarks.common.tables import table_of
from benchmarks.quant.config import CapacityConfig
from quire.layout.codec_names import codec_pair
from quire.layout.kv_format import fill_plain
from quire.layout.layout import layout_for
from quire.layout.model import LayerSpec, ModelSpec

_TABLE_ENTRY_BYTES = 4
_PAGE_TOKENS_OF_PAGE_CODECS = 32


def run_capacity(config: CapacityConfig) -> PartResult:
    """Run the part."""
    made: Numbers = {}
    for codec in config.codecs:
        name = codec.replace(":", "_").replace("=", "_")
        plain = codes_bytes(config, PLAIN) / codes_bytes(config, codec)
        made[f"{name}_capacity_ratio"] = plain
        made[f"{name}_net_capacity_ratio"] = _ratio(config, codec)
        made[f"{name}_kept_capacity_ratio"] = _ratio(config, codec + config.full_precision)
    table = table_of(
        "quant-capacity",
        f"Tokens in the same bytes, over bfloat16: heads of {config.head_dim}, sequences of "
        f"{config.tokens:,} tokens in pages of {config.page_tokens} (codecs of whole pages: "
        f"{_PAGE_TOKENS_OF_PAGE_CODECS}). Codes: all that the codec stores; pages: with page "
        f"tables and alignment; full precision: with "
        f"{config.full_precision[1:].replace('+', ' and ')} in addition.",
        (PLAIN, *config.codecs),
        {
            "codec": lambda codec: codec,
            "bits per element": lambda codec: codes_bytes(config, codec) * 4 / config.head_dim,
            "bytes per token and head": lambda codec: codes_bytes(config, codec),
            "ratio, codes": lambda codec: codes_bytes(config, PLAIN) / codes_bytes(config, codec),
            "ratio, pages": lambda codec: _ratio(config, codec),
            "ratio, full-precision window": lambda codec: (
                None if codec == PLAIN else _ratio(config, codec + config.full_precision)
            ),
        },
    )
    chart = Chart(
        name="quant-capacity",
        title="Tokens in equal bytes",
        x_label="codec",
        y_label="ratio to bfloat16",
        lines={"pages": tuple((codec, _ratio(config, codec)) for codec in config.codecs)},
    )
    return PartResult(claims=made, tables=(table,), charts=(chart,))


def codes_bytes(config: CapacityConfig, codec: str) -> float:
    """Bytes of one head's key and value of a token, with all metadata."""
    tokens = _page_tokens(config, codec)
    return sum(spec.vector_bytes(config.head_dim, tokens) for spec in codec_pair(codec))


def sequence_bytes(config: CapacityConfig, codec: str) -> int:
    """Bytes of a sequence's pages and page tables in a layer."""
    layout = layout_for(
        _one_layer(config), codec=fill_plain(codec, PLAIN), page_tokens=_page_tokens(config, codec)
    )
    total = 0
    for group in layout.groups:
        slots = group.records if group.records is not None else config.tokens
        pages = ceil(slots / group.page_class.tokens)
        total += group.num_lanes * pages * (group.page_class.page_bytes + _TABLE_ENTRY_BYTES)
    return total


def _ratio(config: CapacityConfig, codec: str) -> float:
    return sequence_bytes(config, PLAIN) / sequence_bytes(config, codec)


def _page_tokens(config: CapacityConfig, codec: str) -> int:
    codecs, *_ = codec.split("+")
    per_page = any(spec.per_page for spec in codec_pair(codecs))
    return _PAGE_TOKENS_OF_PAGE_CODECS if per_page else config.page_tokens


def _one_layer(config: CapacityConfig) -> ModelSpec:
    hidden_size = config.num_kv_heads * config.head_dim
    return ModelSpec(
        architecture="llama",
        num_layers=1,
        num_heads=config.num_kv_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_size=hidden_size,
        intermediate_size=1,
        vocab_size=1,
        max_positions=config.tokens,
        tied_embeddings=True,
        gated_mlp=True,
        layers=(LayerSpec(),),
    )
