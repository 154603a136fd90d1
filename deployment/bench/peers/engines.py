"""Ours and the peers as processes to start: what each is told, and which are not here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from deployment.bench.peers.settings import PRECISIONS, Peer, fill
from deployment.bench.peers.works import LONGEST

OURS: Final = "orca-serve"
CONTEXT: Final = 1024
"""Slots a request of a peer gets, where that must be said before."""
_PYTHON_M: Final = (sys.executable, "-m")
_PACKAGE: Final = "deployment.bench.peers"


@dataclass(frozen=True, slots=True)
class Setup:
    """What all engines share. ``home``: folder of the peers' installations. ``model``: a folder of safetensors.

    ``batch_tokens``: rows in one iteration of ours; ``None`` = the product's own choice.
    """

    model: str
    home: str
    threads: int
    batch_tokens: int | None = None

    def places(self, batch: int = 0, port: int = 0) -> dict[str, str]:
        """Values of the names a settings file may use."""
        return {
            "home": self.home, "model": self.model, "model_name": Path(self.model).name, "batch": str(batch),
            "context": str(batch * CONTEXT), "threads": str(self.threads), "cpus": f"0-{self.threads - 1}",
            "port": str(port),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Contestant:
    """An engine to start. ``argv(batch)``: the runner's command line."""

    name: str
    precision: str
    is_ours: bool
    argv: Callable[[int], list[str]]
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Unique among contestants."""
        return f"{self.name} {self.precision}" if self.is_ours else self.name


def ours_alone(setup: Setup, precision: str) -> Contestant:
    """The engine in a process of its own. No prefix is shared between requests, as in the peers."""

    def argv(batch: int) -> list[str]:
        config: dict[str, Any] = {
            "model": setup.model, "dtype": "bfloat16", "quantization": PRECISIONS[precision], "device": "cpu",
            "max_batch_size": batch, "n_slots": batch * LONGEST, "threads": setup.threads, "prefix_cache": False,
        }  # fmt: skip
        if setup.batch_tokens is not None:
            config["max_batch_tokens"] = max(batch, setup.batch_tokens)
        return [*_PYTHON_M, f"{_PACKAGE}.ours", json.dumps(config)]

    return Contestant(OURS, precision, True, argv, {"OMP_NUM_THREADS": str(setup.threads)})


def ours_served(setup: Setup, precision: str) -> Contestant:
    """The whole service, ``orca-serve up`` with one replica that has all threads, through gRPC."""

    def argv(batch: int) -> list[str]:
        engine: dict[str, Any] = {
            "device": "cpu", "max_batch_size": batch, "n_slots": batch * LONGEST, "threads": setup.threads,
            "prefix_cache": False,
        }  # fmt: skip
        if setup.batch_tokens is not None:
            engine["max_batch_tokens"] = max(batch, setup.batch_tokens)
        arguments = {
            "model": {"source": setup.model, "dtype": "bfloat16", "quantization": PRECISIONS[precision]},
            "engine": engine,
            "replicas": {"min": 1, "max": 1, "num_cpus": setup.threads},
            "drain": {"timeout_s": 1},
        }
        return [*_PYTHON_M, f"{_PACKAGE}.service", json.dumps(arguments)]

    return Contestant(OURS, precision, True, argv)


def peer_alone(setup: Setup, peer: Peer, free_port: Callable[[], int]) -> Contestant:
    """A peer by its runner; by its server where it has none."""
    if not peer.command:
        return peer_served(setup, peer, free_port)

    def argv(batch: int) -> list[str]:
        return [fill(text, setup.places(batch)) for text in peer.command]

    return Contestant(peer.name, peer.precision, False, argv, _environment(setup, peer))


def peer_served(setup: Setup, peer: Peer, free_port: Callable[[], int]) -> Contestant:
    """A peer by its own OpenAI server; by its runner where it has none."""
    if not peer.server:
        return peer_alone(setup, peer, free_port)

    def argv(batch: int) -> list[str]:
        port = free_port()
        places = setup.places(batch, port)
        settings = {
            "command": [fill(text, places) for text in peer.server], "port": port, "health": peer.health,
            "body": {key: fill(value, places) if isinstance(value, str) else value
                     for key, value in peer.body.items()},
        }  # fmt: skip
        return [*_PYTHON_M, f"{_PACKAGE}.openai", json.dumps(settings)]

    return Contestant(peer.name, peer.precision, False, argv, _environment(setup, peer))


def _environment(setup: Setup, peer: Peer) -> dict[str, str]:
    places = setup.places()
    return {name: fill(value, places) for name, value in peer.env.items()}


def choose(
    peers: Sequence[Peer], setup: Setup, wanted: Sequence[str] | None, precisions: Sequence[str]
) -> tuple[list[Peer], dict[str, list[str]]]:
    """The peers to run, and of each other one of these precisions what it needs and is not here.

    ``wanted``: their names; ``None`` = all.
    """
    asked = [peer for peer in peers if peer.precision in precisions and (wanted is None or peer.name in wanted)]
    absent = {peer.name: missing for peer in asked if (missing := peer.missing(setup.places()))}
    return [peer for peer in asked if peer.name not in absent], absent
