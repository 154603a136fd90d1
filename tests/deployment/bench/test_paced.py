"""The engine without a model: its tokens are known beforehand, whatever the batch and wherever a stream is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deployment.bench.paced import paced_engine, token_at
from deployment.metrics import ReplicaMetrics
from orca_core.config import EngineConfig
from orca_core.engine import Engine
from orca_core.results import ResultBuilder
from orca_core.types import SamplingParams
from tests.deployment.fake_registry import FakeRegistry

pytestmark = pytest.mark.model  # the tokenizer is that of the embedded model


@pytest.fixture
def engine() -> Engine:
    return paced_engine(EngineConfig(), ReplicaMetrics(FakeRegistry(), "r"), 0.0)


def test_tokens_follow_from_seed_and_position(engine: Engine) -> None:
    params = [SamplingParams(max_new_tokens=20, seed=seed, ignore_eos=True) for seed in (1, 2)]
    with engine:
        results = engine.generate(["one", "two"], params)
        for result, seed in zip(results, (1, 2), strict=True):
            first = len(result.prompt_token_ids)
            assert list(result.token_ids) == [token_at(seed, first + i) for i in range(20)]
        request = replace(engine.make_request("one", params[0]), emitted_ids=results[0].token_ids[:7])
        rest = ResultBuilder(request).extend(engine.submit(request)).build()
        assert rest.token_ids == results[0].token_ids[7:]
        assert results[0].text.endswith(rest.text)
