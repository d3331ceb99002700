"""The emulator against oracles: what an instruction computes, and which mistakes a run reports."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from emulator import EmulationError, Launch, guarded, load, run, sources, unusable_reason
from warpring.runtime.jit import KERNEL_DIR, KernelSpec

pytestmark = pytest.mark.skipif(unusable_reason() is not None, reason=str(unusable_reason()))
HERE = Path(__file__).parent
TWINS = "".join((HERE / name).read_text() for name in ("ptx.hpp", "sync_ptx.hpp"))
SEEDS = range(8)
int32 = ctypes.c_int32


def launch(
    entry: str, *args: Any, block: int = 32, grid: int = 1, smem: int = 0, source: str = "probes.cu", **macros: object
) -> Launch:
    """One launch of a probe; ints are 32-bit values."""
    spec = KernelSpec(source, entry, tuple((name, str(value)) for name, value in macros.items()))
    values = [int32(arg) if isinstance(arg, int) else arg for arg in args]
    return Launch(load(spec, HERE), (grid, 1, 1), block, values, smem)


def ints(count: int) -> torch.Tensor:
    return torch.full((count,), -77, dtype=torch.int32)


def error_of(launched: Launch, seed: int = 0, **kwargs: Any) -> str:
    with pytest.raises(EmulationError) as caught:
        run([launched], seed=seed, **kwargs)
    return str(caught.value)


# -- warps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_shuffles_move_values_within_their_segments(seed: int) -> None:
    values = torch.randint(-(2**31), 2**31 - 1, (32,), generator=torch.Generator().manual_seed(seed)).int()
    lanes = torch.arange(32)
    for width in (4, 16, 32):
        for by in (1, 3, 11):
            out = ints(128)
            run([launch("shuffles", values, width, by, out)], seed=seed)
            first = lanes // width * width
            last = first + width - 1
            from_lane = [first + by % width, lanes - by, lanes + by, lanes ^ by]
            from_lane[1] = torch.where(from_lane[1] < first, lanes, from_lane[1])
            from_lane[2] = torch.where(from_lane[2] > last, lanes, from_lane[2])
            from_lane[3] = torch.where(from_lane[3] > last, lanes, from_lane[3])
            assert torch.equal(out.view(4, 32), values[torch.stack(from_lane)])


def test_votes_and_reductions() -> None:
    values = torch.randint(0, 100, (32,)).int()
    values[7] = values[30] = 42
    out = torch.zeros(192, dtype=torch.int32)
    run([launch("votes", values, out)], seed=2)
    ballot, any_, all_, match, total, largest = out.view(6, 32).long() & 0xFFFFFFFF
    odd = sum(1 << lane for lane in range(32) if values[lane] % 2)
    assert (ballot == torch.tensor([odd & 0xFFFF] * 16 + [odd & 0xFFFF0000] * 16)).all()
    assert any_[0] == (values[:16] > 90).any()
    assert any_[16] == (values[16:] > 90).any()
    assert all_.all()
    assert match[7] == match[30] == sum(1 << lane for lane in range(32) if values[lane] == 42)
    assert (total == values.sum()).all()
    assert (largest == values.max()).all()


def test_misused_collectives_are_named() -> None:
    assert "leaves out lane" in error_of(launch("leaves_out_itself"))
    assert "reads lane 20, which does not take part" in error_of(launch("reads_absent_lane", ints(32)))
    report = error_of(launch("diverges", ints(32)))
    assert "mma_bf16 by lane 16 while other lanes of its mask wait in mma_bf16 at probes.cu:" in report


# -- values ----------------------------------------------------------------------------------------------------------


def test_every_e4m3_and_f16_code_has_its_value() -> None:
    halves, floats = ints(512), torch.zeros(256)
    run([launch("decodes_e4m3", halves, floats, block=256)])
    expected = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(floats.nan_to_num(1e9), expected.nan_to_num(1e9))
    pairs = halves.view(torch.uint8).view(torch.float16).view(2, 256, 2).float()
    assert torch.equal(pairs[0, :, 0].nan_to_num(1e9), expected.nan_to_num(1e9))
    assert torch.equal(pairs[1].nan_to_num(1e9), expected.nan_to_num(1e9)[:, None].expand(256, 2))
    floats = torch.zeros(65536)
    run([launch("decodes_f16", floats, block=64)])
    expected = torch.arange(65536).to(torch.uint16).view(torch.float16).float()
    assert torch.equal(floats.view(torch.int32)[~expected.isnan()], expected.view(torch.int32)[~expected.isnan()])
    assert torch.equal(floats.isnan(), expected.isnan())


def interesting_floats() -> torch.Tensor:
    """All kinds of bit patterns, and the midpoints between neighbouring codes of E4M3 with what lies beside them."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31 - 1, (20000,), generator=generator, dtype=torch.int32).view(torch.float32)
    codes = torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn).double()
    middles = torch.cat(
        [(codes[:-1] + codes[1:]) / 2, torch.tensor([448.0, 464.0, 480.0, 65519.0, 65520.0, 2.0**-25])]
    ).float()
    near = torch.cat([middles, middles * (1 + 2**-23), middles * (1 - 2**-23)])
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-45, -1e-40, 65504.0])
    return torch.cat([bits, near, -near, special, torch.randn(4096, generator=generator)])


