"""Options of KV outside the KV memory that a simulation knows nothing of."""

from dataclasses import fields

from quire.config.kv_config import KVConfig
from quire.errors import ConfigError

_OFFLOAD = (
    "offload_memory",
    "offload_recompute",
    "offload_activation_codec",
    "offload_cpu_attention",
)
_DEFAULTS = KVConfig()
_TIERS = ("disk_memory", "disk_path", "remote")


def refuse_unsimulated(kv: KVConfig) -> None:
    """Refuse options that would change nothing in a simulation.

    Raises:
        ConfigError: with the option to leave out.
    """
    for field in fields(kv):
        value = getattr(kv, field.name)
        if field.name in _OFFLOAD + _TIERS and value not in (getattr(_DEFAULTS, field.name), 0):
            what = "KV offload" if field.name in _OFFLOAD else "prefixes on disk or in a store"
            raise ConfigError(
                f"--{field.metadata['option'].flag}: a simulation has no {what}, so it "
                "would change nothing; leave it out"
            )
