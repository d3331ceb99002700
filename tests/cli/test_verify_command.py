"""`warpring verify`: what it prints, records and returns, and the inputs that it records from a model."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from warpring.bench.records import ACCURACY_PATHS, load
from warpring.cli import Parser
from warpring.cli import verify as command
from warpring.errors import ArgumentError, CheckpointError
from warpring.verify import PACKED_PATHS, Accuracy, Result

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "tiny-qwen3-moe"
SYNTHETIC = ["--inputs", "synthetic", "--shape", "h64xi32xe4xk2", "--device", "cpu"]


def parse(*words: str) -> argparse.Namespace:
    parser = Parser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["verify", *words])


def verify(*words: str) -> int:
    args = parse(*words)
    return args.run(args)


def test_table_names_every_format_and_path(capsys: pytest.CaptureFixture[str]) -> None:
    verify(*SYNTHETIC, "--batches", "1,3")
    text = capsys.readouterr().out
    for word in (
        "bf16",
        "fp8_block",
        "fp8_channel",
        "mxfp8",
        "mxfp4",
        "nvfp4",
        "reference",
        "classical",
        "1-3",
        "MXFP8: 1.4",
    ):
        assert word in text
    # Nothing is cut off in a terminal of 80 columns.
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_each_prints_a_line_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    verify(*SYNTHETIC, "--batches", "1,2,5", "--format", "mxfp8", "--path", "classical", "--each")
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("mxfp8")]
    assert [row[2] for row in rows] == ["1", "2", "5"]


def test_records_hold_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "accuracy.jsonl"
    verify(*SYNTHETIC, "--batches", "2", "--format", "mxfp8", "--seed", "7", "--jsonl", str(file))
    ours, classical = load(file)
    assert (ours["path"], classical["path"]) == ("reference", "classical")
    assert ours["inputs"] == "synthetic"
    assert (ours["model"], ours["seed"], ours["num_tokens"]) == ("h64xi32xe4xk2", 7, 2)
    factor = classical["rms_rel_error"] / ours["rms_rel_error"]
    assert ours["error_factor_vs_classical"] == pytest.approx(factor)
    assert "before quantising" in ours["note"]


def test_every_path_on_packed_weights_has_records(tmp_path: Path) -> None:
    file = tmp_path / "accuracy.jsonl"
    verify(*SYNTHETIC, "--batches", "2", "--format", "mxfp8", "--path", "grouped_packed", "--jsonl", str(file))
    assert [rec["path"] for rec in load(file)] == ["grouped_packed"]
    assert set(PACKED_PATHS) <= set(ACCURACY_PATHS)


@pytest.mark.parametrize(
    ("change", "code"),
    [({}, 0), ({"rms_rel_error": 1.0}, 1), ({"max_abs_diff": 0.01}, 1), ({"rms_rel_error": float("nan")}, 1)],
)
@pytest.mark.parametrize("path", ["reference", "classical"])
def test_exit_code_says_whether_promised_bounds_hold(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str, change: dict[str, float], code: int
) -> None:
    found = Accuracy(**{"cosine_min": 1.0, "max_abs_diff": 0.0, "rms_rel_error": 0.0, "output_max": 0.1} | change)
    result = Result("synthetic", "m", 64, "bf16", path, 1, found, found, 1.0, 1.0, path == "reference")
    monkeypatch.setattr("warpring.verify.report", lambda *_, **__: iter([result]))
    words = [*SYNTHETIC, "--batches", "1", "--jsonl", str(tmp_path / "out.jsonl")]
    assert verify(*words) == (code if path == "reference" else 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "fp7"], "--format must hold"),
        (["--path", "auto"], "--path must hold"),
        (["--batches", "0"], "--batches"),
        (["--shape", "h33xi32xe4xk2"], "multiple of 32"),
        (["--device", "tpu"], "--device"),
        (["--inputs", "recorded", "--text", "README.bin"], "README.bin: must be UTF-8 text"),
    ],
)
def test_bad_input_is_one_named_error(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("README.bin").write_bytes(b"\xff\xfe")
    with pytest.raises(ArgumentError, match=message):
        verify(*SYNTHETIC, *words)


def test_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent.*config\.json"):
        verify("--model", str(tmp_path / "absent"), "--inputs", "recorded", "--device", "cpu")


def tiny_model(folder: Path) -> None:
    """A random Qwen3-MoE with two layers, one of them sparse, and a character tokenizer."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0} | {chr(c): c for c in range(1, 128)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        mlp_only_layers=[0],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
    )
    transformers.Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder)


def test_recorded_inputs_are_what_the_experts_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason="records through transformers, an optional dependency")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from warpring.integrations.recording import recorded_inputs

    folder = tmp_path / "Tiny Model"
    tiny_model(folder)
    inputs = recorded_inputs(folder, 5, text="def main(): return 42  # a text of its own" * 3)
    assert (inputs.kind, inputs.model, inputs.num_tokens) == ("recorded", "tiny-model", 5)
    (layer,) = inputs.layers  # the first of the two layers is dense
    # The same forward pass by hand, with the module's own arguments kept.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = transformers.AutoTokenizer.from_pretrained(folder)("def main(): return 42  # a text of its own" * 3)[
        "input_ids"
    ]
    seen = []
    forward = Qwen3MoeExperts.forward

    def note(self: torch.nn.Module, *args: torch.Tensor) -> torch.Tensor:
        seen.append(args)
        return forward(self, *args)

    monkeypatch.setattr(Qwen3MoeExperts, "forward", note)
    with torch.inference_mode():
        model(input_ids=torch.tensor([ids[:40]]), use_cache=False)
    keep = torch.tensor([0, 10, 20, 29, 39])
    x, idx, weights = seen[0]
    assert torch.equal(layer.x, x[keep])
    assert torch.equal(layer.topk_idx, idx[keep])
    assert torch.equal(layer.topk_weights, weights[keep].float())
    experts = model.model.layers[1].mlp.experts
    assert torch.equal(layer.dense.w13.data.flatten(1, 2), experts.gate_up_proj)
    assert torch.equal(layer.dense.w2.data, experts.down_proj)


def test_text_shorter_than_the_batch_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="records through transformers, an optional dependency")
    from warpring.integrations.recording import recorded_inputs

    tiny_model(tmp_path)
    with pytest.raises(ArgumentError, match="num_tokens=9 tokens or more; got 3"):
        recorded_inputs(tmp_path, 9, text="abc")


def test_default_text_was_held_out_of_the_example_models_training() -> None:
    pytest.importorskip("transformers", reason="records through transformers, an optional dependency")
    from warpring.integrations.recording import held_out_text

    spec = importlib.util.spec_from_file_location("tiny_text", ROOT / "examples" / "tiny_text.py")
    tiny_text = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny_text)
    assert held_out_text() in tiny_text.read_modules(tiny_text.HELD_OUT)


def test_trained_model_keeps_its_promises(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="records through transformers, an optional dependency")
    file = tmp_path / "accuracy.jsonl"
    words = ["--model", str(EXAMPLE), "--inputs", "recorded", "--device", "cpu", "--batches", "4", "--format", "mxfp8"]
    assert verify(*words, "--jsonl", str(file)) == 0
    assert "recorded inputs, tiny-qwen3-moe" in capsys.readouterr().out
    ours, _ = load(file)
    assert ours["error_factor_vs_classical"] > 1.4
    assert json.dumps(ours)
