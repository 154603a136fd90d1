"""The gRPC face: RPCs to the methods of ``Service``, errors to statuses. Serve dispatches on the RPC's name."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final, TypeVar

from grpc_health.v1 import health_pb2

from deployment.auth import HEADER, KeyCheck, NoKeys
from deployment.errors import loggable
from deployment.grpc_arrival import Arrived, RpcContext, Unreadable, add_orca_service, name_of, set_trailers
from deployment.grpc_errors import grpc_status
from deployment.grpc_messages import (
    OUTCOMES,
    call_from_pb,
    chunk_to_pb,
    model_to_pb,
    result_to_pb,
    status_to_pb,
)
from deployment.pb.orca.v1 import orca_pb2 as pb
from deployment.quota import CALLER
from deployment.serving import Service
from orca_core.errors import InvalidRequestError, NotFoundError

__all__ = ["SERVICE_NAME", "TIMEOUT_KEY", "Arrived", "GrpcMethods", "RpcContext", "RpcFailedError", "add_orca_service"]

SERVICE_NAME: Final = "orca.v1.OrcaService"
TIMEOUT_KEY: Final = "orca-timeout-s"
"""Metadata key with the seconds that are left of the client's deadline: Serve's context does not tell them."""

NEARLY: Final = 0.9
_HEALTH_POLL_S: Final = 1.0
_HEALTH_SERVICES: Final = ("", SERVICE_NAME)
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

_OK: Final = "OK"
_CANCELLED: Final = "CANCELLED"
"""What the log says of a call that ended; the second: its client left."""

_M = TypeVar("_M")
_log = logging.getLogger(__name__)


class RpcFailedError(Exception):
    """Ends a stream whose status has been set on the context. Carries nothing: Serve logs it."""


class GrpcMethods(Service):
    """The RPCs, over the methods of ``Service``, which the class that inherits this one implements.

    ``keys``: checked before anything else by every RPC but those of health; everybody may come in unless it is set.
    """

    keys: KeyCheck = NoKeys()

    async def Generate(  # noqa: N802
        self, arrived: Arrived, grpc_context: RpcContext
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Server streaming. Cancelling the call cancels the generation.

        Where the gRPC server is in this process (direct ingress), a failed stream just ends: Serve sends the code, the
        details and the trailers of the context. Through Serve's proxy a context travels only with a message or an
        exception, and an exception takes the code and the details but not the trailers.
        """
        request_id, code = name_of(grpc_context, arrived.message.request_id), _CANCELLED
        try:
            message = self._admitted(arrived.message, grpc_context)
            call = call_from_pb(message, _timeout_s(grpc_context, arrived.remaining_s), request_id)
            async with aclosing(self.generate(call)) as chunks:
                async for served in chunks:
                    yield chunk_to_pb(served)
            code = _OK
        except Exception as error:
            code = _fail(grpc_context, error, request_id)
            if arrived.process != os.getpid():
                raise RpcFailedError from None
        finally:
            _log.info("Generate %s request=%s", code, loggable(request_id))

    async def Complete(  # noqa: N802
        self, arrived: Arrived, grpc_context: RpcContext
    ) -> pb.CompleteResponse:
        """Unary: the whole result. A client that leaves cancels the generation."""
        request_id, code = name_of(grpc_context, arrived.message.request_id), _CANCELLED
        try:
            message = self._admitted(arrived.message, grpc_context)
            call = call_from_pb(message, _timeout_s(grpc_context, arrived.remaining_s), request_id)
            async with aclosing(self.generate(call)) as chunks:
                result = result_to_pb([served async for served in chunks])
            code = _OK
            return result
        except Exception as error:
            code = _fail(grpc_context, error, request_id)
            return pb.CompleteResponse()
        finally:
            _log.info("Complete %s request=%s", code, loggable(request_id))

    async def Cancel(self, request: pb.CancelRequest, grpc_context: RpcContext) -> pb.CancelResponse:  # noqa: N802
        """Unary: cancel by the client's own request id."""
        try:
            if not self._admitted(request, grpc_context).request_id:
                raise InvalidRequestError("request_id", "must not be empty")
            return pb.CancelResponse(outcome=OUTCOMES[await self.cancel(request.request_id)])
        except Exception as error:
            return _failed(grpc_context, error, pb.CancelResponse)

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, grpc_context: RpcContext
    ) -> pb.TokenizeResponse:
        """Unary: the ids a prompt would have."""
        try:
            token_ids = await self.tokenize(self._admitted(request, grpc_context).text, request.model)
            return pb.TokenizeResponse(token_ids=token_ids, count=len(token_ids))
        except Exception as error:
            return _failed(grpc_context, error, pb.TokenizeResponse)

    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, grpc_context: RpcContext
    ) -> pb.DetokenizeResponse:
        """Unary: the text of token ids."""
        try:
            text = await self.detokenize(tuple(self._admitted(request, grpc_context).token_ids), request.model)
            return pb.DetokenizeResponse(text=text, count=len(request.token_ids))
        except Exception as error:
            return _failed(grpc_context, error, pb.DetokenizeResponse)

    async def GetModel(  # noqa: N802
        self, request: pb.GetModelRequest, grpc_context: RpcContext
    ) -> pb.GetModelResponse:
        """Unary: the served model."""
        try:
            self._admitted(request, grpc_context)
            return model_to_pb(await self.model())
        except Exception as error:
            return _failed(grpc_context, error, pb.GetModelResponse)

    async def GetStatus(  # noqa: N802
        self, request: pb.GetStatusRequest, grpc_context: RpcContext
    ) -> pb.GetStatusResponse:
        """Unary: replicas with their load, asked now."""
        try:
            self._admitted(request, grpc_context)
            return status_to_pb(await self.status())
        except Exception as error:
            return _failed(grpc_context, error, pb.GetStatusResponse)

    def _admitted(self, message: _M, context: RpcContext) -> _M:
        """The message of a caller who may come in. Raises ``UnauthenticatedError`` before ``InvalidRequestError``."""
        CALLER.set(self.keys.check(value for key, value in context.invocation_metadata() if key == HEADER))
        if isinstance(message, Unreadable):
            raise InvalidRequestError("request", "is not a message of orca.v1")
        return message

    # ---- grpc.health.v1.Health

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, grpc_context: RpcContext
    ) -> health_pb2.HealthCheckResponse:
        """Unary: SERVING while at least one replica takes requests. NOT_FOUND for services we do not have."""
        try:
            if request.service not in _HEALTH_SERVICES:
                raise NotFoundError("service", request.service)
            return health_pb2.HealthCheckResponse(status=_SERVING if await self.ready() else _NOT_SERVING)
        except Exception as error:
            return _failed(grpc_context, error, health_pb2.HealthCheckResponse)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, grpc_context: RpcContext
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """Server streaming: the status now and whenever it changes, until the client leaves."""
        last = None
        while True:
            if request.service not in _HEALTH_SERVICES:
                status = _SERVICE_UNKNOWN
            else:
                status = _SERVING if await self.ready() else _NOT_SERVING
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
            last = status
            await asyncio.sleep(_HEALTH_POLL_S)


