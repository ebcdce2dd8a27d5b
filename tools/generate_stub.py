"""Write swapkit/_native/_lib.pyi, the typed face of the compiled module, from the public header.

With it mypy reports a misspelt function and a wrong number or kind of arguments, although the
module itself is C. The header is read as build_native.py reads it, so the stub, the bindings and
the compiled core cannot disagree.

    python -m tools.generate_stub            write the stub
    python -m tools.generate_stub --check    fail if the stub in the tree is stale
"""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from typing import TYPE_CHECKING

from pycparser import c_ast, c_parser

from build_native import ROOT, preprocess_header

if TYPE_CHECKING:
    from collections.abc import Iterator

STUB = ROOT / "swapkit/_native/_lib.pyi"

PREAMBLE = '''\
"""The compiled core, as types. Generated from swapkit.h by tools/generate_stub.py; do not edit."""

from typing import Any, Final, TypeAlias, overload

import _cffi_backend

CData: TypeAlias = _cffi_backend.FFI.CData

class _FFI(_cffi_backend.FFI):
    # Any: the members of a struct made here are known to cffi only.
    def new(self, cdecl: str | _cffi_backend.CType, init: Any = ...) -> Any: ...
    # Every string of this library is a char *.
    def string(self, cdata: CData, maxlen: int = ...) -> bytes: ...
    @overload
    def addressof(self, cdata: CData, /, *field_or_index: str | int) -> CData: ...
    @overload
    def addressof(self, library: object, name: str, /) -> CData: ...

class _Lib:
'''
CLOSING = """
ffi: _FFI
lib: _Lib
"""

# What the header takes from <stdint.h> and its like, which are not included under SK_CDEF.
STANDARD_TYPES = (
    "size_t", "uintptr_t", "intptr_t", "bool",
    "int8_t", "int16_t", "int32_t", "int64_t", "uint8_t", "uint16_t", "uint32_t", "uint64_t",
)  # fmt: skip
PYTHON_TYPES = {"bool": "bool", "_Bool": "bool", "float": "float", "double": "float"}  # else int
CALLBACK = re.compile(r'\bextern\s+"Python"\s+(?=[^;]*?\b(\w+)\s*\()')


class Header:
    """The declarations of the preprocessed header, and how they look from Python."""

    def __init__(self, text: str) -> None:
        self.callbacks = set(CALLBACK.findall(text))
        prelude = "".join(f"typedef int {name};\n" for name in STANDARD_TYPES)
        self.tree = c_parser.CParser().parse(prelude + CALLBACK.sub("", text), "swapkit.h")
        # Names of types that are pointers, structs or functions under another name.
        self.data_types = {
            node.name
            for node in self.tree.ext
            if isinstance(node, c_ast.Typedef) and self.is_data(node.type)
        }
        # Those of structs whose members can be read, as opposed to opaque handles.
        self.open_types = {
            node.name
            for node in self.tree.ext
            if isinstance(node, c_ast.Typedef) and getattr(node.type.type, "decls", None)
        }

    def is_data(self, node: c_ast.Node) -> bool:
        """Whether a C type reaches Python as CData, not as a number."""
        if isinstance(node, c_ast.TypeDecl):
            return isinstance(node.type, c_ast.Struct | c_ast.Union)
        return isinstance(node, c_ast.PtrDecl | c_ast.ArrayDecl | c_ast.FuncDecl)

    def constants(self) -> Iterator[str]:
        """Yield the name of every constant: of enums, named or not, and `static const` numbers."""
        for node in self.tree.ext:
            kind = getattr(node, "type", None)
            if not isinstance(kind, c_ast.Enum):
                kind = getattr(kind, "type", None)
            if isinstance(kind, c_ast.Enum) and kind.values is not None:
                yield from (entry.name for entry in kind.values.enumerators)
            elif isinstance(node, c_ast.Decl) and isinstance(node.type, c_ast.TypeDecl):
                yield node.name

    def functions(self) -> Iterator[c_ast.Decl]:
        """Yield the declaration of every function."""
        for node in self.tree.ext:
            if isinstance(node, c_ast.Decl) and isinstance(node.type, c_ast.FuncDecl):
                yield node

    def argument_type(self, node: c_ast.Node) -> str:
        """Return the annotation for an argument of a C type."""
        if isinstance(node, c_ast.PtrDecl) and self.spelling(node.type) == "char":
            return "bytes | CData"
        name = self.spelling(node)
        if not isinstance(node, c_ast.TypeDecl) or name in self.data_types:
            return "CData"
        return PYTHON_TYPES.get(name, "int")

    def result_type(self, node: c_ast.Node) -> str:
        """Return the annotation for a result of a C type."""
        pointed = self.spelling(node.type) if isinstance(node, c_ast.PtrDecl) else ""
        if pointed in self.open_types or self.spelling(node) in self.open_types:
            return "Any"  # its members are known to cffi only
        if isinstance(node, c_ast.TypeDecl) and self.spelling(node) == "void":
            return "None"
        return "CData" if pointed == "char" else self.argument_type(node)

    def spelling(self, node: c_ast.Node) -> str:
        """Return the name of a plain type: "char", "size_t", "sk_pool"; "" for any other."""
        plain = getattr(node, "type", None)
        if isinstance(plain, c_ast.IdentifierType):
            return " ".join(plain.names)
        return getattr(plain, "name", None) or ""

    def signature(self, function: c_ast.Decl) -> str:
        """Return a function's line in the stub."""
        declared = function.type
        nodes = declared.args.params if declared.args else []
        if len(nodes) == 1 and self.spelling(nodes[0].type) == "void":
            nodes = []  # f(void)
        typed = [f"{safe(node.name)}: {self.argument_type(node.type)}" for node in nodes]
        result = self.result_type(declared.type)
        arguments = ", ".join(["self", *typed])
        return f"    def {function.name}({arguments}, /) -> {result}: ..."


def safe(name: str) -> str:
    """Return the name of a C argument as one that Python takes; "from" is a keyword there."""
    return f"{name}_" if keyword.iskeyword(name) or name == "self" else name


def generate_stub() -> str:
    """Return the text of the stub for the header as it is now."""
    header = Header(preprocess_header())
    lines = [f"    {name}: Final[int]" for name in header.constants()]
    for function in header.functions():
        if function.name in header.callbacks:
            lines.append(f'    {function.name}: CData  # extern "Python": give it to def_extern()')
        else:
            lines.append(header.signature(function))
    return PREAMBLE + "\n".join(lines) + "\n" + CLOSING


def main() -> int:
    """Write the stub, or compare it with `--check`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if the stub is stale")
    check: bool = parser.parse_args().check
    text = generate_stub()
    if not check:
        STUB.write_text(text, encoding="utf-8")
    elif not STUB.exists() or STUB.read_text(encoding="utf-8") != text:
        name = STUB.relative_to(ROOT)
        print(f"{name} is stale: run python -m tools.generate_stub", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
