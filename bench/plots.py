"""Draw docs/img/*.svg: a plot a format of the standard rows and the ablation of our own paths (every *.jsonl beside
decode.jsonl that has their records), one a layer beside peers (peers.jsonl), one a layer on CPU cores
(decode_cpu.jsonl), a whole model against its context, and expert-parallel layers with their ablation
(expert_parallel.jsonl).

PYTHONPATH=src python bench/plots.py [--output FOLDER]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from warpring.bench import ep_plots
from warpring.bench.ablation import PATHS, plot_ablation
from warpring.bench.compared import PEER_LAYERS
from warpring.bench.cores_tables import MODELS, plotted
from warpring.bench.end_to_end_plot import factors, plot_end_to_end
from warpring.bench.ep_points import BAR_MODELS
from warpring.bench.plots import plot_decode
from warpring.bench.records import Record, load
from warpring.bench.tables import DECODE_FORMATS, DECODE_MODEL, decode_records, on_latest_gpu

ROOT = Path(__file__).parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results" / "decode.jsonl")
    parser.add_argument("--peers", type=Path, default=ROOT / "bench" / "results" / "peers.jsonl")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "img")
    args = parser.parse_args()
    records = [rec for path in sorted(args.results.parent.glob("*.jsonl")) for rec in load(path)]
    plots = {f"decode-{DECODE_MODEL}-{f}": list(decode_records(records, (f,)).values()) for f in DECODE_FORMATS}
    beside = load(args.peers)
    for layer in PEER_LAYERS:
        plots["peers-{}-{}".format(*layer)] = [rec for rec in beside if (rec["model"], rec["format"]) == layer]
    on_cores = load(args.results.parent / "decode_cpu.jsonl")
    plots |= {f"decode-cpu-{model}": plotted(on_cores, model) for model in MODELS}
    for name, points in plots.items():
        target = args.output / f"{name}.svg"
        if points:
            plot_decode(points, target)
        print(f"{target}: {f'{len(points)} points' if points else 'no records, not drawn'}")
    own = ablation_records(records)
    target = args.output / f"ablation-{DECODE_MODEL}.svg"
    if own:
        plot_ablation(own, target)
    print(f"{target}: {f'{len(own)} points' if own else 'no records, not drawn'}")
    target, buckets = args.output / f"end-to-end-{DECODE_MODEL}.svg", factors(records, ("classical",))
    if buckets:
        plot_end_to_end(records, target)
    print(f"{target}: {f'{len(buckets)} curves' if buckets else 'no records, not drawn'}")
    draw_expert_parallel(load(args.results.parent / "expert_parallel.jsonl"), args.output)
    return 0


def draw_expert_parallel(records: list[Record], output: Path) -> None:
    """A plot a model of the bar, and one of its knobs."""
    for model in BAR_MODELS:
        target, curves = output / f"ep-{model}.svg", ep_plots.plotted(records, model)
        if curves:
            ep_plots.plot_tokens(records, model, target)
        print(f"{target}: {f'{len(curves)} curves' if curves else 'no records, not drawn'}")
    target, turned = output / "ep-ablation.svg", ep_plots.turned(records)
    if turned:
        ep_plots.plot_knobs(records, target)
    print(f"{target}: {f'{len(turned)} knobs' if turned else 'no records, not drawn'}")


def ablation_records(records: list[Record]) -> list[Record]:
    """Uniform decode records of DECODE_MODEL on the GPU that was measured last, at every batch."""
    ours = on_latest_gpu(
        [
            rec
            for rec in records
            if rec["bench"] == "decode" and "gpu" in rec and rec["model"] == DECODE_MODEL
            and rec["routing"] == "uniform" and rec["format"] in DECODE_FORMATS and rec.get("path") in PATHS
        ]
    )  # fmt: skip
    return sorted(ours, key=lambda rec: DECODE_FORMATS.index(rec["format"]))


if __name__ == "__main__":
    sys.exit(main())
