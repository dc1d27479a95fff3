"""The options of the KV memory: size, pages, codec, eviction, offload, prefix caching."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, no_type_check

from quire.config.store_url import StoreURL, parse_folder, parse_store_url
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
    parse_named,
)
from quire.layout.sizes import parse_fraction, parse_size, parse_size_or
from quire.layout.sparse import parse_sparse

AttentionName = Literal["auto", "native", "triton", "gathered", "reference"]

EVICTION = "Eviction"
QUANTIZATION = "Quantization"
SPARSE = "Sparse attention"

MAX_TIMEOUT_S = 60.0
RemoteOption = Parsed[str | StoreURL | None, StoreURL | None]
"""Type of the option of a shared store: set by its URL, read as an address or None."""
ActivationCodecOption = Parsed[str | CodecSpec | None, CodecSpec | None]
"""Type of the activation codec option: set by name or "none", read as a codec or None."""


def parse_activation_codec(text: object) -> CodecSpec | None:
    """Parse the codec of stored activations; None: as computed.

    Raises:
        UnknownName: an unknown codec.
        ConfigError: a codec of whole pages, or with constants measured for keys and values.
    """
    if text is None or text == AS_COMPUTED:
        return None
    if not isinstance(text, str | CodecSpec):
        raise ConfigError(f"expected the name of a codec, got {text!r}")
    spec = codec_spec(text) if isinstance(text, str) else text
    if spec.per_page or spec.constants:
        raise ConfigError(
            f"codec {spec.name} cannot store activations: expected a codec that encodes single "
            "tokens without measured constants, such as int8 or int4"
        )
    return spec


def parse_kv_codec(name: object) -> str:
    """Return the name of a KV codec; vLLM's names of the same codecs are accepted.

    Raises:
        ConfigError: not a text.
    """
    if not isinstance(name, str):
        raise ConfigError(f"expected the name of a codec, got {name!r}")
    return {"auto": AS_COMPUTED, "fp8_e4m3": "fp8", "int8_per_token_head": "int8"}.get(name, name)


def parse_policy_file(file: object) -> str:
    """Return the absolute path of a file of policies, for processes with other folders; "": unset.

    Raises:
        ConfigError: neither a text nor a path.
    """
    if not isinstance(file, str | Path):
        raise ConfigError(f"expected the path of a Python file, got {file!r}")
    return str(Path(file).expanduser().absolute()) if file != "" else ""


def policy_file_option() -> Any:
    """The option --policy-file; a command loads the file before it runs."""
    return option(
        "",
        help="Python file that registers eviction policies or budgets, which can then be named "
        "like those of Quire",
        group=EVICTION,
        metavar="FILE.py",
        parse=parse_policy_file,
    )


@no_type_check  # type checks in tests must not replace the errors of `__post_init__`
@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """KV offload: options for the KV of running requests in CPU memory.

    Attributes are options; see their help.

    Raises:
        ConfigError: a value of the wrong type or out of range.
    """

    kv_memory: Size = option(
        "0",
        help="CPU memory for the oldest KV pages of running requests when the KV memory is full "
        "(bytes or a size such as 4GiB); they are prefetched layer by layer in every step",
        unit="bytes",
        flag="kv-offload-memory",
        common=True,
        parse=parse_size,
    )
    recompute: Fraction = option(
        "auto",
        help="fraction (0 to 1) of the offloaded KV that is recomputed from activations, which are "
        "transferred instead of it; auto (by measured rates), off",
        flag="kv-offload-recompute",
        parse=parse_fraction,
    )
    activation_codec: ActivationCodecOption = option(
        "none",
        help="codec of the activations that offloaded KV is recomputed from: none (as computed), "
        "or a name such as int8",
        flag="kv-offload-activation-codec",
        parse=parse_activation_codec,
    )
    cpu_attention: Fraction = option(
        "auto",
        help="fraction (0 to 1) of the offloaded KV for which the CPU computes attention; auto (by "
        "measured rates; 0 if the device is the CPU), off",
        flag="kv-offload-cpu-attention",
        parse=parse_fraction,
    )

    def __post_init__(self) -> None:
        check_options(self)
        fractions = self.recompute or 0.0, self.cpu_attention or 0.0
        if sum(fractions) > 1:
            raise ConfigError(
                "expected --kv-offload-recompute plus --kv-offload-cpu-attention of at most 1, got "
                f"{fractions[0]:g} and {fractions[1]:g}: lower one of them, or use auto or off"
            )


@no_type_check  # type checks in tests must not replace the errors of `__post_init__`
@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheConfig:
    """Prefix caching: options for cached prefixes and for their tiers outside of the KV memory.

    Attributes are options; see their help.

    Raises:
        ConfigError: a value of the wrong type.
    """

    enabled: bool = option(
        True,
        help="reuse the KV of prompts and outputs in requests with the same prefix",
        flag="enable-prefix-caching",
        common=True,
    )
    cpu_memory: Size = option(
        "0",
        help="CPU memory for cached prefixes evicted from the KV memory (bytes or a size such as "
        "16GiB); full, it evicts them to the disk or the shared store",
        unit="bytes",
        flag="cpu-kv-memory",
        parse=parse_size,
    )
    disk_memory: Size = option(
        "0",
        help="disk space for cached prefixes evicted from the KV memory and from --cpu-kv-memory "
        "(bytes or a size such as 64GiB); they survive a restart",
        unit="bytes",
        flag="disk-kv-memory",
        parse=parse_size,
    )
    disk_path: str = option(
        "",
        help="folder or file:// URL for --disk-kv-memory, created if missing; several engines may "
        "use it together",
        flag="disk-kv-path",
        parse=parse_folder,
    )
    remote: RemoteOption = option(
        "",
        help="URL of a shared store for cached prefixes, below --cpu-kv-memory and "
        "--disk-kv-memory: redis://HOST:PORT or valkey://HOST:PORT, rediss:// (TLS), "
        "unix:///SOCKET, or file:///FOLDER of a shared file system",
        flag="remote-kv",
        parse=parse_store_url,
    )
    remote_memory: Size = option(
        "0",
        help="maximum bytes of the prefixes of all engines in --remote-kv (bytes or a size such as "
        "64GiB); full, it evicts the least recently used; 0: the server's maxmemory only",
        unit="bytes",
        flag="remote-kv-memory",
        parse=parse_size,
    )
    remote_ttl_s: float = option(
        86_400.0,
        help="time in seconds after its last use when a prefix in a Redis or Valkey store expires; "
        "0: never",
        unit="s",
        flag="remote-kv-ttl",
    )
    remote_timeout_s: float = option(
        0.5,
        help="time in seconds without a byte from a Redis or Valkey store after which it counts as "
        "unreachable; its prefixes are then recomputed",
        unit="s",
        flag="remote-kv-timeout",
    )
    require_tiers: bool = option(
        False,
        help="refuse to start if a disk or a store of cached prefixes cannot be used; default: a "
        "warning is logged, prompts are computed, and the tier is tried again",
    )
    write: Literal["back", "through"] = option(
        "back",
        help="when cached prefixes are written to the tiers; back: when they are evicted and at "
        "the end; through: also as soon as they are computed, for other engines",
        flag="kv-write",
    )
    load: Literal["fastest", "whole"] = option(
        "fastest",
        help="how stored prefixes are loaded; fastest: the first tokens are recomputed while the "
        "last are loaded, by measured rates; whole: nothing is recomputed unless a tier stalls, so "
        "that an engine which only decodes is not delayed",
        flag="kv-load",
    )
    state_checkpoint_interval: int = option(
        0,
        help="tokens between checkpoints of recurrent states in the prefix cache, a multiple of "
        "the block; 0: only at the end of a prompt, of its part in common with an earlier one, and "
        "of the newest block of a response",
        unit="tokens",
        min_value=0,
    )
    state_checkpoint_memory: MaybeSize = option(
        "auto",
        help="KV memory for checkpoints of recurrent states (bytes, a size such as 1GiB, or auto: "
        "half of the KV memory); full, it evicts the least recently used checkpoint",
        unit="bytes",
        parse=parse_size_or("auto"),
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.remote_ttl_s < 0 or self.remote_ttl_s != self.remote_ttl_s:
            raise ConfigError(
                f"expected --remote-kv-ttl of 0 or more seconds, got {self.remote_ttl_s:g}"
            )
        if not 0 < self.remote_timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"expected --remote-kv-timeout above 0 and up to {MAX_TIMEOUT_S:g} seconds, got "
                f"{self.remote_timeout_s:g}"
            )


@no_type_check  # type checks in tests must not replace the errors of `__post_init__`
@dataclass(frozen=True, slots=True, kw_only=True)
class KVConfig:
    """Options of the KV memory: size, pages, codec, eviction.

    Attributes are options; see their help. `offload` and `prefix_cache` hold further options.
    """

    memory: MaybeSize = option(
        "auto",
        help="size of the KV memory, fixed for the engine's life: bytes, a size such as 64MiB, or "
        "auto (the free memory of the device; quire tune and quire board need a size)",
        unit="bytes",
        flag="kv-memory",
        common=True,
        parse=parse_size_or("auto"),
    )
    swap_space: MaybeSize = option(
        "auto",
        help="CPU memory for the KV of preempted requests (bytes, a size such as 4GiB, or auto: "
        "the size of the KV memory, at most an eighth of the free CPU memory and 4GiB); 0: their "
        "KV is recomputed",
        unit="bytes",
        common=True,
        parse=parse_size_or("auto"),
    )
    page_tokens: int = option(16, help="tokens in a page (block)", unit="tokens", flag="block-size")
    codec: str = option(
        "none",
        help="codec of keys and values, such as int8, int8/int4:group=32 (keys/values), or "
        "kivi4+sinks=4+residual=128; none: as computed by the model",
        flag="kv-codec",
        group=QUANTIZATION,
        common=True,
        parse=parse_kv_codec,
        synonyms=("kv-cache-dtype",),
    )
    constants: str = option(
        "",
        help="folder with codec constants measured by quire calibrate; unset: the model's folder",
        flag="kv-constants",
        group=QUANTIZATION,
    )
    evict: str = option(
        "full",
        help="default eviction policy of requests, such as recent:cap=512,every=64,sinks=4, or one "
        "of --policy-file; full: no eviction",
        group=EVICTION,
        common=True,
    )
    evict_allow: str = option(
        "",
        help="eviction policies that requests may choose, such as 'h2o; snapkv:window=16', all or "
        "none; unset: the policy of --evict with any option values. full is always allowed",
        group=EVICTION,
    )
    policy_file: str = policy_file_option()
    sparse: str = option(
        "off",
        help="default sparse attention of requests: the pages that a decode step reads, such as "
        "quest:budget=10% or quest:pages=32,recent=4,sinks=1,dense_layers=2; off: all pages. Only "
        "an engine with a rule stores the bounds of keys that requests with other rules need",
        group=SPARSE,
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
        help="KV reuse in requests with the same prefix",
        group="Prefix caching",
    )
    attention: AttentionName = option("auto", help="backend that computes attention over pages")
    scratch: Size = option(
        "64MiB",
        help="maximum memory for gathered pages, outside the KV memory (bytes or a size such as "
        "64MiB)",
        unit="bytes",
        parse=parse_size,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if not 1 <= self.page_tokens <= 1024:
            raise ConfigError(
                f"expected page_tokens (--block-size) from 1 to 1024, got {self.page_tokens}"
            )
        parse_named(parse_sparse, "sparse", self.sparse)
        if not self.scratch:
            raise ConfigError(
                "expected --scratch above 0, got 0: attention gathers at least one sequence's "
                "pages at a time; give a size such as 1MiB, or leave it out"
            )
