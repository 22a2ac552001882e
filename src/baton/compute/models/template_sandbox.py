"""Jinja's sandbox for chat templates, with bounds on its loops and on the growth of its strings.

The sandbox of jinja2 keeps a template away from Python, but bounds neither time nor memory. Here, every loop pass and
every macro call counts as a step, and operations that join or repeat strings check the length first. The time of other
operations, such as filters on long strings, grows at most with the square of their length.
"""

from __future__ import annotations

import json

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

from baton.move.clock import utc_date

OUTPUT_CHARS_MAX = 16_000_000
STEPS_MAX = 200_000
"""Maximum number of loop passes and macro calls of one rendering. Enough for thousands of messages; under a second."""
STEP_NAME = "baton_step"
"""The template variable that holds `StepCounter.step` of the current rendering."""
PADDING_METHODS = frozenset(("center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map"))
"""String methods that make a long text from a number. Chat templates do not need them."""
PADDING_FILTERS = ("center", "format", "indent", "wordwrap", "xmlattr", "pprint", "filesizeformat")


class StepCounter:
    """Counts the steps of one rendering. Raises SecurityError above the maximum."""

    def __init__(self) -> None:
        self._steps = 0

    def step(self) -> None:
        self._steps += 1
        if self._steps > STEPS_MAX:
            raise SecurityError(f"it takes more than {STEPS_MAX} steps")


def check_chars(chars: int) -> None:
    if chars > OUTPUT_CHARS_MAX:
        raise SecurityError(f"it writes more than {OUTPUT_CHARS_MAX} characters")


class _GenerationBlock(Extension):
    """The tag `{% generation %}`, which marks the model's own words for training. Serving renders only its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 wants a plain set here

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the functions that chat templates expect, and bounds on loops and on string lengths."""

    intercepted_binops = frozenset(("*", "**", "+"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
        self.filters["tojson"] = _to_json
        for name in PADDING_FILTERS:
            self.filters.pop(name, None)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        padding = isinstance(obj, str) and attr in PADDING_METHODS
        return not padding and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        if operator == "**":
            raise SecurityError("it raises to a power")
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            check_chars(len(left) + len(right))
        if operator == "*" and not (isinstance(left, int | float) and isinstance(right, int | float)):
            sequence, times = (left, right) if isinstance(right, int) else (right, left)
            if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                check_chars(len(sequence) * times)
        return super().call_binop(context, operator, left, right)

    def joined(self, *parts: object) -> str:
        """Concatenate as `~` does, after a check of the length."""
        texts = [str(part) for part in parts]
        check_chars(sum(map(len, texts)))
        return "".join(texts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse a template, and add a step count to every loop and macro, and a length check to every `~`."""
        tree = super()._parse(source, name, filename)
        for block in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            counter = nodes.Name(STEP_NAME, "load", lineno=block.lineno)
            call = nodes.Call(counter, [], [], None, None, lineno=block.lineno)
            block.body.insert(0, nodes.ExprStmt(call, lineno=block.lineno))
        _BoundedConcat().visit(tree)
        return tree


class _BoundedConcat(NodeTransformer):
    """Replaces `a ~ b` by a call of `Sandbox.joined`."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        joined = nodes.EnvironmentAttribute("joined", lineno=node.lineno)
        return nodes.Call(joined, node.nodes, [], None, None, lineno=node.lineno)


def _raise_exception(message: str) -> str:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return utc_date().astimezone().strftime(pattern)


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False) -> str:  # noqa: FBT001 - as templates call it
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
