"""Two plain Ray Serve deployments without this product: an ingress that reads one Serve generator for each stream.

It is what a service looks like that is built from Serve's own parts alone, and what ours is compared with.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Final

from ray import serve
from ray.serve import Application

from deployment.bench.wire import response_of

_UNLIMITED: Final = 100_000


class PlainEngine:
    """Has all tokens at hand."""

    async def stream(self, n_tokens: int) -> AsyncGenerator[int, None]:
        """One item a token."""
        for index in range(n_tokens):
            yield index


class PlainIngress:
    """Translates."""

    def __init__(self, engine: Any) -> None:
        self._stream = engine.options(method_name="stream", stream=True)

    async def Generate(self, arrived: Any, grpc_context: Any) -> AsyncGenerator[Any, None]:  # noqa: N802
        """See the service of that name: ``arrived`` is what its registration makes of a request."""
        n_tokens = arrived.message.sampling.max_new_tokens
        async for index in self._stream.remote(n_tokens):
            yield response_of(index, n_tokens)


def plain_application(n_replicas: int) -> Application:
    """One ingress, ``n_replicas`` replicas behind it."""
    options: dict[str, Any] = {"max_ongoing_requests": _UNLIMITED, "ray_actor_options": {"num_cpus": 0}}
    engine = serve.deployment(name="PlainEngine", num_replicas=n_replicas, **options)(PlainEngine).bind()
    return serve.deployment(name="PlainIngress", **options)(PlainIngress).bind(engine)
