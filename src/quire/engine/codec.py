"""Which codec an engine stores KV in, and whether it can."""

from quire.codecs.registry import make_codec
from quire.errors import ConfigError
from quire.kv.store import plain_codec
from quire.models.loader import LoadedModel
from quire.spec.codec_refusals import stored_codec
from quire.spec.kv_format import read_format


def codec_of(text: str, model: LoadedModel) -> str:
    """The codec as it is counted and remembered: nothing left to a default.

    Raises:
        ConfigError: it is not known, or cannot store vectors of this model on this device.
    """
    decoder, head_dim = model.decoder, model.spec.head_dim
    written = stored_codec(text, plain_codec(decoder.dtype))
    form = read_format(written)
    for codec in (form.key, form.value):
        why_not = type(make_codec(codec, head_dim)).why_not(decoder.device)
        if why_not is not None:
            raise ConfigError(f"KV codec {text!r} cannot run here: {why_not}; use int8")
    return written
