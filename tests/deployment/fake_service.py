"""A ``Service`` without engine, Ray or network: it echoes scripted tokens and counts what is open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from deployment.serving import (
    DeployedReplicas,
    GenerationCall,
    ReplicaStatus,
    ScalingStatus,
    ServedChunk,
    ServiceStatus,
)
from orca_core.errors import NotFoundError, OrcaError, RequestTooLargeError
from orca_core.types import (
    CancelOutcome,
    FinishReason,
    GenerationChunk,
    Load,
    ModelInfo,
    PositionLogprobs,
    Timings,
    TokenLogprob,
    Usage,
)

MODEL = ModelInfo("tiny/model", "LlamaForCausalLM", "float32", 128, 64, 256, (2,), True)
WORDS = ("Hello", " wor", "", "ld", "!")


class FakeService:
    """``words``: the text of each token; ``fail_after``: raise ``error`` after as many; ``gate``: waits before each."""

    def __init__(
        self,
        words: Sequence[str] = WORDS,
        error: BaseException | None = None,
        fail_after: int = 0,
        gate: asyncio.Semaphore | None = None,
        truncate: bool = False,
        finish: FinishReason = FinishReason.STOP,
    ) -> None:
        self.words = words
        self.error = error
        self.fail_after = fail_after
        self.gate = gate
        self.truncate = truncate
        self.finish = finish
        self.calls: list[GenerationCall] = []
        self.checked: list[GenerationCall] = []
        self.open = 0
        self.cancelled = 0
        self.started = asyncio.Event()
        self.is_ready = True

    async def generate(self, call: GenerationCall) -> AsyncGenerator[ServedChunk, None]:
        self.calls.append(call)
        self.open += 1
        done = False
        try:
            self.started.set()
            self._check(call)
            limit = call.sampling.max_new_tokens or len(self.words)
            words = self.words[:limit]
            for index, word in enumerate(words):
                if self.error is not None and index == self.fail_after:
                    raise self.error
                if self.gate is not None:
                    await self.gate.acquire()
                if index == len(words) - 1 and self.truncate:
                    return
                yield ServedChunk(self._chunk(call, index, word, index == len(words) - 1), call.client_request_id, "r1")
                await asyncio.sleep(0)
            done = True
        finally:
            self.open -= 1
            self.cancelled += not done

    def _chunk(self, call: GenerationCall, index: int, word: str, last: bool) -> GenerationChunk:
        logprobs: tuple[PositionLogprobs, ...] = ()
        if call.sampling.logprobs is not None:
            chosen = TokenLogprob(index, -0.5, word, word.encode())
            masked = TokenLogprob(99, float("-inf"), "x", b"x")
            logprobs = (PositionLogprobs(chosen, (chosen, masked)[: call.sampling.logprobs]),)
        return GenerationChunk(
            "ours",
            word,
            (index,),
            logprobs,
            self.finish if last else None,
            None,
            Usage(3, index + 1, 1) if last else None,
            Timings(0.1, 0.2, 0.3) if last else None,
        )

    def _check(self, call: GenerationCall) -> None:
        if call.model and call.model != MODEL.model_id:
            raise NotFoundError("model", call.model)
        wanted = call.sampling.max_new_tokens or 0
        if wanted > MODEL.max_model_len:
            raise RequestTooLargeError(3, wanted, MODEL.max_model_len, "max_model_len")

    async def check(self, calls: list[GenerationCall]) -> None:
        self.checked.extend(calls)
        for call in calls:
            self._check(call)

    async def cancel(self, client_request_id: str) -> CancelOutcome:
        return CancelOutcome.NOT_FOUND

    async def tokenize(self, text: str, model: str = "") -> list[int]:
        return [ord(character) for character in text]

    async def detokenize(self, token_ids: tuple[int, ...], model: str = "") -> str:
        return "".join(chr(65 + token_id) for token_id in token_ids)

    async def model(self) -> ModelInfo:
        return MODEL

    async def status(self) -> ServiceStatus:
        replicas = (ReplicaStatus("r1", Load(256, 100, 50, 10), 0.1), ReplicaStatus("r2", Load(64), 7.0, silent=True))
        scaling = ScalingStatus(2, 1, "2 replicas: quite enough", 3.0, "1 -> 2 replicas: too much", 61.0)
        deployed = DeployedReplicas(2, 1, 1, "1 replica waits for room")
        return ServiceStatus(MODEL, replicas, 2, 30, False, {"requests": 7}, 1, 2, scaling, deployed)

    async def ready(self) -> bool:
        return self.is_ready


def wrapped(error: OrcaError) -> Exception:
    """The error as Ray hands it over: with the original as its cause."""

    class RayTaskError(Exception):
        cause = error

    return RayTaskError("Traceback: secret words")
