"""Benchmarks that measure every figure that the project claims."""
