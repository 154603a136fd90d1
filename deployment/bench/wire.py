"""Messages of ``orca.v1`` for benchmarks that speak gRPC without our client and our server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from deployment.pb.orca.v1 import orca_pb2 as pb

SERVICE: Final = "orca.v1.OrcaService"
GENERATE: Final = f"/{SERVICE}/Generate"
_PROMPT_TOKENS: Final = 16
_REQUEST_ID: Final = "0123456789abcdef" * 2


def prompt_of(index: int) -> list[int]:
    """Token ids of a short prompt; no two of the first hundreds begin alike."""
    return [1000 + (index * 31 + position * 7) % 4000 for position in range(_PROMPT_TOKENS)]


def request_bytes(token_ids: Sequence[int], new_tokens: int) -> bytes:
    """A greedy request for exactly ``new_tokens`` tokens."""
    sampling = pb.Sampling(max_new_tokens=new_tokens, ignore_eos=True)
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=token_ids), sampling=sampling)
    return bytes(message.SerializeToString())


def response_of(index: int, new_tokens: int) -> pb.GenerateResponse:
    """What a server with nothing behind it says: a token as ours looks, and after the last one that it was the last."""
    fields: dict[str, Any] = {"request_id": _REQUEST_ID, "text": " token", "token_ids": (1000 + index,)}
    if index == new_tokens - 1:
        fields |= {"finish_reason": pb.LENGTH, "usage": pb.Usage(prompt_tokens=1, completion_tokens=new_tokens)}
    return pb.GenerateResponse(**fields)


def count_tokens(messages: Iterable[bytes]) -> int:
    """Tokens in the messages of a stream. Raises ``ValueError`` where the last one does not say that it is the last."""
    n_tokens, finished = 0, False
    for data in messages:
        message = pb.GenerateResponse.FromString(data)
        n_tokens += len(message.token_ids)
        finished = message.finish_reason != pb.NOT_FINISHED
    if not finished:
        raise ValueError("a stream ended early")
    return n_tokens


def generate_handler(generate: Callable[..., Any]) -> Any:
    """For ``grpc.aio.Server.add_generic_rpc_handlers``: ``generate(request, context)`` as the RPC ``Generate``."""
    import grpc

    handler = grpc.unary_stream_rpc_method_handler(
        generate,
        request_deserializer=pb.GenerateRequest.FromString,
        response_serializer=pb.GenerateResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(SERVICE, {"Generate": handler})
