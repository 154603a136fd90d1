"""Metrics that are lists, for tests to read."""

from __future__ import annotations

from collections import defaultdict

from deployment.metrics import Record, Spec


class FakeRegistry:
    """``values``: everything recorded by name and tags. Refuses tags a metric was not made with, as Ray does."""

    def __init__(self) -> None:
        self.specs: dict[str, Spec] = {}
        self.values: defaultdict[tuple[str, frozenset[tuple[str, str]]], list[float]] = defaultdict(list)

    def make(self, spec: Spec) -> Record:
        self.specs[spec.name] = spec

        def record(value: float, **tags: str) -> None:
            assert set(tags) == set(spec.tags), spec.name
            self.values[spec.name, frozenset(tags.items())].append(value)

        return record

    def of(self, name: str, **tags: str) -> list[float]:
        """Values recorded for these tags; without tags, those of all."""
        wanted = set(tags.items())
        return [value for (known, has), values in self.values.items() if known == name and wanted <= has
                for value in values]  # fmt: skip

    def total(self, name: str, **tags: str) -> float:
        return sum(self.of(name, **tags))

    def by_tag(self, name: str, tag: str) -> dict[str, float]:
        """The total of a counter for each value of one of its tags."""
        found: dict[str, float] = defaultdict(float)
        for (known, tags), values in self.values.items():
            if known == name:
                found[dict(tags)[tag]] += sum(values)
        return dict(found)
