"""``orca-serve up``: from a config to a service in the foreground, and back to nothing."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from deployment.cli.answering import reachable
from deployment.cli.notes import Notes
from deployment.cli.stopping import SignalsKept, StartGuard, StopRequests, ignore_signals, leave
from deployment.haproxy import BINARY_VARIABLE, installed_command
from orca_core.source import EMBEDDED_MODELS

if TYPE_CHECKING:
    from deployment.cli.launcher import Launcher
    from deployment.serve_file import ServeFile

_LOOPBACK = ("127.", "::1", "localhost")
_PATIENCE_S = 60.0
"""How much longer than the open streams a drain may take: Serve ends the application then."""
_ANSWER_S = 10.0
"""The same where Serve has no say any more."""
_WITHOUT_RAY_S = 40.0
"""Ray ends this process about a minute after its control service has ended."""


Config = Annotated[str, typer.Argument(help="A Serve config file, or the name of a packaged one.")]
Model = Annotated[str | None, typer.Option("--model", help="Model to serve, in place of the config's.")]
Replicas = Annotated[int | None, typer.Option("--replicas", min=1, help="Number of replicas.")]
Host = Annotated[str | None, typer.Option("--host", help="Address to listen on.")]
HttpPort = Annotated[int | None, typer.Option("--http-port", min=1, max=65535, help="Port of the HTTP face.")]
GrpcPort = Annotated[int | None, typer.Option("--grpc-port", min=1, max=65535, help="Port of the gRPC face.")]
RayAddress = Annotated[str | None, typer.Option("--address", help="Join this Ray cluster; without it start one.")]
ApiKeys = Annotated[str | None, typer.Option("--api-keys", help="File with one API key a line.")]
PlainProxy = Annotated[bool, typer.Option("--plain-proxy", help="Ray Serve's own proxy in place of HAProxy.")]
Dashboard = Annotated[bool, typer.Option("--dashboard", help="Start Ray's dashboard, on loopback.")]


def up(
    config: Config = "local-cpu.yaml",
    model: Model = None,
    replicas: Replicas = None,
    host: Host = None,
    http_port: HttpPort = None,
    grpc_port: GrpcPort = None,
    address: RayAddress = None,
    api_keys: ApiKeys = None,
    plain_proxy: PlainProxy = False,
    dashboard: Dashboard = False,
) -> None:
    """Deploy the service, stay in the foreground, drain on SIGINT or SIGTERM."""
    set_environment(plain_proxy)

    def prepare() -> Launcher:
        from deployment.serve_file import load_serve_file

        file = load_serve_file(config).with_overrides(
            model=_absolute(model),
            replicas=replicas,
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            api_keys_file=api_keys,
        )
        if address is None:
            file = _ready_here(file)
        from deployment.cli.launcher import Launcher

        return Launcher(file, address, dashboard)

    run(prepare)


def run(prepare: Callable[[], Launcher]) -> None:
    """Start, wait for a signal, drain, and leave with status 0. A second signal does not wait for open streams; a
    further one changes nothing.

    ``prepare`` is called where a signal ends the process at once, as it does until the service is ready. Returns only
    by raising what kept it from starting.
    """
    from deployment.cli.progress import Progress

    with SignalsKept():
        launcher: Launcher | None = None
        with StartGuard() as guard:
            try:
                with Progress() as progress:
                    guard.hush = progress.stop
                    launcher = prepare()
                    guard.clean_up = launcher.abort
                    launcher.start(progress)
            except BaseException:
                if launcher is not None:
                    launcher.end()
                raise
            signals = StopRequests()  # while the guard still looks: there is no moment without either
        stdout = sys.stdout
        with redirect_stdout(Notes(sys.stderr, _log_of(launcher))):
            status = _serve(launcher, signals, stdout)
        leave(status)


def _serve(launcher: Launcher, signals: StopRequests, stdout: TextIO) -> int:
    """Until a signal, or until Ray is lost: exit status 1."""
    file = launcher.file
    try:
        typer.echo(_ready_line(file, launcher.model_id), file=stdout)
        _say_next(file)
        typer.echo(f"logs: {launcher.logs}", err=True)
        if launcher.metrics is not None:
            typer.echo(f"metrics: {launcher.metrics}", err=True)
        reason = signals.wait(launcher.lost)
        timeout_s, patience_s = file.app.drain.timeout_s, _PATIENCE_S
        if reason is not None:
            typer.echo(f"orca-serve: {reason}", err=True)
            timeout_s, patience_s = min(timeout_s, _WITHOUT_RAY_S), _ANSWER_S
        typer.echo(f"stopping: open streams may go on for {timeout_s:g} s", err=True)
        if not signals.wait_for(lambda: launcher.drain(timeout_s), timeout_s + patience_s):
            typer.echo("stopping now", err=True)
        return 0 if reason is None else 1
    finally:
        ignore_signals()
        launcher.end()


def _log_of(launcher: Launcher) -> Path | None:
    """Where what Ray tells this process is kept, beside the logs of replicas and ingresses; they may be elsewhere."""
    folder = Path(launcher.logs)
    return folder / "up.log" if folder.is_dir() else None


def _ready_here(file: ServeFile) -> ServeFile:
    """With the paths as replicas and ingresses on this machine will see them: their working directory is not ours.

    Raises ``ConfigError`` before anything is started. In a cluster that is joined, files may be others.
    """
    from deployment.cli.machine import read_machine
    from deployment.cli.preflight import inspect_here

    model, keys = file.app.model, file.app.auth.api_keys_file
    file = file.with_overrides(
        model=_absolute(model.source),
        model_id=model.id,
        api_keys_file=None if keys is None else str(Path(keys).expanduser().resolve()),
    )
    findings = inspect_here(file.app, read_machine(with_gpus=file.app.replicas.num_gpus > 0), starting=True)
    findings.raise_problems()
    for warning in findings.warnings:
        typer.echo(f"warning: {warning}", err=True)
    return file


def _absolute(model: str | None) -> str | None:
    """A path as the replicas will see it: their working directory is not ours. Embedded names go before folders."""
    if model is not None and model not in EMBEDDED_MODELS and Path(model).expanduser().exists():
        return str(Path(model).expanduser().resolve())
    return model


def set_environment(plain_proxy: bool) -> None:
    """Ray reads these when it is imported. What the caller's environment says stays."""
    fast = "0" if plain_proxy else "1"
    defaults = {
        "RAY_SERVE_ENABLE_HA_PROXY": fast,
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": fast,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_TRAIN_V2_ENABLED": "0",
        "GLOG_minloglevel": "2",
    }
    haproxy = installed_command()
    if haproxy is not None:
        defaults[BINARY_VARIABLE] = haproxy
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if plain_proxy:
        os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = os.environ["RAY_SERVE_THROUGHPUT_OPTIMIZED"] = "0"


