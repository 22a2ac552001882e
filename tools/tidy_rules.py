"""The rules of tidy: each looks at one parsed module and yields findings. No I/O."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath

from tidy_words import (
    FINE_TOGETHER,
    NEAR_KV,
    REFUSED_ANYWHERE,
    REFUSED_IN_DEFINITIONS,
    REFUSED_NEAR_KV,
    REFUSED_UNITS,
    UNIT_NEEDED,
)

FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 400
PARAMETERS_MAX = 6
PUBLIC_METHODS_MAX = 10
SIZE_RULES = ("function-lines", "module-lines", "parameters", "public-methods")
NUMBER = re.compile(r"\b(int|float)\b")
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not tidy, and what to do about it."""

    path: str
    line: int
    rule: str
    name: str
    """What the allow-list and the ratchet know it by, with path and rule. Has no line: lines move."""
    size: int = 1
    """How large, for the rules of size; 1 for the others."""
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: [{self.rule}] {self.text}"


@dataclass(frozen=True, slots=True)
class Module:
    """A parsed Python file. `path` is relative to the repository's root and decides which rules apply."""

    path: str
    text: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]
    """All nodes of the tree, in the order of `ast.walk`, which is slow."""

    @property
    def folder(self) -> str:
        return PurePosixPath(self.path).parts[0]

    def found(self, line: int, rule: str, name: str, text: str, size: int = 1) -> Finding:
        return Finding(path=self.path, line=line, rule=rule, name=name, text=text, size=size)


def words(name: str) -> list[str]:
    """Split snake_case and CamelCase into lower-case words: `KVPageTable_ms` -> kv, page, table, ms."""
    return [word.lower() for part in name.split("_") for word in WORD.findall(part)]


def sizes(module: Module) -> Iterator[Finding]:
    """Hold functions, parameter lists, classes and the module to the hard limits."""
    lines = len(module.text.splitlines())
    if lines > MODULE_LINES_MAX:
        text = f"{lines} lines, at most {MODULE_LINES_MAX}: split it by the noun that owns state"
        yield module.found(1, "module-lines", "module", text, lines)
    for node in module.nodes:
        if isinstance(node, Function):
            yield from function_sizes(module, node)
        elif isinstance(node, ast.ClassDef) and module.folder != "tests":
            count = public_methods(node)
            if count > PUBLIC_METHODS_MAX:
                text = f"{node.name} has {count} public methods, at most {PUBLIC_METHODS_MAX}: it is two nouns"
                yield module.found(node.lineno, "public-methods", node.name, text, count)


def function_sizes(module: Module, node: Function) -> Iterator[Finding]:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if lines > FUNCTION_LINES_MAX:
        text = f"{node.name}() has {lines} lines, at most {FUNCTION_LINES_MAX}: give its parts names"
        yield module.found(node.lineno, "function-lines", node.name, text, lines)
    names = [argument.arg for argument in parameters(node)]
    count = len(names) - (names[:1] in (["self"], ["cls"]))
    if count > PARAMETERS_MAX and module.folder != "tests":
        text = f"{node.name}() has {count} parameters, at most {PARAMETERS_MAX}: some of them are one thing"
        yield module.found(node.lineno, "parameters", node.name, text, count)


def parameters(node: Function) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def public_methods(node: ast.ClassDef) -> int:
    """Count methods without an underscore; a property is an attribute, not a method."""
    methods = [
        item.name
        for item in node.body
        if isinstance(item, Function)
        and not item.name.startswith("_")
        and not any(ast.unparse(mark).endswith(("property", ".setter", ".deleter")) for mark in item.decorator_list)
    ]
    return len(set(methods))


def definitions(module: Module) -> Iterator[tuple[int, str]]:
    """Yield names of the module, its classes and its functions."""
    yield 1, PurePosixPath(module.path).stem
    for node in module.nodes:
        if isinstance(node, ast.ClassDef | Function):
            yield node.lineno, node.name


def variables(module: Module) -> Iterator[tuple[int, str]]:
    """Yield names of parameters, fields, attributes and variables where they get their value."""
    for node in module.nodes:
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def names(module: Module) -> Iterator[Finding]:
    """Refuse words that the glossary replaces. One finding per name and module."""
    if module.folder == "tests":
        return
    defined = list(definitions(module))
    places = [(line, name, REFUSED_IN_DEFINITIONS) for line, name in defined]
    everything = [*defined, *variables(module)]
    if module.folder == "src":
        places += [(line, name, REFUSED_ANYWHERE) for line, name in everything]
    if module.path.startswith(tuple(f"src/baton/{package}/" for package in NEAR_KV)):
        places += [(line, name, REFUSED_NEAR_KV) for line, name in everything]
    seen: set[tuple[str, str]] = set()
    for line, name, refused in sorted(places, key=lambda place: place[0]):
        for word, after in pairwise([*words(name), ""]):
            if word in refused and f"{word} {after}" not in FINE_TOGETHER and (name, word) not in seen:
                seen.add((name, word))
                yield module.found(line, "name", name, f"`{name}` has the word '{word}': {refused[word]}")


def numbers(module: Module) -> Iterator[tuple[int, str]]:
    """Yield what is annotated as a number (or returns one): parameters, fields, functions."""
    for node in module.nodes:
        if isinstance(node, ast.arg) and is_number(node.annotation):
            yield node.lineno, node.arg
        elif isinstance(node, ast.AnnAssign) and is_number(node.annotation):
            yield node.lineno, ast.unparse(node.target).rsplit(".", 1)[-1]
        elif isinstance(node, Function) and is_number(node.returns):
            yield node.lineno, node.name


