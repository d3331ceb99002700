"""The tiny trained model: its files, its card, its text, its training script, and what quantising does to it."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "tiny-qwen3-moe"
LOG = json.loads((MODEL / "training_log.json").read_text(encoding="utf-8"))
NUM_TOKENS = 2050
#: Most that a format may add to BF16's perplexity on the text below. Measured: at most 1.2 % (MXFP4).
FACTOR = {"fp8_block": 1.01, "fp8_channel": 1.01, "mxfp8": 1.01, "mxfp4": 1.04, "nvfp4": 1.03}


def load_script(folder: str, name: str) -> ModuleType:
    """A script of `examples` or `bench`, which are no packages."""
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


perplexity = load_script("bench", "perplexity")  # makes examples importable
tiny_card, tiny_text = perplexity.tiny_card, perplexity.tiny_text
train_tiny = load_script("examples", "train_tiny")


@pytest.fixture(scope="module")
def model() -> Any:
    return perplexity.load_model(MODEL)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return perplexity.held_out_tokens(MODEL, NUM_TOKENS)


@pytest.fixture(scope="module")
def bf16_loss(model: Any, tokens: torch.Tensor) -> float:
    perplexity.install(model, format="bf16", path="classical")
    return perplexity.mean_loss(model, tokens, 512)


# The folder


def test_weights_fit_in_a_repository() -> None:
    assert (MODEL / "model.safetensors").stat().st_size <= 16e6
    assert not [path.name for path in MODEL.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".pkl")]


def test_sizes_are_edge_cases_of_the_kernels() -> None:
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["num_local_experts"] >= 32
    assert config["num_experts_per_tok"] >= 4
    for size in (config["hidden_size"], config["moe_intermediate_size"]):
        assert size % 32 == 0
        assert size % 128 != 0


def test_card_is_what_the_log_says() -> None:
    assert (MODEL / "README.md").read_text(encoding="utf-8") == tiny_card.card(LOG)


def test_no_expert_is_dead_and_loads_are_uneven() -> None:
    loads = torch.tensor(LOG["expert_load"])
    assert loads.shape == (4, 32)
    assert len(set(loads.sum(1).tolist())) == 1
    assert 0.9 * 4 * LOG["held_out_tokens"] < int(loads[0].sum()) <= 4 * LOG["held_out_tokens"]
    relative = loads / loads.float().mean(1, keepdim=True)
    assert (relative.amin(1) > 0.02).all()
    assert (relative.amax(1) > 1.3).all()
    assert (relative.amax(1) / relative.amin(1) > 3).all()


def test_last_snapshots_were_not_overfitted() -> None:
    validation = [point["validation"] for point in LOG["curve"]]
    assert LOG["validation_loss"] == min(validation)
    assert validation[-1] < 1.05 * min(validation)


# Perplexity


def test_beats_the_unigram_model_ten_times(bf16_loss: float, tokens: torch.Tensor) -> None:
    assert math.exp(bf16_loss) * 10 < math.exp(perplexity.unigram_loss(MODEL, tokens))


def test_warpring_in_bf16_agrees_with_transformers_own_experts(
    model: Any, tokens: torch.Tensor, bf16_loss: float
) -> None:
    model.set_experts_implementation("grouped_mm")
    assert perplexity.mean_loss(model, tokens, 512) == pytest.approx(bf16_loss, rel=0.005)


@pytest.mark.parametrize("format", FACTOR)
def test_format_keeps_the_perplexity(model: Any, tokens: torch.Tensor, bf16_loss: float, format: str) -> None:
    perplexity.install(model, format=format, path="classical")
    loss = perplexity.mean_loss(model, tokens, 512)
    assert math.exp(loss - bf16_loss) < FACTOR[format]
    assert loss != bf16_loss


def test_warp_arithmetic_keeps_the_perplexity(model: Any, tokens: torch.Tensor) -> None:
    part = tokens[:257]
    perplexity.install(model, format="bf16", path="classical")
    classical = perplexity.mean_loss(model, part, 256)
    perplexity.install(model, format="mxfp8", path="reference")
    assert perplexity.mean_loss(model, part, 256) == pytest.approx(classical, rel=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["bf16", *FACTOR])
def test_warp_decode_keeps_the_perplexity(tokens: torch.Tensor, bf16_loss: float, format: str) -> None:
    model = perplexity.load_model(MODEL, "cuda")
    perplexity.install(model, format=format, path="warp")
    assert math.exp(perplexity.mean_loss(model, tokens, 512) - bf16_loss) < FACTOR.get(format, 1.005)


def test_mean_loss_predicts_each_token_once_whatever_the_window() -> None:
    class Uniform(torch.nn.Module):
        device = torch.device("cpu")
        seen = 0

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            self.seen += input_ids.numel()
            return type("Output", (), {"logits": torch.zeros(*input_ids.shape, 8)})

    for window in (1, 3, 10, 100):
        model = Uniform()
        assert perplexity.mean_loss(model, torch.arange(8).repeat(2), window) == pytest.approx(math.log(8))
        assert model.seen == 15


# The text


def test_reserved_modules_exist_and_are_never_trained_on() -> None:
    reserved = [*tiny_text.HELD_OUT, *tiny_text.VALIDATION]
    assert len(set(reserved)) == 20
    assert all(len(text) > 1000 for text in tiny_text.read_modules(reserved))
    trained = {path.relative_to(tiny_text.stdlib()).as_posix() for path in tiny_text.training_files()}
    assert not trained & set(reserved)
    assert {"argparse.py", "json/decoder.py"} <= trained


def test_training_files_leave_out_packages_tests_and_what_the_build_wrote(tmp_path: Path) -> None:
    kept = ["a.py", "json/b.py", "idlelib/NEWS.txt"]
    left = ["statistics.py", "test/c.py", "site-packages/d.py", "x/tests/e.py", "config-3.12-x/f.py"]
    for name in [*kept, *left, "_sysconfigdata_x.py", "encodings/cp037.py", "g.so", "__pycache__/h.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    files = [path.relative_to(tmp_path).as_posix() for path in tiny_text.training_files(tmp_path)]
    assert files == sorted(kept)


def test_topics_are_read_as_prose(tmp_path: Path) -> None:
    path = tmp_path / "pydoc_data" / "topics.py"
    path.parent.mkdir()
    path.write_text("# made by a tool\ntopics = {'assert': 'The statement\\n', 'with': 'Another'}\n")
    assert tiny_text.read_document(path) == "The statement\n\n\nAnother"


def test_fingerprint_sees_where_documents_end() -> None:
    assert tiny_text.fingerprint(["ab", "c"]) != tiny_text.fingerprint(["a", "bc"])


def test_documents_are_closed_by_end_of_text() -> None:
    tokenizer = perplexity.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    ids = tiny_text.encode_documents(tokenizer, ["x = 1\n", "é😀"])
    assert [i for i, token in enumerate(ids) if token == 0] == [len(tokenizer.encode("x = 1\n").ids), len(ids) - 1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "x = 1\né😀"


# The card


def test_unigram_loss_is_that_of_smoothed_frequencies() -> None:
    counts, scored = torch.tensor([3, 0, 1]), torch.tensor([2, 0, 1, 1])
    expected = -(math.log(4 / 7) + 2 * math.log(1 / 7)) / 3
    assert tiny_card.unigram_loss(counts, scored) == pytest.approx(expected)


def test_load_table_sorts_experts_into_the_right_buckets() -> None:
    # Loads over their mean of 10: 0, 0.25, 0.5, 1, 2, then 4.25 and 0 twice; edges belong to the bucket above.
    head, row = tiny_card.load_table([[0, 2.5, 5, 10, 20, 42.5, 0, 0]]).splitlines()
    assert head.split()[3:9] == ["<0.25", "0.25-0.5", "0.5-1", "1-2", "2-4", ">=4"]
    assert row.split()[:9] == ["0", "0.00", "4.25", "3", "1", "1", "1", "1", "1"]
    assert row.endswith("▁▁▂▄█  ")


# The training script


@pytest.fixture
def _global_settings() -> Iterator[None]:
    precision, state = torch.get_float32_matmul_precision(), torch.get_rng_state()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.set_rng_state(state)


def test_dense_experts_are_the_routed_ones() -> None:
    torch.manual_seed(3)
    model = train_tiny.Qwen3MoeForCausalLM(train_tiny.model_config()).eval()
    experts = model.model.layers[1].mlp.experts
    x, weights = torch.randn(9, 160), torch.rand(9, 4)
    idx = torch.rand(9, 32).argsort(1)[:, :4]
    with torch.no_grad():
        model.set_experts_implementation("eager")
        expected = experts(x, idx, weights)
        torch.testing.assert_close(train_tiny.dense_experts(experts, x, idx, weights), expected, atol=1e-6, rtol=1e-4)


def test_balance_loss_is_one_when_even_and_grows_with_skew() -> None:
    logits = torch.full((8, 4), -4.0)
    even = logits.scatter(1, torch.arange(8)[:, None] % 4, 4.0)
    skewed = logits.scatter(1, torch.zeros(8, 1, dtype=torch.int64), 4.0)
    assert float(train_tiny.balance_loss(even, 1)) == pytest.approx(1.0)
    assert float(train_tiny.balance_loss(skewed, 1)) > 3.9


def test_learning_rate_warms_up_and_ends_low() -> None:
    rates = [train_tiny.rate(i / 200) for i in range(201)]
    top = rates.index(max(rates))
    assert max(rates) == pytest.approx(1.0)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[0] < 0.06
    assert rates[-1] == pytest.approx(0.02)


@pytest.mark.usefixtures("_global_settings")
def test_training_writes_a_model_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tiny_text.training_files()
    monkeypatch.setattr(tiny_text, "training_files", lambda: files[:: len(files) // 12])
    out = tmp_path / "model"
    options = ["--steps", "3", "--batch", "1", "--eval-tokens", "300", "--device", "cpu", "--lr", "1e-2"]
    train_tiny.main([*options, "--out", str(out)])
    names = {path.name for path in out.iterdir()}
    assert names == {path.name for path in MODEL.iterdir()}
    log = json.loads((out / "training_log.json").read_text(encoding="utf-8"))
    assert log.keys() == LOG.keys()
    assert log["steps"] == 3
    assert log["curve"][-1]["validation"] < log["curve"][0]["validation"]
    held_out = perplexity.held_out_tokens(out)[:300]
    again = perplexity.mean_loss(perplexity.load_model(out).float(), held_out, 299)
    assert again == pytest.approx(log["held_out_loss"], rel=1e-3)
