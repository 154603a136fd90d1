"""Every block of docs/library.md and docs/how-it-works.md, in order, on a tiny model in place of the embedded one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from orca_core.config import EMBEDDED_MODEL
from orca_core.types import CancelOutcome
from tests.core.tiny_models import tiny_llama
from tests.core.tiny_tokenizers import save_byte_level

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^```\n(A: .*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(vocab_size=272, max_position_embeddings=512).save_pretrained(folder)
    return str(save_byte_level(folder))


def run_page(page: Path, model: str) -> dict[str, Any]:
    """The names its blocks leave behind."""
    text = page.read_text()
    blocks = [(text[: match.start(1)].count("\n"), match[1]) for match in BLOCK.finditer(text)]
    assert len(blocks) == text.count("```python") > 0
    names: dict[str, Any] = {}
    for line, block in blocks:
        code = "\n" * line + block.replace(f'"{EMBEDDED_MODEL}"', repr(model))
        exec(compile(code, str(page), "exec", dont_inherit=True), names)
    return names


@pytest.fixture(scope="module")
def names(model: str) -> dict[str, Any]:
    return run_page(DOCS / "library.md", model)


def test_the_iterations_of_the_reading_path(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = DOCS / "how-it-works.md"
    run_page(page, model)
    printed = capsys.readouterr().out
    (shown,) = PRINTED.findall(page.read_text())
    assert printed == shown


def test_results_and_refusals(names: dict[str, Any]) -> None:
    assert all(0 < result.usage.completion_tokens <= 16 for result in names["results"])
    assert [result.prompt_token_ids for result in names["results"]][1] == (1, 2, 3)
    assert "1000000" in names["refused"]
    assert names["field"] == "prompt"
    assert names["answer"].prompt_token_ids == tuple(names["ids"])
    assert names["n_prompt"] > 5


def test_streams_and_cancelling(names: dict[str, Any]) -> None:
    assert len(names["texts"]) == 3
    assert names["last"].finish_reason is not None
    assert sum(len(chunk.token_ids) for chunk in names["chunks"]) == names["last"].usage.completion_tokens
    assert names["outcome"] is CancelOutcome.CANCELLED
    assert names["cancelled"]
    assert names["unknown"] is CancelOutcome.NOT_FOUND


def test_facts_resuming_and_iterations(names: dict[str, Any]) -> None:
    assert names["health"].ok
    assert (names["info"].has_chat_template, names["load"].n_slots) == (True, 4096)
    assert (*names["first_half"], *names["rest"]) == names["whole"].token_ids
    seen = names["seen"]
    assert {len(iteration.parts) for iteration in seen} == {1, 2}
    assert sum(part.n_tokens for iteration in seen for part in iteration.parts if not part.initiation) == 3 * 3
