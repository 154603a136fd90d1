"""The file that names the peers and the targets (TOML), read into values that cannot be wrong."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from deployment.bench.peers.works import HEADLINES
from orca_core.errors import ConfigError

DEFAULT_FILE: Final = Path(__file__).parent / "peers.toml"
PRECISIONS: Final = {"bf16": "none", "int8": "int8", "int4": "int4"}
"""Of the weights, and what ``model.quantization`` is called in ours."""
_PEER_KEYS: Final = {"name", "precision", "needs", "command", "server", "health", "body", "env"}
_TARGET_KEYS: Final = {"peer", "workloads", "metric", "batches", "at_least", "at_most"}


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine to compare with. Texts may hold ``{home}`` and the other names of ``fill``.

    - ``command``: a runner, see ``runner``. ``server``: an OpenAI server of its own, for the trace; without a
      ``command`` for everything. ``health``: the path that answers 200 once it is ready.
    - ``needs``: files that must be there, or the peer is left out.
    - ``body``: fields to add to a request to ``server``. ``env``: environment variables to add.
    """

    name: str
    precision: str
    command: tuple[str, ...] = ()
    server: tuple[str, ...] = ()
    health: str = "/health"
    needs: tuple[str, ...] = ()
    body: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    def missing(self, places: Mapping[str, str]) -> list[str]:
        """What it needs and is not there."""
        return [path for path in (fill(each, places) for each in self.needs) if not Path(path).exists()]


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on ``metric`` of ours divided by that of ``peer``; one of ``at_least`` and ``at_most``."""

    peer: str
    workload: str
    metric: str
    batch: int
    at_least: float | None = None
    at_most: float | None = None

    def holds(self, ratio: float) -> bool:
        """Whether a ratio keeps it."""
        return (self.at_least is None or ratio >= self.at_least) and (self.at_most is None or ratio <= self.at_most)

    @property
    def bound(self) -> str:
        """In words."""
        return f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"


def fill(text: str, places: Mapping[str, str]) -> str:
    """Put values for ``{name}``; braces around anything else stay."""
    for name, value in places.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def load_settings(path: Path) -> tuple[list[Peer], list[Target]]:
    """Raises ``ConfigError`` naming what is wrong."""
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError("--config", f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("--config", f"{path}: {error}") from None
    _known("--config", data, {"peer", "target"})
    peers = [_peer(f"peer[{index}]", entry) for index, entry in enumerate(_tables(data, "peer"))]
    names = [peer.name for peer in peers]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError("peer", f"{name} is there twice")
    tables = enumerate(_tables(data, "target"))
    targets = [target for index, entry in tables for target in _targets(f"target[{index}]", entry)]
    for target in targets:
        if target.peer not in names:
            raise ConfigError("target", f"there is no peer {target.peer}")
    return peers, targets


def _tables(data: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    found = data.get(key, [])
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ConfigError(key, f"must be tables [[{key}]]")
    return found


def _peer(where: str, entry: dict[str, Any]) -> Peer:
    _known(where, entry, _PEER_KEYS)
    name, precision = entry.get("name"), entry.get("precision", "bf16")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}.name", "must be text")
    if precision not in PRECISIONS:
        raise ConfigError(f"{where}.precision", f"must be one of {', '.join(PRECISIONS)}")
    command, server = (_texts(where, entry, key) for key in ("command", "server"))
    if not command and not server:
        raise ConfigError(where, f"{name} needs a command or a server")
    health, body, env = entry.get("health", "/health"), entry.get("body", {}), entry.get("env", {})
    if not isinstance(body, dict) or not isinstance(env, dict) or not isinstance(health, str):
        raise ConfigError(where, "body and env must be tables, health a path")
    texts = {str(key): str(value) for key, value in env.items()}
    return Peer(name, precision, command, server, health, _texts(where, entry, "needs"), body, texts)


def _targets(where: str, entry: dict[str, Any]) -> list[Target]:
    _known(where, entry, _TARGET_KEYS)
    bounds = {key: entry[key] for key in ("at_least", "at_most") if key in entry}
    if len(bounds) != 1 or not all(isinstance(value, int | float) for value in bounds.values()):
        raise ConfigError(where, "needs one number, at_least or at_most")
    workloads, metric, batches = _texts(where, entry, "workloads"), entry.get("metric"), entry.get("batches", [])
    for workload in workloads:
        if metric not in HEADLINES.get(workload, ()):
            raise ConfigError(where, f"{workload} does not compare {metric}")
    if not isinstance(batches, list) or not batches or not all(isinstance(batch, int) for batch in batches):
        raise ConfigError(f"{where}.batches", "must be a list of integers")
    peer = str(entry.get("peer", ""))
    return [Target(peer, name, str(metric), batch, **bounds) for name in workloads for batch in batches]


def _texts(where: str, entry: Mapping[str, Any], key: str) -> tuple[str, ...]:
    found = entry.get(key, [])
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ConfigError(f"{where}.{key}", "must be a list of texts")
    return tuple(found)


def _known(where: str, entry: Mapping[str, Any], keys: set[str]) -> None:
    unknown = entry.keys() - keys
    if unknown:
        raise ConfigError(where, f"does not know {', '.join(sorted(unknown))}; it knows {', '.join(sorted(keys))}")
