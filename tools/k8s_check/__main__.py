"""``make k8s-check``: renders every overlay and says what is wrong with it, and which checks could not be made."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

from k8s_check.checking import check_text
from k8s_check.facts import Facts, read_facts
from k8s_check.outside import MissingToolError, alert_problems, core_problems, linter_problems
from k8s_check.render import (
    KUBECTL_VARIABLE,
    ROOT,
    RenderError,
    find_kubectl,
    overlays,
    parse,
    render,
    render_with_everything,
)


def main() -> int:
    """0: nothing wrong, or nothing to check with. 1: something is."""
    skipped: dict[str, None] = {}  # in the order they were met, each once
    problems = 0
    for name, lines in _all(skipped):
        print(f"k8s-check: {name}: {'ok' if not lines else 'not ok'}")
        for line in lines:
            print(f"  {line}")
        problems += len(lines)
    for reason in skipped:
        print(f"k8s-check: skipped: {reason}")
    return 1 if problems else 0


def _all(skipped: dict[str, None]) -> Iterator[tuple[str, list[str]]]:
    kubectl = find_kubectl()
    if kubectl is None:
        skipped[f"all manifests: no kubectl ({KUBECTL_VARIABLE}=PATH; make k8s-tools)"] = None
    else:
        facts = read_facts(ROOT)
        for folder in overlays():
            name = str(folder.relative_to(ROOT))
            yield name, _check(partial(render, kubectl, folder), facts, skipped)
            yield (
                f"{name} with all components",
                _check(partial(render_with_everything, kubectl, folder), facts, skipped),
            )
    alerts = _optional(alert_problems, skipped)
    if alerts is not None:
        yield "alert rules", alerts


def _check(make: Callable[[], str], facts: Facts, skipped: dict[str, None]) -> list[str]:
    try:
        text = make()
        objects = parse(text)
    except RenderError as error:
        return [str(error)]
    lines = check_text(text, facts)
    for tool in (core_problems, linter_problems):
        lines += _optional(partial(tool, objects), skipped) or []
    return lines


def _optional(check: Callable[[], list[str]], skipped: dict[str, None]) -> list[str] | None:
    try:
        return check()
    except MissingToolError as error:
        skipped[str(error)] = None
        return None


if __name__ == "__main__":
    sys.exit(main())
