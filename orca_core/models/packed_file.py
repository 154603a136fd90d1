"""Packed weights in a file that several processes map at once.

The parts' bytes, one behind the other; a JSON table of them; then its length, its SHA-256 and a mark. Written from the
front to the back, so a file that was cut has no mark. Each part has two sums in the table, so one that was damaged, or
lost pages when the machine did, is found out while its pages are fetched.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Final

import torch

from orca_core.kernels import PackedLinear
from orca_core.models.packed import PackedWeights, Packer, Part
from orca_core.quantised import Format

_MARK: Final = b"orca packed 1\n\0\0"
_TAIL: Final = 8 + 32 + len(_MARK)
_ALIGNED: Final = 64
_PAGE_WORDS: Final = 512
_PROBES: Final = 8
HUGE_BYTES: Final = 2 << 20


class DamagedFileError(Exception):
    """The file is not what was written."""


def write_packed(file: IO[bytes], packer: Packer) -> None:
    """Write each part as soon as it is packed, and let go of it. Raises ``OSError``, and what the packer raises.

    ``file``: with a buffer of ``HUGE_BYTES``.
    """
    table: dict[str, Any] = {"parts": {}}
    for name, part in packer.parts():
        if isinstance(part, PackedLinear):
            entry: dict[str, Any] = {
                "n_out": part.n_out, "n_in": part.n_in, "gated": part.gated, "format": asdict(part.format),
                "weight": _append(file, part.weight),
                "bias": None if part.bias is None else _append(file, part.bias),
            }  # fmt: skip
        else:
            entry = {"floats": _append(file, part)}
        table["parts"][name] = entry
    table |= {"n_parameters": packer.source.n_parameters, "weight_bytes": packer.weight_bytes, "end": file.tell()}
    text = json.dumps(table).encode()
    file.write(text + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + _MARK)


def read_packed(path: Path, advise: Callable[[torch.Tensor], None]) -> PackedWeights:
    """Map a file, or copy it where that is better: see ``_bytes_of``. ``advise``: asks for large pages.

    Raises ``DamagedFileError`` and ``OSError``.
    """
    with path.open("rb") as file:
        table = _table(file)
        everything = _bytes_of(file, int(table["end"]), advise)
    parts: dict[str, Part] = {}
    for name, entry in table["parts"].items():
        if "floats" in entry:
            parts[name] = _checked(everything, entry["floats"], name).view(torch.float32)
            continue
        weight = _checked(everything, entry["weight"], name)
        bias = None if entry["bias"] is None else _checked(everything, entry["bias"], name).view(torch.float32)
        kind = Format(**entry["format"])
        parts[name] = PackedLinear(weight, bias, entry["n_out"], entry["n_in"], entry["gated"], kind)
    return PackedWeights(parts, table["n_parameters"], table["weight_bytes"])


def _append(file: IO[bytes], tensor: torch.Tensor) -> list[int]:
    """Where it lies, its bytes, and its sums."""
    file.write(bytes(-file.tell() % _ALIGNED))
    begin, content = file.tell(), tensor.view(torch.uint8)
    left = content.numpy().data
    while left:  # what is handed to the system begins and ends where a large page does, so that it keeps it in such
        n_bytes = HUGE_BYTES - file.tell() % HUGE_BYTES
        file.write(left[:n_bytes])
        left = left[n_bytes:]
    return [begin, content.numel(), *_sums(content)]


def _sums(content: torch.Tensor) -> tuple[int, int]:
    """Of all words, and of all pages times their number: a page that is lost, or lies elsewhere, changes one of them.

    int64, which goes round. As fast as memory is, which a good hash is not.
    """
    whole = content.numel() // (8 * _PAGE_WORDS) * 8 * _PAGE_WORDS
    sums = content[:whole].view(torch.int64).view(-1, _PAGE_WORDS).sum(1)
    weighted = (sums * torch.arange(1, sums.numel() + 1)).sum()
    rest = content[whole:].to(torch.int64)
    rest = rest * torch.arange(1, rest.numel() + 1)
    return int(sums.sum() + rest.sum()), int(weighted)


def _table(file: IO[bytes]) -> dict[str, Any]:
    size = file.seek(0, 2)
    file.seek(max(0, size - _TAIL))
    tail = file.read()
    length = int.from_bytes(tail[:8], "little")
    if len(tail) < _TAIL or tail[40:] != _MARK or length > size - _TAIL:
        raise DamagedFileError("it was cut")
    file.seek(size - _TAIL - length)
    text = file.read(length)
    if hashlib.sha256(text).digest() != tail[8:40]:
        raise DamagedFileError("its table is damaged")
    table: dict[str, Any] = json.loads(text)
    if table["end"] != size - _TAIL - length:
        raise DamagedFileError("its length is wrong")
    return table


def _checked(everything: torch.Tensor, entry: list[int], name: str) -> torch.Tensor:
    begin, n_bytes, *sums = entry
    part = everything[begin : begin + n_bytes]
    if list(_sums(part)) != sums:
        raise DamagedFileError(f"{name} is damaged")
    return part


def _bytes_of(file: IO[bytes], n_bytes: int, advise: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """The file mapped, shared with whoever maps it, where the kernel maps it in large pages; else a copy.

    Small pages make an iteration, which reads all weights once, up to twice as slow as memory allows.
    """
    mapped = _mapped(file, n_bytes)
    advise(mapped)
    if has_large_pages(mapped):
        return mapped
    del mapped
    copy = torch.empty(n_bytes, dtype=torch.uint8)
    advise(copy)
    file.seek(0)
    view, done = copy.numpy().data, 0
    while done < n_bytes:
        read = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not read:
            raise DamagedFileError("it was cut")
        done += read
    return copy


def _mapped(file: IO[bytes], n_bytes: int) -> torch.Tensor:
    memory = mmap.mmap(file.fileno(), n_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nobody writes to it: the system would end who does
        return torch.frombuffer(memory, dtype=torch.uint8)


def has_large_pages(mapped: torch.Tensor, smaps: Path = Path("/proc/self/smaps")) -> bool:
    """Whether most of the large pages of a mapped file are mapped as such. ``False`` where the system does not say."""
    n_large = mapped.numel() // HUGE_BYTES
    probes = range(0, n_large, max(1, n_large // _PROBES))
    touched = sum(int(mapped[at * HUGE_BYTES + HUGE_BYTES // 2]) for at in probes)
    try:
        lines = list(_lines_of(smaps, mapped.data_ptr()))
    except OSError:
        return False
    large = [int(line.split()[1]) << 10 for line in lines if line.startswith(("FilePmdMapped:", "ShmemPmdMapped:"))]
    return touched >= 0 and n_large > 0 and sum(large) >= len(probes) * HUGE_BYTES // 2


def _lines_of(smaps: Path, address: int) -> Iterator[str]:
    """What the system says about the mapping that begins at ``address``."""
    found = False
    with smaps.open() as file:
        for line in file:
            first = line.split(maxsplit=1)[0]
            if "-" in first and not first.endswith(":"):
                found = int(first.partition("-")[0], 16) <= address < int(first.partition("-")[2], 16)
            elif found:
                yield line
