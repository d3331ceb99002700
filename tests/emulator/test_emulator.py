"""Which mistakes of a kernel the emulator reports, and what waits for what."""

from __future__ import annotations

import ctypes

import pytest
import torch

from emulator import EmulationError, Launch, guarded, run
from emulator.probes import SEEDS, error_of, ints, launch, needs_compiler

pytestmark = needs_compiler


# -- shared memory and barriers --------------------------------------------------------------------------------------


def test_missing_barrier_shows_and_a_barrier_helps() -> None:
    values = torch.randint(0, 1000, (256,)).int()
    wrong = 0
    for seed in SEEDS:
        for synchronise in (0, 1):
            out = ints(256)
            run([launch("reverses", values, synchronise, out, block=256)], seed=seed)
            if synchronise:
                assert torch.equal(out, values.flip(0))
            else:
                wrong += not torch.equal(out, values.flip(0))
    assert wrong == len(SEEDS)


def test_shared_memory_starts_as_nan() -> None:
    out = ints(8)
    run([launch("reads_poison", out, smem=16)])
    assert (out == -1).all()
    assert out.view(torch.float32).isnan().all()


@pytest.mark.parametrize("how", range(4), ids=["reads", "writes", "loads 16 bytes", "reads 16 bytes"])
def test_access_beyond_dynamic_shared_memory_is_reported(how: int) -> None:
    for byte in (0, 112):
        run([launch("touches_dynamic", ctypes.c_int64(byte), how, ints(1), block=1, smem=128)])
    report = error_of(launch("touches_dynamic", ctypes.c_int64(128), how, ints(1), block=1, smem=128))
    assert "128" in report
    assert "dynamic shared memory; the launch asked for 128" in report
    assert "probes.cu:" in report


def test_writes_before_dynamic_shared_memory_are_reported() -> None:
    assert "wrote to byte -1" in error_of(launch("touches_dynamic", ctypes.c_int64(-1), 1, ints(1), block=1, smem=128))


def test_misaligned_vector_is_reported() -> None:
    for how in (2, 3):
        report = error_of(launch("touches_dynamic", ctypes.c_int64(8), how, ints(1), block=1, smem=128))
        assert "alignment" in report or "not a multiple of 16" in report


def stream_of(mistake: int, out: torch.Tensor, data: torch.Tensor, rounds: int = 5) -> Launch:
    return launch("streams", data, rounds, mistake, out, smem=1024 + 16)


@pytest.mark.parametrize("seed", SEEDS)
def test_bulk_copies_arrive_behind_their_barrier(seed: int) -> None:
    data = torch.randint(0, 1000, (5, 32, 4)).int()
    out = ints(32)
    run([stream_of(0, out, data)], seed=seed)
    assert torch.equal(out, data[:, :, 0].sum(0).int())


@pytest.mark.parametrize("mistake", [1, 2, 3], ids=["no init", "no wait", "no __syncwarp"])
def test_broken_streams_are_caught(mistake: int) -> None:
    data = torch.randint(0, 1000, (5, 32, 4)).int()
    for seed in SEEDS:
        out = ints(32)
        try:
            run([stream_of(mistake, out, data)], seed=seed)
        except EmulationError:
            continue
        assert not torch.equal(out, data[:, :, 0].sum(0).int())


def test_copy_that_nobody_waits_for_is_reported() -> None:
    assert "copies in flight" in error_of(stream_of(4, ints(32), torch.zeros(5, 32, 4, dtype=torch.int32)))


def test_mbarrier_phases() -> None:
    out = ints(5)
    run([launch("mbarrier_phases", out)])
    assert out.tolist() == [1, 0, 0, 1, 0]


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_copies_arrive_behind_their_barrier(seed: int) -> None:
    data = torch.randint(0, 1000, (64, 4)).int()
    out = ints(32)
    run([launch("copies_by_lanes", data, 1, out, block=64)], seed=seed)
    assert torch.equal(out, (data[:32, 0] + data[32:, 0]).flip(0))
    try:
        run([launch("copies_by_lanes", data, 0, out, block=64)], seed=seed)
    except EmulationError:  # ended with copies in flight
        return
    assert not torch.equal(out, (data[:32, 0] + data[32:, 0]).flip(0))


@pytest.mark.parametrize("seed", SEEDS)
def test_bulk_stores_are_read_before_their_wait_returns(seed: int) -> None:
    data = torch.randint(0, 1000, (32, 4)).int()
    out = torch.zeros_like(data)
    run([launch("stores_in_bulk", data, out)], seed=seed)
    assert torch.equal(out, data)


