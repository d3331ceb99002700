"""bench/expert_parallel.py: which layers and variants a run measures, and in which order."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from warpring.bench.ep_peers import EP_PEERS, NOT_TIMED
from warpring.bench.ep_points import ABLATION_TOKENS, COMM_SMS, SKEWS, TOKENS
from warpring.bench.ep_variants import Variant
from warpring.bench.records import load
from warpring.bench.shapes import LayerShape

SCRIPT = Path(__file__).parents[2] / "bench" / "expert_parallel.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("expert_parallel_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_layers_without_names(script: ModuleType) -> None:
    assert script.chosen(script.bar(2), []) == list(script.bar(2))


def test_named_layers_come_in_the_order_of_their_names(script: ModuleType) -> None:
    names = ["glm-5.2:mxfp4", "deepseek-v4-flash:fp8_block"]
    found = [f"{shape.name}:{format}" for shape, format, *_ in script.chosen(script.bar(2), names)]
    assert found == ["glm-5.2:mxfp4", "deepseek-v4-flash:fp8_block"]


def test_an_unknown_layer_is_refused_with_those_there_are(script: ModuleType) -> None:
    with pytest.raises(
        SystemExit, match=r"--layers: glm-5.2:int4 is none of deepseek-v4-flash:fp8_block, .*glm-5.2:mxfp4"
    ):
        script.chosen(script.bar(2), ["glm-5.2:mxfp4", "glm-5.2:int4"])


def plan(script: ModuleType, line: str, num_ranks: int = 2) -> list[Any]:
    return script.planned(script.command_line().parse_args(line.split(" ")), num_ranks)


def test_the_bar_measures_everything_where_nothing_is_left_out(script: ModuleType) -> None:
    found = plan(script, "bar")
    own_alone, with_peers = found[:8], found[8:]
    assert own_alone == [item._replace(peers=()) for item in script.bar(2)]
    assert [(item.shape.name, item.format, item.tokens) for item in found[:4]] == [
        (name, format, TOKENS)
        for format in ("fp8_block", "mxfp4")
        for name in ("deepseek-v4-flash", "deepseek-v4-flash-ep8")
    ]
    own = (Variant(), Variant("shared"), Variant(activation="bf16"))
    assert found[0].variants == (*own, Variant("nccl"))
    assert found[2].variants == (*own, Variant(shared="fused"))
    assert all(item.peers == (*EP_PEERS, *NOT_TIMED) for item in with_peers)


def test_peers_come_last_in_turns_with_our_layer_alone(script: ModuleType) -> None:
    found = plan(script, "bar --peers flashinfer_pull --layers glm-5.2:mxfp4,glm-5.2:fp8_block,glm-5.2-ep8:fp8_block")
    assert [(item.shape.name, item.format, item.peers) for item in found] == [
        ("glm-5.2", "mxfp4", ()),
        ("glm-5.2", "fp8_block", ()),
        ("glm-5.2-ep8", "fp8_block", ()),
        ("glm-5.2", "fp8_block", ("flashinfer_pull",)),
        ("glm-5.2-ep8", "fp8_block", ("flashinfer_pull",)),
    ]
    assert all(item.variants == (Variant(),) for item in found[3:])


def test_peers_that_cannot_be_imported_cost_nothing(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def sweep(num_ranks: int) -> list[Any]:
        shape = LayerShape("h256xi128xe8xk2", 256, 128, 8, 2)
        return [script.Work(shape, "fp8_block", 1.0, (1,), (Variant(),), peers=("flashinfer_pull",))]

    output = tmp_path / "out.jsonl"
    monkeypatch.setattr(script, "SWEEPS", {"bar": sweep})
    monkeypatch.setattr(sys, "argv", ["expert_parallel.py", "bar", "--windows", "1", "--output", str(output)])
    assert script.main() == 0
    assert [rec["impl"] for rec in load(output)] == ["warpring"]
    assert "flashinfer_pull is left out, it needs two GPUs or more" in capsys.readouterr().err


def test_baselines_and_peers_can_be_left_out(script: ModuleType) -> None:
    for item in plan(script, "bar --baselines  --peers "):
        assert not item.peers
        assert {variant.impl for variant in item.variants} == {"warpring"}
    found = plan(script, "bar --baselines nccl --peers flashinfer_pull")
    assert [variant.impl for variant in found[0].variants] == ["warpring", "warpring", "nccl"]
    assert [item.peers for item in found[-2:]] == [("flashinfer_pull",)] * 2
    assert [variant.impl for variant in plan(script, "ablation --baselines nccl")[0].variants] == ["warpring"] * 6


def test_tokens_and_activations_choose_points(script: ModuleType) -> None:
    found = plan(script, "bar --activations bf16 --baselines  --peers  --tokens 8,1,8,256")
    assert [item.variants for item in found] == [(Variant(activation="bf16"),)] * 4, "a layer without any is left out"
    assert all(item.tokens == (8, 1, 256) for item in found)
    (fp8, *_) = plan(script, "bar --activations fp8")
    assert fp8.variants == (Variant(), Variant("shared"), Variant("nccl"))


def test_without_our_kernels_the_others_stay(script: ModuleType) -> None:
    found = plan(script, "bar --activations ")
    assert [item.variants for item in found[:2]] == [(Variant("nccl"),)] * 2, "an eighth has no baseline"
    assert [bool(item.peers) for item in found] == [False] * 2 + [True] * 4
    assert all(not item.variants for item in found[2:])


def test_the_ablation_is_of_one_layer_unless_others_are_named(script: ModuleType) -> None:
    found = plan(script, "ablation")
    assert {(item.shape.name, item.format, item.tokens) for item in found} == {
        ("deepseek-v4-flash", "mxfp4", ABLATION_TOKENS)
    }
    assert [item.knob for item in found] == ["comm_sms", "block_m", "num_slots", "form", *["skew"] * 3, "shared"]
    assert [item.skew for item in found if item.knob == "skew"] == list(SKEWS)
    assert len(plan(script, "ablation", num_ranks=1)) == len(found) - len(SKEWS)


def test_one_knob_on_two_formats(script: ModuleType) -> None:
    layers = "deepseek-v4-flash:mxfp4,deepseek-v4-flash:fp8_block"
    found = plan(script, f"ablation --knobs comm_sms --baselines  --layers {layers}")
    assert [f"{item.shape.name}:{item.format}" for item in found] == layers.split(",")
    for item in found:
        others = Variant(partition="green"), Variant(partition="streams")
        assert item.variants == (*(Variant(comm_sms=sms) for sms in COMM_SMS), *others)


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("--baselines gloo", "--baselines must hold shared, nccl; got 'gloo'"),
        ("--peers warpring", "--peers must hold .*flashinfer_pull.*; got 'warpring'"),
        ("--activations fp8,fp4", "--activations must hold fp8, bf16; got 'fp4'"),
        ("--knobs sms", "--knobs must hold comm_sms, .*; got 'sms'"),
        ("--tokens 1,257", "--tokens must be counts of 1 to 256, as in 1,2,4; got '1,257'"),
        ("--tokens ", "--tokens must be counts of 1 to 256"),
    ],
)
def test_unknown_names_and_counts_are_refused(
    script: ModuleType, option: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        plan(script, f"bar {option}")
    assert re.search(error, capsys.readouterr().err)


def test_layers_of_the_same_weights_share_them(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (LayerShape(name, 64, 32, 8, 2) for name in ("first", "second"))

    def sweep(num_ranks: int) -> list[Any]:
        work = [(first, "mxfp4", 1.0), (first, "mxfp4", num_ranks), (second, "mxfp4", 1.0)]
        return [script.Work(*item, (1, 2), (Variant(), Variant("shared")), "comm_sms") for item in work]

    output = tmp_path / "out.jsonl"
    monkeypatch.setattr(script, "SWEEPS", {"ablation": sweep})
    monkeypatch.setattr(script, "LAYERS", {})
    options = ["--baselines", "", "--tokens", "3", "--windows", "2", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["expert_parallel.py", "ablation", *options])
    assert script.main() == 0
    found = [(rec["model"], rec["impl"], rec["tokens_per_rank"], rec["repeats"]) for rec in load(output)]
    assert found == [(name, "warpring", 3, 2) for name in ("first", "first", "second")]
    told = capsys.readouterr().err
    assert len(re.findall(r"^experts \d+\.\d\d s$", told, re.MULTILINE)) == 2, "one a layer, not one a sweep's item"
    assert len(re.findall(r"^T=3 timed ", told, re.MULTILINE)) == 3
    assert "first mxfp4 skew 1.0 comm_sms: peers imported" in told


def test_a_plan_without_anything_is_refused(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match="nothing is left to measure"):
        plan(script, "bar --activations  --baselines  --peers ")
    with pytest.raises(SystemExit, match="nothing is left to measure"):
        plan(script, "ablation --knobs ")
