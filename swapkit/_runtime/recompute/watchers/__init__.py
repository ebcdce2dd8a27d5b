"""Dispatch modes that watch a region run and run again: results to keep, values to compare."""
