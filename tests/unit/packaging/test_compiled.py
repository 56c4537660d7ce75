"""What is compiled is named once, in pyproject.toml, and either form of the product is a whole one."""

from __future__ import annotations

import ast
import importlib
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMPILED: list[str] = SETTINGS["tool"]["mooncake"]["compiled"]
ROOM_OF = {
    Path(package).name: Path(package).parent
    for package in SETTINGS["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
}


def module_of(path: str) -> str:
    return path.partition("/")[2].removesuffix(".py").replace("/", ".")


def test_every_module_named_for_compiling_is_there() -> None:
    assert [path for path in COMPILED if not (ROOT / path).is_file()] == []


def test_modules_are_compiled_all_or_none() -> None:
    files = {path: str(importlib.import_module(module_of(path)).__file__) for path in COMPILED}
    compiled = {path for path, file in files.items() if file.endswith(".so")}
    assert compiled in (set(), set(COMPILED)), "a module compiled earlier hides its source: make clean"


def test_nothing_is_compiled_unless_it_is_asked_for() -> None:
    hook = SETTINGS["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]
    assert hook["enable-by-default"] is False


def names_in(node: ast.AST | None) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} if node is not None else set()


def decoded_types(tree: ast.Module) -> set[str]:
    """Names of the types that a module decodes into: arguments of a Decoder, and `type=` of a decode."""
    found: set[str] = set()
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            if call.func.attr == "Decoder":
                found = found.union(*map(names_in, call.args))
            elif call.func.attr in ("decode", "convert"):
                found = found.union(*(names_in(each.value) for each in call.keywords if each.arg == "type"))
    return found


def located(names: set[str], path: Path, tree: ast.Module) -> set[tuple[Path, str]]:
    """Where each name is defined: its own module, or the one that it is imported from."""
    origin = {
        alias.name: ROOT / ROOM_OF[node.module.split(".")[0]] / (node.module.replace(".", "/") + ".py")
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ROOM_OF
        for alias in node.names
    }
    return {(origin.get(name, path), name) for name in names}


def test_nothing_is_decoded_into_a_compiled_class() -> None:
    # mypyc keeps of an annotation such as `Usage | None` only that it is a type: decoding would always fail.
    trees = {
        path: ast.parse(path.read_text())
        for package in SETTINGS["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    decoded = set().union(*(located(decoded_types(tree), path, tree) for path, tree in trees.items()))
    share = ROOT / "core/mooncake_core/ledger/share.py"
    assert (share, "Share") in decoded, "peers' shares are decoded: the search finds them"
    structs = {
        (path, node.name): set().union(
            *(
                located(names_in(field.annotation), path, trees[path])
                for field in node.body
                if isinstance(field, ast.AnnAssign)
            )
        )
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any("Struct" in ast.unparse(base) for base in node.bases)
    }
    while more := set().union(*(structs[each] for each in decoded & structs.keys())) - decoded:
        decoded |= more
    compiled = {ROOT / path for path in COMPILED}
    assert {each for each in structs if each[0] in compiled} & decoded == set()
