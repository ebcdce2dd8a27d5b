"""A model is copied and pickled inside of a session as it is outside."""

from __future__ import annotations

import copy
import gc
import io
import pickle

import pytest
import torch

import swapkit
from tests.support.sessions import make_training, train_plainly

pytestmark = pytest.mark.usefixtures("installation")


def assert_equal(one: torch.nn.Module, other: torch.nn.Module) -> None:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(mine, its) for mine, its in pairs)


@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_model_when_copied_in_every_stage_then_the_copy_trains_and_counts_as_another(
    policy: str,
) -> None:
    plain = train_plainly(make_training, 8)
    training = make_training()
    limit_bytes = plain.budget(0.9)
    stages = set()
    with swapkit.budget(limit_bytes, training.model, training.optimizer, policy=policy) as session:
        for _ in range(8):
            training.step()
            stages.add(session.stage)
            again = copy.deepcopy(training.model)
            loaded = pickle.loads(pickle.dumps(training.model))
            assert_equal(again, training.model)
            assert_equal(loaded, training.model)
            torch.save(training.model, io.BytesIO())
            del again, loaded
            gc.collect()  # a model with choices is in a cycle, whose memory the next step would see
    assert stages >= {"search", "stable"}
    assert training.outcome() == plain.outcome
