"""The rules of tidy for prose: docstrings, comments, messages and documents. No I/O."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import PurePosixPath

from tidy_rules import Finding

SUBJECT, SEE_ONLY = "subject", "see-only"
PROSE_RULES = (SUBJECT, SEE_ONLY)
"""Rules whose old findings are counted per top folder, so that moving a file does not make them new."""
PROSE_FOLDERS = ("src", "docs", "README.md")
PROSE_SUFFIXES = (".py", ".md", ".cpp", ".h", ".html")

REFUSED = re.compile(r"\b(whoever|nobody|somebody)\b", re.IGNORECASE)
WHO = re.compile(r"\b(who)\b", re.IGNORECASE)
AFTER_PERSON = re.compile(
    r"\b(authors?|clients?|developers?|engineers?|everyone|operators?|people|persons?|readers?|tenants?|those|users?)"
    r",?\s+$",
    re.IGNORECASE,
)
"""`Who` may follow a word for people: "for users who ...". A worker, a request or a process is a thing."""
CLAUSE = re.compile(r"(?:^|[.;:!?]\s+)([Ww]hat\s+(?:is|was|are|were)|[Tt]hat\s+which)\b")
"""A clause that stands for a thing at the start of a sentence: "What is held is freed"."""
SEE = re.compile(r"\s*See (?:also )?`")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def prose_findings(path: str, text: str) -> Iterator[Finding]:
    """Yield sentences with a refused subject, and docstrings that only point elsewhere."""
    match PurePosixPath(path).suffix:
        case ".py":
            nodes = list(ast.walk(ast.parse(text)))
            for line, words in [*strings(nodes), *comment_runs(text)]:
                yield from refused_subjects(path, line, CODE.sub("`code`", words))
            yield from empty_pointers(path, nodes)
        case ".md":
            blank = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
            yield from refused_subjects(path, 1, CODE.sub("`code`", blank))
        case _:
            yield from refused_subjects(path, 1, text)


def strings(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield every string that has at least two words, with its line."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, node.value


def comment_runs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the text of each run of comment lines, with its first line."""
    run: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline) if "#" in text else ():
        if token.type == tokenize.COMMENT:
            if run and token.start[0] != last + 1:
                yield last - len(run) + 1, "\n".join(run)
                run = []
            run.append(token.string.lstrip("#: "))
            last = token.start[0]
    if run:
        yield last - len(run) + 1, "\n".join(run)


def refused_subjects(path: str, line: int, prose: str) -> Iterator[Finding]:
    places = list(REFUSED.finditer(prose))
    places += [match for match in WHO.finditer(prose) if not AFTER_PERSON.search(prose[: match.start()])]
    places += list(CLAUSE.finditer(prose))
    for match in sorted(places, key=lambda match: match.start(1)):
        said = " ".join(match[1].split())
        yield Finding(
            path=path,
            line=line + prose.count("\n", 0, match.start(1)),
            rule=SUBJECT,
            name=said.lower(),
            text=f"'{said}' is no subject: name the worker, request, block, policy or user that the sentence is about",
        )


def empty_pointers(path: str, nodes: list[ast.AST]) -> Iterator[Finding]:
    for node in nodes:
        said = ast.get_docstring(node, clean=False) if isinstance(node, DOCUMENTED) else None
        if said is not None and SEE.match(said):
            yield Finding(
                path=path,
                line=node.body[0].lineno,
                rule=SEE_ONLY,
                name="docstring",
                text="the docstring begins with `See ...`: say what the function does, or delete it",
            )
