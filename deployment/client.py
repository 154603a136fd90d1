"""Python client of the gRPC service, plain and asyncio. Needs grpcio and protobuf, neither Ray nor torch.

```python
with OrcaClient("127.0.0.1:9000") as client:
    for chunk in client.generate("Hello", max_new_tokens=32, temperature=0.7):
        print(chunk.text, end="", flush=True)
```

Sampling arguments are the fields of ``orca_core.SamplingParams``; what is left out takes the server's default, which is
greedy. ``timeout_s`` is the deadline of the whole call in seconds; the server drops the request when it passes. Errors
are those of ``orca_core.errors``; ``retry_after_s`` says when a retry makes sense. Requests of one ``session_id``
prefer the same replica, whose prefix cache may hold what they have in common. All of it is in ``docs/api.md``.

Keepalive: HTTP/2 pings go out every ``keepalive_s`` seconds, only while a call is open. gRPC servers end a connection
that pings more often than every five minutes while no data flows (GOAWAY "too_many_pings"), which is the default here.
Calls take turns over all addresses that the name of the server has (``round_robin``; with one address nothing changes).
gRPC asks DNS again only when a connection breaks: a long-lived client finds servers that came later only then.
Messages up to ``MAX_MESSAGE_BYTES`` pass in both directions; the server's own limit on prompts is lower.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from typing import Any, Final, Self

import grpc
import grpc.aio

from deployment.client_messages import (
    ClientChunk,
    Messages,
    chunk_from_pb,
    model_from_pb,
    outcome_from_pb,
    request_to_pb,
    status_from_pb,
)
from deployment.grpc_errors import STATUS_DETAILS_KEY, error_from_grpc
from deployment.pb.orca.v1 import orca_pb2 as pb
from deployment.pb.orca.v1.orca_pb2_grpc import OrcaServiceStub
from deployment.serving import ServiceStatus
from orca_core.errors import DeadlineExceededError, InvalidRequestError, OrcaError, UnavailableError
from orca_core.types import CancelOutcome, ModelInfo

__all__ = ["AsyncOrcaClient", "ClientChunk", "OrcaClient"]

DEFAULT_ADDRESS: Final = "127.0.0.1:9000"
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
DEFAULT_KEEPALIVE_S: Final = 310.0
ROUND_ROBIN: Final = '{"loadBalancingConfig": [{"round_robin": {}}]}'
"""gRPC's service config. Its default, pick_first, leaves all calls with the first address for ever."""
TIMEOUT_KEY: Final = "orca-timeout-s"
"""Metadata key that carries the deadline as data: a Serve deployment does not see gRPC's own."""


class _Client:
    """What both clients share: options, metadata and the translation of messages."""

    def __init__(self, address: str, api_key: str | None, keepalive_s: float) -> None:
        self.address = address
        self._options = [
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.keepalive_time_ms", int(keepalive_s * 1000)),
            ("grpc.keepalive_permit_without_calls", 0),
            ("grpc.service_config", ROUND_ROBIN),
        ]
        self._api_key = api_key

    def _call_options(self, timeout_s: float | None) -> dict[str, Any]:
        metadata = [] if self._api_key is None else [("authorization", f"Bearer {self._api_key}")]
        if timeout_s is not None:
            if not timeout_s > 0:
                raise InvalidRequestError("timeout_s", "must be a positive number of seconds")
            metadata.append((TIMEOUT_KEY, repr(float(timeout_s))))
        return {"timeout": timeout_s, "metadata": tuple(metadata)}

    def _error(self, error: grpc.RpcError, timeout_s: float | None) -> OrcaError:
        code, details = error.code(), error.details() or ""
        trailers = dict(error.trailing_metadata() or ())
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceededError(timeout_s or 0.0)
        status_bytes = trailers.get(STATUS_DETAILS_KEY)
        if code is grpc.StatusCode.CANCELLED and "RST_STREAM" in details:
            # nobody cancelled: a proxy says so when the ingress behind it has died
            return UnavailableError("the connection to the service was lost")
        if code is grpc.StatusCode.UNAVAILABLE and status_bytes is None and "connect" in details.lower():
            return UnavailableError(f"no server answers at {self.address}")
        if code is grpc.StatusCode.NOT_FOUND and status_bytes is None and "Application metadata" in details:
            return UnavailableError(f"the server at {self.address} has no application")  # Serve, before or after ours
        return error_from_grpc(code, details, status_bytes if isinstance(status_bytes, bytes) else None)


