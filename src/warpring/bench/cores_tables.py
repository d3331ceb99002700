"""Tables and plots of docs/cores.md: a layer and a whole model on CPU cores, beside other libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from warpring.bench.markdown import DASH, NOT_MEASURED, markdown, provenance
from warpring.bench.records import FORMATS, OWN_IMPL, Record, newest

#: What bench/cpu_decode.py measures by default, and the layers of docs/cores.md.
BATCHES = (1, 2, 4, 8, 16)
MODELS = ("qwen3-30b-a3b", "gpt-oss-20b", "h160xi96xe32xk4")
TORCH_FORMS = ("torch_eager", "torch_grouped_mm", "torch_batched_mm")
#: How the names of other libraries' forms begin (bench/cpu_peers.py); other benches measure more, which is not shown.
PEERS = ("llama.cpp_", "onnxruntime_")


def on_latest_cpu(records: Sequence[Record]) -> list[Record]:
    """Those of the CPU that was measured last."""
    cpus = [rec for rec in records if "cpu" in rec and "gpu" not in rec]
    last = max(cpus, key=lambda rec: rec["date"], default={})
    return [rec for rec in cpus if rec["cpu"] == last.get("cpu")]


def cores_layer(model: str) -> Callable[[Sequence[Record]], str]:
    """The table of one layer: a row a form, a column a batch."""

    def table(records: Sequence[Record]) -> str:
        decode = [rec for rec in records if rec["bench"] == "decode" and rec["model"] == model]
        # Larger batches, of which crossovers are made, are not shown.
        decode = [rec for rec in decode if rec["num_tokens"] in BATCHES]
        decode = [rec for rec in decode if rec.get("path") == "cores" or rec["impl"].startswith((*TORCH_FORMS, *PEERS))]
        points = newest(on_latest_cpu(decode), ("format", "num_tokens", "impl", "path"))
        found = {(_form(rec), rec["num_tokens"]): rec for rec in points}
        forms = [*FORMATS, *sorted({_form(rec) for rec in points} - set(FORMATS), key=_place)]
        rows: list[list[str]] = []
        for form in forms:
            first = found.get((form, 1))
            share = NOT_MEASURED if first is None else f"{100 * first['fraction_of_peak']:.0f} %"
            rows.append([form, *(_cell(found, form, batch) for batch in BATCHES), share])
        header = ("", *(f"{batch} token{'s' * (batch > 1)}, µs" for batch in BATCHES), "of the read peak, 1 token")
        return markdown(header, rows) + provenance(points)

    return table


def plotted(records: Sequence[Record], model: str) -> list[Record]:
    """What the plot of a layer shows: our BF16, MXFP8 and MXFP4 beside torch's grouped_mm."""
    ours = [rec for rec in records if rec.get("path") == "cores" and rec["format"] in ("bf16", "mxfp8", "mxfp4")]
    theirs = [rec for rec in records if rec["impl"] == "torch_grouped_mm"]
    return [rec for rec in on_latest_cpu([*ours, *theirs]) if rec["bench"] == "decode" and rec["model"] == model]


def _form(rec: Record) -> str:
    return rec["format"] if rec["impl"] == OWN_IMPL else rec["impl"]


def _place(form: str) -> tuple[bool, str]:
    return form not in TORCH_FORMS, form


def _cell(found: dict[tuple[str, int], Record], form: str, batch: int) -> str:
    rec = found.get((form, batch))
    if rec is None:
        return DASH
    rivals = [found[name, batch]["p50_us"] for name in TORCH_FORMS if (name, batch) in found]
    return f"{rec['p50_us']:.0f}" + (f" ({min(rivals) / rec['p50_us']:.2f} x)" if rivals else "")


def cores_end_to_end(records: Sequence[Record]) -> str:
    """A row a form of the experts: tokens a second, and the factor over transformers' default."""
    whole = [rec for rec in records if rec["bench"] == "end_to_end"]
    points = newest(on_latest_cpu(whole), ("format", "impl", "path"))
    base = next((rec["tokens_per_s"] for rec in points if rec["impl"] == "transformers"), None)
    rows = [
        [
            _form(rec),
            f"{rec['tokens_per_s']:.1f}",
            DASH if base is None else f"{rec['tokens_per_s'] / base:.2f} x",
        ]
        for rec in sorted(points, key=lambda rec: rec["tokens_per_s"])
    ]
    rows = rows or [["transformers", NOT_MEASURED, DASH]]
    return markdown(("experts", "tokens a second", "against transformers' default"), rows) + provenance(points)


CORES_TABLES: dict[str, Callable[[Sequence[Record]], str]] = {
    **{f"cores-{model}": cores_layer(model) for model in MODELS},
    "cores-end-to-end": cores_end_to_end,
}
