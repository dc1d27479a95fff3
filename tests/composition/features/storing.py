"""How pages store numbers: codecs, full-precision tokens, mixed precision."""

from composition.feature import Feature, setting
from composition.ran import Ran

CODECS = (
    "int8",
    "fp8",
    "int4",
    "int2",
    "int8/int4",
    "int4_outliers",
    "int4_hadamard",
    "int4_page",
    "int4_page/int4",
    "int8_channel/int8",
    "kvquant4",
    "int4:equalise=1",
)
OF_VALUES = {
    "kvquant4": "int8/kvquant4",
    "int8_channel/int8": "int8/int8_channel",
    "int4:equalise=1": "int8/int4:equalise=1",
}
"""Tried where constants of keys cannot be used: the codec for values."""


def _forms(name: str) -> dict[str, tuple[str, ...]]:
    return {"codec": (name, OF_VALUES[name])} if name in OF_VALUES else {}


def _coded(ran: Ran) -> bool:
    tables = ran.scarce.engine.pool.kv.memory.tables.values()
    return any(not table.group.page_class.is_plain for table in tables)


def _has_group(part: str):
    return lambda ran: any(part in name for name in ran.groups())


def _promoted(ran: Ran) -> bool:
    entries = [e for _, found in ran.traces for e in found]
    return any(len(lane) for e in entries for lane in e.promoted or ())


FEATURES = (
    *(
        Feature(
            name=name,
            group="codec",
            option=f"`--kv-codec {name}`",
            draw=setting(codec=name, vary=_forms(name)),
            acted=_coded,
            alone_in="codec",
        )
        for name in CODECS
    ),
    Feature(
        name="full-precision tokens",
        group="codec",
        option="`--kv-codec int8+sinks=2+residual=8`",
        draw=setting(window="+sinks=2+residual=8"),
        acted=_has_group("full_precision"),
    ),
    Feature(
        name="mixed precision",
        group="codec",
        option="`--kv-codec int2+residual=16+promoted=4:int8`",
        draw=setting(promoted="+residual=16+promoted=4:int8"),
        acted=_promoted,
    ),
    Feature(
        name="plain layers",
        group="codec",
        option="`--kv-codec int8+plain_layers=1`",
        draw=setting(plain_layers="+plain_layers=1", times=2),
        acted=_coded,
    ),
)
