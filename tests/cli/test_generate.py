"""`warpring generate`: the text it streams, the table below it, and how it refuses."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from warpring import generation
from warpring.checkpoint import quantize_checkpoint
from warpring.cli import generate as command
from warpring.cli import main
from warpring.errors import ArgumentError
from warpring.generation import MAX_RECORDED_CALLS, Generation, Loaded, accuracy_of_paths, load
from warpring.integrations.transformers import reset_stats, stats
from warpring.layout import PackedExperts, unpack_experts
from warpring.policy import choose_path
from warpring.verify import Accuracy

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-qwen3-moe"
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(MODEL, device=DEVICE)


def write(loaded: Loaded, prompt: str = "def f(x):\n", **options: Any) -> tuple[Generation, list[str]]:
    pieces: list[str] = []
    settings = {"max_new_tokens": 6, "temperature": 0.0, "seed": 0} | options
    return generation.generate(loaded, prompt, emit=pieces.append, **settings), pieces


def generate(*words: str) -> int:
    return main(["generate", *words])


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a refused command, which must have written nothing to stdout."""
    assert generate(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


# The command


def test_text_goes_to_stdout_and_the_table_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "def f(x):\n    return x\n\n\ndef g(x):\n    return f(x) + 1\n\n\n"
    assert generate(str(MODEL), "--prompt", prompt, "--max-new-tokens", "5", "--temperature", "0") == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(prompt)
    assert len(captured.out) > len(prompt) + 1
    table = captured.err
    for words in (
        "5 written at",
        "tokens/s",
        "mxfp8",
        "warp decode" if GPU else "decode on CPU cores",
        "classical",
        "relative error",
        "FP64",
    ):
        assert words in table
    decode = next(line for line in table.splitlines() if line.startswith(("warp decode", "decode on CPU")))
    calls, tokens, cosine, error = decode.split()[-4:]
    # So short a prompt is decode-sized: one call of each layer for it, and one for each further token.
    assert int(calls) == 4 * 5
    assert tokens.startswith("1-")
    assert 0.9999 < float(cosine) <= 1
    assert 0 < float(error) < 0.01


def test_defaults_are_the_example_model_and_the_policy() -> None:
    args = parse()
    assert args.model == Path("examples", "tiny-qwen3-moe")
    assert (args.format, args.path) == (None, "auto")


@pytest.mark.skipif(GPU, reason="a GPU gives so short a prompt to warp decode")
def test_prompt_and_text_are_served_by_the_paths_of_the_policy_on_a_cpu(loaded: Loaded) -> None:
    reset_stats(loaded.model)
    write(loaded, parse().prompt, max_new_tokens=2)
    experts = next(iter(loaded.experts.values()))
    tokens = [calls.max_tokens for calls in stats(loaded.model).values()]
    assert set(stats(loaded.model)) == {choose_path(experts, num_tokens, 4) for num_tokens in (1, max(tokens))}


@pytest.mark.skipif(GPU, reason="threads matter where a CPU runs the experts")
@pytest.mark.parametrize(("limit", "expected"), [(1 << 20, 1), (1, 2)])
def test_only_small_experts_run_in_one_thread(monkeypatch: pytest.MonkeyPatch, limit: int, expected: int) -> None:
    monkeypatch.setattr(command, "_SMALL_EXPERT_BYTES", limit)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert generate(str(MODEL), "--max-new-tokens", "1") == 0
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_pieces_make_the_text_and_equal_seeds_equal_texts(loaded: Loaded) -> None:
    first, pieces = write(loaded, temperature=1.0, seed=5, max_new_tokens=12)
    assert "".join(pieces) == first.text
    assert write(loaded, temperature=1.0, seed=5, max_new_tokens=12)[0].text == first.text
    assert write(loaded, temperature=1.0, seed=6, max_new_tokens=12)[0].text != first.text


def test_greedy_text_does_not_depend_on_the_seed(loaded: Loaded) -> None:
    assert write(loaded, seed=1)[0].text == write(loaded, seed=2)[0].text


@pytest.mark.parametrize("format", ["mxfp4", "fp8_block"])
def test_quantised_checkpoint_writes_what_quantising_at_load_writes(tmp_path: Path, format: str) -> None:
    target = tmp_path / format
    quantize_checkpoint(MODEL, target, format)
    stored = load(target, device=DEVICE)
    assert stored.format == format
    expected, _ = write(load(MODEL, format=format, device=DEVICE), temperature=1.0, max_new_tokens=10)
    assert write(stored, temperature=1.0, max_new_tokens=10)[0].text == expected.text


def test_quantised_checkpoint_can_be_requantised(tmp_path: Path) -> None:
    quantize_checkpoint(MODEL, tmp_path / "q", "mxfp8")
    steps: list[tuple[int, int]] = []
    again = load(tmp_path / "q", format="nvfp4", device=DEVICE, progress=lambda *done: steps.append(done))
    assert again.format == "nvfp4"
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_forced_path_serves_every_call() -> None:
    model = load(MODEL, path="classical", device=DEVICE)
    write(model, max_new_tokens=3)
    assert set(stats(model.model)) == {"classical"}


def test_experts_for_the_tile_path_are_packed_for_it(tmp_path: Path) -> None:
    quantize_checkpoint(MODEL, tmp_path / "q", "mxfp4")
    for directory in (MODEL, tmp_path / "q"):
        packed = load(directory, path="tile", format="mxfp4", device=DEVICE)
        assert {type(experts) for experts in packed.experts.values()} == {PackedExperts}
        assert packed.format == "mxfp4"
        rows = load(directory, path="grouped", format="mxfp4", device=DEVICE)
        for name, experts in rows.experts.items():
            unpacked = unpack_experts(packed.experts[name])
            assert torch.equal(unpacked.w13.data, experts.w13.data)
            assert torch.equal(unpacked.w2.data, experts.w2.data)


@pytest.mark.gpu
def test_tile_path_serves_every_call_and_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    packed = load(MODEL, path="tile", device=DEVICE)
    run, _ = write(packed, "x " * 60, max_new_tokens=5)
    assert set(stats(packed.model)) == {"tile"}
    found = accuracy_of_paths(run)
    assert list(found) == ["tile", "classical"]
    assert found["tile"].cosine_min > 0.99999
    assert generate(str(MODEL), "--path", "tile", "--max-new-tokens", "3") == 0
    assert "tile decode" in capsys.readouterr().err


@pytest.mark.gpu
def test_decode_on_the_gpu_is_warp_decode(loaded: Loaded) -> None:
    reset_stats(loaded.model)
    run, _ = write(loaded, "x " * 200, max_new_tokens=5)  # a prompt beyond what warp decode is taken for
    assert stats(loaded.model)["warp"].calls == 4 * 4
    assert set(accuracy_of_paths(run)) == {"warp", "classical"}


# What is measured


def test_recorded_calls_are_what_reached_the_experts_in_decode(loaded: Loaded) -> None:
    run, _ = write(loaded, max_new_tokens=5)
    assert run.new_tokens == 5
    assert list(run.calls) == [f"model.layers.{layer}.mlp.experts" for layer in range(4)]
    for name, calls in run.calls.items():
        assert calls.x.shape == (4, 160)
        assert calls.topk_idx.shape == calls.topk_weights.shape == (4, 4)
        assert calls.experts is loaded.experts[name]
        torch.testing.assert_close(calls.topk_weights.float().sum(1), torch.ones(4, device=DEVICE), atol=0.02, rtol=0)


def test_recording_ends_at_its_limit_and_leaves_no_hook(loaded: Loaded) -> None:
    experts = loaded.model.get_submodule("model.layers.0.mlp.experts")
    before = list(experts._forward_pre_hooks)
    run, _ = write(loaded, max_new_tokens=MAX_RECORDED_CALLS + 3, temperature=1.0, seed=1)
    assert run.new_tokens == MAX_RECORDED_CALLS + 3
    assert {calls.x.shape[0] for calls in run.calls.values()} == {MAX_RECORDED_CALLS}
    assert list(experts._forward_pre_hooks) == before


def test_warp_decode_is_far_closer_to_fp64_than_the_classical_path(loaded: Loaded) -> None:
    run, _ = write(loaded, max_new_tokens=9)
    found = accuracy_of_paths(run)
    decode = found["warp" if GPU else "cores"]
    assert decode.cosine_min > 0.99999
    assert found["classical"].rms_rel_error > 1.4 * decode.rms_rel_error


def test_one_token_has_no_decode_speed_and_no_accuracy(loaded: Loaded) -> None:
    run, _ = write(loaded, max_new_tokens=1)
    assert (run.new_tokens, run.tokens_per_s, run.calls) == (1, None, {})
    assert accuracy_of_paths(run) == {}


def test_speed_counts_the_tokens_after_the_first() -> None:
    run = Generation("", prompt_tokens=3, new_tokens=5, first_token_s=9.0, decode_s=2.0, calls={})
    assert run.tokens_per_s == 2.0


def test_table_says_nothing_of_a_path_that_was_not_measured(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    monkeypatch.setattr(generation, "accuracy_of_paths", lambda _: {"classical": Accuracy(0.5, 0.1, 0.25, 1.0)})
    run = Generation("", prompt_tokens=3, new_tokens=1, first_token_s=0.1, decode_s=0.0, calls={})
    reset_stats(loaded.model)
    command._show(loaded, run, Console(stderr=True, width=100))
    table = capsys.readouterr().err
    assert "tokens/s" not in table
    assert next(line for line in table.splitlines() if line.startswith("classical")).split() == [
        *("classical", "0", "0", "0.5000000", "2.50e-01")
    ]
    assert "twin" not in table


# Text, token by token


def test_character_of_several_tokens_comes_whole(loaded: Loaded) -> None:
    text = "é 😀 ok"
    pieces: list[str] = []
    streamer = generation._Streamer(loaded.tokenizer, pieces.append)
    streamer.put(torch.tensor([[1, 2, 3]]))
    ids = loaded.tokenizer(text).input_ids
    assert len(ids) > len(text)
    for token in ids:
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert "".join(pieces) == streamer.text == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "" not in pieces
    assert len(streamer.times) == len(ids)


def test_half_a_character_at_the_end_is_shown_as_such(loaded: Loaded) -> None:
    pieces: list[str] = []
    streamer = generation._Streamer(loaded.tokenizer, pieces.append)
    streamer.put(torch.tensor([[1]]))
    for token in loaded.tokenizer("a😀").input_ids[:-1]:
        streamer.put(torch.tensor([token]))
    assert "".join(pieces) == "a"
    streamer.end()
    assert "".join(pieces) == "a\N{REPLACEMENT CHARACTER}"


def test_empty_prompt_begins_a_document(loaded: Loaded) -> None:
    run, _ = write(loaded, "", max_new_tokens=2)
    assert run.prompt_tokens == 1


def test_empty_prompt_is_refused_where_no_token_begins_a_text(loaded: Loaded) -> None:
    config = SimpleNamespace(bos_token_id=None)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))
    silent = Loaded(model, loaded.tokenizer, {})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match="prompt must not be empty"):
        generation._encode(silent, "")


