"""``orca-serve generate`` and ``chat``: thin users of the gRPC client."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orca_core.errors import InvalidRequestError, OrcaError, UnauthenticatedError
from orca_core.params import DEFAULT_MAX_NEW_TOKENS
from orca_core.types import FinishReason

if TYPE_CHECKING:
    from deployment.client import ClientChunk, OrcaClient

Address = Annotated[str, typer.Option("--address", help="HOST:PORT of the gRPC face.")]
ApiKey = Annotated[str | None, typer.Option("--api-key", envvar="ORCA_API_KEY", help="Sent as a bearer token.")]
MaxNewTokens = Annotated[
    int | None,
    typer.Option("--max-new-tokens", help=f"Most tokens to generate; {DEFAULT_MAX_NEW_TOKENS} when left out."),
]
Temperature = Annotated[float | None, typer.Option("--temperature", help="0 = the most likely token always.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Keep the likeliest tokens up to this probability.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Keep this many of the likeliest tokens; 0 = all.")]
Seed = Annotated[int | None, typer.Option("--seed", help="The same seed gives the same tokens.")]
Timeout = Annotated[float | None, typer.Option("--timeout", help="Deadline in seconds.")]


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End at this text; may be given again.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end token.")] = False,
    as_chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a chat message.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, one line a message.")] = False,
    address: Address = "127.0.0.1:9000",
    api_key: ApiKey = None,
    timeout: Timeout = None,
) -> None:
    """Generate from one prompt; text comes as it is made."""
    text = _stdin() if prompt == "-" else prompt
    if not text:
        raise InvalidRequestError("prompt", "must not be empty")
    source: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if as_chat else {"prompt": text}
    sampling: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop or None,
        "ignore_eos": ignore_eos or None,
    }
    with connected(address, api_key) as client:
        ends_line = True
        last: ClientChunk | None = None
        for chunk in client.generate(**source, timeout_s=timeout, **sampling):
            sys.stdout.write(json.dumps(chunk_body(chunk)) + "\n" if as_json else _printable(chunk.text))
            sys.stdout.flush()
            last = chunk
            ends_line = as_json or (chunk.text.endswith("\n") if chunk.text else ends_line)
        if not ends_line:
            sys.stdout.write("\n")
            sys.stdout.flush()
        if not as_json:
            _say_if_cut_off(last)


def chat(
    system: Annotated[str | None, typer.Option("--system", help="A system message to begin with.")] = None,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    address: Address = "127.0.0.1:9000",
    api_key: ApiKey = None,
    timeout: Timeout = None,
) -> None:
    """Talk with the model. Ctrl-C cancels a reply and keeps the session; Ctrl-D ends it."""
    sampling: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed,
    }  # fmt: skip
    messages = [] if system is None else [{"role": "system", "content": system}]
    with connected(address, api_key) as client:
        typer.echo(f"{client.model().model_id} at {address}. Ctrl-C cancels a reply, Ctrl-D ends.", err=True)
        asks = sys.stdin.isatty()
        while True:
            try:
                line = input("> " if asks else "").strip()
            except (EOFError, KeyboardInterrupt):
                if asks:
                    typer.echo()
                return
            if line:
                messages = _turn(client, [*messages, {"role": "user", "content": line}], timeout, sampling)


@contextmanager
def connected(address: str, api_key: str | None) -> Iterator[OrcaClient]:
    """A client; a refusal for want of a key says how to give one, where none was given."""
    from deployment.client import OrcaClient

    with OrcaClient(address, api_key) as client:
        try:
            yield client
        except UnauthenticatedError as error:
            if api_key:
                raise
            raise UnauthenticatedError(f"{error}; --api-key KEY or ORCA_API_KEY=KEY gives one") from None


def _turn(
    client: OrcaClient, messages: list[dict[str, str]], timeout: float | None, sampling: dict[str, Any]
) -> list[dict[str, str]]:
    """One question and its answer, as the session goes on from it. A failed question is forgotten."""
    reply: list[str] = []
    last: ClientChunk | None = None
    stream = client.generate(messages=messages, timeout_s=timeout, **sampling)
    try:
        for chunk in stream:
            reply.append(chunk.text)
            sys.stdout.write(_printable(chunk.text))
            sys.stdout.flush()
            last = chunk
        typer.echo()
        _say_if_cut_off(last)
    except KeyboardInterrupt:
        stream.close()
        typer.echo(" [cancelled]")
    except OrcaError as error:
        typer.echo(f"\norca-serve: {error}", err=True)
        return messages[:-1]
    text = "".join(reply)
    return [*messages, {"role": "assistant", "content": text}] if text else messages[:-1]


def _say_if_cut_off(last: ClientChunk | None) -> None:
    """One dim line on stderr, where the output ends because of its length."""
    if last is None or last.finish_reason is not FinishReason.LENGTH:
        return
    count = "" if last.usage is None else f" after {last.usage.completion_tokens} tokens"
    line = f"[cut off{count}; --max-new-tokens N allows more]"
    typer.secho(line, err=True, dim=True)


def chunk_body(chunk: ClientChunk) -> dict[str, Any]:
    """One message of a stream as plain JSON values; the last has ``finish_reason``, ``usage`` and ``timings``."""
    body: dict[str, Any] = {"request_id": chunk.request_id, "text": chunk.text, "token_ids": list(chunk.token_ids)}
    if chunk.finish_reason is None:
        return body
    usage, timings = chunk.usage, chunk.timings
    body |= {"finish_reason": chunk.finish_reason.value, "stop": chunk.stop}
    if usage is not None:
        body["usage"] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_prompt_tokens": usage.cached_prompt_tokens,
        }
    if timings is not None:
        body["timings"] = {"queue_s": timings.queue_s, "first_token_s": timings.ttft_s, "total_s": timings.total_s}
    return body | {"replica": chunk.replica, "resumes": chunk.resumes}


def _stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise InvalidRequestError("prompt", "stdin is not UTF-8 text") from None


def _printable(text: str) -> str:
    """``text`` in the terminal's encoding: one that lacks a character must not end the stream."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)
