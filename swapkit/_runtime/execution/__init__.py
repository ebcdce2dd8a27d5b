"""A plan as tables for the shim, its recomputations, and the steps that it fits.

Releases and prefetches are scheduled by event number; operators to recompute are captured where
they run. A release waits for its event even if the transfer is done earlier, because otherwise each
step would take and give memory in another order. Recomputation that a plan puts into a wait runs
when the program reaches that wait, known by the number of events before it and of waits since that
event.
"""
