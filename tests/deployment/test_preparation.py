"""Where texts are tokenised: whoever sends a large one waits, nobody else does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from deployment.config import AppConfig
from deployment.preparation import LARGE_BYTES, MAX_LARGE, SHORT_BYTES, Preparation
from orca_core.errors import NotFoundError, OverloadedError
from tests.deployment.serving_fakes import ByteTokenizer

LARGE = "x" * LARGE_BYTES


class SlowForLarge(ByteTokenizer):
    """Large texts wait for ``go``."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.thread = threading.main_thread()

    def encode(self, text: str) -> list[int]:
        self.thread = threading.current_thread()
        if len(text) >= LARGE_BYTES:
            self.go.wait()
        return super().encode(text)


@pytest.fixture
def tokenizer() -> Iterator[SlowForLarge]:
    made = SlowForLarge()
    yield made
    made.go.set()


@pytest.fixture
def preparation(tokenizer: SlowForLarge) -> Iterator[Preparation]:
    made = Preparation(AppConfig.parse({"model": {"id": "m"}}), tokenizer)
    yield made
    tokenizer.go.set()
    made.close()


async def test_small_texts_pass_large_ones(preparation: Preparation, tokenizer: SlowForLarge) -> None:
    large = [asyncio.ensure_future(preparation.encode(LARGE)) for _ in range(3)]
    await asyncio.sleep(0)
    assert await preparation.encode("ab") == [97, 98]
    assert len(await preparation.encode("x" * (LARGE_BYTES - 1))) == LARGE_BYTES - 1
    assert not any(task.done() for task in large)
    tokenizer.go.set()
    assert [len(ids) for ids in await asyncio.gather(*large)] == [LARGE_BYTES] * 3


async def test_a_short_prompt_goes_to_no_thread(preparation: Preparation, tokenizer: SlowForLarge) -> None:
    here = threading.current_thread()
    await preparation.encode("x" * SHORT_BYTES)
    assert tokenizer.thread is here
    await preparation.encode("x" * (SHORT_BYTES + 1))
    assert tokenizer.thread is not here
    await preparation.encode("\N{EURO SIGN}" * SHORT_BYTES)  # bytes count
    assert tokenizer.thread is not here


async def test_large_texts_are_bounded_and_their_places_return(
    preparation: Preparation, tokenizer: SlowForLarge
) -> None:
    large = [asyncio.ensure_future(preparation.encode(LARGE)) for _ in range(MAX_LARGE)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError) as refused:
        await preparation.encode(LARGE)
    assert refused.value.retry_after_s > 0
    for task in large[1:]:  # whoever leaves while waiting frees its place without its text being read
        task.cancel()
    await asyncio.gather(*large[1:], return_exceptions=True)
    again = [asyncio.ensure_future(preparation.encode(LARGE)) for _ in range(MAX_LARGE - 1)]
    tokenizer.go.set()
    await asyncio.gather(large[0], *again)
    assert tokenizer.n_calls == MAX_LARGE


async def test_the_model_that_is_asked_for(preparation: Preparation) -> None:
    preparation.check_model("m")
    preparation.check_model("")
    with pytest.raises(NotFoundError):
        preparation.check_model("other")
