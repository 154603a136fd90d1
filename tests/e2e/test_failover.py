"""Streams that lose their replica, as their clients see it: they don't. A service of its own, since it breaks it."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from deployment.pb.orca.v1 import orca_pb2 as pb
from tests.e2e.conftest import CONFIG, MARK, Server, left_over, marked_processes, start, stop

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]
N_STREAMS = 6
N_TOKENS = 60
RECOVERY_S = 120.0
# float32: what a request computes must not depend on how it is cut into pieces
FAILOVER_CONFIG = CONFIG.replace("args:", "args:\n      model: {dtype: float32}\n      failover: {silence_s: 3}")


class Answer(NamedTuple):
    """All of one stream."""

    text: str
    token_ids: tuple[int, ...]
    last: pb.GenerateResponse


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    mark = uuid.uuid4().hex
    running = start(tmp_path_factory.mktemp("failover"), "throughput", {MARK: mark}, FAILOVER_CONFIG)
    yield running, mark
    assert stop(running) == 0
    assert left_over(mark) == {}


def replica_pids(mark: str) -> list[int]:
    return [pid for pid, command in marked_processes(mark).items() if ":Replica" in command]


def ask(server: Server, number: int) -> Iterator[pb.GenerateResponse]:
    sampling = pb.Sampling(max_new_tokens=N_TOKENS, ignore_eos=True, temperature=0.9, seed=100 + number)
    stream: Iterator[pb.GenerateResponse] = server.stub.Generate(
        pb.GenerateRequest(prompt=f"Once upon a time, {number} kings", sampling=sampling), timeout=120
    )
    return stream


def whole(messages: list[pb.GenerateResponse]) -> Answer:
    token_ids = tuple(token_id for message in messages for token_id in message.token_ids)
    return Answer("".join(message.text for message in messages), token_ids, messages[-1])


def answers(server: Server, disturb: signal.Signals | None = None, mark: str = "") -> list[Answer]:
    """What all streams say; once each has begun, one replica gets the signal."""
    streams = [ask(server, number) for number in range(N_STREAMS)]
    begun = [[next(stream), next(stream)] for stream in streams]
    if disturb is not None:
        os.kill(replica_pids(mark)[0], disturb)
    with ThreadPoolExecutor(N_STREAMS) as pool:
        return [whole(first + rest) for first, rest in zip(begun, pool.map(list, streams), strict=True)]


def wait_for_two(server: Server) -> None:
    """Until Serve has replaced what was lost."""
    deadline = time.monotonic() + RECOVERY_S
    while len(server.loads()) < 2:
        assert time.monotonic() < deadline, "the replica was not replaced"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def undisturbed(marked: tuple[Server, str]) -> list[Answer]:
    return answers(marked[0])


@pytest.mark.parametrize("loss", [signal.SIGKILL, signal.SIGSTOP])
def test_every_stream_says_what_it_would_have_said(
    marked: tuple[Server, str], undisturbed: list[Answer], loss: signal.Signals
) -> None:
    server, mark = marked
    wait_for_two(server)
    frozen = replica_pids(mark)[0] if loss is signal.SIGSTOP else None
    try:
        disturbed = answers(server, loss, mark)
    finally:
        if frozen is not None:
            os.kill(frozen, signal.SIGCONT)
    for got, expected in zip(disturbed, undisturbed, strict=True):
        assert (got.text, got.token_ids) == (expected.text, expected.token_ids)
        assert got.last.finish_reason == pb.LENGTH
        assert got.last.usage.prompt_tokens == expected.last.usage.prompt_tokens
        assert got.last.usage.completion_tokens == N_TOKENS
    lost = [got.last for got in disturbed if got.last.resumes]
    assert 0 < len(lost) < N_STREAMS
    assert len({last.replica for last in lost}) == 1
    wait_for_two(server)
    server.settle()
    assert " is lost: " in actor_logs(server, "Ingress")
    assert "slots" in actor_logs(server, "Replica"), "the engine says how it was set up"


def actor_logs(server: Server, kind: str) -> str:
    """What the actors of that kind have written to the files that the documentation names."""
    (line,) = [line for line in server.log.read_text().splitlines() if line.startswith("logs: ")]
    files = Path(line.removeprefix("logs: ")).glob(f"replica_orca_{kind}_*.log")
    return "".join(file.read_text() for file in files)


def test_requests_are_served_while_a_replica_is_gone(marked: tuple[Server, str], undisturbed: list[Answer]) -> None:
    """Field case F16: nothing fails but what was in flight, and that does not either."""
    server, mark = marked
    wait_for_two(server)
    os.kill(replica_pids(mark)[0], signal.SIGKILL)
    for _ in range(3):
        got = whole(list(ask(server, 0)))
        assert got.token_ids == undisturbed[0].token_ids
    wait_for_two(server)
    server.settle()
