"""Which class encodes under which name. A codec is found by standing in `quire.codecs`."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import TypeVar

from quire import codecs
from quire.codecs.base import Codec
from quire.codecs.equalised import equalised
from quire.errors import ConfigError
from quire.layout.codec_names import CODECS
from quire.layout.codecs import CodecSpec

C = TypeVar("C", bound=Codec)
_CODECS: dict[str, type[Codec]] = {}
_loaded: list[bool] = []


def register(*names: str) -> Callable[[type[C]], type[C]]:
    """Say which codecs a class implements.

    Raises:
        ConfigError: a name that has no bytes in `quire.layout.codec_names`, or that is taken.
    """

    def put(codec: type[C]) -> type[C]:
        for name in names:
            if name not in CODECS:
                raise ConfigError(
                    f"codec {name!r} says nowhere what it stores: see spec.codec_names"
                )
            if _CODECS.get(name, codec) is not codec:
                raise ConfigError(f"two codecs are called {name!r}")
            _CODECS[name] = codec
        return codec

    return put


def registered() -> Mapping[str, type[Codec]]:
    """All codecs by name."""
    if not _loaded:
        for module in pkgutil.iter_modules(codecs.__path__):
            importlib.import_module(f"{codecs.__name__}.{module.name}")
        _loaded.append(True)
    return dict(sorted(_CODECS.items()))


def make_codec(spec: CodecSpec, head_dim: int) -> Codec:
    """What encodes vectors of so many numbers.

    Raises:
        ConfigError: head_dim does not suit the codec.
    """
    return equalised(registered()[spec.rule](spec, head_dim))
