"""`swapkit replay`: a trace of requests through several allocators, and their figures."""