@pytest.mark.parametrize("seed", SEEDS)
def test_named_barriers_hand_over(seed: int) -> None:
    out = ints(96)
    run([launch("hands_over", out, block=96)], seed=seed)
    assert (out[32:] == 8).all()
    assert (out[:32] == -77).all()


def test_barriers_do_not_wait_for_threads_that_exited() -> None:
    out = ints(64)
    run([launch("barrier_after_exit", out, block=64)], seed=1)
    assert (out[::2] == 17).all()


def test_deadlock_says_who_waits_where() -> None:
    report = error_of(launch("waits_for_more_than_come", block=64))
    assert "deadlock" in report
    assert "warp 0: named_barrier_sync at probes.cu:" in report
    assert "lanes 0-31" in report


# -- between CTAs and grids ------------------------------------------------------------------------------------------


def test_ctas_that_wait_for_each_other_need_to_run_at_once() -> None:
    for seed in SEEDS:
        out, flag = ints(40), torch.zeros(1, dtype=torch.int32)
        run([launch("waits_for_all_ctas", flag, out, grid=40)], seed=seed, concurrent=True)
        assert (out == 1).all()
    flag = torch.zeros(1, dtype=torch.int32)
    report = error_of(launch("waits_for_all_ctas", flag, out, grid=40), timeout_s=0.1)
    assert "nothing but polling" in report
    assert "nanosleep at probes.cu:" in report


def test_streams_run_beside_each_other() -> None:
    flag, out = torch.zeros(1, dtype=torch.int32), ints(2)
    run([launch("waits_for_all_ctas", flag, out, grid=2)], [launch("traps", 99)], seed=3)
    waiter = launch("waits_at_most", flag.zero_(), ctypes.c_int64(10**9), out, block=1)
    run([waiter], [launch("takes_tickets", flag, ints(32))], seed=4)
    assert out[0] == 2


def test_time_passes_when_everybody_waits() -> None:
    for seed in SEEDS:
        out = ints(32)
        run([launch("waits_at_most", torch.zeros(1, dtype=torch.int32), ctypes.c_int64(10**10), out)], seed=seed)
        assert (out == 1).all()


def test_dependent_grid_overlaps_and_waits() -> None:
    early = 0
    for seed in SEEDS:
        for wait in (0, 1):
            data, out = torch.zeros(8, dtype=torch.int32), ints(8)
            first = launch("first_of_two", data, 5, grid=8, block=64)
            run([first, launch("second_of_two", data, wait, out, grid=8)], seed=seed, concurrent=True)
            assert not wait or (out == 5).all()
            early += not (out == 5).all()
    assert early > 0


def test_same_seed_gives_the_same_run_and_others_do_not() -> None:
    def order(seed: int) -> list[int]:
        out = ints(256)
        run([launch("takes_tickets", torch.zeros(1, dtype=torch.int32), out, grid=4, block=64)], seed=seed)
        assert sorted(out.tolist()) == list(range(256))
        return out.tolist()

    orders = [order(seed) for seed in SEEDS]
    assert orders == [order(seed) for seed in SEEDS]
    assert len({tuple(one) for one in orders}) == len(SEEDS)
    assert orders[0] == list(range(256))


# -- mistakes that end a launch --------------------------------------------------------------------------------------


def test_trap_names_its_thread_and_line() -> None:
    run([launch("traps", 40)])
    report = error_of(launch("traps", 3))
    assert "traps, CTA (0, 0, 0), thread (3, 0, 0): __trap() at probes.cu:" in report


def test_reading_past_a_tensor_is_reported() -> None:
    for count in (32, 31):
        weights = guarded(torch.ones(count * 16, dtype=torch.uint8))
        loads = launch("loads_weights", weights, ints(32))
        if count == 32:
            run([loads])
        else:
            report = error_of(loads)
            assert "not mapped" in report
            assert "probes.cu:" in report


def test_stack_overflow_and_division_by_zero_do_not_end_the_process() -> None:
    run([launch("overflows_its_stack", 100, ints(1), block=1)])
    assert "stack overflow" in error_of(launch("overflows_its_stack", 100000, ints(1), block=1))
    assert "division by zero" in error_of(launch("divides", 0, ints(1), block=1))


def test_endless_loop_ends_with_a_report() -> None:
    report = error_of(launch("runs_without_end", torch.zeros(2, dtype=torch.int32)))
    assert "thread (0, 0, 0): runs without end at probes.cu:" in report


def test_arguments_are_counted_and_measured() -> None:
    assert "takes arguments of (4,) bytes; got ()" in error_of(launch("traps"))
    assert "got (8,)" in error_of(launch("traps", ctypes.c_int64(0)))