def _ready_line(file: ServeFile, model_id: str) -> str:
    host = f"[{file.host}]" if ":" in file.host else file.host
    return (
        f"ready grpc={host}:{file.grpc_port} http=http://{host}:{file.http_port} model={model_id} "
        f"replicas={file.app.replicas.start}"
    )


def _own_name() -> str:
    """How to call this command from here: by its path where the shell would not find it."""
    path = Path(sys.argv[0])
    if shutil.which("orca-serve") or path.name != "orca-serve":
        return "orca-serve"
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _say_next(file: ServeFile) -> None:
    host = reachable(file.host)
    address = "" if (host, file.grpc_port) == ("127.0.0.1", 9000) else f" --address {host}:{file.grpc_port}"
    with_keys = file.app.auth.api_keys_file is not None
    key, header = (" --api-key KEY", " -H 'authorization: Bearer KEY'") if with_keys else ("", "")
    typer.echo(f'try:  {_own_name()} generate "Why is the sky blue?" --chat{address}{key}', err=True)
    typer.echo(f"      curl http://{host}:{file.http_port}/v1/models{header}", err=True)
    if not file.host.startswith(_LOOPBACK) and not with_keys:
        typer.echo(f"warning: listening on {file.host} without API keys: whoever reaches it can use it", err=True)
