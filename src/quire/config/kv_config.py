"""What a user can say about the KV memory."""

from dataclasses import dataclass
from typing import no_type_check

from quire.errors import ConfigError
from quire.layout.codec_names import AS_COMPUTED, codec_spec
from quire.layout.codecs import CodecSpec
from quire.layout.options import option, require_types


@no_type_check  # run-time type checks in tests must not answer before our own refusals
@dataclass(frozen=True, slots=True, kw_only=True)
class KVConfig:
    """The KV memory: how large, in what pages, what stays.

    Attributes are options; see their help.
    """

    memory: int | str = option(
        "auto",
        help="KV memory, fixed for the engine's life: bytes, a size such as 64MiB, or auto",
        unit="bytes",
        flag="kv-memory",
    )
    swap_space: int | str = option(
        "0",
        help="host memory for preempted sequences, in bytes or a size; with 0 they are read again",
        unit="bytes",
        flag="swap-space",
    )
    offload_memory: int | str = option(
        "0",
        help="host memory for the first pages of sequences that run on while the KV memory is "
        "full: their KV is brought layer by layer, in every step; bytes or a size",
        unit="bytes",
        flag="kv-offload-memory",
    )
    disk_memory: int | str = option(
        "0",
        help="room on disk for cached prefixes that the KV memory lets go of: a restarted engine "
        "finds them again; bytes or a size",
        unit="bytes",
        flag="disk-kv-memory",
    )
    disk_path: str = option(
        "",
        help="folder for --disk-kv-memory, of this engine alone; made where there is none",
        flag="disk-kv-path",
    )
    remote: str = option(
        "",
        help="HOST:PORT of a store for cached prefixes, as quire kv-store serves it, in place of "
        "a disk",
        flag="remote-kv",
    )
    offload_recompute: str = option(
        "auto",
        help="of the first pages on the host the part whose keys and values are made again from "
        "activations, which are carried in their place: auto (what measured rates say), off, or "
        "a part from 0 to 1",
        flag="kv-offload-recompute",
    )
    offload_activation_codec: str = option(
        "none",
        help="how these activations are kept on the host and carried: none (as computed), or codes "
        "such as int8",
        flag="kv-offload-activation-codec",
    )
    offload_cpu_attention: str = option(
        "auto",
        help="of the first pages on the host the part that is attended to there: auto (what "
        "measured rates say; nothing on a CPU), off, or a part from 0 to 1",
        flag="kv-offload-cpu-attention",
    )
    store: str = option(
        "paged",
        help="how KV lies in memory: paged, contiguous_max, contiguous_growing or ring",
        flag="kv-store",
    )
    store_tokens: int | None = option(
        None,
        help="longest sequence a contiguous store reserves for; the model's context where not said",
        unit="tokens",
        flag="kv-store-tokens",
    )
    page_tokens: int = option(16, help="slots in a page (block)", unit="tokens", flag="block-size")
    codec: str = option(
        "none",
        help="how keys and values are stored, such as int8, int8/int4:group=32 for each apart, or "
        "kivi4+sinks=4+residual=128; none: as the model computes",
        flag="kv-codec",
    )
    constants: str = option(
        "",
        help="folder in which quire calibrate has put what some codecs need; not said: the model's",
        flag="kv-constants",
    )
    evict: str = option(
        "full",
        help="which tokens stay where a request says nothing else, such as "
        "recent:cap=512,every=64,sinks=4; full keeps all",
    )
    evict_allow: str = option(
        "",
        help="rules that requests may name themselves, such as 'h2o; snapkv:window=16', all or "
        "none; not said: the rule of --evict with other numbers. full may always be named",
    )
    record_evictions: bool = option(
        False, help="keep which tokens left each request, for who wants to look at it"
    )
    enable_prefix_caching: bool = option(
        True, help="keep the KV of prompts and answers for requests that begin alike"
    )
    attention: str = option("auto", help="who computes attention over pages")
    scratch: int | str = option(
        "64MiB", help="bound on gathered pages at a time, outside the KV memory", unit="bytes"
    )

    def __post_init__(self) -> None:
        require_types(self)
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