class OrcaClient(_Client):
    """Blocking client; may be shared by threads. ``api_key`` goes out as a bearer token."""

    def __init__(
        self, address: str = DEFAULT_ADDRESS, api_key: str | None = None, keepalive_s: float = DEFAULT_KEEPALIVE_S
    ) -> None:
        super().__init__(address, api_key, keepalive_s)
        self._channel = grpc.insecure_channel(address, options=self._options)
        self._stub: Any = OrcaServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Messages | None = None,
        timeout_s: float | None = None,
        request_id: str = "",
        model: str = "",
        session_id: str = "",
        **sampling: Any,
    ) -> Generator[ClientChunk, None, None]:
        """Stream one generation from one of ``prompt``, ``token_ids`` and ``messages`` (``{"role", "content"}``).

        The call starts with the first ``next``; dropping or closing the iterator cancels it. Raises ``OrcaError``.
        """
        request = request_to_pb(prompt, token_ids, messages, request_id, model, session_id, sampling)
        return self._stream(request, self._call_options(timeout_s), timeout_s)

    def _stream(
        self, request: pb.GenerateRequest, options: dict[str, Any], timeout_s: float | None
    ) -> Generator[ClientChunk, None, None]:
        call = self._stub.Generate(request, **options)
        finished = False
        try:
            for response in call:
                finished = response.finish_reason != pb.NOT_FINISHED
                yield chunk_from_pb(response)
            if not finished:
                raise UnavailableError("the stream ended early")
        except grpc.RpcError as error:
            raise self._error(error, timeout_s) from None
        finally:
            call.cancel()

    def complete(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Messages | None = None,
        timeout_s: float | None = None,
        request_id: str = "",
        model: str = "",
        session_id: str = "",
        **sampling: Any,
    ) -> ClientChunk:
        """The whole of one generation at once. Arguments and errors as in ``generate``."""
        request = request_to_pb(prompt, token_ids, messages, request_id, model, session_id, sampling)
        return chunk_from_pb(self._unary(self._stub.Complete, request, timeout_s))

    def cancel(self, request_id: str, *, timeout_s: float | None = None) -> CancelOutcome:
        """Cancel every live generation that was started with that ``request_id``."""
        return outcome_from_pb(self._unary(self._stub.Cancel, pb.CancelRequest(request_id=request_id), timeout_s))

    def tokenize(self, text: str, *, timeout_s: float | None = None) -> list[int]:
        """The token ids a prompt would have."""
        return list(self._unary(self._stub.Tokenize, pb.TokenizeRequest(text=text), timeout_s).token_ids)

    def detokenize(self, token_ids: Iterable[int], *, timeout_s: float | None = None) -> str:
        """The text of token ids."""
        response = self._unary(self._stub.Detokenize, pb.DetokenizeRequest(token_ids=token_ids), timeout_s)
        return str(response.text)

    def model(self, *, timeout_s: float | None = None) -> ModelInfo:
        """The served model."""
        return model_from_pb(self._unary(self._stub.GetModel, pb.GetModelRequest(), timeout_s))

    def status(self, *, timeout_s: float | None = None) -> ServiceStatus:
        """Replicas with their load, the waiting line, totals."""
        return status_from_pb(self._unary(self._stub.GetStatus, pb.GetStatusRequest(), timeout_s))

    def close(self) -> None:
        """Close the connection; open calls are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _unary(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        try:
            return method(request, **self._call_options(timeout_s))
        except grpc.RpcError as error:
            raise self._error(error, timeout_s) from None


class AsyncOrcaClient(_Client):
    """The same for asyncio. Create and use it in one event loop."""

    def __init__(
        self, address: str = DEFAULT_ADDRESS, api_key: str | None = None, keepalive_s: float = DEFAULT_KEEPALIVE_S
    ) -> None:
        super().__init__(address, api_key, keepalive_s)
        self._channel = grpc.aio.insecure_channel(address, options=self._options)
        self._stub: Any = OrcaServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Messages | None = None,
        timeout_s: float | None = None,
        request_id: str = "",
        model: str = "",
        session_id: str = "",
        **sampling: Any,
    ) -> AsyncGenerator[ClientChunk, None]:
        """As ``OrcaClient.generate``; closing the generator, or cancelling its reader, cancels the call."""
        request = request_to_pb(prompt, token_ids, messages, request_id, model, session_id, sampling)
        return self._stream(request, self._call_options(timeout_s), timeout_s)

    async def _stream(
        self, request: pb.GenerateRequest, options: dict[str, Any], timeout_s: float | None
    ) -> AsyncGenerator[ClientChunk, None]:
        call = self._stub.Generate(request, **options)
        finished = False
        try:
            async for response in call:
                finished = response.finish_reason != pb.NOT_FINISHED
                yield chunk_from_pb(response)
            if not finished:
                raise UnavailableError("the stream ended early")
        except grpc.RpcError as error:
            raise self._error(error, timeout_s) from None
        finally:
            call.cancel()

    async def complete(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Messages | None = None,
        timeout_s: float | None = None,
        request_id: str = "",
        model: str = "",
        session_id: str = "",
        **sampling: Any,
    ) -> ClientChunk:
        """The whole of one generation at once."""
        request = request_to_pb(prompt, token_ids, messages, request_id, model, session_id, sampling)
        return chunk_from_pb(await self._unary(self._stub.Complete, request, timeout_s))

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> CancelOutcome:
        """Cancel every live generation that was started with that ``request_id``."""
        return outcome_from_pb(await self._unary(self._stub.Cancel, pb.CancelRequest(request_id=request_id), timeout_s))

    async def tokenize(self, text: str, *, timeout_s: float | None = None) -> list[int]:
        """The token ids a prompt would have."""
        return list((await self._unary(self._stub.Tokenize, pb.TokenizeRequest(text=text), timeout_s)).token_ids)

    async def detokenize(self, token_ids: Iterable[int], *, timeout_s: float | None = None) -> str:
        """The text of token ids."""
        response = await self._unary(self._stub.Detokenize, pb.DetokenizeRequest(token_ids=token_ids), timeout_s)
        return str(response.text)

    async def model(self, *, timeout_s: float | None = None) -> ModelInfo:
        """The served model."""
        return model_from_pb(await self._unary(self._stub.GetModel, pb.GetModelRequest(), timeout_s))

    async def status(self, *, timeout_s: float | None = None) -> ServiceStatus:
        """Replicas with their load, the waiting line, totals."""
        return status_from_pb(await self._unary(self._stub.GetStatus, pb.GetStatusRequest(), timeout_s))

    async def close(self) -> None:
        """Close the connection; open calls are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _unary(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        try:
            return await method(request, **self._call_options(timeout_s))
        except grpc.RpcError as error:
            raise self._error(error, timeout_s) from None
