"""`swapkit machine`: measures how fast this machine copies."""

from __future__ import annotations

import json
from pathlib import Path

import click

from swapkit.cli.base import DONE, CliCommand, show_table
from swapkit.errors import InvalidArgument
from swapkit.ir.codec import encode_machine, write_machine
from swapkit.ir.machines import Machine
from swapkit.reporting.machines import list_machine
from swapkit.units import parse_bytes

STDOUT = "-"


@click.command(cls=CliCommand)
@click.option("--device", help='E.g. "cpu" or "cuda:1" (default: an accelerator if present).')
@click.option(
    "--budget",
    default="100%",
    show_default=True,
    help='Bytes, or a share of the device\'s memory: "10GiB", "80%".',
)
@click.option("--host-limit", metavar="BYTES", help="Most host memory for copies.")
@click.option("--disk", metavar="FOLDER", help="Also measure a disk.")
@click.option("--fresh", is_flag=True, help="Measure even if a cached result exists.")
@click.option(
    "--json",
    "file",
    is_flag=False,
    flag_value=STDOUT,
    metavar="[FILE]",
    help="Write a document for swapkit.plan(machine=...) instead of text (default: to stdout).",
)
def machine(
    *,
    device: str | None,
    budget: str,
    host_limit: str | None,
    disk: str | None,
    fresh: bool,
    file: str | None,
) -> int:
    """Measure how fast this machine copies, and print the result.

    The command copies from the device to the host and back while the device computes. The result is
    cached, and plans are made from it.
    """
    found, threads = find_machine(
        device, budget=budget, host_limit=host_limit, disk=disk, fresh=fresh
    )
    if file == STDOUT:
        click.echo(json.dumps(encode_machine(found), indent=2))
    elif file is not None:
        write_machine(file, found)
    else:
        heads, *rows = list_machine(found)
        show_table(heads, rows)
        if threads:
            click.echo(f"\nwith bind_cpus=True: {threads}")
    return DONE


def find_machine(
    device: str | None,
    *,
    budget: str = "100%",
    host_limit: str | None = None,
    disk: str | None = None,
    fresh: bool = False,
) -> tuple[Machine, str]:
    """Return what is known of the machine, and where the threads of a session would run.

    Args:
        device: torch's name; None: an accelerator if present.
        budget: bytes, or a share of the device's memory.
        host_limit: most host memory for copies; None: no limit.
        disk: a folder to measure, too; None: none.
        fresh: whether to measure even if a cached result exists.

    Raises:
        InvalidArgument: an argument cannot be parsed, or the folder does not exist.
        Unsupported: the device does not exist.
    """
    from swapkit._runtime.allocators.installation import choose_device, default_device
    from swapkit._runtime.machine.measured_machine import measure_machine
    from swapkit._runtime.process.runtime import get_runtime
    from swapkit._runtime.saved.device import Limits
    from swapkit.config.environment import read_environment

    name = choose_device(device or default_device())
    if disk is not None and not Path(disk).is_dir():
        raise InvalidArgument(f"--disk {disk!r}: expected an existing folder")
    runtime = get_runtime()
    opened = runtime.device(name)
    host_bytes = None
    if host_limit is not None:
        whole_bytes = runtime.host_bytes()
        host_bytes = parse_bytes(host_limit, whole_bytes=whole_bytes, name="--host-limit")
    whole_bytes = opened.backend.memory_info().total_bytes
    limits = Limits(
        budget_bytes=parse_bytes(budget, whole_bytes=whole_bytes, name="--budget"),
        host_bytes=host_bytes,
        disk=None if disk is None else Path(disk),
    )
    found = measure_machine(opened, limits, fresh=fresh)
    choice = runtime.places.choose(name, read_environment().cpu_affinity)
    return found, "" if choice is None else choice.text
