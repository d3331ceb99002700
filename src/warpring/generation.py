"""The engine of `warpring generate`: load a model, give its experts to warpring, stream text, measure what happened.

A checkpoint is a directory: one of transformers, or one that `warpring quantize` wrote.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from warpring.errors import ArgumentError, CheckpointError
from warpring.experts import Experts
from warpring.integrations.transformers import install, is_quantized_checkpoint, load_quantized
from warpring.layout import PackedExperts
from warpring.verify import Accuracy, accuracy, worst

#: What the experts of a BF16 checkpoint are quantised to unless a format is named.
DEFAULT_FORMAT = "mxfp8"
#: Decode calls of each layer that are kept to measure accuracy on.
MAX_RECORDED_CALLS = 64

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Loaded:
    """A model whose routed experts run through warpring.

    Attributes:
        experts: the experts that serve the model, by module name: `PackedExperts` for path "tile".
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    experts: Mapping[str, Experts] | Mapping[str, PackedExperts]

    @property
    def format(self) -> str:
        return next(iter(self.experts.values())).format


@dataclass(frozen=True)
class Calls:
    """Decode calls of one layer's experts, one after the other.

    Attributes:
        x: [num_calls, hidden], what came into the experts.
        topk_idx, topk_weights: [num_calls, topk], the router's choice.
    """

    experts: Experts | PackedExperts
    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(frozen=True)
