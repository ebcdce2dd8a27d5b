"""Simulation of a training step under a plan."""
