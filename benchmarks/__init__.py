"""Benchmarks: cases, competitors, a runner that times only what is right, and a report."""