def is_number(annotation: ast.expr | None) -> bool:
    """True for int, float, and those or None; not for containers of numbers."""
    if annotation is None:
        return False
    text = ast.unparse(annotation)
    return bool(NUMBER.search(text)) and "[" not in text.replace("Optional[", "")


def units(module: Module) -> Iterator[Finding]:
    """Hold names of numbers to one unit per quantity, said at their end."""
    if module.folder == "tests":
        return
    for line, name in numbers(module):
        parts = words(name)
        for unit, others in REFUSED_UNITS.items():
            for word in parts:
                if word in others:
                    yield module.found(line, "unit", name, f"`{name}` counts in '{word}': convert it, end it in {unit}")
        if parts and parts[-1] in UNIT_NEEDED:
            ending = UNIT_NEEDED[parts[-1]]
            yield module.found(line, "unit", name, f"`{name}` does not say its unit: call it `{name}{ending}`")


def comments(module: Module) -> Iterator[Finding]:
    """Refuse notes of unfinished work: an issue remembers it better."""
    if not UNFINISHED.search(module.text):
        return
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        mark = UNFINISHED.search(token.string) if token.type == tokenize.COMMENT else None
        if mark:
            text = f"a comment says {mark[0]}: do it now, or open an issue and remove the comment"
            yield module.found(token.start[0], "unfinished", mark[0], text)


class _Constructs(ast.NodeVisitor):
    """Collect constructs that we refuse, each named by the innermost function around it."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.findings: list[Finding] = []
        self._functions: list[str] = []
        self._optional_depth = 0
        """Over 0 inside of `try: ... except ImportError:`, where an optional package is imported."""

    def add(self, node: ast.stmt | ast.expr | ast.excepthandler, rule: str, text: str) -> None:
        name = self._functions[-1] if self._functions else "module"
        self.findings.append(self.module.found(node.lineno, rule, name, text))

    def visit_FunctionDef(self, node: Function) -> None:
        self._functions.append(node.name)
        if node.args.kwarg is not None:
            self.add(node, "kwargs", f"{node.name}() takes **{node.args.kwarg.arg}: name its parameters")
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            self._check_sentinel(default)
        self.generic_visit(node)
        self._functions.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._check_sentinel(node.value)
        self.generic_visit(node)

    def _check_sentinel(self, value: ast.expr | None) -> None:
        if value is not None and ast.unparse(value) == "-1":
            self.add(value, "sentinel", "-1 stands for something else than a number: use None, or an enum's name")

    def visit_Try(self, node: ast.Try) -> None:
        caught = [ast.unparse(clause.type) for clause in node.handlers if clause.type is not None]
        optional = any(re.search(r"\b(ImportError|ModuleNotFoundError)\b", text) for text in caught)
        self._optional_depth += optional
        for statement in node.body:
            self.visit(statement)
        self._optional_depth -= optional
        for statement in [*node.handlers, *node.orelse, *node.finalbody]:
            self.visit(statement)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        caught = "" if node.type is None else ast.unparse(node.type)
        if node.type is None or re.search(r"\b(Base)?Exception\b", caught):
            text = f"`except {caught or '(everything)'}` hides our bugs: name the errors that the world causes here"
            self.add(node, "broad-except", text)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func)
        if called in ("getattr", "setattr", "delattr"):
            self.add(node, "getattr", f"{called}() picks a name at run time: use match, a dict, or a Protocol")
        if called == "time.sleep":
            self.add(node, "sleep", "time.sleep() polls: wait for the event itself (a queue, a socket, a process)")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv"):
            self.add(node, "environment", f"{ast.unparse(node)} is no configuration: take it as an argument or a flag")
        self.generic_visit(node)

    def visit_Global(self, node: ast.Global) -> None:
        self.add(node, "global", f"global {', '.join(node.names)}: let an object own it, and pass the object")

    def visit_Import(self, node: ast.Import) -> None:
        self._check_import(node, [alias.name for alias in node.names])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self._check_import(node, [f"{node.module}.{alias.name}" for alias in node.names])

    def _check_import(self, node: ast.Import | ast.ImportFrom, imported: list[str]) -> None:
        if self._functions and not self._optional_depth:
            text = (
                f"{imported[0]} is imported inside a function: move it to the top, or (an optional package) "
                "into a `try` whose `except ImportError` says what to install"
            )
            self.add(node, "inner-import", text)
        for name in imported:
            if name.split(".")[0] == "atexit":
                self.add(node, "atexit", "atexit runs in an unknown order: close things where they are owned")
            if name == "time.sleep":
                self.add(node, "sleep", "time.sleep() polls: wait for the event itself (a queue, a socket, a process)")
            if name in ("os.environ", "os.getenv"):
                self.add(node, "environment", f"{name} is no configuration: take it as an argument or a flag")


TESTS_FREE_OF = ("inner-import", "environment", "broad-except", "kwargs", "getattr", "sentinel")


def constructs(module: Module) -> Iterator[Finding]:
    """Refuse what style.md's list refuses. Tests may do some of it: they look from outside."""
    visitor = _Constructs(module)
    visitor.visit(module.tree)
    for finding in visitor.findings:
        if module.folder != "tests" or finding.rule not in TESTS_FREE_OF:
            yield finding


RULES = (sizes, names, units, comments, constructs)


def findings(path: str, text: str) -> list[Finding]:
    """Apply every rule to one module."""
    tree = ast.parse(text, filename=path)
    module = Module(path, text, tree, tuple(ast.walk(tree)))
    return [finding for rule in RULES for finding in rule(module)]
