"""Draw docs/img/*.svg from bench/results/decode.jsonl: one plot a format of the standard rows.

PYTHONPATH=src python bench/plots.py [--output FOLDER]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from warpring.bench.plots import plot_decode
from warpring.bench.records import load
from warpring.bench.tables import DECODE_FORMATS, DECODE_MODEL, decode_records

ROOT = Path(__file__).parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results" / "decode.jsonl")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "img")
    args = parser.parse_args()
    records = load(args.results)
    for format in DECODE_FORMATS:
        points = decode_records(records, (format,))
        target = args.output / f"decode-{DECODE_MODEL}-{format}.svg"
        if points:
            plot_decode(list(points.values()), target)
        print(f"{target}: {f'{len(points)} points' if points else 'no records, not drawn'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
