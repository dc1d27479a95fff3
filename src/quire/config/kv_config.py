"""What a user can say about the KV memory."""

from dataclasses import dataclass
from typing import Literal, no_type_check

from quire.errors import ConfigError
from quire.layout.codec_names import AS_COMPUTED, codec_spec
from quire.layout.codecs import CodecSpec
from quire.layout.options import check_options, option

StoreName = Literal["paged", "contiguous_max", "contiguous_growing", "ring"]
AttentionName = Literal["auto", "native", "gathered", "reference"]

EVICTION = "Eviction"
OFFLOADING = "Offloading"
PREFIX_CACHING = "Prefix caching"
QUANTIZATION = "Quantization"


@no_type_check  # run-time type checks in tests must not answer before our own refusals
@dataclass(frozen=True, slots=True, kw_only=True)
class KVConfig:
    """The KV memory: how large, in what pages, what stays.

    Attributes are options; see their help.
    """

    memory: int | str = option(
        "auto",
        help="KV memory, fixed for the engine's life: bytes, a size such as 64MiB, or auto (what "
        "the device has free)",
        unit="bytes",
        flag="kv-memory",
        common=True,
    )
    swap_space: int | str = option(
        "0",
        help="CPU memory for the KV of preempted requests, in bytes or a size; with 0 it is "
        "recomputed",
        unit="bytes",
        common=True,
    )
    offload_memory: int | str = option(
        "0",
        help="CPU memory for the oldest KV pages of running requests when the KV memory is full, "
        "in bytes or a size; they are prefetched layer by layer in every step",
        unit="bytes",
        flag="kv-offload-memory",
        group=OFFLOADING,
        common=True,
    )
    disk_memory: int | str = option(
        "0",
        help="disk space for cached prefixes that leave the KV memory, in bytes or a size; a "
        "restarted engine finds them again",
        unit="bytes",
        flag="disk-kv-memory",
        group=PREFIX_CACHING,
    )
    disk_path: str = option(
        "",
        help="folder for --disk-kv-memory, used by this engine only; it is created if missing",
        flag="disk-kv-path",
        group=PREFIX_CACHING,
    )
    remote: str = option(
        "",
        help="HOST:PORT of a store for cached prefixes, as quire kv-store serves it, in place of "
        "a disk",
        flag="remote-kv",
        group=PREFIX_CACHING,
    )
    offload_recompute: str = option(
        "auto",
        help="fraction (0 to 1) of the offloaded KV that is recomputed from activations, which are "
        "transferred in its place; auto (by measured rates), off",
        flag="kv-offload-recompute",
        group=OFFLOADING,
    )
    offload_activation_codec: str = option(
        "none",
        help="how these activations are stored on the CPU and transferred: none (as computed), or "
        "a codec such as int8",
        flag="kv-offload-activation-codec",
        group=OFFLOADING,
    )
    offload_cpu_attention: str = option(
        "auto",
        help="fraction (0 to 1) of the offloaded KV whose attention the CPU computes; auto (by "
        "measured rates; 0 where the device is the CPU), off",
        flag="kv-offload-cpu-attention",
        group=OFFLOADING,
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
    enable_prefix_caching: bool = option(
        True,
        help="keep the KV of prompts and outputs for requests that begin alike",
        group=PREFIX_CACHING,
        common=True,
    )
    attention: AttentionName = option("auto", help="backend that computes attention over pages")
    scratch: int | str = option(
        "64MiB",
        help="bound on gathered pages at a time, outside the KV memory, in bytes or a size",
        unit="bytes",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if not 1 <= self.page_tokens <= 1024:
            raise ConfigError(f"expected page_tokens from 1 to 1024, got {self.page_tokens}")
        parts = self.recompute_fraction or 0.0, self.cpu_attention_fraction or 0.0
        if sum(parts) > 1:
            raise ConfigError(
                "expected --kv-offload-recompute and --kv-offload-cpu-attention of 1 together "
                "or less, "
                f"got {parts[0]:g} and {parts[1]:g}: lower one of them, or use auto or off"
            )
        _ = self.input_codec
        if self.store_tokens is not None and self.store_tokens < 1:
            raise ConfigError(f"expected store_tokens of 1 or more, got {self.store_tokens}")

    @property
    def recompute_fraction(self) -> float | None:
        """Of the first pages on the host, the part to make again; None: what rates say.

        Raises:
            ConfigError: not a part, nor auto, nor off.
        """
        return part_of(self.offload_recompute, "--kv-offload-recompute")

    @property
    def input_codec(self) -> CodecSpec | None:
        """How activations are kept; None: as computed.

        Raises:
            UnknownName: no codec has this name.
            ConfigError: one that needs whole pages, or constants measured for keys and values.
        """
        if self.offload_activation_codec == AS_COMPUTED:
            return None
        spec = codec_spec(self.offload_activation_codec)
        if spec.per_page or spec.constants:
            raise ConfigError(
                f"--kv-offload-activation-codec {spec.name}: expected a codec that writes "
                "tokens one by one "
                "and needs nothing measured, such as int8 or int4"
            )
        return spec

    @property
    def cpu_attention_fraction(self) -> float | None:
        """Of the first pages on the host, the part attended to there; None: what rates say.

        Raises:
            ConfigError: not a part, nor auto, nor off.
        """
        return part_of(self.offload_cpu_attention, "--kv-offload-cpu-attention")


def part_of(text: str, flag: str) -> float | None:
    """What a part is written as; None for auto.

    Raises:
        ConfigError: not a number from 0 to 1, nor auto, nor off.
    """
    if text in ("auto", "off"):
        return None if text == "auto" else 0.0
    try:
        part = float(text)
    except ValueError:
        part = -1.0
    if not 0 <= part <= 1:
        raise ConfigError(f"expected {flag} of auto, off or a part from 0 to 1, got {text!r}")
    return part
