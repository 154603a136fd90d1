"""What the serving plane costs: the arithmetic, and the processes that are measured, without any Ray."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from deployment.bench import paced
from deployment.bench.front import FrontOptions, front_arguments, make_record, tables, throughput
from deployment.bench.helpers import Helper
from deployment.bench.machine import TreeShares, role_of
from deployment.bench.paced import PacedExecutor
from deployment.bench.tax import TaxOptions, alone_config, make_tax_record, tax_arguments, tax_tables
from deployment.bench.wire import count_tokens, prompt_of, response_of
from deployment.cli.bench_plane import numbers
from deployment.config import AppConfig
from orca_core.errors import ConfigError, UnavailableError

OPTIONS = FrontOptions((2, 128), (1,), 256, 2, 25_000.0, 10, False)


def a_run(server: str, streams: int, number: int, rate: float, first_ms: float = 1.0) -> dict[str, Any]:
    first = {"mean": first_ms, "p50": first_ms, "p95": first_ms, "p99": 2 * first_ms}
    run: dict[str, Any] = {"server": server, "replicas": 1, "streams": streams, "round": number}
    if streams:
        run |= {"tokens_per_s": rate, "messages_per_s": rate / 2, "tokens_per_message": 2.0, "client_core": 0.5}
    return run | {"first_token_ms": first, "foreign_cpu": 0.5, "own_cpu": 0.4}


def test_ratios_are_taken_within_a_round() -> None:
    rates = {"bare": (100.0, 10.0), "plain": (20.0, 2.0), "orca": (60.0, 8.0)}  # the machine slows down tenfold
    runs = [a_run(server, 128, n, rate) for server, pair in rates.items() for n, rate in enumerate(pair)]
    (case,) = make_record(OPTIONS, runs)["summary"]
    assert case["to_bare"] == pytest.approx({"tokens_per_s": 0.7, "messages_per_s": 0.7})
    assert case["to_plain"]["tokens_per_s"] == pytest.approx(3.5)
    assert case["orca"]["tokens_per_s"] == 34


def test_what_is_added_to_the_first_token_is_a_difference_and_all_of_it_is_shown() -> None:
    times = {"bare": (1.0, 3.0), "plain": (5.0, 5.0), "orca": (4.0, 5.0)}
    runs = [a_run(server, 0, n, 0.0, ms) for server, pair in times.items() for n, ms in enumerate(pair)]
    runs += [a_run(server, 2, 0, 10.0) for server in times]
    record = make_record(OPTIONS, runs)
    assert record["summary"][0]["added_ms"] == {"mean": 2.5, "p50": 2.5, "p95": 2.5, "p99": 5.0}
    assert [table.row_count for table in tables(record)] == [3, 1, 3]


def test_a_run_says_what_each_process_used_for_a_token() -> None:
    shares = TreeShares()
    shares.seconds = {"Ingress": 0.5, "clients": 1.0}
    said = {"tokens": 10_000, "messages": 5000, "elapsed_s": 2.0, "cpu_s": 1.0, "first_token_s": [0.1]}
    run = throughput(said, shares)
    assert (run["tokens_per_s"], run["messages_per_s"], run["tokens_per_message"]) == (5000, 2500, 2)
    assert run["client_core"] == 0.5
    assert run["cpu_us"] == pytest.approx({"Ingress": 50, "clients": 100})


def test_no_stream_of_the_measurement_waits_in_line() -> None:
    config = AppConfig.parse(front_arguments(OPTIONS, 2))
    assert config.engine.max_batch_size == 128
    assert config.engine.n_slots == 128 * (256 + 64)
    assert (config.replicas.min, config.replicas.max) == (2, 2)
    assert config.limits.max_stream_backlog >= OPTIONS.tokens


def test_the_engine_alone_is_the_replica_s() -> None:
    options = TaxOptions(4, 32, 1, 3, "smollm2-135m-instruct", False)
    config = alone_config(options)
    assert config == AppConfig.parse(tax_arguments(options)).engine_config()
    assert (config.threads, config.max_batch_size, config.n_slots) == (3, 4, 4 * 96)


def test_the_tax_is_the_median_of_the_ratios() -> None:
    options = TaxOptions(4, 32, 3, 1, "m", False)
    rates = {"alone": (100.0, 50.0, 10.0), "service": (90.0, 49.0, 8.0)}
    runs = [
        {"way": way, "round": n, "tokens_per_s": rate, "foreign_cpu": 0.0}
        for way, each in rates.items()
        for n, rate in enumerate(each)
    ]
    record = make_tax_record(options, runs)
    assert record["ratio"] == pytest.approx(0.9)
    assert record["alone"]["tokens_per_s"] == 50
    assert tax_tables(record)[0].row_count == 2


def test_tokens_are_counted_only_of_streams_that_have_ended() -> None:
    stream = [response_of(index, 3).SerializeToString() for index in range(3)]
    assert count_tokens(stream) == 3
    with pytest.raises(ValueError, match="ended early"):
        count_tokens(stream[:2])
    assert len({tuple(prompt_of(index)) for index in range(512)}) == 512


@pytest.mark.parametrize(
    ("command", "role"),
    [("ray::ServeReplica:orca:Ingress.handle x", "Ingress.handle"), ("ray::ServeReplica:orca:Replica", "Replica"),
     ("/opt/bin/haproxy -dS -f x", "HAProxy"), ("python -m haproxy", "rest"), ("", "rest")],
)  # fmt: skip
def test_processes_are_told_apart(command: str, role: str) -> None:
    assert role_of(command) == role.partition(".")[0]


@dataclass
class FakeTime:
    now: float = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_tokens_come_at_a_rate_and_the_first_one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    time = FakeTime()
    monkeypatch.setattr(paced, "time", time)
    executor = PacedExecutor(0.0, token_s=0.5)
    request = SimpleNamespace(spec=SimpleNamespace(seed=1), token_ids=[1])
    batch: Any = SimpleNamespace(sampling_requests=[request] * 4)
    ended = []
    for _ in range(3):
        executor.run_iteration(batch)
        ended.append(time.now)
    assert ended == [100, 102, 104]
    time.now = 200.0
    executor.run_iteration(batch)
    assert time.now == 200


def test_clients_read_all_of_a_bare_server() -> None:
    with Helper("deployment.bench.bare") as bare, Helper("deployment.bench.load") as load:
        address = f"127.0.0.1:{bare.ask()['port']}"
        said = load.ask(address=address, application="", streams=3, tokens=5, repeat=2)
        assert (said["tokens"], said["messages"], len(said["first_token_s"])) == (30, 30, 6)
        assert 0 < max(said["first_token_s"]) <= said["elapsed_s"]
        with pytest.raises(UnavailableError, match="TypeError"):
            load.ask(nonsense=1)


def test_numbers_come_with_commas() -> None:
    assert numbers("--streams", "1,16") == (1, 16)
    for text in ("", "x", "0", "1,,2"):
        with pytest.raises(ConfigError, match="--streams"):
            numbers("--streams", text)
