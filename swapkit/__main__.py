"""Command line: `python -m swapkit COMMAND`."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swapkit.ir.machines import Machine


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the command and its options; None: those of the process.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(
        prog="python -m swapkit", description="Train PyTorch models inside a memory budget."
    )
    _add_flags(parser)
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    _add_demo(commands)
    _add_machine(commands)
    _add_replay(commands)
    _add_build(commands)
    chosen = parser.parse_args(arguments)
    refusal = _refuse_flags(chosen)
    if refusal:
        parser.error(refusal)
    if chosen.cflags or chosen.libs:
        print(_flags_of(chosen))
        return 0
    status: int = chosen.run(chosen)
    return status


def _add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the options for building operators in C and C++."""
    group = parser.add_argument_group("building operators with hooks")
    group.add_argument("--cflags", action="store_true", help="print the compiler's options")
    group.add_argument("--libs", action="store_true", help="print the linker's options")
    group.add_argument(
        "--compat",
        action="store_true",
        help="with --cflags: also for MindSpeed's header NPUSwapManager.h",
    )


def _refuse_flags(chosen: argparse.Namespace) -> str:
    """Return why options and a command do not go together; empty: they do."""
    options = [f"--{name}" for name in ("cflags", "libs", "compat") if getattr(chosen, name)]
    if chosen.compat and not chosen.cflags:
        return (
            "--compat without --cflags: it adds a folder to the compiler's options. Call "
            f"'python -m swapkit --cflags{' --libs' * chosen.libs} --compat'."
        )
    if options and chosen.command is not None:
        return (
            f"{' '.join(options)} with the command {chosen.command!r}: a call prints options or "
            f"runs a command. Call {' '.join(['python -m swapkit', *options])!r} or "
            f"'python -m swapkit {chosen.command} ...'."
        )
    if not options and chosen.command is None:
        return "the following arguments are required: COMMAND, --cflags or --libs"
    return ""


def _flags_of(chosen: argparse.Namespace) -> str:
    from swapkit._native import hooks

    flags = []
    if chosen.cflags:
        flags += [f"-I{hooks.INCLUDE}"] + [f"-I{hooks.COMPAT}"] * chosen.compat
    if chosen.libs:
        flags += [f"-L{hooks.FOLDER}", "-lswapkit", f"-Wl,-rpath,{hooks.FOLDER}"]
    return shlex.join(flags)


def _add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare `demo`."""
    from swapkit.demo import options

    parser = commands.add_parser(
        "demo",
        help="train a small language model with and without a budget, and compare",
        description="Train a small language model on the Python standard library's sources, "
        "with and without a memory budget, and compare.",
    )
    options.add_arguments(parser)

    def run(arguments: argparse.Namespace) -> int:
        from swapkit.demo.command import run_demo

        try:
            asked = options.from_arguments(arguments)
        except options.OptionError as error:
            parser.error(str(error))
        return run_demo(asked)

    parser.set_defaults(run=run)


def _add_machine(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare `machine`."""
    parser = commands.add_parser(
        "machine",
        help="measure how fast this machine copies, and print the result",
        description=(
            "Measure how fast a device copies to the host and back while it computes. The result "
            "is cached, and plans are made from it."
        ),
    )
    parser.add_argument(
        "--device", help='e.g. "cpu" or "cuda:1" (default: an accelerator if present)'
    )
    parser.add_argument(
        "--budget",
        default="100%",
        help='bytes, or a share of the device\'s memory: "10GiB", "80%%" (default: all)',
    )
    parser.add_argument("--host-limit", metavar="BYTES", help="most host memory for copies")
    parser.add_argument("--disk", metavar="FOLDER", help="also measure a disk")
    parser.add_argument(
        "--fresh", action="store_true", help="measure even if a cached result exists"
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write a document for swapkit.plan(machine=...) instead of text (default: to stdout)",
    )
    parser.set_defaults(run=_run_machine)


def _run_machine(arguments: argparse.Namespace) -> int:
    from swapkit.errors import SwapkitError
    from swapkit.ir.codec import encode_machine, write_machine
    from swapkit.reporting.machines import format_machine

    try:
        machine, threads = _find_machine(arguments)
        if arguments.json not in {None, "-"}:
            write_machine(arguments.json, machine)
    except (SwapkitError, OSError) as error:
        print(f"python -m swapkit machine: {error}", file=sys.stderr)
        return 2
    if arguments.json == "-":
        print(json.dumps(encode_machine(machine), indent=2))
    elif arguments.json is None:
        print(format_machine(machine))
        if threads:
            print(f"\nwith bind_cpus=True: {threads}")
    return 0


def _find_machine(arguments: argparse.Namespace) -> "tuple[Machine, str]":
    """Return what is known of the machine, and where the threads of a session would run."""
    from swapkit._runtime.allocators.installation import choose_device, default_device
    from swapkit._runtime.machine.measured_machine import measure_machine
    from swapkit._runtime.process.runtime import get_runtime
    from swapkit._runtime.saved.limits import Limits
    from swapkit.config.environment import read_environment
    from swapkit.errors import InvalidArgument
    from swapkit.units import parse_bytes

    name = choose_device(arguments.device or default_device())
    if arguments.disk is not None and not Path(arguments.disk).is_dir():
        raise InvalidArgument(f"--disk {arguments.disk!r}: expected an existing folder")
    runtime = get_runtime()
    device = runtime.device(name)
    host_bytes = None
    if arguments.host_limit is not None:
        whole_bytes = runtime.host_bytes()
        host_bytes = parse_bytes(arguments.host_limit, whole_bytes=whole_bytes, name="--host-limit")
    whole_bytes = device.backend.memory_info().total_bytes
    limits = Limits(
        budget_bytes=parse_bytes(arguments.budget, whole_bytes=whole_bytes, name="--budget"),
        host_bytes=host_bytes,
        disk=None if arguments.disk is None else Path(arguments.disk),
    )
    machine = measure_machine(device, limits, fresh=arguments.fresh)
    choice = runtime.places.choose(name, read_environment().cpu_affinity)
    return machine, "" if choice is None else choice.text


def _add_replay(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare `replay`."""
    from swapkit.replay import command

    parser = commands.add_parser(
        "replay",
        help="send recorded allocations through several allocators, and compare them",
        description="Send the allocations of a file through torch's allocator, with and without "
        "expandable segments, through swapkit's pool, and to planned addresses; print how much "
        "memory each reserves and why.",
    )
    command.add_arguments(parser)
    parser.set_defaults(run=command.run_replay)


def _add_build(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare `build`."""
    parser = commands.add_parser(
        "build",
        help="compile the shim that the first install() would compile",
        description=(
            "Compile the shim, the part of swapkit that uses torch's C++ headers, for the "
            "installed torch. The first swapkit.install() then does not have to, e.g. in an image "
            "without a compiler. The library is kept in the cache, $XDG_CACHE_HOME/swapkit or "
            "~/.cache/swapkit."
        ),
    )
    parser.add_argument("--force", action="store_true", help="compile even if the library exists")
    parser.set_defaults(run=_run_build)


def _run_build(arguments: argparse.Namespace) -> int:
    from swapkit._runtime.shim.build import build_shim
    from swapkit._runtime.shim.library import Shim
    from swapkit.errors import SwapkitError

    try:
        built = build_shim(force=arguments.force)
        Shim(built.library)  # fails if the library cannot be loaded
    except SwapkitError as error:
        print(f"python -m swapkit build: {error}", file=sys.stderr)
        return 1
    how = "already compiled" if built.seconds is None else f"compiled in {built.seconds:.1f} s"
    print(f"{built.library}: {how}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
