"""The parts of Kubernetes and KubeRay that the rules look at, as strict types.

Other fields are left out here: ``fields`` knows which there are. Sources: the Kubernetes API reference and KubeRay's
ray.io/v1.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Quantity = Annotated[str, Field(pattern=r"^(\d*\.?\d+|\d+\.)([eE][+-]?\d+|[numkMGTPE]|[KMGTPE]i)?$")] | int | float
LabelKey = Annotated[str, Field(pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?$")]
LabelValue = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?$")]
Labels = dict[LabelKey, LabelValue]
Port = Annotated[int, Field(ge=1, le=65535)]
PortName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?$")]
PullPolicy = Literal["Always", "IfNotPresent", "Never"]


class Shape(BaseModel):
    """Strict about types, as the API server."""

    model_config = ConfigDict(extra="ignore", strict=True, alias_generator=to_camel, populate_by_name=True)


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
    """Where a value comes from: a Secret, or something else."""

    secret_key_ref: KeyRef | None = None


class EnvVar(Shape):
    """One variable."""

    name: str
    value: str | None = None
    value_from: ValueFrom | None = None


class ContainerPort(Shape):
    """A port with its name."""

    name: PortName | Literal[""] = ""
    container_port: Port
    protocol: Literal["TCP", "UDP", "SCTP"] = "TCP"


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
    privileged: bool = False
    run_as_user: int | None = None
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
