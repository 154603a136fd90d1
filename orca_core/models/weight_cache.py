"""Packed weights kept in the user's cache: the next replica maps them, and shares them with the others of its host."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from orca_core.kernels import Kernels
from orca_core.kernels.build import KernelError, locked, own_folder
from orca_core.models.packed import PackedWeights, Packer
from orca_core.models.packed_file import HUGE_BYTES, DamagedFileError, read_packed, write_packed

logger = logging.getLogger(__name__)

CACHE_VARIABLE: Final = "ORCA_WEIGHTS_CACHE"
"""Environment variable: a folder, or ``off``."""
_WORTH_KEEPING: Final = 32 << 20
"""Parameters. A smaller model is packed faster than it is looked up."""
_FRESH_NS: Final = 2 * 10**9
"""A file changed since this long may be changed again without its times telling."""
_CODE: Final = Path(__file__).parents[1]


def weights_cache() -> Path | None:
    """``$ORCA_WEIGHTS_CACHE``, else ``orca-serve/weights`` in the user's cache folder; ``None`` = turned off."""
    chosen = os.environ.get(CACHE_VARIABLE, "")
    if chosen.lower() in ("off", "0", "no", "false"):
        return None
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "orca-serve" / "weights"
    except RuntimeError:  # nobody knows this user's home
        return None


class WeightCache:
    """One folder of packed weights. Whatever goes wrong in it, the weights are packed as if it were not there."""

    def __init__(self, folder: Path | None, worth_keeping: int = _WORTH_KEEPING) -> None:
        self._folder = folder
        self._worth_keeping = worth_keeping

    def packed(self, packer: Packer, kernels: Kernels, files: Iterable[Path], form: str) -> PackedWeights:
        """What ``packer`` makes of ``files``, from the cache where it is there. ``form``: all else it depends on.

        Safe in several processes at once: one packs, the others wait for it. Raises what the packer raises.
        """
        if self._folder is None or packer.source.n_parameters < self._worth_keeping:
            return packer.all()
        try:
            folder = own_folder(self._folder)
            path = folder / f"{_key(folder, kernels, files, form)}.packed"
            found = _read(path, kernels)  # without the lock: the folder may be read-only
            if found is None:
                with locked(path.with_suffix(".lock")):
                    found = _read(path, kernels) or _made(path, packer, kernels)
        except (OSError, KernelError) as error:
            logger.info("packed weights are not kept: %s", error)
            found = None
        return packer.all() if found is None else found


def _made(path: Path, packer: Packer, kernels: Kernels) -> PackedWeights | None:
    started = time.monotonic()
    for left in path.parent.glob(f"{path.stem}-*"):  # by one that was killed: who holds the lock is the only one alive
        left.unlink(missing_ok=True)
    _make_room(path, 2 * packer.source.n_parameters)
    with tempfile.NamedTemporaryFile(
        buffering=HUGE_BYTES, prefix=f"{path.stem}-", dir=path.parent, delete=False
    ) as file:
        try:
            write_packed(file, packer)
            file.close()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    logger.info("packed the weights in %.1f s (once; kept in %s)", time.monotonic() - started, path)
    return _read(path, kernels)


def _read(path: Path, kernels: Kernels) -> PackedWeights | None:
    try:
        found = read_packed(path, kernels.advise)
    except FileNotFoundError:
        return None
    except (DamagedFileError, ValueError, KeyError, TypeError) as error:
        logger.warning("the packed weights in %s are damaged (%s): packing them again", path, error)
        return None
    with suppress(OSError):  # a folder of root's
        os.utime(path)  # used: see _make_room
    return found


def _make_room(path: Path, n_bytes: int) -> None:
    """Removes what was not used for longest, until all files take no more than half of what would be free without them.

    Who has mapped a file keeps it. ``n_bytes``: at most what will be written. Raises ``OSError`` where the disk is
    too small.
    """
    others = sorted((each.stat().st_mtime, each.stat().st_size, each) for each in path.parent.glob("*.packed"))
    used = sum(size for _, size, _ in others)
    bound = (shutil.disk_usage(path.parent).free + used) // 2
    if n_bytes > bound:
        raise OSError(f"the disk of {path.parent} is too full for {n_bytes >> 20} MiB")
    for _, size, each in others:
        if used + n_bytes > bound:
            each.unlink(missing_ok=True)
            used -= size


def _key(folder: Path, kernels: Kernels, files: Iterable[Path], form: str) -> str:
    """Of content: that of the files, of the code that reads and packs them, and of the compiled kernels, whose name
    covers their sources, flags and compiler, and with these the layout and what the CPU must have.
    """
    hashed = hashlib.sha256(f"{kernels.path.name}\0{form}".encode())
    code = (*_CODE.glob("models/*.py"), *_CODE.glob("kernels/*.py"), _CODE / "quantised.py")
    for path in sorted(code):
        hashed.update(path.name.encode() + path.read_bytes())
    for path in files:
        hashed.update(_digest(folder, path).encode())
    return hashed.hexdigest()[:32]


def _digest(folder: Path, path: Path) -> str:
    """SHA-256 of a file. It is remembered for as long as the file has the same number, size and times on its disk:
    nobody can write to a file and leave its change time as it was.
    """
    identity = _identity(path)
    note = folder / f"{hashlib.sha256(repr(identity).encode()).hexdigest()[:32]}.source"
    with suppress(FileNotFoundError, UnicodeDecodeError):
        known = note.read_text()
        if len(known) == 2 * hashlib.sha256().digest_size:
            return known
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if time.time_ns() - identity[-1] > _FRESH_NS and _identity(path) == identity:
        _remember(note, digest)
    return digest


def _identity(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _remember(note: Path, digest: str) -> None:
    with suppress(OSError):  # it is found out anew each time, then
        with tempfile.NamedTemporaryFile("w", dir=note.parent, prefix="note-", delete=False) as file:
            file.write(digest)
        Path(file.name).replace(note)
