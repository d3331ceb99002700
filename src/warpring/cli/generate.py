"""`warpring generate`: a model writes text through warp decode; below it, what served it, how fast and how exactly."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from warpring.cli import seed
from warpring.cli.quantize import FORMAT_NAMES
from warpring.errors import UnsupportedError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace, _SubParsersAction  # pyright: ignore[reportPrivateUsage]

    from rich.console import Console

    from warpring.experts import Experts
    from warpring.generation import Generation, Loaded
    from warpring.layout import PackedExperts

EXAMPLE_MODEL = Path("examples", "tiny-qwen3-moe")
DEFAULT_PROMPT = 'def read_config(path, default=None):\n    """Read the configuration file at path.\n\n    Return'

# Below this, a CPU spends more on handing an expert's work to a second thread than the thread saves.
_SMALL_EXPERT_BYTES = 1 << 20

_PATHS = ("auto", "warp", "tile", "cores", "grouped", "classical", "reference")
_PATH_TITLES = {
    "warp": "warp decode",
    "tile": "tile decode",
    "cores": "decode on CPU cores",
    "reference": "decode in plain torch",
    "classical": "classical",
    "grouped": "grouped GEMM",
}


def add_parser(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "generate",
        help="write text with a MoE model whose experts run through warpring",
        description="Stream text to stdout. Then show, on stderr, tokens/s, the path that served each call, and the "
        "accuracy of warp decode and of the classical path on this very run, against FP64.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        type=Path,
        default=EXAMPLE_MODEL,
        metavar="MODEL",
        help="checkpoint directory, as transformers or `warpring quantize` writes it (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", default=DEFAULT_PROMPT, help="text to continue (default: %(default)r)"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=160, metavar="N", help="tokens to write at most (default: %(default)s)"
    )
    parser.add_argument(
        "--format",
        choices=FORMAT_NAMES,
        help="number format of the experts (default: mxfp8; of a quantised checkpoint, its own)",
    )
    parser.add_argument(
        "--path", choices=_PATHS, default="auto", help="what serves the experts (default: auto, by batch)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="of the sampling; 0 takes the likeliest token each time (default: %(default)s)",
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of the sampling (default: %(default)s)")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Load, write, show; 0 when the text is complete. Errors are WarpringError or OSError."""
    from rich.console import Console

    console = Console(stderr=True)
    loaded = _load(args, console)
    from warpring.generation import generate

    waiting = [args.prompt]  # shown with the first new text: a refused request leaves stdout empty

    def emit(piece: str) -> None:
        sys.stdout.write("".join([*waiting, piece]))
        sys.stdout.flush()
        waiting.clear()

    generation = generate(
        loaded,
        args.prompt,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        emit=emit,
    )
    emit("\n")
    _show(loaded, generation, console)
    return 0


def _load(args: Namespace, console: Console) -> Loaded:
    """The model, with a sign of life for each thing that takes time."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with console.status("starting torch and transformers"):
        import torch

        # generation needs transformers, an optional dependency.
        try:
            from transformers.utils import logging

            from warpring.generation import load
        except ImportError as error:
            raise UnsupportedError(
                f"generate: running a model needs transformers ({error}). Install warpring[transformers]."
            ) from error
    logging.set_verbosity_error()  # what it would warn of is an error of ours
    if not console.is_terminal:
        logging.disable_progress_bar()  # of reading the weights
    device = "cuda" if torch.cuda.is_available() else "cpu"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("packing experts", total=None)

        def show(done: int, layers: int) -> None:
            bar.update(task, completed=done, total=layers)

        loaded = load(args.model, format=args.format, path=args.path, device=device, progress=show)
    experts = next(iter(loaded.experts.values()))
    if device == "cpu" and experts.bytes_per_expert < _SMALL_EXPERT_BYTES:
        torch.set_num_threads(1)
    return loaded


def _show(loaded: Loaded, generation: Generation, console: Console) -> None:
    """What was written, how fast, by which paths, and how exactly."""
    from rich.table import Table

    from warpring.generation import accuracy_of_paths
    from warpring.integrations.transformers import PathStats, stats

    speed = generation.tokens_per_s
    experts = next(iter(loaded.experts.values()))
    console.print(
        f"\n{generation.prompt_tokens} tokens read, {generation.new_tokens} written"
        + (f" at {speed:.1f} tokens/s" if speed is not None else "")
        + f", the first after {generation.first_token_s * 1e3:.0f} ms",
        highlight=False,
    )
    console.print(
        f"{len(loaded.experts)} layers of {experts.num_experts} experts in {loaded.format}, on {_where(experts)}\n"
    )
    served, exactness = stats(loaded.model), accuracy_of_paths(generation)
    table = Table("path", box=None, pad_edge=False)
    for column in ("calls", "tokens a call", "least cosine", "relative error"):
        table.add_column(column, justify="right")
    for path in dict.fromkeys([*exactness, *served]):
        calls, accuracy = served.get(path, PathStats()), exactness.get(path)
        one_size = calls.min_tokens == calls.max_tokens
        table.add_row(
            _PATH_TITLES[path],
            str(calls.calls),
            str(calls.max_tokens) if one_size else f"{calls.min_tokens}-{calls.max_tokens}",
            "" if accuracy is None else f"{accuracy.cosine_min:.7f}",
            "" if accuracy is None else f"{accuracy.rms_rel_error:.2e}",
        )
    console.print(table)
    if exactness:
        console.print("Cosine and relative RMS error: against FP64, in this run's worst layer.", style="dim")


def _where(experts: Experts | PackedExperts) -> str:
    """The GPU's name, or "the CPU"."""
    import torch

    return torch.cuda.get_device_name(experts.device) if experts.device.type == "cuda" else "the CPU"
