"""How a call reaches the gRPC face: bytes become messages, with what only the gRPC server knows of it."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from google.protobuf.message import DecodeError

from deployment.pb.orca.v1 import orca_pb2_grpc

TIMED: Final = ("Generate", "Complete")
"""The methods that take ``Arrived``: what they do may last."""

REQUEST_ID_KEY: Final = "request_id"
"""Trailer with the id of an RPC. Serve sets it, to what the client's metadata has under that name or to an id of its
own, and its lines of the log have it."""

_FIT_FOR_A_TRAILER: Final = re.compile(r"[!-~]([ -~]{0,254}[!-~])?")


class RpcContext(Protocol):
    """What we use of ``ray.serve.grpc_util.RayServegRPCContext``."""

    def invocation_metadata(self) -> list[tuple[str, Any]]:
        """What the client sent."""
        ...

    def trailing_metadata(self) -> Any:
        """Trailers that were set before: pairs, or ``None``."""

    def set_code(self, code: Any) -> None:
        """Status of the RPC."""

    def set_details(self, details: str) -> None:
        """Message of the status."""

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, Any]]) -> None:
        """Trailers of the RPC."""


def name_of(context: RpcContext, own: str = "") -> str:
    """The one id of an RPC, for its messages, its error, its trailers and the log: the client's ``own``, else the one
    that Serve has given it, else a new one.
    """
    request_id = own or _serves_id(context) or uuid.uuid4().hex
    set_trailers(context, request_id)
    return request_id


def set_trailers(context: RpcContext, request_id: str, more: Sequence[tuple[str, Any]] = ()) -> None:
    """The id, as far as a trailer can hold it, and more in place of all trailers that were set before."""
    named = request_id if _FIT_FOR_A_TRAILER.fullmatch(request_id) else _serves_id(context)
    earlier = context.trailing_metadata()
    if isinstance(earlier, list):
        earlier.clear()  # Serve's context would go on sending the first id it was told, beside ours
    context.set_trailing_metadata([*([(REQUEST_ID_KEY, named)] if named else ()), *more])


def _serves_id(context: RpcContext) -> str:
    return next((str(value) for key, value in context.trailing_metadata() or () if key == REQUEST_ID_KEY), "")


class Arrived(NamedTuple):
    """A request, with the id of the process whose gRPC server read it.

    ``remaining_s``: seconds that were left of gRPC's own deadline then; ``None`` = the client gave none. The context
    that Serve hands to a method does not tell it.
    """

    message: Any
    process: int
    remaining_s: float | None = None


class Unreadable(NamedTuple):
    """In place of a message: the bytes were none."""

    request_id: str = ""
    model: str = ""


def add_orca_service(servicer: Any, server: Any) -> None:
    """What ``grpc_options.grpc_servicer_functions`` names: the generated registration, with readers of our own."""
    orca_pb2_grpc.add_OrcaServiceServicer_to_server(servicer, _Stamping(server))  # type: ignore[no-untyped-call]


class _Stamping:
    """A gRPC server to register with: bytes that are no message reach the method, which knows what to answer, and
    methods that may last know where their request was read and how long they have.
    """

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The generated code registers everything twice; both registrations are made below, from the second."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        import grpc

        ours = {name: h._replace(request_deserializer=_Reader(h.request_deserializer)) for name, h in handlers.items()}
        for name in TIMED:
            ours[name] = _timed(ours[name])
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, ours),))
        self._server.add_registered_method_handlers(service, ours)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Bytes to a message or ``Unreadable``; gRPC's own answer would be a status that blames the server."""

    parse: Callable[[bytes], Any]

    def __call__(self, data: bytes) -> Any:
        try:
            return self.parse(data)
        except DecodeError:
            return Unreadable()


class _Stamp(partial[Any]):
    """A method's behaviour, which is handed ``Arrived`` in place of the message.

    A ``partial`` of it, since gRPC looks through those to see whether they are asynchronous, and nothing is added to
    what a message of a stream costs.
    """

    def __call__(self, message: Any, context: Any) -> Any:
        return self.func(Arrived(message, os.getpid(), context.time_remaining()), context)


def _timed(handler: Any) -> Any:
    """The handler of a method whose behaviour is stamped, as is any that takes its place: Serve puts its own there."""

    class Timed(type(handler)):  # type: ignore[misc]
        def _replace(self, **fields: Any) -> Any:
            for kind in ("unary_unary", "unary_stream"):
                if fields.get(kind) is not None:
                    fields[kind] = _Stamp(fields[kind])
            return super()._replace(**fields)

    made = Timed(**handler._asdict())
    return made._replace(unary_unary=handler.unary_unary, unary_stream=handler.unary_stream)
