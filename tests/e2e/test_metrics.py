"""The metrics as Prometheus reads them: from Ray's endpoint, under the names that were promised."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable

import grpc
import httpx
import pytest

from deployment.metrics import SPECS
from deployment.pb.orca.v1 import orca_pb2 as pb
from tests.e2e.conftest import Server

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]

EXPORT_TIMEOUT_S = 90.0
"""Ray's processes hand their metrics on every ten seconds or so."""
UNUSED = {"orca_failed_total", "orca_failovers_total", "orca_prefix_cache_hit_tokens_total"}
"""A counter appears with its first count; nothing makes these count here."""


class Samples:
    """One scrape: each sample's value by name and labels."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.values: dict[str, dict[str, float]] = defaultdict(dict)
        for name, labels, value in re.findall(r"^ray_(orca_\w+)(?:\{(.*)\})? (\S+)", text, re.MULTILINE):
            self.values[name][labels] = float(value)

    def total(self, name: str, label: str = "") -> float:
        return sum(value for labels, value in self.values[name].items() if label in labels)


def scrape(server: Server) -> Samples:
    found = re.search(r"^metrics: (\S+)$", server.log.read_text(), re.MULTILINE)
    assert found is not None, server.log.read_text()
    return Samples(httpx.get(found[1]).text)


def wait_for(server: Server, condition: Callable[[Samples], bool]) -> Samples:
    deadline = time.monotonic() + EXPORT_TIMEOUT_S
    while not condition(samples := scrape(server)):
        assert time.monotonic() < deadline, samples.text
        time.sleep(0.5)
    return samples


def n_requests(samples: Samples) -> float:
    return samples.total("orca_requests_total")


def test_the_endpoint_tells_what_has_happened(settled: Server) -> None:
    known = settled.stub.GetStatus(pb.GetStatusRequest(), timeout=20).counters["requests"]
    before = wait_for(settled, lambda now: n_requests(now) == known)  # what other tests did is exported by then
    usages = []
    for n in (1, 9):
        sampling = pb.Sampling(max_new_tokens=n, ignore_eos=True)
        answer = settled.stub.Complete(pb.GenerateRequest(prompt="Once upon a time", sampling=sampling), timeout=60)
        usages.append(answer.usage)
    body = {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
    answered = httpx.post(f"http://127.0.0.1:{settled.http_port}/v1/completions", json=body, timeout=60).json()["usage"]
    stream = settled.stub.Generate(
        pb.GenerateRequest(prompt="Hello", sampling=pb.Sampling(max_new_tokens=900, ignore_eos=True)), timeout=60
    )
    next(stream)
    stream.cancel()
    with pytest.raises(grpc.RpcError):
        settled.stub.Complete(pb.GenerateRequest(prompt="x", sampling=pb.Sampling(max_new_tokens=10**6)), timeout=60)
    settled.settle()

    after = wait_for(settled, lambda now: n_requests(now) >= n_requests(before) + 5)

    def more(name: str, label: str = "") -> float:
        return after.total(name, label) - before.total(name, label)

    assert more("orca_requests_total") == 5
    outcomes = {name: more("orca_requests_total", f'outcome="{name}"') for name in ("length", "cancelled", "error")}
    assert outcomes == {"length": 3, "cancelled": 1, "error": 1}
    assert more("orca_requests_total", 'api="http"') == 1
    assert more("orca_rejected_total") == 1
    assert more("orca_prompt_tokens_total") == sum(u.prompt_tokens for u in usages) + answered["prompt_tokens"]
    assert more("orca_generated_tokens_total") == 1 + 9 + 4
    assert more("orca_time_to_first_token_seconds_count") == 4
    assert more("orca_request_seconds_count") == 5
    assert more("orca_time_per_output_token_seconds_count") == 2


def test_every_name_is_there_and_gauges_are_at_rest(settled: Server) -> None:
    def at_rest(now: Samples) -> bool:
        gauges = ("orca_slots_reserved", "orca_slots_used", "orca_queued_slots", "orca_waiting_requests",
                  "orca_running_requests")  # fmt: skip
        return all(len(now.values[name]) >= 2 and now.total(name) == 0 for name in gauges)

    samples = wait_for(settled, at_rest)
    slots = [load.n_slots for load in settled.loads()]
    assert samples.total("orca_slots_total") == samples.total("orca_headroom_slots") == sum(slots)
    assert samples.total("orca_iterations_total") >= 10
    assert samples.total("orca_iteration_seconds_count") == samples.total("orca_iterations_total")
    assert samples.total("orca_iteration_tokens_count") == samples.total("orca_iterations_total")
    names = {spec.name + ("_count" if spec.kind == "histogram" else "") for spec in SPECS if spec.name not in UNUSED}
    assert not names - {name for name, values in samples.values.items() if values}
    described = set(re.findall(r"^# HELP ray_(orca_\w+) \S", samples.text, re.MULTILINE))
    assert {spec.name for spec in SPECS if spec.name not in UNUSED} <= described
