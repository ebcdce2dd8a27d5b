"""Runs a user's script or module as `__main__`."""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

import click

from swapkit.cli.base import DONE, FAILED, INTERRUPTED
from swapkit.errors import InvalidArgument

# ---- script --------------------------------------------------------------------------------------
#
# Runs a user's script or module as `__main__`, as `python script.py` and `python -m` do.

_MAIN = "__main__"
# Frames of code between the command line and the script, which its traceback leaves out.
_OURS = (f"{Path(__file__).parent}{os.sep}", "<frozen importlib")


class Ended(BaseException):
    """The command ends the script. No `Exception`: scripts catch these."""


class _NoProgram(Exception):
    """There is no such module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A program of the user, and its arguments.

    Args:
        name: the path of a script, or of a folder or archive with a `__main__.py`, or the dotted
            name of a module.
        is_module: whether the name is a module's.
        arguments: what the program finds in `sys.argv[1:]`.
    """

    name: str
    is_module: bool
    arguments: tuple[str, ...]

    def run(self) -> int:
        """Run the program in this process, on this thread; return its exit code.

        The exit code is that of `sys.exit`, 1 after an exception and 130 after Ctrl-C. Exceptions
        are passed to `sys.excepthook`, without the frames of the command line.

        Raises:
            InvalidArgument: there is no such script or module.
            Ended: the command ended the script.
        """
        execute = self.prepare()
        try:
            execute()
        except _NoProgram as error:
            raise InvalidArgument(str(error)) from None
        except SystemExit as error:
            return _code_of_exit(error)
        except Ended:
            raise
        except KeyboardInterrupt as error:
            return _show(error, INTERRUPTED)
        except BaseException as error:  # noqa: BLE001 - as Python's own main program
            return _show(error, FAILED)
        return DONE

    def prepare(self) -> Callable[[], None]:
        """Set `sys.argv` and `sys.path`, and return the function that runs the program.

        Raises:
            InvalidArgument: there is no such script or module.
        """
        if self.is_module:
            return self._prepare_module()
        spec = _find_main_of(os.path.abspath(self.name))
        return self._prepare_script() if spec is None else self._prepare_folder(spec)

    def _prepare_folder(self, spec: ModuleSpec) -> Callable[[], None]:
        _set_path(os.path.abspath(self.name))
        sys.argv = [self.name, *self.arguments]

        def execute() -> None:
            code = _code_of(spec)
            assert code is not None
            exec(code, _make_main(spec.origin, loader=spec.loader, spec=spec).__dict__)

        return execute

    def _prepare_script(self) -> Callable[[], None]:
        path = Path(self.name)
        if not path.is_file():
            raise InvalidArgument(
                f"{self.name!r} is neither a file nor a folder with a __main__.py: pass the path "
                "of a script, or -m and a module's name"
            )
        # As Python since 3.9: the full path in tracebacks, the given one in sys.argv.
        file = os.path.abspath(path)
        _set_path(os.path.dirname(os.path.realpath(path)))
        sys.argv = [self.name, *self.arguments]
        loader = importlib.machinery.SourceFileLoader(_MAIN, file)
        main = _make_main(file, loader=loader, spec=None)

        def execute() -> None:
            with io.open_code(file) as source:
                code: CodeType = compile(source.read(), file, "exec", dont_inherit=True)
            exec(code, main.__dict__)

        return execute

    def _prepare_module(self) -> Callable[[], None]:
        _set_path(os.getcwd())
        sys.argv = ["-m", *self.arguments]

        def execute() -> None:
            spec, code = _find_module(self.name)
            sys.argv[0] = spec.origin or self.name
            main = _make_main(spec.origin, loader=spec.loader, spec=spec)
            exec(code, main.__dict__)

        return execute


def _set_path(folder: str) -> None:
    """Replace the first folder of `sys.path`, which is that of the command, by the program's."""
    if sys.flags.safe_path if hasattr(sys.flags, "safe_path") else sys.flags.isolated:
        return  # Python put no folder there
    sys.path[0] = folder


def _make_main(file: str | None, *, loader: object, spec: ModuleSpec | None) -> ModuleType:
    """Return a new `__main__`: pickle and worker processes find the program's classes in it."""
    main = ModuleType(_MAIN)
    main.__dict__.update(
        __builtins__=builtins,
        __file__=file,
        __loader__=loader,
        __spec__=spec,
        __package__=None if spec is None else spec.parent,
        __cached__=None if spec is None else spec.cached,
    )
    _former.append(sys.modules[_MAIN])
    sys.modules[_MAIN] = main
    return main


_former: list[ModuleType] = []  # kept: Python would empty a module that nothing refers to


def _find_module(name: str) -> tuple[ModuleSpec, CodeType]:
    """Return a module's spec and code; of a package, those of its `__main__`.

    Raises:
        _NoProgram: there is no such module, or it has no Python code.
    """
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.{_MAIN}"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # of an import in a package's __init__
        spec = None
    if spec is None:
        raise _NoProgram(f"no module named {name!r}; the search began in {sys.path[0]!r}")
    code = _code_of(spec)
    if code is None:
        raise _NoProgram(f"the module {name!r} has no Python code to run")
    return spec, code


def _find_main_of(path: str) -> ModuleSpec | None:
    """Return the spec of the `__main__` in a folder or an archive; None: it has none."""
    finder = pkgutil.get_importer(path)
    return None if finder is None else finder.find_spec(_MAIN)


def _code_of(spec: ModuleSpec) -> CodeType | None:
    """Return the code of a module; None: it is not written in Python."""
    get_code = getattr(spec.loader, "get_code", None)  # archives' loaders are no InspectLoader
    code: CodeType | None = None if get_code is None else get_code(spec.name)
    return code


def _code_of_exit(error: SystemExit) -> int:
    if error.code is None:
        return DONE
    if isinstance(error.code, int):
        return error.code
    click.echo(error.code, err=True)
    return FAILED


def _show(error: BaseException, code: int) -> int:
    """Pass an exception to `sys.excepthook`, which scripts may have replaced; return the exit code.

    Args:
        error: that ended the script.
        code: for the exception, unless the hook exits by itself.
    """
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(_OURS):
        traceback = traceback.tb_next
    try:
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
    except SystemExit as exited:
        return _code_of_exit(exited)
    return code
