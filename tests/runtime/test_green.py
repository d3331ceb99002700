"""Green Contexts and symmetric memory on fake drivers: one split for both parts, nothing left open on failure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from warpring import UnsupportedError
from warpring.runtime import green, symmetric
from warpring.runtime.green import SmLimits, has_workqueues, sm_limits, split_device

pytest.importorskip("cuda.core", reason="cuda-core is not installed")


class Driver:
    """A device of 132 SMs that gives SMs in steps of 8, and writes down what it was asked for."""

    def __init__(self, *, workqueues: bool = False, contexts: int = 2) -> None:
        self.log: list[str] = []
        self.left = contexts
        self.workqueues = workqueues
        self.resources = self

    @property
    def sm(self) -> Any:
        return SimpleNamespace(sm_count=132, min_partition_size=8, coscheduled_alignment=8, split=self.split)

    @property
    def workqueue(self) -> Any:
        if not self.workqueues:
            raise RuntimeError("needs driver 13.1")
        return SimpleNamespace(
            concurrency_limit=8, configure=lambda options: self.log.append(f"queues {options.sharing_scope}")
        )

    def split(self, options: Any) -> tuple[list[Any], Any]:
        self.log.append(f"split {options.count}")
        return [SimpleNamespace(sm_count=options.count)], SimpleNamespace(sm_count=132 - options.count)

    def create_context(self, options: Any) -> Any:
        if self.left == 0:
            raise RuntimeError("out of contexts")
        self.left -= 1
        sms, resources = options.resources[0].sm_count, len(options.resources)
        self.log.append(f"context of {sms} with {resources}")
        stream = SimpleNamespace(handle=sms, close=lambda: self.log.append(f"stream {sms} closed"))
        return SimpleNamespace(
            handle=1000 + sms,
            create_stream=lambda options: stream,
            close=lambda: self.log.append(f"context {sms} closed"),
        )


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(driver: Driver) -> Driver:
        monkeypatch.setattr(green, "_device", lambda index: driver)
        monkeypatch.setattr(
            torch.cuda,
            "ExternalStream",
            lambda handle, device: SimpleNamespace(handle=handle, synchronize=lambda: None),
        )
        return driver

    return install


def test_limits_are_the_drivers(use: Any) -> None:
    use(Driver())
    assert sm_limits(0) == SmLimits(132, 8, 8)
    assert not has_workqueues(0)
    use(Driver(workqueues=True))
    assert has_workqueues(0)


def test_one_split_gives_both_parts(use: Any) -> None:
    driver = use(Driver())
    first, rest = split_device(0, 16)
    assert driver.log == ["split 16", "context of 16 with 1", "context of 116 with 1"]
    assert [(part.num_sms, part.context, part.stream.handle) for part in (first, rest)] == [
        (16, 1016, 16),
        (116, 1116, 116),
    ]
    first.close()
    assert driver.log[-2:] == ["stream 16 closed", "context 16 closed"]


def test_each_part_gets_queues_of_its_own_where_there_are_some(use: Any) -> None:
    driver = use(Driver(workqueues=True))
    split_device(0, 8)
    assert driver.log.count("queues green_ctx_balanced") == 2
    assert "context of 124 with 2" in driver.log


def test_a_failure_leaves_nothing_open(use: Any) -> None:
    driver = use(Driver(contexts=1))
    with pytest.raises(
        UnsupportedError, match=r"cuda:0 has no Green Contexts: out of contexts\. They need driver 12\.4"
    ):
        split_device(0, 16)
    assert driver.log[-1] == "context 16 closed"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where no GPU is; found one")
def test_without_a_gpu_there_are_none() -> None:
    with pytest.raises(UnsupportedError, match="has no Green Contexts"):
        sm_limits(0)
    assert not has_workqueues(0)


def test_symmetric_memory_that_fails_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import _symmetric_memory

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no\npeer access")

    monkeypatch.setattr(_symmetric_memory, "empty", refuse)
    with pytest.raises(UnsupportedError, match=r"symmetric memory of 1,000 bytes on cpu failed: no peer access\."):
        symmetric.allocate(1000, torch.device("cpu"), object())


def test_symmetric_memory_is_zero_before_the_addresses_are_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import _symmetric_memory

    order: list[str] = []

    def empty(num_bytes: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full((num_bytes,), 255, dtype=dtype)

    def rendezvous(local: torch.Tensor, group: object) -> Any:
        order.append("exchanged" if not local.any() else "exchanged before it was zero")
        return SimpleNamespace(buffer_ptrs=[4096, local.data_ptr()])

    monkeypatch.setattr(_symmetric_memory, "empty", empty)
    monkeypatch.setattr(_symmetric_memory, "rendezvous", rendezvous)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("synchronized"))
    buffer = symmetric.allocate(64, torch.device("cpu"), object())
    assert order == ["synchronized", "exchanged"]
    assert buffer.addresses == (4096, buffer.local.data_ptr())
