"""Readable texts from plain values."""
