"""Starting and stopping what ``up`` runs: a Ray of its own (or a cluster that is there), Serve, the application.

Imports Ray: the environment must be set before this module is imported.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import ray
from ray import serve
from ray.serve import Application
from ray.serve.schema import ApplicationStatus

from deployment.cli.answering import wait_for_ports
from deployment.cli.app_state import failure_of, n_running
from deployment.cli.draining import Doors
from deployment.cli.notes import silence
from deployment.cli.ownership import Ownership
from deployment.cli.ports import check_ports, check_ray, why_not
from deployment.cli.progress import Progress
from deployment.cli.ray_processes import RayProcesses
from deployment.cli.room import check_gpus, check_memory
from deployment.cli.stopping import FOLDER_VARIABLE, SignalsKept, end_children
from deployment.config import AppConfig
from deployment.haproxy import own_environment
from deployment.scaling_board import RayStore
from deployment.serve_document import SERVICERS
from deployment.serve_file import ServeFile
from orca_core.errors import ConfigError, ModelLoadError, UnavailableError
from orca_core.host_memory import read_host_memory
from orca_core.source import resolve_source

_log = logging.getLogger(__name__)

_POLL_S: Final = 0.2
_PLAIN_KEYS: Final = frozenset({"name", "import_path", "route_prefix", "args"})


class Launcher:
    """One run of ``up``. ``start`` to be ready, ``drain`` to let streams end, ``stop`` to leave nothing behind.

    ``build``: makes the application; ``None`` = ``deployment.app.build``.
    """

    def __init__(
        self,
        file: ServeFile,
        address: str | None,
        dashboard: bool,
        build: Callable[[AppConfig], Application] | None = None,
    ) -> None:
        self._build = build
        self._file = file
        self._address = address
        self._dashboard = dashboard
        self._temp_dir: str | None = None
        self._deployed = False
        self._owner = Ownership(RayStore(), file.app_name)
        self._doors: Doors | None = None
        self._ray: RayProcesses | None = None
        extra = set(file.document["applications"][0]) - _PLAIN_KEYS
        if extra:
            reason = "is not taken by `up`; use `serve deploy`"
            raise ConfigError(f"applications.0.{min(extra)}", reason)

    @property
    def file(self) -> ServeFile:
        """What is served."""
        return self._file

    @property
    def model_id(self) -> str:
        """What clients call the model."""
        return self._file.app.model.id

    @property
    def logs(self) -> str:
        """Where Ray Serve writes what the replicas and the ingress log; gone when a Ray of our own ends."""
        if self._temp_dir is None:
            return "in the session folder of the Ray that was joined, under logs/serve"
        return f"{self._temp_dir}/session_latest/logs/serve"

    @property
    def metrics(self) -> str | None:
        """Where Prometheus reads the metrics of this node; ``None`` where Ray does not say."""
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        here = ray.get_runtime_context().get_node_id()
        for node in nodes:
            if node["NodeID"] == here and node.get("MetricsExportPort"):
                return f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        return None

    def start(self, progress: Progress) -> None:
        """Start Ray and Serve, deploy, and wait until the application runs.

        Raises ``OrcaError`` with one line that says what failed.
        """
        if self._address is None:
            check_ports(self._file)
            progress.say(f"looking for model {self.model_id}")
            source = resolve_source(self._file.app.model.source, self._file.app.model.revision)
            check_memory(self._file.app, source, read_host_memory())
        progress.say("starting Ray" if self._address is None else f"joining Ray at {self._address}")
        self._start_ray()
        self._check_room()
        progress.say("starting Ray Serve")
        self._start_serve()
        self._deploy(progress)

    def lost(self) -> str | None:
        """Which part of a Ray of our own has ended, though nobody asked it to: nothing can be mended from then on."""
        return None if self._ray is None else self._ray.lost()

    def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait for the open ones until the drain time is over; then end the application."""
        if not self._deployed:
            return
        if self._address is not None and self._owner.is_lost():
            _log.warning("another `up` has deployed %s since: it stays", self._file.app_name)
            self._deployed = False
            return
        logging.getLogger("ray.serve").setLevel(logging.CRITICAL)  # it regrets that the loop of the drain has ended
        try:
            if self._doors is not None:
                self._doors.close(timeout_s)
        except Exception as error:  # ingresses that do not answer have nothing open that could be saved
            _log.warning("could not drain: %s", error)
        self._deployed = False
        if self.lost() is not None:
            return
        try:
            serve.delete(self._file.app_name)
        except Exception as error:  # Serve gives up waiting for actors that take long to end; `stop` ends our own Ray
            _log.warning("the application has not ended yet: %s", error)

    def stop(self) -> None:
        """End everything this run started. Of a cluster it joined, the application alone."""
        self._end_application()
        with silence():
            ray.shutdown()
        if self._temp_dir is not None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)
            self._temp_dir = None

    def end(self) -> None:
        """As ``stop``, for a process that has to ``leave`` then: signals stay what they are to the end.

        ``ray.shutdown`` gives SIGTERM its default action back, in native code: the next one would end this process in
        the middle of it, and processes, folder and logs would stay.
        """
        self._end_application()
        if self._address is None:
            end_children(self._temp_dir)

    def _end_application(self) -> None:
        with silence(), suppress(Exception):
            if ray.is_initialized() and self.lost() is None:
                if self._address is None:
                    serve.shutdown()  # type: ignore[no-untyped-call]
                elif self._deployed:
                    serve.delete(self._file.app_name)

    def abort(self) -> None:
        """End at once what was being started, from any thread: nothing is open that could be saved.

        The process has to end then: Ray in it is not told, and its complaints go nowhere.
        """
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)
        if self._address is None:
            end_children(self._temp_dir)
        elif self._deployed:
            serve.delete(self._file.app_name, _blocking=False)

    def _start_ray(self) -> None:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "serve"}
        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.ERROR)
        if self._address is not None:
            check_ray(self._address)
            try:
                with SignalsKept(), silence():  # its native code repeats every second what it raises in the end
                    ray.init(address=self._address, **quiet)
            except Exception as error:
                raise UnavailableError(f"cannot join Ray at {self._address}: {why_not(error)}") from None
            return
        # unix sockets live in it, and their paths have at most 107 bytes
        self._temp_dir = tempfile.mkdtemp(prefix="orca-", dir="/tmp" if os.path.isdir("/tmp") else None)  # noqa: S108, PTH112
        longest_s = max(self._file.app.drain.timeout_s, self._file.app.limits.max_request_seconds)
        for name, value in own_environment(self._temp_dir, longest_s).items():
            os.environ.setdefault(name, value)
        os.environ[FOLDER_VARIABLE] = self._temp_dir
        try:
            with SignalsKept(), silence():  # from here on a signal would be answered with a stack trace of its own
                ray.init(
                    address="local",
                    include_dashboard=self._dashboard,
                    num_cpus=self._local_cpus(),
                    _temp_dir=self._temp_dir,
                    **quiet,
                )
        except Exception as error:
            raise UnavailableError(f"cannot start Ray: {why_not(error)}") from None
        self._ray = RayProcesses()

    def _local_cpus(self) -> int:
        """Ray's count of CPUs: at least what the config asks for; a small machine may run more replicas than cores."""
        app = self._file.app
        wanted = app.replicas.max * app.replicas.num_cpus + app.ingress.replicas * app.ingress.num_cpus
        return max(os.cpu_count() or 1, int(wanted) + 1)

    def _check_room(self) -> None:
        """A replica that fits on no machine would be waited for in silence."""
        if self._address is None:  # a cluster may grow
            check_gpus(self._file.app, ray.cluster_resources().get("GPU", 0.0))  # type: ignore[no-untyped-call]

    def _start_serve(self) -> None:
        document = self._file.document
        http_options = {**(document.get("http_options") or {}), "host": self._file.host, "port": self._file.http_port}
        grpc_options = {**(document.get("grpc_options") or {}), "port": self._file.grpc_port}
        grpc_options.setdefault("grpc_servicer_functions", list(SERVICERS))
        try:
            serve.start(
                proxy_location=document.get("proxy_location", "HeadOnly" if self._address is None else "EveryNode"),
                http_options=http_options,
                grpc_options=grpc_options,
                logging_config={"log_level": "INFO", "enable_access_log": False},
            )
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            alarms = [line for line in lines if line.startswith("[ALERT]")]  # HAProxy's word for why it ended
            reason = (alarms or lines[-1:] or [type(error).__name__])[0]
            raise UnavailableError(f"cannot start Ray Serve: {reason}") from None

    def _deploy(self, progress: Progress) -> None:
        from deployment.app import build

        application = self._file.document["applications"][0]
        target = serve.RunTarget(
            target=(self._build or build)(self._file.app),
            name=self._file.app_name,
            route_prefix=application.get("route_prefix", "/"),
        )
        # where a version runs that another `up` has deployed, it stays if this one does not come up
        self._deployed = self._address is None or self._file.app_name not in serve.status().applications
        self._owner.take()
        try:
            self._run(target, progress)
        except BaseException:
            self._owner.give_back()
            raise
        self._deployed = True

    def _run(self, target: serve.RunTarget, progress: Progress) -> None:
        """Deploy, and wait until it runs."""
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        wanted = self._file.app.replicas.start
        deadline = time.monotonic() + self._file.app.replicas.startup_timeout_s
        while True:
            overview = serve.status().applications.get(self._file.app_name)
            if overview is not None:
                if overview.status == ApplicationStatus.RUNNING:
                    wait_for_ports(self._file, deadline)
                    self._doors = Doors(serve.get_app_handle(self._file.app_name))
                    return
                cause = failure_of(overview)
                if cause is not None:
                    source = self._file.app.model.source
                    raise ModelLoadError(source, cause.removeprefix(f"cannot load model {source!r}: "))
                ready = n_running(overview.deployments)
                progress.say(f"loading model {self.model_id}, {ready}/{wanted} replicas ready")
            if time.monotonic() > deadline:
                raise UnavailableError("the replicas were not ready within replicas.startup_timeout_s")
            time.sleep(_POLL_S)
