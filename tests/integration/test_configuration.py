"""`configure` does to a Llama what the examples of the original's description say."""

from __future__ import annotations

import logging
import re
import statistics
from typing import TYPE_CHECKING, Any

import pytest

import swapkit
from tests.integration.configured import (
    ATTENTION_BYTES,
    HIDDEN_BYTES,
    INNER_BYTES,
    STEPS,
    TOKENS,
    Sent,
    assert_same_training,
    count_calls,
    count_recomputed,
    get_loss,
    make_llama,
    read_examples,
    trace_moves,
    train,
    train_llama_plainly,
    watch_sent,
)
from tests.support import installed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from swapkit._runtime.saved.device import PlannedMove

pytest.importorskip("transformers", reason="transformers is not installed")

EXAMPLES = read_examples()
FORTY_EIGHT = 48
SPREAD: dict[str, Any] = {
    "pipeline_stage": 5,
    "pp_interleave_num": 2,
    "offset": [[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]],
}
OFF = {"swap": False}
LOGGER = "swapkit.settings"


def swap(**config: Any) -> dict[str, Any]:
    return {"swap_config": {"swap": True, **config}}


def op_swap(name: str, layers: Any, prefetch: int = 2) -> dict[str, Any]:
    return {"op_name": name, "backward_prefetch": prefetch, "layers": layers}


def configured(document: Any, layers: int = 4, **inputs: Any) -> Any:
    model = make_llama(layers)
    swapkit.configure(model, document, **inputs)
    return model


def sent_by(document: Any) -> list[Sent]:
    """Train a configured Llama, which must give the bits of a plain one; return what moved."""
    model = configured(document)
    with watch_sent() as sent:
        assert_same_training(train(model), train_llama_plainly())
    return sent


def total(sent: Iterable[Sent], prefix: str = "") -> int:
    """Return the bytes that the modules with this prefix sent in one step."""
    return sum(one.nbytes for one in sent if one.name.startswith(prefix)) // STEPS


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == LOGGER and r.levelname == "INFO"]


# ---- the examples -------------------------------------------------------------------------------


