"""Pods and what makes them, from the parts of ``shapes``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from k8s_check.shapes import Container, Labels, Metadata, Quantity, Resources, Shape


class KeyToPath(Shape):
    """A key, and the file that it becomes."""

    key: str
    path: str


class SecretVolume(Shape):
    """Files from a Secret."""

    secret_name: str
    items: list[KeyToPath] = Field(default=[])
    default_mode: int = 0o644
    optional: bool = False


class ConfigMapVolume(Shape):
    """Files from a ConfigMap."""

    name: str
    optional: bool = False


class ClaimVolume(Shape):
    """A claimed volume."""

    claim_name: str
    read_only: bool = False


class EmptyDir(Shape):
    """A folder for as long as the pod lives."""

    medium: str = ""
    size_limit: Quantity | None = None


class Volume(Shape):
    """One volume of a pod."""

    name: str
    empty_dir: EmptyDir | None = None
    secret: SecretVolume | None = None
    config_map: ConfigMapVolume | None = None
    persistent_volume_claim: ClaimVolume | None = None


class Seccomp(Shape):
    """Which system calls."""

    type: Literal["RuntimeDefault", "Localhost", "Unconfined"]


class PodSecurity(Shape):
    """Who the pod runs as."""

    run_as_non_root: bool = False
    run_as_user: int | None = None
    run_as_group: int | None = None
    fs_group: int | None = None
    fs_group_change_policy: Literal["OnRootMismatch", "Always"] = "Always"
    seccomp_profile: Seccomp | None = None


class Selector(Shape):
    """Labels that must be there."""

    match_labels: Labels = Field(default={})


class Toleration(Shape):
    """Of a taint; an empty effect means all."""

    operator: Literal["", "Equal", "Exists", "Lt", "Gt"] | None = None
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class Spread(Shape):
    """Of pods over nodes."""

    max_skew: int
    topology_key: str
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]


class PodSpec(Shape):
    """One pod."""

    containers: list[Container] = Field(min_length=1)
    init_containers: list[Container] = Field(default=[])
    volumes: list[Volume] = Field(default=[])
    security_context: PodSecurity = PodSecurity()
    termination_grace_period_seconds: int = 30
    restart_policy: Literal["Always", "OnFailure", "Never"] | None = None
    automount_service_account_token: bool = True
    node_selector: Labels = Field(default={})
    tolerations: list[Toleration] = Field(default=[])
    topology_spread_constraints: list[Spread] = Field(default=[])


class PodTemplate(Shape):
    """A pod with its labels."""

    metadata: Metadata = Metadata()
    spec: PodSpec


class Budget(Shape):
    """A PodDisruptionBudget's spec; both numbers may be percentages, which the rules refuse."""

    min_available: int | str | None = None
    max_unavailable: int | str | None = None
    unhealthy_pod_eviction_policy: Literal["AlwaysAllow", "IfHealthyBudget"] | None = None
    selector: Selector = Selector()


class ClaimSpec(Shape):
    """Of a PersistentVolumeClaim."""

    access_modes: list[str] = Field(default=[])
    resources: Resources = Resources()


class Claim(Shape):
    """A claim that a StatefulSet makes for each pod."""

    metadata: Metadata
    spec: ClaimSpec


class JobSpec(Shape):
    """Of a Job."""

    backoff_limit: int = 6
    ttl_seconds_after_finished: int | None = None
    template: PodTemplate


class StatefulSetSpec(Shape):
    """Of a StatefulSet."""

    service_name: str
    replicas: int = 1
    selector: Selector
    template: PodTemplate
    volume_claim_templates: list[Claim] = Field(default=[])
