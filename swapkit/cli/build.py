"""`swapkit build`: compiles the shim beforehand."""

from __future__ import annotations

from pathlib import Path

import click

from swapkit import __version__
from swapkit.cli.base import DONE, CliCommand


@click.command(cls=CliCommand)
@click.option("--force", is_flag=True, help="Compile even if the library exists.")
@click.option(
    "--wheel",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Also write it as a wheel into this folder.",
)
def build(*, force: bool, wheel: Path | None) -> int:
    """Compile the shim that the first install() would compile.

    The shim is the part of swapkit that uses torch's C++ headers; it is compiled for the installed
    torch. The first swapkit.install() then does not have to, e.g. in an image without a compiler.
    The library is kept in the cache, $XDG_CACHE_HOME/swapkit or ~/.cache/swapkit. A wheel of it
    serves machines with the same Python and torch, beside swapkit's own wheel.
    """
    from swapkit._runtime.shim.build import build_shim, build_wheel
    from swapkit._runtime.shim.library import Shim

    built = build_shim(force=force)
    Shim(built.library)  # fails if the library cannot be loaded
    how = "already compiled" if built.seconds is None else f"compiled in {built.seconds:.1f} s"
    click.echo(f"{built.library}: {how}")
    if wheel is not None:
        click.echo(build_wheel(wheel, built.library, __version__))
    return DONE
