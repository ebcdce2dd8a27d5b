"""What a plan does is told in a few lines, however many layers there are."""

from __future__ import annotations

from swapkit.ir.plans import Action, Plan, Prediction, Tier
from swapkit.planning.reasons import Reason, Why
from swapkit.planning.search.solving import TradeOff
from swapkit.reporting.plans import (
    SiteReport,
    format_plan,
    format_ranges,
    format_sites,
    format_totals,
    format_trade_offs,
    group_sites,
    report_sites,
)

MIB = 1 << 20


def reason(module: str, action: Action, why: Why, index: int = 0, **values: object) -> Reason:
    given: dict[str, object] = {
        "storage": 0,
        "tier": Tier.HOST,
        "nbytes": MIB,
        "recompute_seconds": None,
        "recompute_price": None,
        "link_price": 1e-9,
        "copy_seconds": 0.0,
        **values,
    }
    return Reason(module=module, index=index, action=action, why=why, **given)  # type: ignore[arg-type]


def eighty_layers() -> list[Reason]:
    """Return a plan's reasons: of each layer one storage is swapped, one made again, one kept."""
    rows = []
    for layer in range(80):
        name = f"model.layers.{layer}.mlp"
        rows += [
            reason(f"{name}.up_proj", Action.SWAP, Why.HIDDEN, nbytes=4 * MIB),
            reason(f"{name}.act", Action.RECOMPUTE, Why.CHEAPER_RECOMPUTE, recompute_seconds=0.001),
            reason(f"{name}.down_proj", Action.KEEP, Why.FITS, 1),
        ]
    return rows


def test_sites_when_eighty_layers_are_equal_then_one_line_each_class() -> None:
    found = report_sites(eighty_layers())
    assert [(each.site, each.action, each.count, each.nbytes) for each in found] == [
        ("model.layers.0-79.mlp.up_proj#0", "swap", 80, 320 * MIB),
        ("model.layers.0-79.mlp.act#0", "recompute", 80, 80 * MIB),
        ("model.layers.0-79.mlp.down_proj#1", "keep", 80, 80 * MIB),
    ]
    assert abs(found[1].exposed_seconds - 0.08) < 1e-9


def test_sites_when_their_fate_differs_then_told_apart() -> None:
    rows = [
        reason("layers.0.up", Action.SWAP, Why.HIDDEN),
        reason("layers.1.up", Action.SWAP, Why.CHEAPER_COPY, exposed_seconds=0.5),
        reason("layers.2.up", Action.SWAP, Why.HIDDEN, tier=Tier.DISK),
        reason("layers.3.up", Action.SWAP, Why.HIDDEN),
        reason("layers.3.up", Action.SWAP, Why.HIDDEN, 1),
        reason("", Action.KEEP, Why.FITS),
    ]
    found = {(each.site, each.action): each for each in report_sites(rows)}
    assert set(found) == {
        ("layers.0,3.up#0", "swap"),
        ("layers.1.up#0", "swap"),
        ("layers.2.up#0", "swap to disk"),
        ("layers.3.up#1", "swap"),
        ("(outside of the model)#0", "keep"),
    }
    assert found["layers.1.up#0", "swap"].exposed_seconds == 0.5


def test_sites_when_two_numbers_vary_then_each_has_its_ranges() -> None:
    rows = [
        SiteReport(site=f"layers.{i}.experts.{j}.up#0", action="swap", why="", nbytes=1)
        for i in range(4)
        for j in range(8)
    ]
    (found,) = group_sites(rows)
    assert (found.site, found.count) == ("layers.0-3.experts.0-7.up#0", 32)


def test_sites_when_the_same_one_comes_again_then_counted() -> None:
    rows = [SiteReport(site="head#0", action="keep", why="", nbytes=3)] * 4
    (found,) = group_sites(rows)
    assert (found.site, found.count, found.nbytes) == ("head#0", 4, 12)


def test_ranges_when_there_are_many_then_the_first_and_the_last() -> None:
    assert format_ranges([3]) == "3"
    assert format_ranges([1, 2, 3, 7, 9, 10]) == "1-3,7,9-10"
    assert format_ranges(range(0, 10, 2)) == "0,2,4,...,8"
    assert format_ranges(range(0, 8, 2)) == "0,2,4,6"


def test_table_when_there_are_more_classes_than_lines_then_the_rest_is_summed() -> None:
    rows = [
        SiteReport(site=f"m{i}#0", action="swap", why="far", nbytes=MIB, exposed_seconds=0.25)
        for i in range(5)
    ]
    lines = format_sites(rows, most=2).splitlines()
    assert len(lines) == 4
    assert lines[1].split() == ["m0#0", "swap", "1", "1.00", "MiB", "250.00", "ms", "far"]
    assert lines[-1].split() == ["3", "other", "classes", "3", "3.00", "MiB", "750.00", "ms"]
    assert format_sites([]) == "the step saves nothing that a plan can move"


def test_totals_when_summed_then_one_line_an_action() -> None:
    assert format_totals(report_sites(eighty_layers())) == [
        "swap: 80 storages, 320.00 MiB",
        "recompute: 80 storages, 80.00 MiB, costs 80.00 ms",
        "keep: 80 storages, 80.00 MiB",
    ]


def test_plan_when_formatted_then_prediction_bound_and_measurement() -> None:
    plan = Plan(
        decisions=(),
        budget_bytes=10 * MIB,
        policy="auto",
        prediction=Prediction(
            seconds=1.01, peak_bytes=9 * MIB, recompute_seconds=0.08, stall_seconds=0.002
        ),
        bound_seconds=1.0,
    )
    lines = format_plan(plan, eighty_layers(), step_seconds=1.0605).splitlines()
    assert lines[:4] == [
        "plan auto, budget 10.00 MiB",
        "predicted: step 1.010 s (2.00 ms waiting for copies, 80.00 ms recomputing), peak 9.00 MiB",
        "lower bound 1.000 s for any plan; this plan is 1.00% above it",
        "measured: step 1.060 s, +5.0% from the prediction",
    ]
    assert len(lines) == 4 + 1 + 4 + 1 + 3
    unknown = Plan(decisions=(), budget_bytes=MIB)
    assert format_plan(unknown, []).splitlines()[0] == "plan of the user, budget 1.00 MiB"


def test_trade_offs_when_formatted_then_compared_to_the_plan_in_force() -> None:
    rows = [
        TradeOff(budget_bytes=n * MIB, seconds=4 / n, bound_seconds=3 / n, peak_bytes=n * MIB)
        for n in (1, 2)
    ]
    plan = Plan(decisions=(), budget_bytes=1, prediction=Prediction(seconds=4.0, peak_bytes=1))
    first, heads, small, large = format_trade_offs(rows, plan=plan).splitlines()
    assert first == "effect of other budgets (predicted)"
    assert "vs. now" in heads
    assert small.split()[:8] == ["1.00", "MiB", "4.000", "s", "+0.0%", "3.000", "s", "1.00"]
    assert large.split()[4] == "-50.0%"
    assert format_trade_offs(rows).splitlines()[2].split()[4] == "+100.0%"
    assert format_trade_offs([]).endswith("unknown")
