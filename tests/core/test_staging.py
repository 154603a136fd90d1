"""One copy for many columns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from orca_core.staging import StaticColumns, Upload, pack_doubles, read_back, unpack_doubles

CPU = torch.device("cpu")


@pytest.mark.parametrize("packed", [False, True])
def test_columns_arrive_as_they_were_added(packed: bool) -> None:
    upload = Upload(CPU, packed=packed)
    added = [
        upload.add([1, 2, 3], torch.int64),
        upload.add([], torch.int64),
        upload.add([0.5, -0.25, 1e300], torch.float64),
        upload.add([1.5], torch.float32),
        upload.add(np.arange(6, dtype=np.int32).reshape(2, 3), torch.int32),
        upload.add(np.array([2**62]), torch.int64),
        upload.add(np.array([3.0]), torch.float32),
    ]
    upload.send()
    tensors = [column.tensor for column in added]
    assert [t.dtype for t in tensors] == [
        torch.int64, torch.int64, torch.float64, torch.float32, torch.int32, torch.int64, torch.float32,
    ]  # fmt: skip
    assert [t.tolist() for t in tensors] == [
        [1, 2, 3], [], [0.5, -0.25, 1e300], [1.5], [[0, 1, 2], [3, 4, 5]], [2**62], [3.0],
    ]  # fmt: skip
    addresses = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
    assert len(addresses) == (1 if packed else 6)
    assert all(t.data_ptr() % 16 == 0 for t in tensors if packed and t.numel())


def test_an_empty_upload_and_one_of_empty_columns() -> None:
    Upload(CPU, packed=True).send()
    upload = Upload(CPU, packed=True)
    column = upload.add([], torch.int64)
    upload.send()
    assert column.tensor.shape == (0,)


def test_static_columns_stay_where_they_are() -> None:
    start = {"tokens": np.zeros(3, np.int64), "table": np.full((2, 2), 7, np.int32)}
    columns = StaticColumns(start, CPU)
    tokens, table = columns["tokens"], columns["table"]
    assert table.tolist() == [[7, 7], [7, 7]]
    columns.refresh({"tokens": np.array([4, 5, 6]), "table": np.array([[1, 2], [3, 4]], np.int32)})
    assert (tokens.tolist(), table.tolist()) == ([4, 5, 6], [[1, 2], [3, 4]])


@pytest.mark.parametrize("values", [
    {"tokens": np.zeros(2, np.int64)}, {"tokens": np.zeros(3, np.int32)}, {"other": np.zeros(3, np.int64)}, {},
])  # fmt: skip
def test_static_columns_take_nothing_else(values: dict[str, np.ndarray]) -> None:
    columns = StaticColumns({"tokens": np.zeros(3, np.int64)}, CPU)
    with pytest.raises(ValueError, match="keep"):
        columns.refresh(values)


def test_what_comes_up_is_what_was_there() -> None:
    tensors = [
        torch.tensor([3, 2**53 - 1]),
        torch.tensor([[True], [False]]),
        torch.empty(0),
        torch.tensor([[-0.1, float("-inf")]]),
    ]
    for arrays in (read_back(tensors), unpack_doubles(pack_doubles(tensors), tensors)):
        assert [array.tolist() for array in arrays] == [tensor.tolist() for tensor in tensors]
