"""Benchmarks: speed is measured here and never in a test."""