class Generation:
    """One run of `generate`.

    Attributes:
        text: what was written, without the prompt.
        prompt_tokens, new_tokens: tokens read and written.
        first_token_s: seconds until the first new token was there (prefill, packing, first calls).
        decode_s: seconds of the tokens after it.
        calls: recorded decode calls by module name; empty where fewer than two tokens were written.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    first_token_s: float
    decode_s: float
    calls: Mapping[str, Calls]

    @property
    def tokens_per_s(self) -> float | None:
        """Decode speed; None with fewer than two new tokens."""
        return (self.new_tokens - 1) / self.decode_s if self.new_tokens > 1 else None


def load(
    directory: Path,
    *,
    format: str | None = None,
    path: str = "auto",
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Loaded:
    """Load a checkpoint directory in BF16 and install warpring's experts.

    Args:
        directory: a checkpoint of transformers, or one of `warpring quantize`.
        format: number format of the experts. None: as stored if the checkpoint is quantised, else `DEFAULT_FORMAT`.
        path: see `warpring.integrations.transformers.install`; experts for "tile" are packed in its layout.
        device: where the model runs.
        progress: called with (layers packed, layers in all) after each layer of experts.

    Raises:
        ArgumentError: no checkpoint there; an unknown path or format.
        UnsupportedError: a model without experts that warpring can serve.
        CheckpointError: its files are damaged or incomplete.
    """
    if not (directory / "config.json").is_file():
        raise ArgumentError(
            f"generate: {directory} must be a checkpoint directory; found no config.json in it. "
            "Name a directory that holds config.json, safetensors and a tokenizer."
        )
    tokenizer = _from_files(AutoTokenizer, directory)
    # Without its files, transformers makes an empty tokenizer that turns every text into nothing.
    if not tokenizer("a", add_special_tokens=False).input_ids:
        raise CheckpointError(f"generate: {directory} has no tokenizer that knows any text. Copy its files there.")
    options: dict[str, Any] = {"path": path, "progress": progress, "layout": "tile" if path == "tile" else "rows"}
    experts: Any
    if is_quantized_checkpoint(directory):
        model, experts = load_quantized(directory, device=device, format=format, **options)
    else:
        model = _complete_model(directory).to(device)
        experts = install(model, format=format or DEFAULT_FORMAT, free=True, **options)
    return Loaded(model.eval(), tokenizer, experts)


def generate(
    loaded: Loaded, prompt: str, *, max_new_tokens: int, temperature: float, seed: int, emit: Callable[[str], None]
) -> Generation:
    """Continue `prompt` with transformers' own `generate`, handing each piece of text to `emit` as it comes.

    Args:
        prompt: text; empty starts from the beginning of a document.
        max_new_tokens: tokens to write at most; the model may end its text earlier.
        temperature: 0 takes the likeliest token each time.
        seed: of torch's default generators, which sampling draws from.

    Raises:
        ArgumentError: a number out of range, or more tokens than the model's context holds.
    """
    model = loaded.model
    prompt_ids = _encode(loaded, prompt)
    _check(model, len(prompt_ids), max_new_tokens, temperature)
    streamer = _Streamer(loaded.tokenizer, emit)
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature}
    input_ids = torch.tensor([prompt_ids], device=model.device)
    torch.manual_seed(seed)
    with _Recorder(loaded) as recorder, torch.inference_mode():
        started = time.perf_counter()
        generate: Any = model.generate
        generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_new_tokens,
            streamer=streamer,
            **sampling,
        )
    return Generation(
        text=streamer.text,
        prompt_tokens=len(prompt_ids),
        new_tokens=len(streamer.times),
        first_token_s=streamer.times[0] - started,
        decode_s=streamer.times[-1] - streamer.times[0],
        calls=recorder.calls(),
    )


def accuracy_of_paths(generation: Generation) -> dict[str, Accuracy]:
    """Accuracy of decode and of the classical path on what reached the experts, against FP64, in the worst layer.

    Decode is path "tile" where the experts are packed for it, else "warp" on a GPU and "cores" on a CPU. Empty where no
    decode call was recorded.
    """
    if not generation.calls:
        return {}
    experts = next(iter(generation.calls.values())).experts
    decode = "tile" if isinstance(experts, PackedExperts) else "warp" if experts.device.type == "cuda" else "cores"
    return {
        path: worst(
            [accuracy(c.x.bfloat16(), c.experts, c.topk_idx, c.topk_weights, path) for c in generation.calls.values()]
        )
        for path in (decode, "classical")
    }


def _check(model: PreTrainedModel, num_prompt: int, max_new_tokens: int, temperature: float) -> None:
    if max_new_tokens < 1:
        raise ArgumentError(f"generate: max_new_tokens must be at least 1; got {max_new_tokens}.")
    if not 0 <= temperature < float("inf"):
        raise ArgumentError(f"generate: temperature must be a finite number >= 0; got {temperature}.")
    context = getattr(_text_config(model), "max_position_embeddings", None)
    if isinstance(context, int) and num_prompt + max_new_tokens > context:
        raise ArgumentError(
            f"generate: prompt and new tokens must fit the model's context of {context} tokens; got {num_prompt} + "
            f"{max_new_tokens}. Shorten the prompt, or set max_new_tokens to {max(0, context - num_prompt)} at most."
        )


def _encode(loaded: Loaded, prompt: str) -> list[int]:
    encode: Any = loaded.tokenizer
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"generate: prompt must be valid text; {error}.") from error
    ids: list[int] = encode(prompt).input_ids
    if ids:
        return ids
    start = loaded.tokenizer.bos_token_id
    start = _text_config(loaded.model).bos_token_id if start is None else start
    if not isinstance(start, int):
        raise ArgumentError("generate: prompt must not be empty, since this model has no token to begin with.")
    return [start]


def _text_config(model: PreTrainedModel) -> Any:
    config: Any = model.config
    return config.get_text_config()


def _complete_model(directory: Path) -> Any:
    """The model in BF16; transformers itself would fill a missing or misshapen weight with random numbers."""
    model, found = _from_files(
        AutoModelForCausalLM, directory, dtype=torch.bfloat16, use_safetensors=True, output_loading_info=True
    )
    lacking = sorted({*found["missing_keys"], *(entry[0] for entry in found["mismatched_keys"])})
    if lacking:
        raise CheckpointError(
            f"generate: {directory} must hold every weight of {type(model).__name__} in the shape that config.json "
            f"gives; {len(lacking)} are missing or misshapen, {lacking[0]} first. Download it again."
        )
    return model


def _from_files(factory: Any, directory: Path, **options: Any) -> Any:
    """`factory.from_pretrained` without the network; its many kinds of complaint as one of ours."""
    try:
        return factory.from_pretrained(directory, local_files_only=True, **options)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"generate: {directory}: transformers cannot load it: {error}") from error


class _Streamer(BaseStreamer):
    """Text and time of each token as `generate` finds it. The first `put` brings the prompt."""

    def __init__(self, tokenizer: Any, emit: Callable[[str], None]) -> None:
        self.text = ""
        self.times: list[float] = []
        self._ids: list[int] = []
        self._prompt_seen = False
        self._decode: Callable[..., str] = tokenizer.decode
        self._emit = emit

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, [1, num_tokens], or the next token, [1]."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self._ids.append(int(value))
        self.times.append(time.perf_counter())
        self._flush(final=False)

    def end(self) -> None:
        """No more tokens: give out what was held back."""
        self._flush(final=True)

    def _flush(self, *, final: bool) -> None:
        # A token may end inside a character: its bytes are held back until the rest comes.
        text = self._decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if not final:
            text = text.rstrip(_REPLACEMENT)
        piece, self.text = text[len(self.text) :], text
        if piece:
            self._emit(piece)


class _Recorder:
    """Keeps what came into each layer's experts in its first decode calls (one token each)."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._inputs: dict[str, list[tuple[torch.Tensor, ...]]] = {name: [] for name in loaded.experts}
        self._hooks = ExitStack()

    def __enter__(self) -> _Recorder:
        for name, inputs in self._inputs.items():
            module = self._loaded.model.get_submodule(name)
            self._hooks.callback(module.register_forward_pre_hook(self._keep(inputs)).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    @staticmethod
    def _keep(inputs: list[tuple[torch.Tensor, ...]]) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if len(inputs) < MAX_RECORDED_CALLS and args[0].shape[0] == 1:
                inputs.append(tuple(arg.clone() for arg in args[:3]))

        return hook

    def calls(self) -> dict[str, Calls]:
        """By module name; layers that saw no decode call are left out."""
        return {
            name: Calls(self._loaded.experts[name], *(torch.cat(parts) for parts in zip(*inputs, strict=True)))
            for name, inputs in self._inputs.items()
            if inputs
        }
