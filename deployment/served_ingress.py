"""The ingress as Serve constructs it: from picklable values, speaking HTTP and gRPC from one class."""

from __future__ import annotations

import asyncio
from typing import Any

from deployment.auth import key_check
from deployment.config import AppConfig
from deployment.ingress import Ingress
from deployment.metrics import RayRegistry
from deployment.replica_set import ServeReplicaSet


class ServedIngress(Ingress):
    """Loads the tokenizer, then serves. ``replicas``: the deployment handle of the replicas."""

    async def __init__(self, config: AppConfig, replicas: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        keys = key_check(config.auth.api_keys_file)
        from orca_core.source import resolve_source
        from orca_core.tokenizer import Tokenizer

        def load() -> Tokenizer:
            return Tokenizer.load(resolve_source(config.model.source, config.model.revision))

        tokenizer = await asyncio.to_thread(load)
        Ingress.__init__(self, config, ServeReplicaSet(replicas), tokenizer, keys=keys, registry=RayRegistry())

    def __serve_build_asgi_app__(self) -> Any:
        """Called by Serve once the ingress is constructed: the HTTP face."""
        from deployment.http_api import build_app

        return build_app(self, self._config.limits, keys=self.keys)
