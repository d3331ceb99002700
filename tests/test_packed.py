"""`moe_decode` with packed experts, and with path "auto": one set of weights for every batch."""

from __future__ import annotations

import pytest
import torch
from moe_inputs import Inputs, make_inputs, rms_rel_error

from warpring import SILU, ArgumentError, UnsupportedError, decode, gpt_oss_swiglu, moe_decode, moe_exact
from warpring.decode import PACKED_PATHS, PATHS
from warpring.formats import FORMATS
from warpring.kernels import panels, tile, tile_wgmma
from warpring.layout import pack_experts
from warpring.policy import device_name, limit
from warpring.runtime.device import has_grouped_gemms

GPU = pytest.mark.gpu
#: Bound of the grouped path's RMS relative error, see test_grouped.py.
RMS = 10**0.5 * 2**-9


def run(inputs: Inputs, path: str) -> torch.Tensor:
    return moe_decode(*inputs.args(), out=torch.full_like(inputs.x, torch.nan), path=path)


@pytest.mark.parametrize("beyond", [0, 1])
def test_auto_is_the_path_of_the_policy_on_either_side_of_the_crossover(beyond: int) -> None:
    inputs = make_inputs(1, 96, 64, 4, 2, format="bf16", seed=28)
    most = limit(device_name(inputs.experts.device), "cores", "bf16", 96, 64, 4, 2).max_tokens
    inputs = make_inputs(most + beyond, 96, 64, 4, 2, format="bf16", seed=29)
    assert torch.equal(run(inputs, "auto"), run(inputs, "grouped" if beyond else "cores"))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("num_tokens", [1, 90])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_packed_experts_serve_every_batch(device: str, num_tokens: int, format: str, bias: bool) -> None:
    activation = gpt_oss_swiglu() if bias else SILU
    inputs = make_inputs(num_tokens, 96, 160, 7, 3, format=format, activation=activation, bias=bias, seed=30).to(device)
    packed, out = pack_experts(inputs.experts), torch.full_like(inputs.x, torch.nan)
    x, _, idx, weights = inputs.args()
    for path in ("auto", "grouped"):
        moe_decode(x, packed, idx, weights, out=out.fill_(torch.nan), path=path)
        assert rms_rel_error(out, moe_exact(*inputs.args())) < RMS
    if not has_grouped_gemms(out.device):  # which round less
        assert torch.equal(out, run(inputs, "grouped"))


def test_ids_of_packed_experts_are_checked_on_the_host() -> None:
    x, experts, idx, weights = make_inputs(2, 64, 64, 4, 2).args()
    idx[1, 1] = 4
    with pytest.raises(ArgumentError, match="got 4 at token 1, slot 1"):
        moe_decode(x, pack_experts(experts), idx, weights)


def test_out_in_the_memory_of_packed_weights_is_refused() -> None:
    x, experts, idx, weights = make_inputs(2, 64, 64, 4, 2).args()
    packed = pack_experts(experts)
    for name, matrix in (("experts", packed.w13), ("experts.w2", packed.w2)):
        out = matrix.records.view(-1)[: 2 * 64 * 2].view(torch.bfloat16).view(2, 64)
        with pytest.raises(ArgumentError, match=f"out must not overlap {name},"):
            moe_decode(x, packed, idx, weights, out=out)


@pytest.mark.parametrize("path", [path for path in PATHS if path not in PACKED_PATHS])
def test_path_that_packed_experts_lack_is_refused_by_name(path: str) -> None:
    x, experts, idx, weights = make_inputs(1, 64, 64, 4, 2).args()
    with pytest.raises(UnsupportedError, match=f"PackedExperts take path auto, tile, grouped; got '{path}'"):
        moe_decode(x, pack_experts(experts), idx, weights, path=path)


def test_tile_path_without_its_layout_or_a_gpu_is_refused_by_name() -> None:
    x, experts, idx, weights = make_inputs(1, 64, 64, 4, 2).args()
    with pytest.raises(UnsupportedError, match=r"path 'tile' takes PackedExperts; got Experts\. Pack them once"):
        moe_decode(x, experts, idx, weights, path="tile")
    with pytest.raises(UnsupportedError, match="path 'tile' needs CUDA tensors; got cpu"):
        moe_decode(x, pack_experts(experts), idx, weights, path="tile")


@pytest.mark.parametrize("num_tokens", [1, 90])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_slabs_serve_every_batch(device: str, num_tokens: int) -> None:
    inputs = make_inputs(num_tokens, 128, 192, 7, 3, format="mxfp4", bias=True, seed=31)
    packed, inputs = pack_experts(inputs.experts, in_slabs=True).to(device), inputs.to(device)
    out = torch.full_like(inputs.x, torch.nan)
    for path in ("auto", "grouped"):
        moe_decode(inputs.x, packed, *inputs.args()[2:], out=out.fill_(torch.nan), path=path)
        assert rms_rel_error(out, moe_exact(*inputs.args())) < RMS


def test_path_tile_runs_the_kernels_of_the_layout_and_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which launches it makes, and that slabs on another GPU are refused by name."""
    few, more = (make_inputs(tokens, 128, 64, 4, 2, format="mxfp4", seed=32) for tokens in (2, 3))
    called: list[str] = []
    monkeypatch.setattr(panels, "moe_panels", lambda *args, **kwargs: called.append("panels"))
    monkeypatch.setattr(tile, "moe_tile", lambda *args, **kwargs: called.append("tile"))
    monkeypatch.setattr(tile_wgmma, "moe_tile_wgmma", lambda *args, **kwargs: called.append("tile_wgmma"))
    monkeypatch.setattr(tile_wgmma, "is_hopper", lambda device: True)
    run_tile = decode._RUN["tile"]  # pyright: ignore[reportPrivateUsage]
    for in_slabs in (False, True):
        for inputs in (few, more):
            run_tile(inputs.x, pack_experts(inputs.experts, in_slabs=in_slabs), *inputs.args()[2:], inputs.x)
    assert called == ["panels", "tile", "tile_wgmma", "tile_wgmma"]
    monkeypatch.setattr(tile_wgmma, "is_hopper", lambda device: False)
    with pytest.raises(UnsupportedError, match=r"PackedExperts\.to"):
        run_tile(few.x, pack_experts(few.experts, in_slabs=True), *few.args()[2:], few.x)
