"""Tests that need a CUDA device: each is marked ``gpu`` and skipped with the reason where there is none."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from flashgen.tuner.cards.cuda import CudaDevice, find_device
from flashgen.tuner.errors import FlashgenError

HERE = Path(__file__).parent


@cache
def device_or_reason() -> CudaDevice | str:
    try:
        device = find_device(0)
        device.toolchain()
    except FlashgenError as error:
        return str(error)
    return device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if HERE in item.path.parents]
    if not here:
        return
    found = device_or_reason()
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if isinstance(found, str):
            item.add_marker(pytest.mark.skip(reason=found))


@pytest.fixture(scope="session")
def device() -> CudaDevice:
    found = device_or_reason()
    assert isinstance(found, CudaDevice)
    return found


@pytest.fixture(scope="session")
def torch(device: CudaDevice) -> Any:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return torch