# Refusals


def parse(*words: str) -> Any:
    from warpring.cli import Parser

    parser = Parser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["generate", *words])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1; got 0"),
        (["--temperature", "-0.1"], "temperature must be a finite number >= 0; got -0.1"),
        (["--temperature", "nan"], "temperature must be a finite number >= 0; got nan"),
        (["--max-new-tokens", "512"], "context of 512 tokens; got"),
        (["--format", "int3"], "invalid choice: 'int3'"),
        (["--path", "fast"], "invalid choice: 'fast'"),
        (["--max-new-tokens", "many"], "invalid int value: 'many'"),
    ],
)
def test_bad_option_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert said in refusal(capsys, str(MODEL), *words)


def test_context_is_filled_to_its_last_token(loaded: Loaded) -> None:
    generation._check(loaded.model, 500, 12, 1.0)
    with pytest.raises(ArgumentError, match="set max_new_tokens to 12 at most"):
        generation._check(loaded.model, 500, 13, 1.0)


def test_missing_model_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = refusal(capsys, str(tmp_path / "nowhere"))
    assert "nowhere must be a checkpoint directory" in line


@pytest.mark.skipif(GPU, reason="a GPU serves both paths")
@pytest.mark.parametrize("path", ["warp", "tile"])
def test_path_of_a_gpu_without_one_is_refused(capsys: pytest.CaptureFixture[str], path: str) -> None:
    assert f"path '{path}' needs CUDA tensors" in refusal(capsys, str(MODEL), "--path", path)


