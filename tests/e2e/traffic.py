"""Clients who know what they are to get: streams over gRPC and SSE, many at once, each checked to the last token."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

import grpc
import grpc.aio
import httpx
from google.rpc import error_details_pb2, status_pb2

from deployment.bench.paced import token_at
from deployment.pb.orca.v1 import orca_pb2 as pb
from deployment.pb.orca.v1.orca_pb2_grpc import OrcaServiceStub
from orca_core.config import EMBEDDED_MODEL
from orca_core.source import resolve_source
from orca_core.tokenizer import Tokenizer
from tests.e2e.conftest import Server

TIMEOUT_S = 180.0
N_CHANNELS = 4


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve_source(EMBEDDED_MODEL, None))


@dataclass(frozen=True)
class Ask:
    """One request."""

    seed: int
    prompt: tuple[int, ...]
    n_tokens: int

    @property
    def token_ids(self) -> list[int]:
        """All that it is to get."""
        return [token_at(self.seed, len(self.prompt) + number) for number in range(self.n_tokens)]

    @property
    def text(self) -> str:
        return tokenizer().decode(self.token_ids)


@dataclass
class Got:
    """What became of it. ``error``: a status code or what else ended it; ``retry_s``: when it was told to come back.

    ``token_ids``: ``None`` where the face does not tell them. Times on the monotonic clock, seconds.
    """

    ask: Ask
    face: str
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str = ""
    usage: tuple[int, int] = (0, 0)
    replica: str = ""
    resumes: int = 0
    error: str = ""
    retry_s: float | None = None

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def fault(self) -> str:
        """What is wrong with it; empty where nothing is."""
        if self.error:
            return self.error
        wrong = {
            "text": self.text != self.ask.text,
            "tokens": self.token_ids is not None and self.token_ids != self.ask.token_ids,
            "finish reason": self.finish_reason != "length",
            "usage": self.usage != (len(self.ask.prompt), self.ask.n_tokens),
        }
        return " ".join(f"wrong {name}" for name, is_wrong in wrong.items() if is_wrong)


def random_ask(rng: random.Random, n_tokens: tuple[int, int]) -> Ask:
    prompt = tuple(rng.randrange(1000, 6000) for _ in range(rng.randrange(4, 40)))
    return Ask(rng.randrange(2**40), prompt, rng.randint(*n_tokens))


async def by_grpc(stub: Any, ask: Ask) -> Got:
    got = Got(ask, "grpc", token_ids=[])
    sampling = pb.Sampling(max_new_tokens=ask.n_tokens, ignore_eos=True, seed=ask.seed, temperature=1.0)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ask.prompt), sampling=sampling)
    texts = []
    try:
        async for message in stub.Generate(request, timeout=TIMEOUT_S, wait_for_ready=True):
            texts.append(message.text)
            got.token_ids += message.token_ids
            got.resumes, got.replica = message.resumes, message.replica
            if message.finish_reason:
                got.finish_reason = pb.FinishReason.Name(message.finish_reason).lower()
                got.usage = message.usage.prompt_tokens, message.usage.completion_tokens
    except grpc.RpcError as error:
        _read_error(got, error)
    got.text, got.ended = "".join(texts), time.monotonic()
    return got


def _read_error(got: Got, error: Any) -> None:
    got.error = f"{error.code().name}: {error.details()}"
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for packed in status_pb2.Status.FromString(value).details:
                retry = error_details_pb2.RetryInfo()
                if packed.Unpack(retry):
                    got.retry_s = retry.retry_delay.ToNanoseconds() / 1e9


async def by_http(client: httpx.AsyncClient, ask: Ask) -> Got:
    got = Got(ask, "http")
    body = {"prompt": list(ask.prompt), "max_tokens": ask.n_tokens, "ignore_eos": True, "seed": ask.seed}
    body |= {"temperature": 1.0, "stream": True, "stream_options": {"include_usage": True}}
    texts: list[str] = []
    done = False
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                got.error = f"{answer.status_code}: {(await answer.aread()).decode()}"
                got.retry_s = float(answer.headers["retry-after"]) if "retry-after" in answer.headers else None
            async for line in answer.aiter_lines() if not got.error else _nothing():
                done = done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    _read_event(got, json.loads(line[6:]), texts)
        if not done and not got.error:
            got.error = "the stream ended early"
    except httpx.TransportError as error:
        got.error = f"{type(error).__name__}: {error}"
    got.text, got.ended = "".join(texts), time.monotonic()
    return got


async def _nothing() -> Any:
    return
    yield


def _read_event(got: Got, event: dict[str, Any], texts: list[str]) -> None:
    if "error" in event:
        got.error = f"event: {event['error']}"
    for choice in event.get("choices", ()):
        texts.append(choice["text"])
        got.finish_reason = choice["finish_reason"] or got.finish_reason
    if usage := event.get("usage"):
        got.usage = usage["prompt_tokens"], usage["completion_tokens"]


class Traffic:
    """So many streams all the time: whenever one has ended, the next begins. Runs in a thread of its own.

    ``may_break(got)``: whether a stream that failed so is begun again, as a client would, without that being a fault.
    """

    def __init__(
        self,
        server: Server,
        n_grpc: int,
        n_http: int,
        n_tokens: tuple[int, int],
        may_break: Callable[[Got], bool] = lambda _: False,
        seed: int = 1,
    ) -> None:
        self._server = server
        self._faces = ["grpc"] * n_grpc + ["http"] * n_http
        self._n_tokens = n_tokens
        self._may_break = may_break
        self._seed = seed
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="traffic")
        self._failure: BaseException | None = None
        self.done: list[Got] = []
        self.broken: list[Got] = []
        self.recovered_s: list[float] = []
        """From the first break of a request to the end of the attempt that succeeded."""

    def __enter__(self) -> Self:
        tokenizer()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """No new streams; those that are open run to their end."""
        self._stopping.set()
        self._thread.join()

    def wait_for(self, n_more: int, timeout_s: float = 120.0) -> None:
        """Until so many more streams have ended."""
        wanted, deadline = len(self.done) + n_more, time.monotonic() + timeout_s
        while len(self.done) < wanted:
            assert self._thread.is_alive(), self._failure
            assert time.monotonic() < deadline, f"{len(self.done)} streams have ended, {self.faults()}"
            time.sleep(0.05)

    def faults(self) -> Counter[str]:
        return Counter(fault for got in self.done if (fault := f"{got.face} {got.fault()}".strip()) != got.face)

    @property
    def resumes(self) -> int:
        return sum(got.resumes for got in self.done)

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(self._server.target, options=options) for _ in range(N_CHANNELS)]
        stubs = [OrcaServiceStub(channel) for channel in channels]
        url = f"http://127.0.0.1:{self._server.http_port}"
        try:
            async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
                asks: list[Callable[[Ask], Any]] = []
                for number, face in enumerate(self._faces):
                    stub = stubs[number % N_CHANNELS]
                    asks.append(
                        (lambda ask, s=stub: by_grpc(s, ask)) if face == "grpc" else lambda a: by_http(client, a)
                    )
                await asyncio.gather(*(self._keep_asking(n, ask) for n, ask in enumerate(asks)))
        except BaseException as error:
            self._failure = error
            raise
        finally:
            for channel in channels:
                await channel.close()

    async def _keep_asking(self, number: int, ask: Callable[[Ask], Any]) -> None:
        rng = random.Random(1000 * self._seed + number)
        while not self._stopping.is_set():
            wanted, since = random_ask(rng, self._n_tokens), None
            while True:
                got = await ask(wanted)
                if not (got.error and self._may_break(got)):
                    break
                since = got.ended if since is None else since
                self.broken.append(got)
                await asyncio.sleep(0.2)
            self.done.append(got)
            if since is not None:
                self.recovered_s.append(got.ended - since)
