"""What a chat request wants with its tools, and what that means for its prompt, its output and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.compute.models.tokenizer import Tokenizer
from baton.core.errors import RequestError
from baton.core.types import Grammar
from baton.serve.http.tools.formats import ToolFormat, format_of
from baton.serve.http.tools.grammar import arguments_schema, call_grammar, mark_token
from baton.serve.http.tools.parser import ToolParser
from baton.serve.http.wire.constraint import Constraint, schema_constraint
from baton.serve.http.wire.schemas import ChatRequest, FunctionSpec, NamedTool, Tool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that the model may call (or has to)."""

    form: ToolFormat
    tools: Sequence[Tool]
    wanted: Sequence[FunctionSpec]
    """What has to be called: one of these. Empty: the model decides whether to call."""
    many: bool
    """Several calls in one answer are welcome."""

    def constraint(self, tokenizer: Tokenizer) -> Constraint | None:
        """Return what an answer has to match that is to be a call."""
        if not self.wanted:
            return None
        parts = [
            schema_constraint(arguments_schema(tool.function), f"tools[{index}].function.parameters")
            for index, tool in enumerate(self.tools)
            if tool.function in self.wanted
        ]
        text = call_grammar(self.wanted, self.form, tokenizer, many=self.many)
        return Constraint(Grammar(kind="lark", text=text), "tools", tuple(parts))

    def parser(self, name: str) -> ToolParser:
        """Make the parser of one choice. `name`: unique among answers."""
        return ToolParser(self.form, name=name, calls_max=None if self.many else 1)

    def shown_tokens(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Special tokens that are part of the text here, so that the parser meets them."""
        tokens = (mark_token(mark, tokenizer) for mark in (self.form.opening, self.form.closing) if mark)
        return frozenset(token for token in tokens if token is not None)


def tool_use(fields: ChatRequest, template: str) -> ToolUse | None:
    """Read a request's tools. None: it has none, or wants none called. Raises RequestError (400)."""
    tools, choice = fields.tools or [], fields.tool_choice
    if not tools:
        if choice in (None, "none", "auto"):
            return None
        raise RequestError("tool_choice asks for a call, but there are 0 tools; send tools", param="tool_choice")
    if choice == "none":
        return None
    many = fields.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
    return ToolUse(format_of(template), tools, _wanted(tools, choice), many)


def _wanted(tools: Sequence[Tool], choice: object) -> list[FunctionSpec]:
    functions = [tool.function for tool in tools]
    if isinstance(choice, NamedTool):
        name = choice.function.name
        found = [function for function in functions if function.name == name]
        if not found:
            known = ", ".join(function.name for function in functions)
            message = f"tool_choice names {name[:64]!r}, which is none of the tools; known: {known}"
            raise RequestError(message, param="tool_choice.function.name")
        return found[:1]
    return functions if choice == "required" else []
