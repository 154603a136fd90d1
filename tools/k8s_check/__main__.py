"""``make k8s-check``: renders overlays, says what is wrong with them, and which checks could not be made.

``ARGS="my"`` looks at kustomizations of your own instead of those of k8s/overlays; with ``--overlays`` at both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from k8s_check.checking import check_text
from k8s_check.examples import example_images
from k8s_check.facts import Facts, read_facts
from k8s_check.outside import (
    MissingToolError,
    alert_problems,
    core_problems,
    linter_problems,
    rule_problems,
    wrong_tools,
)
from k8s_check.patches import unmatched
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


def main(arguments: Sequence[str] = ()) -> int:
    """0: nothing wrong, or nothing to check with. 1: something is, or a tool is missing that was named or is needed."""
    given = _arguments(arguments)
    if wrong := wrong_tools():
        print(*(f"k8s-check: {said}" for said in wrong), sep="\n")
        return 1
    skipped: dict[str, None] = {}  # in the order they were met, each once
    problems, looked_at = 0, 0
    for name, lines in _all(given, skipped):
        print(f"k8s-check: {name}: {'ok' if not lines else 'not ok'}")
        for line in lines:
            print(f"  {line}")
        problems, looked_at = problems + len(lines), looked_at + 1
    for reason in skipped:
        print(f"k8s-check: {'missing' if given.strict else 'skipped'}: {reason}")
    what = "your own folders" if given.folders else "the overlays of k8s/"
    both = " and the overlays of k8s/" if given.folders and given.overlays else ""
    print(f"k8s-check: looked at {what}{both}: {looked_at} checked, {problems} problems")
    return 1 if problems or (given.strict and skipped) else 0


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="k8s-check", description="Checks manifests without a cluster.")
    parser.add_argument("folders", nargs="*", type=Path, help="kustomizations of your own, instead of k8s/overlays")
    parser.add_argument("--overlays", action="store_true", help="those of k8s/overlays as well")
    parser.add_argument("--strict", action="store_true", help="a tool that is missing is an error (for CI)")
    return parser.parse_args(arguments)


def _all(given: argparse.Namespace, skipped: dict[str, None]) -> Iterator[tuple[str, list[str]]]:
    shipped = given.overlays or not given.folders
    kubectl = find_kubectl()
    if kubectl is None:
        skipped[f"all manifests: no kubectl ({KUBECTL_VARIABLE}=PATH; make k8s-tools)"] = None
    else:
        facts = read_facts(ROOT)
        for folder in given.folders:
            yield str(folder), _check(partial(render, kubectl, folder), facts, skipped, own=folder)
        for folder in overlays() if shipped else []:
            name = str(folder.relative_to(ROOT))
            yield name, _check(partial(render, kubectl, folder), facts, skipped)
            yield (
                f"{name} with all components",
                _check(partial(render_with_everything, kubectl, folder), facts, skipped),
            )
    alerts = _optional(alert_problems, skipped) if shipped else None
    if alerts is not None:
        yield "tests of the alert rules", alerts


def _check(make: Callable[[], str], facts: Facts, skipped: dict[str, None], *, own: Path | None = None) -> list[str]:
    try:
        text = make()
        objects = parse(text)
    except RenderError as error:
        return [str(error)]
    lines = check_text(text, facts)
    if own is not None:
        lines += [*example_images(objects), *unmatched(own, objects)]
    for tool in (core_problems, linter_problems, rule_problems):
        lines += _optional(partial(tool, objects), skipped) or []
    return lines


def _optional(check: Callable[[], list[str]], skipped: dict[str, None]) -> list[str] | None:
    try:
        return check()
    except MissingToolError as error:
        skipped[str(error)] = None
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
