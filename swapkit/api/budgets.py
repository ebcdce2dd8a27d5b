"""`budget`: training inside a memory budget."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swapkit._runtime.allocators.installation import choose_device, ensure_installation
from swapkit._runtime.allocators.installed_pool import Installation
from swapkit._runtime.allocators.limits import AUTO, find_free_limit
from swapkit._runtime.control.rank_alarm import ALL, ONE
from swapkit._runtime.control.resharding import AUTO as AUTO_RESHARD
from swapkit._runtime.control.resharding import USER
from swapkit._runtime.control.session_config import RESCUE, SessionConfig
from swapkit._runtime.model.ranks import share_of_node
from swapkit._runtime.model.tracker import gather_parts
from swapkit._runtime.optimizer.wrapped import list_optimizers
from swapkit._runtime.saved.device import Limits
from swapkit._runtime.session.session import Session
from swapkit.api.path_arguments import read_argument
from swapkit.config.environment import MIN_SWAP_BYTES, CpuAffinity, read_environment
from swapkit.errors import InvalidArgument, Unsupported
from swapkit.ir.checks import check_plan
from swapkit.ir.codec import inside, read_planned
from swapkit.ir.plans import Plan
from swapkit.ir.traces import Trace
from swapkit.planning.planner import POLICIES as PLANNED
from swapkit.planning.planner import Policy, check_policy
from swapkit.units import parse_bytes, show

if TYPE_CHECKING:
    import torch

POLICIES = (*PLANNED, RESCUE)
# On a device that uses host memory, a host copy frees no memory. With a disk, the host only stages
# transfers: at most this share of the budget, but at least this many bytes.
STAGING_SHARE = 1 / 8
STAGING_BYTES = 64 << 20
_PLAN = "the path of a file that session.save_plan() or swapkit.ir.codec.write_planned() wrote"


def budget(  # noqa: PLR0913 - keyword arguments of the main interface
    limit: int | float | str,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    policy: str | Policy = "auto",
    host_limit: int | float | str | None = None,
    disk: str | os.PathLike[str] | None = None,
    disk_limit: int | float | str | None = None,
    device: str | torch.device | None = None,
    min_swap_bytes: int | str | None = None,
    profile_steps: int = 2,
    search_steps: int = 4,
    plan: str | os.PathLike[str] | Plan | None = None,
    bind_cpus: bool | None = None,
    on_step: Callable[[Session], object] | None = None,
    on_oom: str = ONE,
    reshard: str = USER,
) -> Session:
    """Train inside a memory budget.

    Inside the `with` block the pool never reserves more than `limit` bytes of the device. Saved
    tensors are copied to the host when memory fills up, their device memory is freed when an
    allocation would not fit, and they are copied back when backward needs them. Results are bitwise
    identical to training without a budget. `budget` installs the pool if `swapkit.install()` was
    not called. Tensors created before that are outside the budget, so call `swapkit.install()`
    before you build the model.

    The budget holds from the first step. Unless the policy is `"rescue"`, the session records the
    second step and makes plans from it. The next steps try the plans, and the session follows the
    fastest one that stays within the budget. A plan keeps, swaps or recomputes each saved tensor. A
    later step with other input shapes or other operators gets its own plan.

    As a decorator of a function, each call runs in its own session. A session ends with the block,
    with `session.close()`, or when nothing refers to it any more, so a notebook cell with
    `session = swapkit.budget(...).__enter__()` can run again. `swapkit.sessions()` returns the
    active sessions.

    Budgets nest: the tightest limit holds, and each session keeps its own statistics. The block
    covers tensors that its own thread saves for backward; backward may run on any thread. A forked
    child, such as a `DataLoader` worker, has its own pool without a budget: it works for the host.

    Args:
        limit: bytes, `"10GiB"`, `"80%"` or a fraction of the device's memory (on the CPU: of the
            control group's limit or of the physical memory; the ranks of the machine have equal
            parts of it). `"auto"`: what is free on the device when `budget` is called, with what
            swapkit's pool has reserved already, less a reserve for memory outside of the pool: 4 %
            of a GPU's or NPU's memory, at least 512 MiB; on the CPU, where host copies take the
            same memory, 10 %, at least 256 MiB. Processes that torchrun started on one device get
            equal shares. `session.limit_bytes` is the result.
        model: provides module names for reports and errors; a step begins with its first forward.
            Or a list of parts that are called one by one, such as torchtitan's, or a rank's chunks
            of a pipeline: their modules are named by the part's number, as `0.layers.1`.
        optimizer: a step ends at its `step()`. An optimizer, a wrapper of one (such as
            accelerate's), or a list or container (such as torchtitan's): a step then ends when each
            has stepped at least once. None: all optimizers that hold parameters of the model,
            including those created later; without a model, those that step on this thread. Or call
            `session.mark_step()`.
        policy: `"auto"`: the fastest mix of keep, swap and recompute; `"swap"`, `"recompute"`:
            only that one, besides keep; `"rescue"`: no plan, act when memory fills up; or an object
            with a method `plan(trace, machine)` that returns a `swapkit.ir.plans.Plan`.
        host_limit: most host memory for copies: bytes, or a share of the machine's memory, of which
            its ranks have equal parts. None: all available memory; on a GPU, whose copies are
            page-locked, three quarters of such a part; on the CPU with `disk`, an eighth of
            `limit`. 0: no swapping. Tensors that do not fit a small `host_limit` are recomputed,
            also before there is a plan; for this, operators are captured until the plan settles if
            `host_limit` is below four times `limit`.
        disk: a folder. Tensors that do not fit on the host go to an unnamed file in it, those
            needed last first. The file vanishes with the process.
        disk_limit: most bytes of that file, or a share of the file system, of which the ranks of
            the machine have equal parts; None: its free space.
        device: `"cpu"`, `"cuda"` or `"npu"` (the current one), or `"cuda:1"`. None: the model's
            device; without a model, the one that `install()` without a device would take.
        min_swap_bytes: smaller saved storages are never moved. At least 1024; 0 means 1024. None:
            the environment variable MIN_SWAP_TENSOR_SIZE, or 1024.
        profile_steps: steps before there is a plan; the last of them is recorded. One more is
            recorded if that step is no model for the next ones, such as one that creates the
            optimizer's states.
        search_steps: plans to try, for one or two steps each, before the session settles on one.
        plan: the result of `swapkit.plan`, or the path of a file that `session.save_plan` wrote.
            The session follows it from the first step, unless another number of ranks trains than
            when it was made. Then, and when later steps differ, `policy`, which must not be
            `"rescue"`, plans again.
        bind_cpus: run this thread, and those that compute gradients and copy for it, on the CPUs
            near the device until the session ends; threads and processes started meanwhile, such as
            `DataLoader` workers, inherit them. None: if CPU_BINDING_NUM or CPU_AFFINITY_CONF asks
            for it (`docs/environment.md`). Without effect for the device `"cpu"`.
        on_step: called with the session after each step, on the thread that ended it, e.g. to log
            `session.metrics()` or `session.history[-1]`. What it raises, `optimizer.step()` or
            `session.mark_step()` raises; the step itself is complete.
        on_oom: whose training ends when a rank runs out of memory. `"rank"`: that rank raises
            `torch.OutOfMemoryError`. If it catches the error and goes on, or takes its time to end,
            the others wait for it in a collective, at most until the process group's timeout.
            `"all"`: the others raise `swapkit.errors.RankOutOfMemory`, with the rank and its text,
            also out of a collective, and no process group can be used any more; a rank that
            skips what does not fit fails with them. Pass it on every rank (`docs/ranks.md`).
        reshard: who sets `reshard_after_forward` of the modules that FSDP2 shards. `"user"`: the
            session changes nothing. `"auto"`: it chooses which modules keep their gathered weights
            from forward to backward, once for all ranks of their group and at the same step. The
            user's setting comes back when the session ends. Pass it on every rank, and end the
            session at the same step on all of them (`docs/ranks.md`).

    Returns:
        The session; enter it once, or use it to decorate a function.

    Raises:
        InvalidArgument: an argument cannot be parsed or is out of range.
        OverBudget: on entry, if more than `limit` is in use already. Weights leave the device then,
            unless the policy is `"recompute"` or an object, or torch uses its own allocator.
        DiskError: on entry, if no file can be created in `disk`.
        InvalidArgument: on entry, if CPU_BINDING_NUM is more than the CPUs for each device.
        PlanMismatch: on entry, if `plan` is for another model or a larger budget.
        InvalidDocument: the file `plan` is malformed.
        Unsupported: this version does not support the device, or `on_oom="all"` with torch's own
            allocator.
        RankOutOfMemory: at the end of a step or of the block, or where the model saves a tensor:
            another rank ran out of memory, and `on_oom="all"`.

    Example:
        >>> import swapkit, torch
        >>> swapkit.install(device="cpu")
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with swapkit.budget("64MiB", model, optimizer) as session:
        ...     model(torch.ones(8, 64)).sum().backward()
        ...     optimizer.step()
        >>> session.stats.steps, session.stats.peak_bytes <= session.stats.budget_bytes
        (1, True)
    """
    check_policy(policy, POLICIES)
    saved_plan = _read_plan(plan, policy)
    _check_count("profile_steps", profile_steps)
    _check_count("search_steps", search_steps)
    whole = gather_parts(model)
    if on_step is not None and not callable(on_step):
        raise InvalidArgument(f"on_step={on_step!r}: expected a function that takes the session")
    optimizers = list_optimizers(optimizer)
    where = choose_device(device, whole)
    installation = ensure_installation(where)
    environment = read_environment()
    if limit == AUTO:
        limit_bytes = find_free_limit(installation)
    else:
        limit_bytes = parse_bytes(limit, whole_bytes=installation.shared_bytes, name="limit")
    config = SessionConfig(
        device=where,
        limits=Limits(
            budget_bytes=limit_bytes,
            host_bytes=_host_limit(installation, host_limit, disk, limit_bytes),
            disk=None if disk is None else Path(disk),
            disk_bytes=_parse_disk_limit(disk, disk_limit),
        ),
        min_swap_bytes=_least_bytes(min_swap_bytes, environment.min_swap_bytes),
        rescue_multiple=environment.swap_size_multiple,
        policy=policy,
        profile_steps=profile_steps,
        search_steps=search_steps,
        saved_plan=saved_plan,
        cpu_affinity=_choose_affinity(environment.cpu_affinity, bind_cpus=bind_cpus),
        separates_lives=environment.memory_fragmentation,
        on_step=on_step,
        on_oom=_check_on_oom(on_oom, installation),
        reshard=_check_reshard(reshard, policy),
    )
    return Session(config, whole, optimizers)


def _check_reshard(reshard: object, policy: str | Policy) -> str:
    """Return who sets `reshard_after_forward`.

    Raises:
        InvalidArgument: it is no known value, or there are no plans of ours to choose by.
    """
    if reshard not in {USER, AUTO_RESHARD}:
        raise InvalidArgument(f"reshard={show(reshard)}: expected {USER!r} or {AUTO_RESHARD!r}")
    if reshard == AUTO_RESHARD and policy not in PLANNED:
        raise InvalidArgument(
            f"reshard={AUTO_RESHARD!r} compares plans, and policy={show(policy)} makes none to "
            f"compare: expected one of {', '.join(map(repr, PLANNED))}"
        )
    return str(reshard)


def _check_on_oom(on_oom: object, installation: Installation) -> str:
    """Return whose training ends when a rank runs out of memory.

    Raises:
        InvalidArgument: it is no known value.
        Unsupported: swapkit does not see here which requests fail.
    """
    if on_oom not in {ONE, ALL}:
        raise InvalidArgument(f"on_oom={show(on_oom)}: expected {ONE!r} or {ALL!r}")
    if on_oom == ALL and not installation.tells_failures:
        raise Unsupported(
            f"on_oom={ALL!r} needs swapkit's pool: torch's own allocator does not say whether a "
            "request has failed for good. Leave out allocator='torch', or on_oom"
        )
    return str(on_oom)


def _least_bytes(asked: int | str | None, usual: int) -> int:
    """Return the smallest size in bytes of a saved storage that is moved."""
    if asked is None:
        return usual
    least = parse_bytes(asked, name="min_swap_bytes", least=0) or MIN_SWAP_BYTES
    if least < MIN_SWAP_BYTES:
        raise InvalidArgument(f"min_swap_bytes={asked!r}: expected at least {MIN_SWAP_BYTES}")
    return least


def _choose_affinity(environment: CpuAffinity, *, bind_cpus: bool | None) -> CpuAffinity | None:
    """Return the binding to CPUs that a session applies; None: none."""
    applies = environment.is_asked if bind_cpus is None else bind_cpus
    return environment if applies else None


def _host_limit(
    installation: Installation,
    asked: int | float | str | None,
    disk: str | os.PathLike[str] | None,
    limit_bytes: int,
) -> int | None:
    """Return the limit for host copies in bytes; None: all that the machine has."""
    if asked is not None:
        return parse_bytes(
            asked,
            whole_bytes=lambda: share_of_node(installation.runtime.host_bytes()),
            name="host_limit",
            least=0,
        )
    if disk is not None and installation.device.name.type == "cpu":
        return max(STAGING_BYTES, int(limit_bytes * STAGING_SHARE))
    return None


def _read_plan(plan: object, policy: str | Policy) -> tuple[Trace, Plan] | None:
    """Return the plan to follow, with its trace; None: no plan was given."""
    if plan is None:
        return None
    if policy == RESCUE:
        others = ", ".join(repr(name) for name in POLICIES if name != RESCUE)
        raise InvalidArgument(
            f"plan={show(plan)}: policy={RESCUE!r} follows no plan. Omit plan=, or pass "
            f"policy={others}, or an object with plan(trace, machine)."
        )
    if not isinstance(plan, Plan):
        return read_argument("plan", plan, read_planned, _PLAN)
    if plan.trace is None:
        raise InvalidArgument(
            f"plan={show(plan)}: the plan lacks its trace, so swapkit cannot follow it. Pass the "
            f"plan that swapkit.plan() returned, or {_PLAN}."
        )
    with inside("plan: "):
        check_plan(plan, plan.trace)
    return plan.trace, plan


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument(f"{name}={value!r}: expected a whole number of at least 1")


def _parse_disk_limit(
    disk: str | os.PathLike[str] | None, disk_limit: int | float | str | None
) -> int:
    if disk is None:
        if disk_limit is not None:
            raise InvalidArgument(f"disk_limit={disk_limit!r} needs disk=, a folder")
        return 0
    if not Path(disk).is_dir():
        raise InvalidArgument(f"disk={os.fspath(disk)!r}: expected an existing folder")
    if disk_limit is None:
        return 0
    return parse_bytes(
        disk_limit,
        whole_bytes=lambda: share_of_node(shutil.disk_usage(disk).total),
        name="disk_limit",
    )
