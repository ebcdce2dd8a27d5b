"""The settings that pyproject.toml has no words for."""

from setuptools import setup

setup(
    cffi_modules=["build_native.py:make_builder"],
    options={
        # One wheel for every Python from 3.10 on.
        "bdist_wheel": {"py_limited_api": "cp310"},
        # Never reuse objects of a build with other flags (SWAPKIT_DEBUG, CC, CFLAGS).
        "build_ext": {"force": "1"},
    },
)
