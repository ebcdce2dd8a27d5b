"""The tables of a recorded step, each filled from one source."""
