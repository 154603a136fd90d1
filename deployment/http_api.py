"""The HTTP face: OpenAI-compatible endpoints as one ASGI application over a ``Service``. Pure translation.

Three rules hold for every endpoint that generates. A client that goes away cancels its work, whether it streams or not.
A status line is sent only after the first token exists, so that refusals have their own status. A stream that breaks
ends with an error event, never with a finish reason or ``[DONE]``.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from deployment.auth import KeyCheck, KeyGuard, NoKeys
from deployment.choices import merged
from deployment.config_sections import LimitsSection
from deployment.errors import http_error
from deployment.http_arrival import REQUEST_ID_HEADER, WithoutRequestId, read_body, unless_disconnected
from deployment.openai_requests import FIELD_NAMES, OpenAIRequest, parse_chat, parse_completion, parse_json
from deployment.openai_responses import Answer, sse, to_json
from deployment.serving import GenerationCall, ServedChunk, Service, ServiceStatus
from orca_core.errors import InvalidRequestError, NotFoundError, OrcaError, UnavailableError

_log = logging.getLogger(__name__)

TIMEOUT_HEADER: Final = "x-request-timeout-s"
REPLICA_HEADER: Final = "x-orca-replica"
_CLIENT_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_DONE: Final = b"data: [DONE]\n\n"

_Stream = AsyncGenerator[tuple[int, ServedChunk], None]
_Parser = Callable[[dict[str, Any], LimitsSection, str, float | None], OpenAIRequest]


def build_app(
    service: Service,
    limits: LimitsSection | None = None,
    wall_clock: Callable[[], float] = time.time,
    keys: KeyCheck | None = None,
    *,
    server_names_requests: bool = False,
) -> Starlette:
    """The ASGI application. ``limits.max_prompt_bytes`` bounds a body; ``wall_clock``: Unix seconds.

    ``server_names_requests``: the server itself adds ``x-request-id`` to each answer, as Serve's do.
    """
    face = _HttpFace(service, limits or LimitsSection(), wall_clock)
    return Starlette(
        routes=[
            Route("/v1/completions", face.completions, methods=["POST"]),
            Route("/v1/chat/completions", face.chat_completions, methods=["POST"]),
            Route("/v1/models", face.models, methods=["GET"]),
            Route("/v1/models/{model_id:path}", face.one_model, methods=["GET"]),
            Route("/v1/status", face.status, methods=["GET"]),
            Route("/livez", face.livez, methods=["GET"]),
            Route("/readyz", face.readyz, methods=["GET"]),
        ],
        middleware=[
            *([Middleware(WithoutRequestId)] if server_names_requests else ()),
            Middleware(KeyGuard, keys=keys or NoKeys()),
        ],
        exception_handlers={HTTPException: _routing_error, OrcaError: _plain_error, Exception: _plain_error},
    )


class _HttpFace:
    """The endpoints. Holds nothing of any request."""

    def __init__(self, service: Service, limits: LimitsSection, wall_clock: Callable[[], float]) -> None:
        self._service = service
        self._limits = limits
        self._wall_clock = wall_clock
        self._created = int(wall_clock())

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, parse_completion, "cmpl")

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, parse_chat, "chatcmpl")

    async def models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [await self._model_body()]})

    async def one_model(self, request: Request) -> Response:
        body = await self._model_body()
        if request.path_params["model_id"] != body["id"]:
            raise NotFoundError("model", request.path_params["model_id"][:200])
        return _json(body)

    async def status(self, _: Request) -> Response:
        return _json(status_body(await self._service.status()))

    async def livez(self, _: Request) -> Response:
        return _json({"status": "alive"})

    async def readyz(self, _: Request) -> Response:
        if not await self._service.ready():
            raise UnavailableError("no replica takes requests, or the service is draining")
        return _json({"status": "ready"})

    async def _generate(self, request: Request, parse: _Parser, prefix: str) -> Response:
        """One answer, whole or streamed, or the error that came instead."""
        request_id = _request_id(request)
        headers = {REQUEST_ID_HEADER: request_id}
        try:
            body = parse_json(await read_body(request, self._limits.max_prompt_bytes))
            parsed = parse(body, self._limits, request_id, _timeout_s(request))
            work = self._answer(parsed, f"{prefix}-{request_id}", headers)
            response = await unless_disconnected(request.receive, work)
        except ClientDisconnect:  # while it sent the body
            response = None
        except Exception as error:
            failure = http_error(error, request_id, FIELD_NAMES)
            response = _json(failure.body, failure.status, {**headers, **failure.headers})
        if response is None:
            response = Response(status_code=499, headers=headers)
        _log.info("%s %d request=%s", request.url.path, response.status_code, request_id)
        return response

    async def _answer(self, parsed: OpenAIRequest, answer_id: str, headers: dict[str, str]) -> Response:
        if len(parsed.calls) > 1:
            await self._service.check(list(parsed.calls))
        model_id = (await self._service.model()).model_id
        echoes = [await self._echo(parsed, call) for call in parsed.calls]
        answer = Answer(parsed, answer_id, int(self._wall_clock()), model_id, echoes)
        stream = merged(self._service, parsed.calls)
        try:
            index, first = await anext(stream)
        except StopAsyncIteration:
            raise UnavailableError("the stream ended early") from None
        except BaseException:
            await stream.aclose()
            raise
        headers = {**headers, REPLICA_HEADER: first.replica} if first.replica else headers
        if parsed.stream:
            events = _events(parsed, answer, stream, (index, first), headers[REQUEST_ID_HEADER])
            return _EventStream(events, stream, headers)
        async with aclosing(stream):
            answer.add(index, first.chunk)
            async for index, served in stream:
                answer.add(index, served.chunk)
        if answer.unfinished():
            raise UnavailableError("the stream ended early")
        return _json(answer.whole(), headers=headers)

    async def _echo(self, parsed: OpenAIRequest, call: GenerationCall) -> str:
        if not parsed.echo:
            return ""
        return call.prompt if call.prompt is not None else await self._service.detokenize(call.token_ids or ())

    async def _model_body(self) -> dict[str, Any]:
        info = await self._service.model()
        return {
            "id": info.model_id,
            "object": "model",
            "created": self._created,
            "owned_by": "orca-serve",
            "max_model_len": info.max_model_len,
        }


async def _events(
    parsed: OpenAIRequest, answer: Answer, stream: _Stream, first: tuple[int, ServedChunk], request_id: str
) -> AsyncGenerator[bytes, None]:
    """The bytes of a stream, from its first chunk to ``[DONE]``, or to an error event where it broke."""
    async with aclosing(stream):
        try:
            for body in answer.events(first[0], first[1].chunk):
                yield sse(body)
            async for index, served in stream:
                for body in answer.events(index, served.chunk):
                    yield sse(body)
            if answer.unfinished():
                raise UnavailableError("the stream ended early")
        except Exception as error:
            yield sse(http_error(error, request_id, FIELD_NAMES).body)
            return
    if parsed.include_usage:
        yield sse(answer.usage_event())
    yield _DONE


class _EventStream(Response):
    """Server-sent events. The client's leaving is watched for, also while no token comes, and closes the generator."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], stream: _Stream, headers: dict[str, str]) -> None:
        super().__init__(headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # closing a generator that never started runs none of its clean-up: the inner stream is closed by name
        async with aclosing(self._stream), aclosing(self._events):
            finished = await unless_disconnected(receive, self._send_all(send))
        if finished is None:
            _log.info("%s 499 request=%s", scope["path"], self.headers[REQUEST_ID_HEADER])

    async def _send_all(self, send: Send) -> bool | None:
        try:
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:  # how a server says that the socket is gone
            return None
        return True


def _request_id(request: Request) -> str:
    """The client's own id where it is fit for a header and a log line, else a new one."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    return given if _CLIENT_REQUEST_ID.fullmatch(given) else secrets.token_hex(12)


def _timeout_s(request: Request) -> float | None:
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    with suppress(ValueError):
        timeout_s = float(given)
        if math.isfinite(timeout_s) and timeout_s > 0:
            return timeout_s
    raise InvalidRequestError(TIMEOUT_HEADER, "must be a positive number of seconds")


def status_body(status: ServiceStatus) -> dict[str, Any]:
    """``/v1/status`` as plain JSON values: slots are counts, ages seconds."""
    body = dataclasses.asdict(status)
    for replica, source in zip(body["replicas"], status.replicas, strict=True):
        replica["load"] |= {"headroom": source.load.headroom, "unused_slots": source.load.unused_slots}
    return body


def _json(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(body), status, headers, media_type="application/json")


async def _plain_error(request: Request, error: Exception) -> Response:
    request_id = _request_id(request)
    failure = http_error(error, request_id)
    return _json(failure.body, failure.status, {REQUEST_ID_HEADER: request_id, **failure.headers})


async def _routing_error(_: Request, error: Exception) -> Response:
    """Unknown paths and methods, as OpenAI error objects."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    reason = "unknown path" if status == 404 else "method not allowed" if status == 405 else "request refused"
    body = {"message": reason, "type": "invalid_request_error", "param": None, "code": None}
    return _json({"error": body}, status, headers)
