"""The parts of Kubernetes and KubeRay that our manifests use, as strict types: an unknown field is an error.

A field that Kubernetes knows and this file does not has to be added here first: that is the price for finding typos
with no schema of 10,000 lines at hand. Sources: the Kubernetes API reference and KubeRay's ray.io/v1.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Quantity = Annotated[str, Field(pattern=r"^\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?$")] | int
LabelKey = Annotated[str, Field(pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?$")]
LabelValue = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?$")]
Labels = dict[LabelKey, LabelValue]
Port = Annotated[int, Field(ge=1, le=65535)]
PortName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?$")]
PullPolicy = Literal["Always", "IfNotPresent", "Never"]


class Shape(BaseModel):
    """Strict about names and types, as the API server with ``--validate=strict``."""

    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel, populate_by_name=True)


class Metadata(Shape):
    """Of an object, or of a pod template."""

    name: str = ""
    namespace: str = ""
    labels: Labels = {}
    annotations: dict[LabelKey, str] = {}


class KeyRef(Shape):
    """A key of a Secret."""

    name: str
    key: str
    optional: bool = False


class ValueFrom(Shape):
    """Where a value comes from."""

    secret_key_ref: KeyRef


class EnvVar(Shape):
    """One variable."""

    name: str
    value: str | None = None
    value_from: ValueFrom | None = None


class ContainerPort(Shape):
    """A port with its name."""

    name: PortName
    container_port: Port
    protocol: Literal["TCP"] = "TCP"


class Resources(Shape):
    """Requests and limits."""

    requests: dict[str, Quantity] = {}
    limits: dict[str, Quantity] = {}


class Mount(Shape):
    """A volume in a container."""

    name: str
    mount_path: str
    read_only: bool = False
    sub_path: str | None = None


class Exec(Shape):
    """A command."""

    command: list[str]


class HttpGet(Shape):
    """An HTTP request of a probe."""

    path: str
    port: Port | PortName


class Probe(Shape):
    """A question of the kubelet."""

    exec: Exec | None = None
    http_get: HttpGet | None = None
    initial_delay_seconds: int = 0
    period_seconds: int = 10
    timeout_seconds: int = 1
    failure_threshold: int = 3


class Sleep(Shape):
    """The kubelet's own sleep (Kubernetes 1.30)."""

    seconds: int


class Hook(Shape):
    """What happens before SIGTERM."""

    sleep: Sleep | None = None
    exec: Exec | None = None


class Lifecycle(Shape):
    """Of a container."""

    pre_stop: Hook | None = None


class Capabilities(Shape):
    """Of Linux."""

    drop: list[str] = []


class ContainerSecurity(Shape):
    """What a container may do."""

    allow_privilege_escalation: bool = True
    read_only_root_filesystem: bool = False
    capabilities: Capabilities = Capabilities()


class Container(Shape):
    """One container."""

    name: str
    image: str
    image_pull_policy: PullPolicy | None = None
    command: list[str] = []
    args: list[str] = []
    env: list[EnvVar] = []
    ports: list[ContainerPort] = []
    resources: Resources = Resources()
    volume_mounts: list[Mount] = []
    security_context: ContainerSecurity = ContainerSecurity()
    lifecycle: Lifecycle = Lifecycle()
    liveness_probe: Probe | None = None
    readiness_probe: Probe | None = None
    startup_probe: Probe | None = None

    def value(self, name: str) -> str | None:
        """Of an environment variable; ``None`` where it is not set."""
        return next((each.value for each in self.env if each.name == name), None)

    def port(self, name: str) -> int | None:
        """The number behind a port's name."""
        return next((each.container_port for each in self.ports if each.name == name), None)


class SecretVolume(Shape):
    """Files from a Secret."""

    secret_name: str
    default_mode: int = 0o644
    optional: bool = False


class ConfigMapVolume(Shape):
    """Files from a ConfigMap."""

    name: str


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

    type: Literal["RuntimeDefault"]


class PodSecurity(Shape):
    """Who the pod runs as."""

    run_as_non_root: bool = False
    run_as_user: int | None = None
    run_as_group: int | None = None
    fs_group: int | None = None
    fs_group_change_policy: Literal["OnRootMismatch", "Always"] = "Always"
    seccomp_profile: Seccomp | None = None


class Toleration(Shape):
    """Of a taint."""

    key: str = ""
    operator: Literal["Exists", "Equal"] = "Equal"
    value: str = ""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class Selector(Shape):
    """Labels that must be there."""

    match_labels: Labels


class Spread(Shape):
    """Over what pods are spread."""

    max_skew: int
    topology_key: str
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]
    label_selector: Selector


class PodSpec(Shape):
    """One pod."""

    containers: list[Container] = Field(min_length=1)
    init_containers: list[Container] = []
    volumes: list[Volume] = []
    security_context: PodSecurity = PodSecurity()
    termination_grace_period_seconds: int = 30
    restart_policy: Literal["Always", "OnFailure", "Never"] | None = None
    automount_service_account_token: bool = True
    service_account_name: str | None = None
    tolerations: list[Toleration] = []
    node_selector: Labels = {}
    topology_spread_constraints: list[Spread] = []
    priority_class_name: str | None = None


class PodTemplate(Shape):
    """A pod with its labels."""

    metadata: Metadata = Metadata()
    spec: PodSpec


class Budget(Shape):
    """A PodDisruptionBudget's spec; both numbers may be percentages, which the rules refuse."""

    min_available: int | str | None = None
    max_unavailable: int | str | None = None
    unhealthy_pod_eviction_policy: Literal["AlwaysAllow", "IfHealthyBudget"] | None = None
    selector: Selector


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
    volume_claim_templates: list[Any] = []
