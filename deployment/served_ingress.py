"""The ingress as Serve constructs it: from picklable values, speaking HTTP and gRPC from one class."""

from __future__ import annotations

import asyncio
from typing import Any

from deployment.auth import key_check
from deployment.broadcast import ask_all, best_outcome
from deployment.config import AppConfig
from deployment.ingress import Ingress
from deployment.metrics import RayRegistry
from deployment.replica_set import ServeReplicaSet
from orca_core.types import CancelOutcome


class ServedIngress(Ingress):
    """Loads the tokenizer, then serves. ``replicas``: the deployment handle of the replicas."""

    async def __init__(self, config: AppConfig, replicas: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        keys = key_check(config.auth.api_keys_file)
        from orca_core.source import resolve_source
        from orca_core.tokenizer import Tokenizer

        def load() -> Tokenizer:
            return Tokenizer.load(resolve_source(config.model.source, config.model.revision))

        tokenizer = await asyncio.to_thread(load)
        peers = _Peers() if config.ingress.replicas > 1 else None
        Ingress.__init__(
            self, config, ServeReplicaSet(replicas), tokenizer, keys=keys, registry=RayRegistry(), peers=peers
        )
        self.start()

    def __del__(self) -> None:
        # Serve calls this once no call is open any more, on our event loop, and kills the actor then: replicas that are
        # to exit too would wait for us until they take us for dead. It may run on an object whose constructor failed
        if hasattr(self, "_dispatcher"):
            self.close()

    def __serve_build_asgi_app__(self) -> Any:
        """Called by Serve once the ingress is constructed: the HTTP face."""
        from deployment.http_api import build_app

        return build_app(self, self._config.limits, keys=self.keys)


class _Peers:
    """Has every ingress, this one too, cancel what it has of a client's id."""

    def __init__(self) -> None:
        self._handle: Any = None  # Serve knows of us only once we are constructed

    async def __call__(self, client_request_id: str) -> CancelOutcome:
        from ray import serve

        if self._handle is None:
            context = serve.get_replica_context()
            self._handle = serve.get_deployment_handle(context.deployment, context.app_name)
        return best_outcome(await ask_all(self._handle, "cancel_here", CancelOutcome, client_request_id))
