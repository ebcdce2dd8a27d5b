"""Programs that are legal in plain autograd, and some that are not, for whoever runs them."""

from tests.programs import (  # noqa: F401 - importing them registers their programs
    checkpoints,
    compiled,
    contexts,
    dtypes,
    functions,
    hooks,
    kinds,
    layouts,
    leaves,
    mutations,
    orders,
    parameters,
    states,
    transforms,
)
from tests.programs.compare import assert_same_bits, is_same
from tests.programs.registry import (
    ILLEGAL,
    PROGRAMS,
    SIDE,
    Entry,
    Evict,
    Program,
    gradients,
    leaf,
    run,
)

__all__ = [
    "ILLEGAL",
    "PROGRAMS",
    "SIDE",
    "Entry",
    "Evict",
    "Program",
    "assert_same_bits",
    "gradients",
    "is_same",
    "leaf",
    "run",
]
