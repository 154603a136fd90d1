"""How often the same greedy request gets other tokens when only its circumstances differ: rounding, made visible.

In exact arithmetic nothing would differ. In floating point a product's last bits depend on how many rows are computed
together, and where two tokens are almost equally likely they decide; from there on the texts part. In float32 that is
so rare that tests demand equality; in bfloat16 it is not, but in the CPU kernels, whose sums have one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Final

from rich.table import Table

from deployment.bench.workloads import Shape, random_prompts
from orca_core.config import EngineConfig
from orca_core.engine import Engine
from orca_core.executor import LoadedModel
from orca_core.results import ResultBuilder
from orca_core.types import GenerationRequest, SamplingParams

Tokens = list[tuple[int, ...]]
_SMALL_BUDGET: Final = 24


@dataclass(frozen=True, slots=True)
class Difference:
    """One circumstance. ``n_differ`` of ``n_requests`` had another token somewhere.

    ``first_at``: the median place of the first one, counted in output tokens; ``None`` where none differs.
    """

    name: str
    n_requests: int
    n_differ: int
    first_at: float | None

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure_exactness(
    config: EngineConfig, model: LoadedModel, n_requests: int, new_tokens: int, watch: Callable[[str], object],
    seed: int = 0,
) -> list[Difference]:  # fmt: skip
    """Each request alone, then in a batch, in pieces, with its prefix cached, and resumed from its middle.

    ``watch`` is told what begins.
    """
    shapes = [Shape(16 + 7 * (i % 16), new_tokens) for i in range(n_requests)]
    prompts = random_prompts(shapes, model.info.vocab_size, seed)
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    plain = replace(config, prefix_cache=False)

    def alone(engine: Engine) -> Tokens:
        return [engine.generate([prompt], params)[0].token_ids for prompt in prompts]

    def together(engine: Engine) -> Tokens:
        return [result.token_ids for result in engine.generate(prompts, params)]

    watch(f"{n_requests} requests of {new_tokens} tokens, each alone")
    with Engine(plain, model=model) as engine:
        expected = alone(engine)
    circumstances: list[tuple[str, EngineConfig, Callable[[Engine], Tokens]]] = [
        ("alone, again", plain, alone),
        (f"in a batch of {config.max_batch_size}", plain, together),
        (
            f"prompt in pieces of {_SMALL_BUDGET}",
            replace(plain, max_batch_size=1, max_batch_tokens=_SMALL_BUDGET),
            alone,
        ),
        ("prefix cached", config, lambda engine: (alone(engine), alone(engine))[1]),
        ("resumed from its middle", plain, lambda engine: _resumed(engine, prompts, params, expected)),
    ]
    found = []
    for number, (name, changed, run) in enumerate(circumstances, 1):
        watch(f"{number} of {len(circumstances)}, {name}")
        with Engine(changed, model=model) as engine:
            found.append(compare(name, expected, run(engine)))
    return found


def _resumed(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, expected: Tokens) -> Tokens:
    """Prompt and the first half of the output are computed like a prompt; then it goes on."""
    tokens: Tokens = []
    for prompt, whole in zip(prompts, expected, strict=True):
        half = whole[: len(whole) // 2]
        request: GenerationRequest = replace(engine.make_request(prompt, params), emitted_ids=half)
        rest = ResultBuilder(request).extend(engine.submit(request)).build()
        tokens.append(half + rest.token_ids)
    return tokens


def compare(name: str, expected: Tokens, got: Tokens) -> Difference:
    """Where two runs of the same requests part."""
    firsts = [
        next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        for one, other in zip(expected, got, strict=True) if one != other
    ]  # fmt: skip
    return Difference(name, len(expected), len(firsts), median(firsts) if firsts else None)


def exactness_table(found: Sequence[Difference], dtype: str) -> Table:
    """One row a circumstance."""
    table = Table(title=f"greedy tokens, {dtype}, against each request alone", box=None, header_style="bold")
    table.add_column("circumstance")
    for name in ("differ", "of", "first at (median)"):
        table.add_column(name, justify="right")
    for each in found:
        first = "-" if each.first_at is None else f"{each.first_at:g}"
        table.add_row(each.name, str(each.n_differ), str(each.n_requests), first)
    return table
