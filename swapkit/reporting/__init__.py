"""Texts for people, made from plain values."""
