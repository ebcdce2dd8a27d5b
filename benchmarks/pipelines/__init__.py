"""Pipelines planned as a whole, in simulations: `python -m benchmarks.pipelines`."""
