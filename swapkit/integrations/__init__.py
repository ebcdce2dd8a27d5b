"""Callbacks and helpers for training frameworks, each in a module that needs its framework."""
