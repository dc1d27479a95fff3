"""What a user can say about the KV memory."""

from dataclasses import dataclass
from typing import Literal, no_type_check

from quire.errors import ConfigError
from quire.layout.codec_names import AS_COMPUTED, codec_spec
from quire.layout.codecs import CodecSpec
from quire.layout.options import (
    Fraction,
    MaybeSize,
    Parsed,
    Size,
    check_options,
    option,
)
from quire.layout.sizes import parse_fraction, parse_size, parse_size_or

StoreName = Literal["paged", "contiguous_max", "contiguous_growing", "ring"]
AttentionName = Literal["auto", "native", "gathered", "reference"]

EVICTION = "Eviction"
QUANTIZATION = "Quantization"

ActivationCodecOption = Parsed[str | CodecSpec | None, CodecSpec | None]
"""The name of a codec, or none; holds the codec, or None for none."""


def parse_activation_codec(text: object) -> CodecSpec | None:
    """How activations are stored; None: as computed.

    Raises:
        UnknownName: no codec has this name.
        ConfigError: one that needs whole pages, or constants measured for keys and values.
    """
    if text is None or text == AS_COMPUTED:
        return None
    if not isinstance(text, str | CodecSpec):
        raise ConfigError(f"expected the name of a codec, got {text!r}")
    spec = codec_spec(text) if isinstance(text, str) else text
    if spec.per_page or spec.constants:
        raise ConfigError(
            f"codec {spec.name}: expected a codec that writes tokens one by one and needs nothing "
            "measured, such as int8 or int4"
        )
    return spec


@no_type_check  # run-time type checks in tests must not answer before our own refusals
@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """KV of running requests outside the KV memory: how much, and what is done with it there.

    Attributes are options; see their help.

    Raises:
        ConfigError: a value of the wrong type or out of range.
    """

    kv_memory: Size = option(
        "0",
        help="CPU memory for the oldest KV pages of running requests when the KV memory is full, "
        "in bytes or a size; they are prefetched layer by layer in every step",
        unit="bytes",
        flag="kv-offload-memory",
        common=True,
        parse=parse_size,
    )
    recompute: Fraction = option(
        "auto",
        help="fraction (0 to 1) of the offloaded KV that is recomputed from activations, which are "
        "transferred in its place; auto (by measured rates), off",
        flag="kv-offload-recompute",
        parse=parse_fraction,
    )
    activation_codec: ActivationCodecOption = option(
        "none",
        help="how these activations are stored on the CPU and transferred: none (as computed), or "
        "a codec such as int8",
        flag="kv-offload-activation-codec",
        parse=parse_activation_codec,
    )
    cpu_attention: Fraction = option(
        "auto",
        help="fraction (0 to 1) of the offloaded KV whose attention the CPU computes; auto (by "
        "measured rates; 0 where the device is the CPU), off",
        flag="kv-offload-cpu-attention",
        parse=parse_fraction,
    )

    def __post_init__(self) -> None:
        check_options(self)
        parts = self.recompute or 0.0, self.cpu_attention or 0.0
        if sum(parts) > 1:
            raise ConfigError(
                "expected --kv-offload-recompute and --kv-offload-cpu-attention of 1 together "
                f"or less, got {parts[0]:g} and {parts[1]:g}: lower one of them, or use auto or off"
            )


@no_type_check  # run-time type checks in tests must not answer before our own refusals
@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheConfig:
    """KV that is kept for requests that begin alike: whether, and where beside the KV memory.

    Attributes are options; see their help.

    Raises:
        ConfigError: a value of the wrong type.
    """

    enabled: bool = option(
        True,
        help="keep the KV of prompts and outputs for requests that begin alike",
        flag="enable-prefix-caching",
        common=True,
    )
    disk_memory: Size = option(
        "0",
        help="disk space for cached prefixes that leave the KV memory, in bytes or a size; a "
        "restarted engine finds them again",
        unit="bytes",
        flag="disk-kv-memory",
        parse=parse_size,
    )
    disk_path: str = option(
        "",
        help="folder for --disk-kv-memory, used by this engine only; it is created if missing",
        flag="disk-kv-path",
    )
    remote: str = option(
        "",
        help="HOST:PORT of a store for cached prefixes, as quire kv-store serves it, in place of "
        "a disk",
        flag="remote-kv",
    )

    def __post_init__(self) -> None:
        check_options(self)


@no_type_check  # run-time type checks in tests must not answer before our own refusals
@dataclass(frozen=True, slots=True, kw_only=True)
class KVConfig:
    """The KV memory: how large, in what pages, what stays.

    Attributes are options; see their help. Rare ones are in `offload` and `prefix_cache`.
    """

    memory: MaybeSize = option(
        "auto",
        help="KV memory, fixed for the engine's life: bytes, a size such as 64MiB, or auto (what "
        "the device has free)",
        unit="bytes",
        flag="kv-memory",
        common=True,
        parse=parse_size_or("auto"),
    )
    swap_space: Size = option(
        "0",
        help="CPU memory for the KV of preempted requests, in bytes or a size; with 0 it is "
        "recomputed",
        unit="bytes",
        common=True,
        parse=parse_size,
    )
    store: StoreName = option(
        "paged", help="how KV lies in memory; all but paged are for comparison", flag="kv-store"
    )
    store_tokens: int | None = option(
        None,
        help="longest sequence that a contiguous store reserves memory for; unset: the model's "
        "context",
        unit="tokens",
        flag="kv-store-tokens",
    )
    page_tokens: int = option(
        16, help="tokens in a page (block)", unit="tokens", flag="block-size", common=True
    )
    codec: str = option(
        "none",
        help="how keys and values are stored, such as int8, int8/int4:group=32 for each apart, or "
        "kivi4+sinks=4+residual=128; none: as the model computes",
        flag="kv-codec",
        group=QUANTIZATION,
        common=True,
    )
    constants: str = option(
        "",
        help="folder with what quire calibrate measured for some codecs; unset: the model's",
        flag="kv-constants",
        group=QUANTIZATION,
    )
    evict: str = option(
        "full",
        help="eviction policy of requests that name none, such as "
        "recent:cap=512,every=64,sinks=4; full keeps all tokens",
        group=EVICTION,
        common=True,
    )
    evict_allow: str = option(
        "",
        help="policies that requests may name, such as 'h2o; snapkv:window=16', all or none; "
        "unset: the policy of --evict with other numbers. full may always be named",
        group=EVICTION,
    )
    record_evictions: bool = option(
        False,
        help="record which tokens were evicted from each request, for analysis",
        group=EVICTION,
    )
    offload: OffloadConfig = option(
        OffloadConfig(), help="KV of running requests outside the KV memory", group="Offloading"
    )
    prefix_cache: PrefixCacheConfig = option(
        PrefixCacheConfig(),
        help="KV kept for requests that begin alike",
        group="Prefix caching",
    )
    attention: AttentionName = option("auto", help="backend that computes attention over pages")
    scratch: Size = option(
        "64MiB",
        help="bound on gathered pages at a time, outside the KV memory, in bytes or a size",
        unit="bytes",
        parse=parse_size,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if not 1 <= self.page_tokens <= 1024:
            raise ConfigError(f"expected page_tokens from 1 to 1024, got {self.page_tokens}")
        if self.store_tokens is not None and self.store_tokens < 1:
            raise ConfigError(f"expected store_tokens of 1 or more, got {self.store_tokens}")
