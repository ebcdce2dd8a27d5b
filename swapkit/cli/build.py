"""`swapkit build`: compiles the shim beforehand."""

from __future__ import annotations

import click

from swapkit.cli.base import DONE, CliCommand


@click.command(cls=CliCommand)
@click.option("--force", is_flag=True, help="Compile even if the library exists.")
def build(*, force: bool) -> int:
    """Compile the shim that the first install() would compile.

    The shim is the part of swapkit that uses torch's C++ headers; it is compiled for the installed
    torch. The first swapkit.install() then does not have to, e.g. in an image without a compiler.
    The library is kept in the cache, $XDG_CACHE_HOME/swapkit or ~/.cache/swapkit.
    """
    from swapkit._runtime.shim.build import build_shim
    from swapkit._runtime.shim.library import Shim

    built = build_shim(force=force)
    Shim(built.library)  # fails if the library cannot be loaded
    how = "already compiled" if built.seconds is None else f"compiled in {built.seconds:.1f} s"
    click.echo(f"{built.library}: {how}")
    return DONE
