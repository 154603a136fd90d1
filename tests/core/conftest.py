"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from orca_core.tokenizer import Tokenizer
from tests.core.engine_bench import Bench
from tests.core.tiny_tokenizers import byte_level_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def bench(tokenizer: Tokenizer) -> Iterator[Bench]:
    made = Bench(tokenizer)
    made.engine.start()
    yield made
    made.executor.let_go()
    made.engine.close()