def test_rounding_to_small_formats_is_that_of_torch() -> None:
    values = interesting_floats()
    count = len(values)
    bf16, f16, e4m3 = (torch.zeros(count, dtype=torch.uint16) for _ in range(3))
    products = torch.zeros(count, dtype=torch.int32)
    run([launch("encodes", values, count, bf16, f16, e4m3, products, block=128)], seed=1)
    nan = values.isnan()

    def check(codes: torch.Tensor, expected: torch.Tensor, nan_code: int, nans: torch.Tensor = nan) -> None:
        same = codes.view(torch.int16) == expected.view(torch.int16)
        assert same[~nans].all()
        assert (codes[nans].view(torch.int16) == nan_code).all()

    check(bf16, values.bfloat16(), 0x7FFF)
    check(f16, values.half(), 0x7FFF)
    saturated = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    high = e4m3.view(torch.uint8).view(-1, 2)
    assert torch.equal(high[:, 1][~nan], saturated[~nan])
    assert torch.equal(high[:, 0], high[:, 1].roll(-1))
    assert (high[:, 1][nan] == 0x7F).all()
    low, top = products.view(torch.int16).view(-1, 2).unbind(1)
    rounded = values.bfloat16().double()
    for codes, by in ((top, 0), (low, 1)):
        exact = rounded.roll(-by) * rounded.roll(-by - 2)
        # FP32 holds every product of two BF16 values that is not below its own smallest normal.
        usual = exact.isfinite() & (exact.abs() >= 2.0**-126)
        assert torch.equal(codes[usual], exact.float().bfloat16().view(torch.int16)[usual])
        assert (codes[exact.isnan()] == 0x7FFF).all()


KINDS = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn}