@pytest.mark.promise("B1")
@pytest.mark.promise("B2")
@pytest.mark.promise("B4")
@pytest.mark.promise("B5")
def test_example_when_forty_eight_layers_then_the_layers_and_operators_that_it_says(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    model = configured(EXAMPLES["Recompute"].document, FORTY_EIGHT, **SPREAD)
    lines = logged(caplog)
    formative = re.compile(r"Formative (layer|select|select_comm)_recompute:")
    assert [line for line in lines if formative.match(line)] == EXAMPLES["Recompute"].lines
    full = {0, 1, 4, 24}
    assert [int(line.split()[-1]) for line in lines if "full recompute at" in line] == sorted(full)

    expected = train_llama_plainly(FORTY_EIGHT)
    with count_calls(model) as calls, count_recomputed() as recomputed:
        assert_same_training(train(model), expected)
    for layer in range(FORTY_EIGHT):
        for part in ("self_attn", "mlp", "mlp.gate_proj"):
            often = 2 if layer in full else 1
            assert calls[f"model.layers.{layer}.{part}"] == often * STEPS, (layer, part)
    # Outside of these layers every silu and mul; and of two layers the first product.
    others = FORTY_EIGHT - len(full)
    assert recomputed == [STEPS * (len(full) + 2 * others + len({25, 29}))]
    chosen = {
        row.where: row.operators for row in swapkit.choices(model) if row.operators is not None
    }
    wanted = [f"model.layers.{i}.mlp.{op}" for i in range(FORTY_EIGHT) if i not in full
              for op in ("mul", "act_fn.silu")]  # fmt: skip
    products = [f"model.layers.{i}.mlp.gate_proj.matmul" for i in (25, 29)]
    assert chosen == dict.fromkeys([*wanted, *products], STEPS)


@pytest.mark.promise("B7")
@pytest.mark.promise("B8")
def test_example_when_swap_is_on_alone_then_attention_operators_of_all_layers_move(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    sent = sent_by(EXAMPLES["Swap 1"].document)
    assert [line for line in logged(caplog) if "flash_attention," in line] == EXAMPLES[
        "Swap 1"
    ].lines
    assert {one.prefetch for one in sent} == {10}
    for layer in range(4):
        assert total(sent, f"model.layers.{layer}.self_attn") == ATTENTION_BYTES
    assert total(sent) == 4 * ATTENTION_BYTES


@pytest.mark.promise("B9")
@pytest.mark.promise("B11")
def test_example_when_layers_are_swapped_then_only_what_they_save_moves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    sent = sent_by(EXAMPLES["Swap 2"].document)
    assert [line for line in logged(caplog) if "layer swap at" in line] == EXAMPLES["Swap 2"].lines
    assert {one.prefetch for one in sent} == {20}
    first, last = (total(sent, f"model.layers.{layer}.") for layer in (0, 3))
    assert total(sent) == first + last
    assert min(first, last) > 4 * INNER_BYTES  # the gate, its silu, and what they are multiplied to


@pytest.mark.promise("B10")
@pytest.mark.promise("B16")
def test_example_when_parts_are_swapped_then_they_move_with_their_own_distances(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    sent = sent_by(EXAMPLES["Swap 3"].document)
    assert [line for line in logged(caplog) if "op_swap at" in line] == EXAMPLES["Swap 3"].lines
    found = {(".".join(one.name.split(".")[2:4]), one.prefetch) for one in sent}
    attentions = {(f"{layer}.self_attn", 20) for layer in range(3)}
    assert found == attentions | {("3.self_attn", 10), ("1.mlp", 15), ("2.mlp", 15)}


@pytest.mark.promise("B13")
@pytest.mark.promise("B14")
def test_example_when_mixed_then_recomputed_where_it_says_and_swapped_elsewhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    model = configured(EXAMPLES["Swap 4"].document)
    lines = [line for line in logged(caplog) if " at layer " in line]
    assert lines == EXAMPLES["Swap 4"].lines
    with count_calls(model) as calls, watch_sent() as sent:
        assert_same_training(train(model), train_llama_plainly())
    again = {path for path, count in calls.items() if count == 2 * STEPS}
    assert again == {
        f"model.layers.{layer}.mlp.{part}"
        for layer in (0, 3)
        for part in ("gate_proj", "act_fn", "up_proj", "down_proj")
    }
    assert {one.name.split(".")[2] for one in sent if ".mlp" in one.name} == {"1", "2"}
    assert {one.name.split(".")[2] for one in sent if ".self_attn" in one.name} == set("0123")


# ---- recompute and swap together ----------------------------------------------------------------

FLASH, SILU, MUL = (
    r"attention\.flash_attention",
    r"feed_forward\.w1\.activation\.silu",
    r"feed_forward\.mul",
)


@pytest.mark.promise("B13")
@pytest.mark.parametrize(
    ("swapped", "recomputed", "nbytes"),
    [
        (FLASH, FLASH, ATTENTION_BYTES),
        (MUL, MUL, INNER_BYTES),
        (MUL, "feed_forward", INNER_BYTES),  # around it
        ("feed_forward", "feed_forward", HIDDEN_BYTES + 4 * INNER_BYTES),
        (SILU, MUL, INNER_BYTES),  # whose operand it is
        (MUL, r"feed_forward\.w2\.matmul", INNER_BYTES),
        (MUL, r"feed_forward\.w2", INNER_BYTES),
        (r"feed_forward\.w1\.matmul", r"feed_forward\.w1\.activation", INNER_BYTES),
    ],
)
def test_swap_when_it_or_its_consumer_is_recomputed_then_it_moves_nothing(
    swapped: str, recomputed: str, nbytes: int
) -> None:
    document = swap(op_swap=[op_swap(swapped, [1, 2])])
    sent = sent_by(document)
    assert [total(sent, f"model.layers.{layer}.") for layer in range(4)] == [0, nbytes, nbytes, 0]
    sent = sent_by({**document, "recompute_config": {"select_recompute": {recomputed: [1]}}})
    assert [total(sent, f"model.layers.{layer}.") for layer in range(4)] == [0, 0, nbytes, 0]


@pytest.mark.promise("B13")
def test_layer_swap_when_a_part_is_recomputed_then_neither_its_inside_nor_its_input_moves() -> None:
    document = swap(layer_swap=[{"backward_prefetch": 2, "layers": [1]}])
    whole = total(sent_by(document))
    sent = sent_by({**document, "recompute_config": {"select_recompute": {"feed_forward": [1]}}})
    assert total(sent) == whole - HIDDEN_BYTES - 4 * INNER_BYTES
    sent = sent_by({**document, "recompute_config": {"recompute": [1]}})
    assert sent == []


@pytest.mark.promise("B13")
def test_module_swap_when_an_operator_inside_is_recomputed_then_its_operands_stay() -> None:
    document = swap(op_swap=[op_swap("attention", [1])])
    whole = total(sent_by(document))
    sent = sent_by({**document, "recompute_config": {"select_recompute": {FLASH: [1]}}})
    mask = 4 * TOKENS[0] * TOKENS[1] ** 2
    # Neither what it makes nor query, key, value and mask.
    assert total(sent) == whole - ATTENTION_BYTES - 3 * HIDDEN_BYTES - mask


@pytest.mark.promise("B13")
def test_swap_when_recompute_overrules_it_then_warned_and_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    document = swap(op_swap=[op_swap(r"feed_forward\.w[13]", [1])])
    model = configured(
        {**document, "recompute_config": {"select_recompute": {"feed_forward": [1]}}}
    )
    (warning,) = [r.getMessage() for r in caplog.records if "no effect" in r.getMessage()]
    where = ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"]
    reasons = [f"{path} (model.layers.1.mlp is recomputed)" for path in where]
    assert warning == f"no effect: {', '.join(reasons)}"
    assert [row.where for row in swapkit.choices(model) if not row.holds] == where


# ---- distances ----------------------------------------------------------------------------------


def ahead(moves: Iterable[PlannedMove], kind: str) -> list[int]:
    return [move.operator - move.saved_by for move in moves if move.kind == kind]


@pytest.mark.promise("B8")
@pytest.mark.parametrize(
    "document",
    [
        lambda n: swap(default_prefetch=n),
        lambda n: swap(op_swap=[op_swap(MUL, True, n)]),
        lambda n: swap(op_swap=[op_swap("feed_forward", True, n)]),
        lambda n: swap(layer_swap=[{"backward_prefetch": n, "layers": [0, 1, 2]}]),
    ],
    ids=["default", "operator", "module", "layer"],
)
def test_prefetch_when_given_then_release_thrice_as_late_and_copy_back_so_much_ahead(
    document: Any,
) -> None:
    for distance in (1, 3, 9):
        model = configured(document(distance), 12)
        get_loss(model).backward()  # from the first step it learns the order of operators
        with trace_moves() as moves:
            loss = get_loss(model)
            forward = list(moves)
            loss.backward()
        released = ahead(forward, "release")
        # Later what the model has in variables till then, such as residuals.
        assert 3 * distance == min(released) == statistics.mode(released)
        assert set(ahead(moves[len(forward) :], "prefetch")) == {distance}


@pytest.mark.promise("B8")
@pytest.mark.promise("B11")
def test_default_prefetch_when_parts_are_named_then_unused() -> None:
    sent = sent_by(swap(default_prefetch=7, op_swap=[op_swap(MUL, [2], 3)]))
    assert {(one.name, one.prefetch) for one in sent} == {("model.layers.2.mlp.down_proj", 3)}


# ---- what is not asked for ----------------------------------------------------------------------


@pytest.mark.promise("B7")
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"swap": False, "default_prefetch": 10},
        {"swap": False, "layer_swap": [{"backward_prefetch": 2, "layers": True}]},
        {"swap": False, "op_swap": [op_swap("attention", True)]},
        {"swap": True, "op_swap": []},
        {"swap": True, "layer_swap": []},
        {"swap": True, "layer_swap": [{"backward_prefetch": 2, "layers": False}]},
    ],
)
def test_swap_when_off_or_of_nothing_then_inert(config: dict[str, Any]) -> None:
    model = configured({"swap_config": config})
    assert len(swapkit.choices(model)) == 0
    assert sent_by({"swap_config": config}) == []


# ---- memory -------------------------------------------------------------------------------------


@pytest.mark.promise("B2")
def test_memory_when_silu_and_mul_are_recomputed_then_less_by_what_they_make() -> None:
    with installed():
        held = []
        for chosen in (False, True):
            model = configured({"recompute_config": {"select_recompute": chosen}})
            get_loss(model).backward()  # what is made once is there
            model.zero_grad()
            before = swapkit.memory_stats()["allocated_bytes.all.current"]
            loss = get_loss(model)
            held.append(swapkit.memory_stats()["allocated_bytes.all.current"] - before)
            del loss, model
    assert held[0] - held[1] == 4 * 2 * INNER_BYTES
