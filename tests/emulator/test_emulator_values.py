"""What emulated instructions compute, against torch and plain arithmetic."""

from __future__ import annotations

import pytest
import torch

from emulator import EmulationError, run
from emulator.probes import SEEDS, error_of, ints, launch, needs_compiler

pytestmark = needs_compiler


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
