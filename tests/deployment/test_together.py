"""Choices that can never run together are told so; those that could, only not now, are not."""

from __future__ import annotations

import pytest

from deployment.config_sections import LimitsSection
from deployment.parcels import ReplicaReport
from deployment.together import check_together
from orca_core.errors import InvalidRequestError
from orca_core.types import Load
from tests.deployment.serving_fakes import INFO

LIMITS = LimitsSection(max_waiting_requests=8, max_waiting_slots=100)


def reports(*n_slots: int) -> list[ReplicaReport]:
    return [ReplicaReport(str(index), INFO, Load(n), 0.0) for index, n in enumerate(n_slots)]


@pytest.mark.parametrize(
    ("demands", "share", "reason"),
    [
        ([50] * 5, None, None),
        ([50] * 6, None, "6 choices need 300 slots together, and all replicas with the line have 299"),
        ([10] * 3, 30, None),
        ([10] * 3, 29, r"3 choices need 30 slots together, and limits\.max_slots_per_key is 29"),
        ([1] * 16, None, None),
        ([1] * 17, None, "17 choices, and all replicas with the line have 16 places"),
    ],
)
def test_what_fits(demands: list[int], share: int | None, reason: str | None) -> None:
    if reason is None:
        check_together(demands, reports(99, 100), LIMITS, 4, share)
        return
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        check_together(demands, reports(99, 100), LIMITS, 4, share)
    assert caught.value.field == "n"


def test_only_so_many_can_wait_in_line() -> None:
    """There are slots enough with those of the line, but too few places in it: the others would have to run at once."""
    limits = LimitsSection(max_waiting_requests=1, max_waiting_slots=100)
    check_together([60] * 4, reports(99, 100), limits, 4, None)
    check_together([80, 60, 60, 70], reports(99, 100), limits, 4, None)
    with pytest.raises(InvalidRequestError, match="3 of 4 choices need 210 slots at once, and all replicas have 199"):
        check_together([70] * 4, reports(99, 100), limits, 4, None)
    nobody_waits = LimitsSection(max_waiting_requests=0)
    with pytest.raises(InvalidRequestError, match="3 of 3 choices need 240 slots at once, and all replicas have 199"):
        check_together([80] * 3, reports(99, 100), nobody_waits, 4, None)
