"""Weights that leave the device are saved, copied and loaded as others are, one at a time."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import swapkit
from tests.integration.test_weights import SEALED, WIDTH, digest_of, send_away

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LIMIT = "1MiB"


pytestmark = pytest.mark.usefixtures("served")


class Model(nn.Module):
    """Layers, a weight that two of them share, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.table = nn.Buffer(torch.randn(WIDTH, WIDTH))


def written(what: object, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(what, file, **options)
    return file.getvalue()


def read_back(data: bytes) -> list[object]:
    """Return the bits of what was saved, with as little in the pool as possible."""
    found = torch.load(io.BytesIO(data), weights_only=False)
    return [digest_of(each) for each in found.values()]


def safetensors(model: Model, folder: Path) -> list[object]:
    library = pytest.importorskip("safetensors.torch")
    library.save_model(model, folder / "whole")
    with pytest.raises(RuntimeError, match=r"share memory.*first\.weight"):
        library.save_file(model.state_dict(), folder / "shared")
    return [(folder / "whole").read_bytes()]


def in_shards(model: Model, folder: Path) -> list[object]:
    library = pytest.importorskip("huggingface_hub")
    library.save_torch_model(model, folder, max_shard_size=300_000)
    return [each.read_bytes() for each in sorted(folder.iterdir())]


def checkpointed(model: Model, folder: Path) -> list[object]:
    library = pytest.importorskip("torch.distributed.checkpoint")
    library.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    state = {"model": model.state_dict()}
    library.load(state, checkpoint_id=folder, no_dist=True)
    return [digest_of(each) for each in model.parameters()]


def mapped(model: Model, folder: Path, **options: bool) -> list[object]:
    torch.save(model.state_dict(), folder / "file")
    with torch.no_grad():
        model.table.zero_()
    model.load_state_dict(torch.load(folder / "file", mmap=True), **options)
    return [digest_of(each) for each in model.state_dict().values()]


def views(model: Model, _: Path) -> list[object]:
    weight = model.get_parameter("layers.1.weight")
    return [written([model.table[3:5], model.table.t(), weight.detach()[4], weight])]


SAVERS: dict[str, Callable[[Model, Path], list[object]]] = {
    "state": lambda model, _: [written(model.state_dict())],
    "module": lambda model, _: [written(model)],
    "views": views,
    "legacy": lambda model, _: read_back(
        written(model.state_dict(), _use_new_zipfile_serialization=False)
    ),
    "pickle": lambda model, _: [digest_of(pickle.loads(pickle.dumps(model.last.weight)))],
    "copies": lambda model, _: [digest_of(copy.deepcopy(model.table)), copy.copy(model).table],
    "safetensors": safetensors,
    "shards": in_shards,
    "checkpoint": checkpointed,
    "mapped": mapped,
    "assigned": lambda model, folder: mapped(model, folder, assign=True),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("saver", SAVERS)
def test_weights_when_saved_or_copied_while_away_then_the_bytes_are_those_of_plain_torch(
    saver: str, tmp_path: Path
) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "held").mkdir()
    expected = [digest_of(each) for each in SAVERS[saver](Model(), tmp_path / "plain")]
    gc.collect()
    model = Model()
    with swapkit.budget(LIMIT, model, policy="rescue") as session:
        send_away()
        with pytest.raises(RuntimeError, match=SEALED):
            model.first.weight.data_ptr()
        found = [digest_of(each) for each in SAVERS[saver](model, tmp_path / "held")]
        assert found == expected
        assert session.stats.peak_bytes <= 1 << 20
    for owner in (torch.Tensor, torch.UntypedStorage):
        assert "data_ptr" not in vars(owner)
