"""From host values to device tensors: on a GPU everything of one step goes down in one asynchronous copy.

A copy from ordinary memory makes the host wait for the device; one from pinned memory does not, and torch's allocator
of pinned memory keeps a buffer from being reused before its copy is done. On a CPU there is nothing to copy or to pin.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

_ALIGNMENT: Final = 16
"""Bytes; what vectorised loads want."""

HostValues = Sequence[int] | Sequence[float] | np.ndarray | torch.Tensor


@dataclass(slots=True, eq=False)
class Column:
    """Values on their way: ``tensor`` is on the host until the upload is sent, then on the device."""

    tensor: torch.Tensor


class HostColumn:
    """int64 values that are written in place, again and again, and the tensor over the first of them."""

    __slots__ = ("_all", "_first", "values")

    def __init__(self, n: int) -> None:
        self._reserve(n)

    def _reserve(self, n: int) -> None:
        self.values = array("q", bytes(8 * n))
        self._all = self._first = torch.frombuffer(self.values, dtype=torch.int64)

    def reserve(self, n: int) -> array[int]:
        """Make room for ``n``, which loses what is there if it has to grow; returns the values, to be written."""
        if n > len(self.values):
            self._reserve(max(n, 2 * len(self.values)))
        return self.values

    def first(self, n: int) -> torch.Tensor:
        """Over the first ``n`` values, on the host: it changes with them."""
        if self._first.shape[0] != n:
            self._first = self._all[:n]
        return self._first


class Upload:
    """Collects columns, then sends them. ``packed``: through one buffer; ``None`` = where the device is a GPU."""

    def __init__(self, device: torch.device, *, packed: bool | None = None) -> None:
        self._device = device
        self._packed = device.type != "cpu" if packed is None else packed
        self._columns: list[Column] = []

    def add(self, values: HostValues, dtype: torch.dtype) -> Column:
        """One more column of that dtype."""
        if isinstance(values, torch.Tensor):
            host = values
        else:
            host = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values, dtype=dtype)
        column = Column(host if host.dtype is dtype else host.to(dtype))
        self._columns.append(column)
        return column

    def send(self) -> None:
        """Start the copy; the columns are usable on the current stream at once."""
        hosts = [column.tensor for column in self._columns]
        if self._packed and hosts:
            buffer = pack(hosts, pin=self._device.type == "cuda").to(self._device, non_blocking=True)
            for column, tensor in zip(self._columns, views(buffer, hosts), strict=True):
                column.tensor = tensor
        self._columns = []


class StaticColumns:
    """Columns that keep their place on the device while their values change: what a captured graph reads.

    ``start``: values of every column, which fix shape and dtype.
    """

    def __init__(self, start: Mapping[str, np.ndarray], device: torch.device) -> None:
        self._device = device
        hosts = {name: torch.from_numpy(values) for name, values in start.items()}
        self._buffer = pack(list(hosts.values()), pin=False).to(device)
        self._tensors = dict(zip(hosts, views(self._buffer, list(hosts.values())), strict=True))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def refresh(self, values: Mapping[str, np.ndarray]) -> None:
        """New values for every column, in one copy. Raises ``ValueError`` where names, shapes or dtypes differ."""
        hosts = {name: torch.from_numpy(array) for name, array in values.items()}
        if list(hosts) != list(self._tensors) or any(
            host.shape != self._tensors[name].shape or host.dtype is not self._tensors[name].dtype
            for name, host in hosts.items()
        ):
            raise ValueError("static columns keep their names, shapes and dtypes")
        self._buffer.copy_(pack(list(hosts.values()), pin=self._device.type == "cuda"), non_blocking=True)


def pack(tensors: Sequence[torch.Tensor], *, pin: bool) -> torch.Tensor:
    """All tensors, one after the other, in a new host buffer of bytes."""
    buffer = torch.empty(sum(_room(tensor) for tensor in tensors), dtype=torch.uint8, pin_memory=pin)
    for view, tensor in zip(views(buffer, tensors), tensors, strict=True):
        view.copy_(tensor)
    return buffer


def views(buffer: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of the shapes and dtypes of ``like``, in their places in a buffer that ``pack`` laid out."""
    found, offset = [], 0
    for tensor in like:
        n_bytes = tensor.numel() * tensor.element_size()
        found.append(buffer[offset : offset + n_bytes].view(tensor.dtype).view(tensor.shape))
        offset += _room(tensor)
    return found


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def read_back(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """The tensors' values, in their shapes: one copy up, the one place where the host waits for the device.

    From a GPU they come as float64: exact for integers below 2^53 and for float32.
    """
    if tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    return unpack_doubles(pack_doubles(tensors).cpu(), tensors)


def pack_doubles(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All values, one after the other, as float64."""
    return torch.cat([tensor.reshape(-1).double() for tensor in tensors])


def unpack_doubles(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """What ``pack_doubles`` packed, on the host, in the shapes it had."""
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape).numpy() for part, tensor in zip(parts, like, strict=True)]