@pytest.mark.skipif(GPU, reason="one path of a CPU is enough")
def test_grouped_path_serves_every_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(str(MODEL), "--path", "grouped", "--max-new-tokens", "3") == 0
    served = [line for line in capsys.readouterr().err.splitlines() if line.startswith("grouped GEMM")]
    assert len(served) == 1
    assert int(served[0].split()[2]) == 4 * 3


def copy_of_model(target: Path) -> Path:
    shutil.copytree(MODEL, target)
    return target


def test_truncated_weights_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    weights = copy_of_model(tmp_path / "m") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    assert "transformers cannot load it" in refusal(capsys, str(tmp_path / "m"))


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"num_hidden_layers": 5}, "model.layers.4.input_layernorm.weight"),
        ({"intermediate_size": 100, "mlp_only_layers": [1]}, "model.layers.1.mlp.down_proj.weight"),
        ({"head_dim": 48}, "model.layers.0.self_attn.k_norm.weight"),
    ],
)
def test_weights_that_transformers_would_make_up_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, object], first: str
) -> None:
    config = copy_of_model(tmp_path / "m") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    line = refusal(capsys, str(tmp_path / "m"))
    assert "are missing or misshapen" in line or "transformers cannot load it" in line
    assert "missing" not in line or first in line


def test_prompt_that_is_no_text_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "prompt must be valid text" in refusal(capsys, str(MODEL), "--prompt", "a\udcff")


def test_missing_transformers_is_named_with_the_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers.utils", None)
    assert "Install warpring[transformers]" in refusal(capsys, str(MODEL))


def test_missing_tokenizer_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = copy_of_model(tmp_path / "m")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).unlink()
    assert "has no tokenizer that knows any text" in refusal(capsys, str(target))


def test_unknown_model_type_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = copy_of_model(tmp_path / "m") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "no-such-model"}))
    assert "no-such-model" in refusal(capsys, str(tmp_path / "m"))


def test_model_without_experts_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=2048, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, head_dim=32
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "dense")
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path / "dense")
    capsys.readouterr()  # transformers may show its progress in writing
    assert "has no experts" in refusal(capsys, str(tmp_path / "dense"))
