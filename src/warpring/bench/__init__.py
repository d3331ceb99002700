"""Benchmarks: shapes, timing, and the records (JSONL) that every figure in the docs is generated from."""
