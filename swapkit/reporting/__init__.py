"""Texts, records of runs and pages, from plain values."""
