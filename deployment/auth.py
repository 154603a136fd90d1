"""API keys: a file with one key a line, read anew when it changes, and the guard in front of the HTTP face."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any, Final, Protocol

from deployment.errors import http_error
from deployment.quota import CALLER
from orca_core.errors import ConfigError, OrcaError, UnauthenticatedError

_log = logging.getLogger(__name__)

HEADER: Final = "authorization"
"""Header of HTTP and metadata key of gRPC that carries ``Bearer KEY`` (RFC 6750)."""

MAX_KEYS_BYTES: Final = 4 << 20
"""A file of keys that is larger is none."""

CHECK_PERIOD_S: Final = 1.0
"""The file is looked at no more often than that."""

_CALLER: Final = b"orca-caller"  # this hash is no other one of the same key
FIELD: Final = "auth.api_keys_file"
OPEN_PATHS: Final = frozenset({"/livez", "/readyz"})
"""Paths of the HTTP face that need no key: probes have none."""

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]


class KeyCheck(Protocol):
    """Whether a caller may come in."""

    def check(self, authorizations: Iterable[str | bytes]) -> str:
        """A name for the caller's key, the same in every process, which does not tell it; empty where callers are not
        told apart. It stays in memory. ``authorizations``: all values of the caller's ``authorization``.

        Raises ``UnauthenticatedError``.
        """
        ...


class NoKeys:
    """Everybody may come in: no file of keys is configured."""

    def check(self, authorizations: Iterable[str | bytes]) -> str:
        """See ``KeyCheck.check``."""
        return ""


class ApiKeys:
    """The keys of a file, kept as salted hashes and compared in a time that says nothing of them.

    A file that has changed is read again, at most once in ``CHECK_PERIOD_S``; replacing it in one step (rename, or a
    Kubernetes secret's link) is safe. One that cannot be read or understood leaves the keys as they were. One without
    keys lets nobody in. ``clock``: seconds, monotonic. The constructor reads the file and raises ``ConfigError``.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._path = Path(path)
        self._clock = clock
        self._salt = secrets.token_bytes(32)
        self._seen = self._version()
        self._hashes = tuple(self._hash(key) for key in read_keys(self._path))
        self._looked_at = clock()

    def check(self, authorizations: Iterable[str | bytes]) -> str:
        """See ``KeyCheck.check``. May read the file."""
        self._refresh()
        given = list(authorizations)
        key = _bearer(given[0]) if len(given) == 1 else b""
        mine, known = self._hash(key), False
        for each in self._hashes:  # all of them, whichever fits
            known |= hmac.compare_digest(mine, each)
        if not (known and key):
            raise UnauthenticatedError
        return hashlib.blake2b(key, digest_size=16, person=_CALLER).hexdigest()

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._looked_at < CHECK_PERIOD_S:
            return
        self._looked_at = now
        version = self._version()
        if version == self._seen:
            return
        self._seen = version  # whatever comes of it, said once
        try:
            self._hashes = tuple(self._hash(key) for key in read_keys(self._path))
        except ConfigError as error:
            _log.error("the API keys stay as they were: %s", error)
            return
        _log.info("%d API keys read from %s", len(self._hashes), self._path)
        if not self._hashes:
            _log.warning("%s holds no API key: nobody is let in", self._path)

    def _version(self) -> tuple[int, ...] | None:
        """What changes with the file; ``None`` where there is none."""
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino, stat.st_dev

    def _hash(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._salt).digest()


def read_keys(path: Path) -> list[bytes]:
    """The keys of a file: one a line, of visible ASCII; what follows ``#`` behind white space, or a line of it, is a
    comment. Raises ``ConfigError``, which names the line and never its text.
    """
    try:
        if path.exists() and not path.is_file():  # a device or a pipe may have no end
            raise ConfigError(FIELD, f"{str(path)!r} is not a file")
        if path.stat().st_size > MAX_KEYS_BYTES:
            raise ConfigError(FIELD, f"{str(path)!r} has more than {MAX_KEYS_BYTES} bytes")
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    except OSError as error:
        raise ConfigError(FIELD, f"cannot read {str(path)!r}: {error.strerror}") from None
    keys = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith(b"#"):
            continue
        if len(words) > 1 and not words[1].startswith(b"#"):
            raise ConfigError(FIELD, f"{str(path)!r}, line {number}: must hold one key")
        if not all(0x21 <= byte <= 0x7E for byte in words[0]):
            raise ConfigError(FIELD, f"{str(path)!r}, line {number}: a key must be of visible ASCII characters")
        keys.append(words[0])
    return keys


def key_check(path: str | None) -> KeyCheck:
    """The check for ``auth.api_keys_file``. Raises ``ConfigError`` where the file cannot be read or holds no key."""
    if path is None:
        return NoKeys()
    if not read_keys(Path(path)):
        raise ConfigError(FIELD, f"{path!r} holds no key")
    return ApiKeys(path)


class CountedKeys:
    """A check of keys that tells ``on_refusal`` of each refusal."""

    def __init__(self, keys: KeyCheck, on_refusal: Callable[[OrcaError], None]) -> None:
        self._keys = keys
        self._on_refusal = on_refusal

    def check(self, authorizations: Iterable[str | bytes]) -> str:
        """See ``KeyCheck.check``."""
        try:
            return self._keys.check(authorizations)
        except UnauthenticatedError as error:
            self._on_refusal(error)
            raise


class KeyGuard:
    """ASGI: an application behind a check of keys. A refusal is an OpenAI error object; no body is read for it."""

    def __init__(self, app: _App, keys: KeyCheck) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """One connection, as ASGI says."""
        if scope["type"] != "lifespan" and not self._is_open(scope):
            try:
                CALLER.set(self._keys.check(value for name, value in scope["headers"] if name == HEADER.encode()))
            except UnauthenticatedError as error:
                return await self._refuse(error, scope, send)
        await self._app(scope, receive, send)
        return None

    @staticmethod
    def _is_open(scope: _Scope) -> bool:
        return scope["path"].removeprefix(scope.get("root_path", "")) in OPEN_PATHS

    @staticmethod
    async def _refuse(error: UnauthenticatedError, scope: _Scope, send: _Send) -> None:
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        failure = http_error(error, "")
        body = json.dumps(failure.body).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"www-authenticate", b"Bearer"),
        ]
        await send({"type": "http.response.start", "status": failure.status, "headers": headers})
        return await send({"type": "http.response.body", "body": body, "more_body": False})


def _bearer(authorization: str | bytes) -> bytes:
    """The key of ``Bearer KEY``, empty where there is none."""
    given = authorization if isinstance(authorization, bytes) else authorization.encode("utf-8", "replace")
    scheme, _, key = given.strip().partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
