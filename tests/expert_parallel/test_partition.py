"""The split of SMs over many devices, drivers and wishes; each rule on both sides of its limit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from warpring import ArgumentError, UnsupportedError
from warpring.expert_parallel import partition
from warpring.expert_parallel.partition import (
    DEFAULT_COMM_SMS,
    Split,
    broken_rules,
    check_split,
    open_partition,
    plan_capped,
    plan_split,
)
from warpring.runtime.green import SmLimits

#: (SMs, least partition, alignment): H200 (as measured), H100 PCIe, H20, B200, B300, GB10, and one of an odd size.
DEVICES = {
    "h200": SmLimits(132, 8, 8),
    "h200, fine": SmLimits(132, 2, 2),
    "h100-pcie": SmLimits(114, 8, 8),
    "h20": SmLimits(78, 8, 8),
    "b200": SmLimits(148, 8, 8),
    "b300, 13.1": SmLimits(148, 4, 4),
    "gb10": SmLimits(48, 8, 8),
    "odd": SmLimits(133, 1, 1),
}


@pytest.mark.parametrize("limits", DEVICES.values(), ids=DEVICES)
def test_default_split_follows_every_rule(limits: SmLimits) -> None:
    split = plan_split(limits)
    check_split(split, limits.num_sms)
    assert split.comm_sms % limits.alignment == 0
    assert split.comm_sms >= limits.min_partition_sms


def test_an_h200_gives_16_and_116() -> None:
    assert plan_split(DEVICES["h200"]) == Split(DEFAULT_COMM_SMS, 116)


@pytest.mark.parametrize(("asked", "granted"), [(2, 8), (8, 8), (9, 16), (10, 16), (20, 24), (24, 24), (100, 104)])
def test_a_wish_is_rounded_up_as_the_driver_does(asked: int, granted: int) -> None:
    if 132 - granted >= 32:
        assert plan_split(DEVICES["h200"], asked) == Split(granted, 132 - granted)
    else:
        with pytest.raises(UnsupportedError, match="compute SMs must be at least 32; got 28"):
            plan_split(DEVICES["h200"], asked)


def test_compute_at_its_least_and_one_step_beyond() -> None:
    fine = DEVICES["h200, fine"]
    assert plan_split(fine, 100) == Split(100, 32)
    with pytest.raises(ArgumentError, match="comm_sms must be 2 to 100 on a device of 132 SMs; got 102"):
        plan_split(fine, 102)


def test_communication_at_its_least_and_below() -> None:
    assert plan_split(DEVICES["h200, fine"], 2) == Split(2, 130)
    for wish in (1, 0, -4):
        with pytest.raises(ArgumentError, match="comm_sms must be"):
            plan_split(DEVICES["h200, fine"], wish)


def test_odd_remainder_is_mended_where_the_step_is_odd_and_refused_where_not() -> None:
    assert plan_split(SmLimits(133, 1, 1), 16) == Split(17, 116)
    with pytest.raises(UnsupportedError, match="even number; got 117"):
        plan_split(SmLimits(133, 8, 8), 16)


def test_a_small_device_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="compute SMs must be at least 32; got 24"):
        plan_split(SmLimits(32, 8, 8))


@pytest.mark.parametrize(
    ("split", "broken"),
    [
        (Split(16, 116), 0),
        (Split(2, 130), 0),
        (Split(1, 131), 2),
        (Split(102, 30), 1),
        (Split(100, 32), 0),
        (Split(16, 114), 1),
        (Split(17, 115), 1),
        (Split(0, 0), 3),
    ],
)
def test_each_broken_rule_is_named(split: Split, broken: int) -> None:
    assert len(list(broken_rules(split, 132))) == broken
    if broken:
        with pytest.raises(UnsupportedError, match="partition: "):
            check_split(split, 132)
    else:
        check_split(split, 132)


@given(
    num_sms=st.integers(1, 200),
    least=st.sampled_from([1, 2, 4, 8, 16]),
    alignment=st.sampled_from([1, 2, 4, 8]),
    wish=st.none() | st.integers(-2, 200),
)
def test_any_plan_follows_the_rules_or_says_why_not(num_sms: int, least: int, alignment: int, wish: int | None) -> None:
    try:
        split = plan_split(SmLimits(num_sms, least, alignment), wish)
    except (ArgumentError, UnsupportedError):
        return
    assert not list(broken_rules(split, num_sms))
    assert split.comm_sms % alignment == 0
    assert wish is None or split.comm_sms >= wish


@given(num_sms=st.integers(36, 200), wish=st.none() | st.integers(2, 100))
def test_plain_streams_never_start_more_ctas_than_sms(num_sms: int, wish: int | None) -> None:
    try:
        split = plan_capped(num_sms, wish)
    except (ArgumentError, UnsupportedError):
        assert wish is None or num_sms - wish < 36
        return
    assert split.comm_sms + split.compute_sms in (num_sms, num_sms - 1)
    assert split.compute_sms % 2 == 0


class FakeStream:
    """Stands for a GreenStream: what the driver granted, and whether it was given back."""

    def __init__(self, num_sms: int) -> None:
        self.num_sms = num_sms
        self.stream = f"stream of {num_sms}"
        self.context = num_sms
        self.closed = False

    def close(self) -> None:
        self.closed = True


def fake_driver(monkeypatch: pytest.MonkeyPatch, *, granted: tuple[int, int] | None) -> list[FakeStream]:
    """A device of 132 SMs whose driver grants these SMs, or has no Green Contexts."""
    streams: list[FakeStream] = []

    def limits(device_index: int) -> SmLimits:
        if granted is None:
            raise UnsupportedError("cuda:0 has no Green Contexts: driver 12.2.")
        return SmLimits(132, 8, 8)

    def split(device_index: int, first_sms: int) -> tuple[FakeStream, ...]:
        assert granted is not None
        streams.extend(map(FakeStream, granted))
        return tuple(streams)

    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(partition, "sm_limits", limits)
    monkeypatch.setattr(partition, "split_device", split)
    monkeypatch.setattr(partition, "has_workqueues", lambda index: False)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: f"plain stream of {index}")
    return streams


def test_granted_sms_become_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = fake_driver(monkeypatch, granted=(24, 108))
    opened = open_partition(0, 20)
    assert (opened.split, opened.contexts, opened.fallback_reason) == (Split(24, 108), (24, 108), None)
    opened.close()
    assert all(stream.closed for stream in streams)


def test_a_grant_that_breaks_a_rule_is_given_back_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = fake_driver(monkeypatch, granted=(16, 108))
    with pytest.raises(UnsupportedError, match=r"must be the device's 132; got 16 \+ 108"):
        open_partition(0, mode="green")
    assert len(streams) == 2
    assert all(stream.closed for stream in streams)


def test_without_green_contexts_two_plain_streams_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver(monkeypatch, granted=None)
    with pytest.warns(RuntimeWarning, match="driver 12.2.* Falling back to two plain streams with grids of 16 and 116"):
        opened = open_partition(0)
    assert (opened.split, opened.contexts) == (Split(16, 116), None)
    assert opened.fallback_reason == "cuda:0 has no Green Contexts: driver 12.2."
    opened.close()


def test_without_green_contexts_an_error_where_they_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver(monkeypatch, granted=None)
    with pytest.raises(UnsupportedError, match="no Green Contexts"):
        open_partition(0, mode="green")


def test_a_wrong_wish_is_an_error_and_no_reason_to_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver(monkeypatch, granted=(16, 116))
    with pytest.raises(ArgumentError, match="comm_sms"):
        open_partition(0, 131)


def test_plain_streams_can_be_chosen_without_a_warning(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    streams = fake_driver(monkeypatch, granted=(16, 116))
    opened = open_partition(0, 24, "streams")
    assert (opened.mode, opened.split, opened.contexts) == ("streams", Split(24, 108), None)
    assert opened.streams is not None
    assert not streams
    assert not recwarn


def test_a_sequence_has_all_sms_for_every_role_and_no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = fake_driver(monkeypatch, granted=(16, 116))
    opened = open_partition(0, mode="sequence")
    assert (opened.mode, opened.split, opened.streams) == ("sequence", Split(132, 132), None)
    assert not streams
    opened.close()


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ArgumentError, match="mode must be one of auto, green, streams, sequence; got 'both'"):
        open_partition(0, mode="both")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("connections", "own_queues", "refused"), [("1", False, True), ("1", True, False), ("8", False, False)]
)
def test_one_hardware_queue_for_all_streams_is_refused(
    connections: str, own_queues: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_driver(monkeypatch, granted=(16, 116))
    monkeypatch.setattr(partition, "has_workqueues", lambda index: own_queues)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    open_partition(0, mode="sequence")
    if refused:
        with pytest.raises(UnsupportedError, match="CUDA_DEVICE_MAX_CONNECTIONS must be above 1"):
            open_partition(0)
    else:
        open_partition(0)
