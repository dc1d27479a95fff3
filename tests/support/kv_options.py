"""A KVConfig made of flat names, so that options of nested configs can stand in one dictionary.

Without `swap_space` there is none: preempted requests are recomputed.
"""

from collections.abc import Mapping

from quire.config.kv_config import KVConfig, OffloadConfig, PrefixCacheConfig

_OFFLOAD = {
    "offload_memory": "kv_memory",
    "offload_recompute": "recompute",
    "offload_activation_codec": "activation_codec",
    "offload_cpu_attention": "cpu_attention",
}
_PREFIX_CACHE = {
    "enable_prefix_caching": "enabled",
    "cpu_memory": "cpu_memory",
    "disk_memory": "disk_memory",
    "disk_path": "disk_path",
    "remote": "remote",
    "remote_memory": "remote_memory",
    "remote_ttl_s": "remote_ttl_s",
    "remote_timeout_s": "remote_timeout_s",
    "kv_write": "write",
    "require_tiers": "require_tiers",
    "kv_load": "load",
    "state_checkpoint_interval": "state_checkpoint_interval",
    "state_checkpoint_memory": "state_checkpoint_memory",
}


def kv_config(**options: object) -> KVConfig:
    """A KVConfig; `offload_memory`, `enable_prefix_caching` and the like go to nested configs."""
    return KVConfig(**({"swap_space": 0} | kv_options(options)))


def kv_options(options: Mapping[str, object]) -> dict[str, object]:
    """Flat options as arguments of KVConfig."""
    nested = {*_OFFLOAD, *_PREFIX_CACHE}
    found = {name: value for name, value in options.items() if name not in nested}
    offload = {inner: options[name] for name, inner in _OFFLOAD.items() if name in options}
    prefix = {inner: options[name] for name, inner in _PREFIX_CACHE.items() if name in options}
    if offload:
        found["offload"] = OffloadConfig(**offload)
    if prefix:
        found["prefix_cache"] = PrefixCacheConfig(**prefix)
    return found
