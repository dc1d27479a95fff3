"""The KV codec of an engine, checked against the model and the device."""

from dataclasses import dataclass
from pathlib import Path

from quire.codecs.registry import make_codec
from quire.config.kv_config import KVConfig
from quire.errors import ConfigError
from quire.kv.coded_layers import MeasuredConstants, read_constants, sides_of
from quire.kv.store import plain_codec
from quire.layout.codec_refusals import stored_codec
from quire.layout.kv_format import read_format
from quire.layout.model import ModelSpec
from quire.models.base import Decoder
from quire.models.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class StoredAs:
    """The storage format of keys and values."""

    codec: str  # with all defaults resolved
    dtype: str  # compute dtype of the model
    measured: MeasuredConstants | None = None  # calibration constants; None if the codec needs none

    @property
    def fingerprint(self) -> str:
        """Identity of the encoding: equal fingerprints encode equal values to equal codes."""
        parts = [self.codec, self.dtype]
        return " ".join([*parts, self.measured.digest] if self.measured else parts)


def codec_of(config: KVConfig, model: LoadedModel) -> StoredAs:
    """Resolve the KV codec of an engine and read its calibration constants; see `stored_as`."""
    return stored_as(
        config.codec, model.decoder, model.spec, constants=config.constants, folder=model.folder
    )


def stored_as(
    codec: str,
    decoder: Decoder,
    spec: ModelSpec,
    *,
    constants: str = "",
    folder: Path | None = None,
) -> StoredAs:
    """Resolve a KV codec; read its constants from `constants`, else the model's folder."""
    dtype = plain_codec(decoder.dtype)
    written = stored_codec(codec, dtype)
    form = read_format(written)
    records = (form.promoted.key, form.promoted.value) if form.promoted else ()
    for part in (form.key, form.value, *records):
        why_not = type(make_codec(part, spec.head_dim)).why_not(decoder.device)
        if why_not is not None:
            raise ConfigError(
                f"KV codec {codec!r} cannot run on {decoder.device}: {why_not}; use int8"
            )
    if not sides_of(form):
        if constants:
            raise ConfigError(
                f"--kv-constants {constants} has no effect: codec {codec!r} needs no "
                "measured constants; use --kv-codec with one that does, such as int8_channel or "
                "kvquant4, or leave out --kv-constants"
            )
        return StoredAs(written, dtype)
    found = Path(constants).expanduser() if constants else folder
    return StoredAs(written, dtype, read_constants(found, form, spec))
