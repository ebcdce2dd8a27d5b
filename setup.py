"""The settings that pyproject.toml has no words for."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent))

from build_native import INSTRUMENTS, LIBRARY, build_instruments, build_library

PACKAGE = Path("swapkit/_native")


class BuildNative(build_ext):
    """Compiles the library of operator hooks beside the native core."""

    def build_extensions(self) -> None:
        """Build the core, then the library."""
        super().build_extensions()
        build_library(Path(self.build_lib).absolute() / PACKAGE)

    def copy_extensions_to_source(self) -> None:
        """Copy both to the checkout, for an editable installation; add what only tests use."""
        super().copy_extensions_to_source()
        built, inplace = self._library_files()
        self.copy_file(built, inplace, level=self.verbose)
        if INSTRUMENTS.is_dir():
            core: str = self.get_ext_filename("swapkit._native._lib")  # type: ignore[no-untyped-call]
            build_instruments(Path(core))

    def get_outputs(self) -> list[str]:
        """Return the files built."""
        return [*super().get_outputs(), str(self._library_files()[0])]

    def get_output_mapping(self) -> dict[str, str]:
        """Return the files of a checkout by the files built."""
        built, inplace = self._library_files()
        mine = {str(built): str(inplace)} if self.inplace else {}
        return {**super().get_output_mapping(), **mine}

    def _library_files(self) -> tuple[Path, Path]:
        return Path(self.build_lib) / PACKAGE / LIBRARY, PACKAGE / LIBRARY


setup(
    cmdclass={"build_ext": BuildNative},
    cffi_modules=["build_native.py:make_builder"],
    options={
        # One wheel for every Python from 3.10 on.
        "bdist_wheel": {"py_limited_api": "cp310"},
        # Never reuse objects of a build with other flags (SWAPKIT_DEBUG, CC, CFLAGS).
        "build_ext": {"force": "1"},
    },
)
