"""Addresses of shared stores for cached prefixes: redis://, rediss://, unix:// and file:// URLs."""

import re
from dataclasses import dataclass, field
from types import MappingProxyType
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from quire.errors import ConfigError

DEFAULT_PORT = 6379
_SCHEMES = MappingProxyType(
    {
        "redis": "redis",
        "rediss": "rediss",
        "unix": "unix",
        "file": "file",
        "valkey": "redis",
        "valkeys": "rediss",
    }
)
"""Accepted schemes and the scheme that each one means."""
_QUERY = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_LOGIN = re.compile(r"//.*@")
_FORMS = (
    "redis://HOST:PORT, rediss://HOST:PORT (TLS), unix:///SOCKET or file:///FOLDER, such as "
    "redis://127.0.0.1:6379/0"
)


@dataclass(frozen=True, slots=True)
class StoreURL:
    """Address of a shared store. Its text never contains the password.

    Attributes:
        scheme: redis, rediss (TLS), unix (a socket) or file (a folder).
        host: name or address of the server; empty for unix and file.
        port: port of the server.
        path: socket or folder; empty for redis and rediss.
        database: number of the server's database.
        username, password: login; None if the URL has none.
        files: files of TLS by the names ssl_ca_certs, ssl_certfile, ssl_keyfile.
    """

    scheme: str
    host: str = ""
    port: int = DEFAULT_PORT
    path: str = ""
    database: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    files: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """The URL without its password."""
        if self.scheme in ("unix", "file"):
            return f"{self.scheme}://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}/{self.database}"


def parse_store_url(text: object) -> StoreURL | None:
    """Parse the URL of a shared store; None if it is empty.

    Raises:
        ConfigError: not a URL of a store; the message has no password.
    """
    if text is None or text == "":
        return None
    if isinstance(text, StoreURL):
        return text
    if not isinstance(text, str):
        raise ConfigError(f"expected {_FORMS}, got {text!r}")
    shown = repr(_LOGIN.sub("//", text))
    scheme, colon, _ = text.partition("://")
    if scheme not in _SCHEMES or not colon:
        raise ConfigError(f"expected {_FORMS}, got {shown}")
    try:
        return _checked(_SCHEMES[scheme], urlsplit(text))
    except ConfigError:
        raise
    except ValueError as error:  # a port that is not a number, or brackets without an end
        raise ConfigError(f"expected {_FORMS}, got {shown}") from error


def parse_folder(text: object) -> str:
    """Parse a folder or a file:// URL; return the folder.

    Raises:
        ConfigError: a URL of another kind, or not a text.
    """
    if not isinstance(text, str):
        raise ConfigError(f"expected a folder, got {text!r}")
    if "://" not in text:
        return text
    url = parse_store_url(text)
    if url is None or url.scheme != "file":
        raise ConfigError(f"expected a folder or file:///FOLDER, got {url}; use --remote-kv for it")
    return url.path


def _checked(scheme: str, parts: SplitResult) -> StoreURL:
    query = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    files = {name: value for name, value in query.items() if name in _QUERY}
    unknown = sorted(set(query) - set(files) - ({"db"} if scheme == "unix" else set()))
    if unknown or (files and scheme != "rediss"):
        raise ConfigError(
            f"expected a URL with only {', '.join(_QUERY)} (rediss) or db (unix) after '?', got "
            f"{', '.join(unknown or files)}"
        )
    login = {"username": _text(parts.username), "password": _text(parts.password)}
    if scheme in ("unix", "file"):
        is_here = scheme == "unix" or parts.netloc in ("", "localhost")
        if not parts.path.strip("/") or not is_here:
            raise ConfigError(
                f"expected an absolute path, such as {scheme}:///var/lib/quire/kv, got "
                f"{scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
            )
        return StoreURL(
            scheme,
            path=unquote(parts.path),
            database=int(query.get("db", 0)),
            username=login["username"] or None,
            password=login["password"],
        )
    if not parts.hostname:
        raise ConfigError(f"expected a host in {scheme}://HOST:PORT, got none")
    return StoreURL(
        scheme,
        host=parts.hostname,
        port=parts.port or DEFAULT_PORT,
        database=int(parts.path.strip("/") or 0),
        username=login["username"],
        password=login["password"],
        files=tuple(sorted(files.items())),
    )


def _text(part: str | None) -> str | None:
    return None if part is None else unquote(part)
