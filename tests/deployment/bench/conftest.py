"""A model that costs nothing, for benchmarks of which only the course matters."""

from __future__ import annotations

import pytest

from orca_core.executor import LoadedModel
from orca_core.types import ModelInfo
from tests.core.fakes import VOCAB, FakeExecutor
from tests.core.tiny_tokenizers import byte_level_tokenizer

INFO = ModelInfo("fake", "Fake", "float32", VOCAB, 1024, 10_000, (), False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Its tokens are all the same: nobody looks at them."""
    tokenizer = byte_level_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return LoadedModel(FakeExecutor(lambda _: 42), tokenizer, INFO)