def _timeout_s(context: RpcContext, remaining_s: float | None) -> float | None:
    """Seconds that are left of the client's deadline: gRPC's own, or what it told us, whichever is sooner.

    A client that gives both means the same by them, and gRPC's has been running since. Raises ``InvalidRequestError``.
    """
    told_s = _told_timeout_s(context)
    if told_s is None or remaining_s is None:
        return remaining_s if told_s is None else told_s
    return told_s if remaining_s >= NEARLY * told_s else remaining_s


def _told_timeout_s(context: RpcContext) -> float | None:
    for key, value in context.invocation_metadata():
        if key == TIMEOUT_KEY:
            try:
                timeout_s = float(value)
            except ValueError:
                timeout_s = math.nan
            if not (math.isfinite(timeout_s) and timeout_s > 0):
                raise InvalidRequestError(TIMEOUT_KEY, "must be a positive number of seconds")
            return timeout_s
    return None


# ---- errors


def _fail(context: RpcContext, error: Exception, request_id: str) -> str:
    """Put the error's status on the context; returns the name of its code."""
    status = grpc_status(error, request_id)
    context.set_code(status.code)
    context.set_details(status.details)
    set_trailers(context, request_id, status.trailing_metadata)
    return str(status.code.name)


def _failed(context: RpcContext, error: Exception, empty: Callable[[], _M], request_id: str = "") -> _M:
    """Put the error's status on the context; gRPC drops the message of an RPC that failed."""
    _fail(context, error, request_id or name_of(context))
    return empty()
