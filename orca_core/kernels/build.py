"""From the C++ sources to a shared library in the user's cache, once for each compiler and version of the sources."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

SOURCES: Final = Path(__file__).parent / "src"
CACHE_VARIABLE: Final = "ORCA_KERNELS_CACHE"
COMPILER_VARIABLE: Final = "CXX"
_COMPILERS: Final = ("g++", "clang++", "c++")
_FLAGS: Final = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-fno-math-errno", "-fvisibility=hidden")
_ROOT: Final = 0  # a user id
_TIMEOUT_S: Final = 300.0
_MAX_COMPLAINT: Final = 500


class KernelError(Exception):
    """There are no kernels to be had here; the text says why. Never fatal: torch computes instead."""


def find_compiler() -> str:
    """Path of ``$CXX``, g++, clang++ or c++, whichever is there first. Raises ``KernelError``."""
    chosen = os.environ.get(COMPILER_VARIABLE)
    for name in (chosen,) if chosen else _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise KernelError(f"{chosen} ($CXX) is not there" if chosen else "there is no C++ compiler (g++ or clang++)")


def default_cache() -> Path:
    """``$ORCA_KERNELS_CACHE``, else ``orca-serve/kernels`` in the user's cache folder.

    Where the user has no home to write to, as in many containers, a folder of the user's own among temporary files.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(base) if base else Path.home() / ".cache") / "orca-serve" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: nobody knows this user's home
        pass
    return Path(tempfile.gettempdir()) / f"orca-serve-kernels-{os.getuid()}"


def build(flags: Sequence[str], *, compiler: str | None = None, cache: Path | None = None) -> Path:
    """The library compiled with ``flags`` beside the common ones, from the cache where it is there already.

    Safe to call from several processes at once: one compiles, the others wait for it. What is half done is never seen,
    and what was damaged since it was compiled (a full disk, a crash of the machine) is compiled again: a process that
    maps such a file dies of it. Raises ``KernelError``.
    """
    compiler = compiler or find_compiler()
    try:
        version = _output([compiler, "--version"]).splitlines()[0]
        folder = own_folder(cache or default_cache())
        library = folder / f"orca-{_digest([version, *_FLAGS, *flags])}.so"
        if _is_whole(library):  # without the lock: the folder of an image may be read-only
            return library
        with locked(library.with_suffix(".lock")):
            if not _is_whole(library):
                _sweep(folder, library.stem)
                _compile(compiler, flags, library)
    except (OSError, IndexError) as error:
        raise KernelError(f"they could not be built: {error}") from error
    return library


def _digest(parts: Sequence[str]) -> str:
    hashed = hashlib.sha256("\0".join(parts).encode())
    for path in sorted(SOURCES.iterdir()):
        hashed.update(b"\0" + path.name.encode() + b"\0" + path.read_bytes())
    return hashed.hexdigest()[:20]


def own_folder(folder: Path) -> Path:
    """Made if it is not there. What lies in it will be run, so nobody else may write to it, but root: as in an image.

    Raises ``KernelError``.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid not in (os.getuid(), _ROOT) or status.st_mode & 0o022:
        raise KernelError(f"{folder} belongs to, or can be written by, others")
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Held by one process at a time; the system lets go of it when the process ends, however it does."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sum_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _is_whole(library: Path) -> bool:
    """Whether the library is what was compiled, to the last byte."""
    try:
        whole = _sum_file(library).read_bytes() == _sum(library.read_bytes()).encode()
    except FileNotFoundError:
        return False
    if not whole:
        logger.warning("the CPU kernels in %s are damaged: compiling them again", library)
    return whole


def _sweep(folder: Path, stem: str) -> None:
    """Removes what killed builds of this library left behind: who holds the lock is the only one alive."""
    for path in folder.glob(f"{stem}-*"):
        shutil.rmtree(path, ignore_errors=True)


def _to_disk(path: Path) -> None:
    """A rename may reach the disk before what the file holds does, unless this is waited for."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _compile(compiler: str, flags: Sequence[str], library: Path) -> None:
    started = time.monotonic()
    logger.info("compiling the CPU kernels with %s (once; kept in %s)", compiler, library.parent)
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    with tempfile.TemporaryDirectory(prefix=f"{library.stem}-", dir=library.parent) as folder:
        made = Path(folder) / library.name
        _output([compiler, *_FLAGS, *flags, *sources, "-o", str(made)])
        content = made.read_bytes()
        if not content:
            raise KernelError(f"{compiler} made an empty library")
        sums = Path(folder) / "sum"
        sums.write_text(_sum(content))
        _to_disk(made)
        _to_disk(sums)
        # who has mapped the old file keeps it; between the two the sum does not match, and the next one compiles again
        made.replace(library)
        sums.replace(_sum_file(library))
        _to_disk(library.parent)
    logger.info("compiled the CPU kernels in %.1f s", time.monotonic() - started)


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - the compiler found above, and our own sources
            command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise KernelError(f"{command[0]} took longer than {_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        complaint = done.stderr.strip()
        raise KernelError(f"{command[0]} failed ({done.returncode}): {complaint[:_MAX_COMPLAINT]}")
    return done.stdout
