"""The ingress as Serve constructs it: from picklable values, speaking HTTP and gRPC from one class."""

from __future__ import annotations

import asyncio
from typing import Any

from deployment.auth import key_check
from deployment.config import AppConfig
from deployment.deployed import DeployedBoard, ask_serve
from deployment.garbage import spare_what_is_loaded
from deployment.ingress import Ingress
from deployment.metrics import Deferred, RayRegistry
from deployment.overview import Around
from deployment.peers import ServePeers
from deployment.replica_set import ServeReplicaSet
from deployment.scaling_board import RayStore, ScalingBoard
from deployment.serve_log import join_serve_log, leave_out_departures


class ServedIngress(Ingress):
    """Loads the tokenizer, then serves. ``replicas``: the deployment handle of the replicas."""

    async def __init__(self, config: AppConfig, replicas: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        join_serve_log()
        leave_out_departures()
        keys = key_check(config.auth.api_keys_file)
        from orca_core.source import resolve_source
        from orca_core.tokenizer import Tokenizer

        def load() -> Tokenizer:
            return Tokenizer.load(resolve_source(config.model.source, config.model.revision))

        tokenizer = await asyncio.to_thread(load)
        Ingress.__init__(
            self,
            config,
            ServeReplicaSet(replicas),
            tokenizer,
            keys=keys,
            registry=Deferred(RayRegistry()),
            around=around(config),
        )
        self.start()
        spare_what_is_loaded()

    def __del__(self) -> None:
        # Serve calls this once no call is open any more, on our event loop, and kills the actor then: replicas that are
        # to exit too would wait for us until they take us for dead. It may run on an object whose constructor failed
        if hasattr(self, "_dispatcher"):
            self.close()

    def __serve_build_asgi_app__(self) -> Any:
        """Called by Serve once the ingress is constructed: the HTTP face."""
        from deployment.http_api import build_app

        return build_app(self, self._config.limits, keys=self.keys, server_names_requests=True)


def around(config: AppConfig) -> Around:
    """The other ingresses and the autoscaler, where the config has any, and Serve."""
    from ray import serve

    app_name = serve.get_replica_context().app_name
    peers = ServePeers() if config.ingress.replicas > 1 else None
    scales = config.replicas.min < config.replicas.max
    scaling = ScalingBoard(RayStore(), app_name).read if scales else None
    return Around(peers, scaling, DeployedBoard(lambda: ask_serve(app_name)).read)