def operands(
    rows: int, columns: int, steps: int, kind: str, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, b as stored, and c; rows of steps * 32 bytes."""
    generator = torch.Generator().manual_seed(seed)
    depth = steps * (32 if kind == "e4m3" else 16)
    a, b = (torch.randn(n, depth, generator=generator).to(KINDS[kind]) for n in (rows, columns))
    return a, b, torch.randn(rows, columns, generator=generator)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_mma_multiplies(kind: str, seed: int) -> None:
    a, b, c = operands(16, 8, 1, kind, seed)
    out = torch.full((16, 8), torch.nan)
    run([launch("multiplies_16x8", a, b, c, list(KINDS).index(kind), out)], seed=seed)
    exact = c.double() + a.double() @ b.double().T
    terms = c.abs().double() + a.abs().double() @ b.abs().double().T
    assert ((out - exact).abs() <= terms * 2.0**-22).all()  # each term cut off 25 bits below the largest, the sum at 23


def test_mma_cuts_terms_off_as_hopper_does() -> None:
    """2^25 and ones: what lies more than 25 bits below the largest term is lost, whatever its number."""
    a, b, c = torch.zeros(16, 16), torch.ones(8, 16), torch.zeros(16, 8)
    a[:, 0] = 2.0**30
    a[:, 1:] = 31.0
    a[8:, 1:] = 32.0
    out = torch.full((16, 8), torch.nan)
    run([launch("multiplies_16x8", a.bfloat16(), b.bfloat16(), c, 0, out)])
    assert (out[:8] == 2.0**30).all()
    assert (out[8:] == 2.0**30 + 15 * 32 // 128 * 128).all()


def test_ldmatrix_hands_out_words_of_rows() -> None:
    data = torch.randint(0, 2**15, (32, 8), dtype=torch.int16)
    out = ints(320)
    run([launch("loads_matrices", data, out)], seed=3)
    words = out.view(torch.int16).view(10, 8, 4, 2)  # register, lane / 4, lane % 4, half
    matrices = data.flip(0).view(4, 8, 8)
    assert torch.equal(words[:4].reshape(4, 8, 8), matrices)
    assert torch.equal(words[4:8].reshape(4, 8, 8), matrices.transpose(1, 2))
    assert torch.equal(words[8:].reshape(2, 8, 8), data[:16].view(2, 8, 8))


def warpgroup_product(
    columns: int, kind: str, swizzle: int, seed: int, mistake: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(result, exact) of the wgmma probe."""
    a, b, c = operands(64, columns, 4, kind, seed)
    out = torch.full((64, columns), torch.nan)
    args = (a, b, c, list(KINDS).index(kind), swizzle, mistake, out)
    probe = launch(
        "multiplies_warpgroup", *args, block=128, smem=columns * 128, source="probe_wgmma.cu", COLUMNS=columns
    )
    run([probe], seed=seed)
    return out, c.double() + a.double() @ b.double().T


@pytest.mark.parametrize("columns", [8, 64])
@pytest.mark.parametrize("swizzle", [0, 1, 2, 3], ids=["none", "128B", "64B", "32B"])
@pytest.mark.parametrize("kind", KINDS)
def test_wgmma_multiplies_from_every_layout(columns: int, swizzle: int, kind: str) -> None:
    out, exact = warpgroup_product(columns, kind, swizzle, seed=columns + swizzle)
    # E4M3: sums keep 13 bits of fraction.
    assert ((out - exact).abs() <= exact.abs().max() * 2.0 ** (-10 if kind == "e4m3" else -19)).all()
    if kind == "e4m3":
        assert (out.view(torch.int32) & 0x3FF == 0).all()


def test_wgmma_rules_are_kept() -> None:
    with pytest.raises(EmulationError, match="wgmma without warpgroup_arrive"):
        warpgroup_product(8, "bf16", 0, 0, mistake=1)
    out, _ = warpgroup_product(8, "bf16", 0, 0, mistake=2)  # no wait: sums are not there yet
    assert out.isnan().all()
    out, exact = warpgroup_product(8, "bf16", 0, 0, mistake=3)  # B overwritten before the wait
    assert ((out - exact).abs() > 0.01).any()


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
    out = ints(32)
    run([launch("waits_at_most", torch.zeros(1, dtype=torch.int32), ctypes.c_int64(10**10), out)])
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


# -- sources ---------------------------------------------------------------------------------------------------------


def test_assembly_goes_and_lines_stay() -> None:
    text = (
        "#pragma once\n// asm { }\nconstexpr int k[2] = {1, 2};\n"
        'template <int N>\n__device__ void f(int a = 3) {\n    asm volatile("x { ;");\n}\n'
        "struct S {\n    int g() { return 1; }\n};\n__device__ int f(float v) { return 2; }\n"
        "__shared__ float table[4][k[1]];\n"
    )
    made = sources.emulated(text, "x.cuh")
    assert made.count("\n") == text.count("\n")
    assert "asm volatile" not in made
    assert "using ::cuda_on_cpu::f;" in made  # an overload stays, and would hide the emulated one
    assert "struct S" in made
    assert "StaticShared<float[4][k[1]]" in made
    assert [function.name for function in sources.assembly_functions(text)] == ["f"]


def test_sources_that_cannot_be_emulated_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"x\.cuh: inline assembly inside `struct S`"):
        sources.emulated('struct S {\n    void f() { asm("x"); }\n};\n', "x.cuh")
    with pytest.raises(ValueError, match=r"x.cuh:2: a declaration of shared memory"):
        sources.emulated("\n__shared__ int a, b;\n", "x.cuh")


def test_every_assembly_function_has_a_twin_of_its_signature(tmp_path: Path) -> None:
    checks: list[str] = []
    for header in sorted(KERNEL_DIR.glob("*.cuh")):
        functions = sources.assembly_functions(header.read_text())
        if functions:
            checks.append(f'#include "{header.name}"')
        for function in functions:
            if function.is_template:
                assert re.search(rf"\b{function.name}\b", TWINS), f"{header.name}: {function.name} has no twin"
                continue
            values = ", ".join(f"std::declval<{kind}>()" for kind in function.parameters)
            call = f"::cuda_on_cpu::{function.name}({values})"
            checks.append(f'static_assert(std::is_same_v<decltype({call}), {function.returns}>, "{header.name}");')
    assert len(checks) > 50
    (tmp_path / "twins.cu").write_text("\n".join([*checks, 'extern "C" __global__ void nothing() {}\n']))
    load(KernelSpec("twins.cu", "nothing"), tmp_path)
