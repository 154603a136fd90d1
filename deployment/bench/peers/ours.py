"""``python -m deployment.bench.peers.ours CONFIG``: the runner of this engine, in its process and without a service.

``CONFIG``: the fields of ``EngineConfig`` as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from deployment.bench.helpers import answer_lines
from orca_core.config import EngineConfig
from orca_core.engine import Engine
from orca_core.results import collect
from orca_core.types import SamplingParams


def run(
    engine: Engine,
    requests: Sequence[dict[str, Any]],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> dict[str, Any]:
    """Submit each request when it arrives, and all that arrive at once together; the answer of a runner."""
    made = [
        engine.make_request(each["prompt"], SamplingParams(max_new_tokens=each["new_tokens"], ignore_eos=True))
        for each in requests
    ]
    started = clock()
    channels: list[Any] = []
    submitted_s: list[float] = []
    for at_s in sorted({each["at_s"] for each in requests}):
        now = clock() - started
        if at_s > now:
            sleep(at_s - now)
        together = [index for index, each in enumerate(requests) if each["at_s"] == at_s]
        submitted_s += [clock() - started] * len(together)
        channels += engine.submit_all([made[index] for index in together])
    results = collect(made, channels, lambda: None)
    return {
        "requests": [
            {"first_s": at_s + result.metrics.ttft_s, "last_s": at_s + result.metrics.total_s,
             "tokens": len(result.token_ids)}
            for at_s, result in zip(submitted_s, results, strict=True)
        ]
    }  # fmt: skip


def main() -> None:
    """Answer until nobody asks any more."""
    with Engine(EngineConfig(**json.loads(sys.argv[1]))) as engine:
        answer_lines(lambda requests: run(engine, requests))


if __name__ == "__main__":
    main()
