"""The formats in which models write tool calls. A model's format is found from its chat template."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A format of tool calls: marks around JSON objects with a name and arguments."""

    name: str
    opening: str
    """The mark before each call, or before the list of all calls if `is_list`."""
    closing: str = ""
    arguments: str = "arguments"
    """Key of the arguments in the JSON object."""
    is_list: bool = False
    is_bare: bool = False
    """Whether a text that begins with a JSON object is a call, even without the mark."""
    in_prompt: bool = False
    """Whether Baton describes the tools in a system message, because the template does not support tools."""


HERMES = ToolFormat(name="hermes", opening="<tool_call>", closing="</tool_call>")
"""Hermes 2 Pro, Qwen 2.5 and 3, SmolLM 3: `<tool_call>{"name": ..., "arguments": ...}</tool_call>` for each call."""
MISTRAL = ToolFormat(name="mistral", opening="[TOOL_CALLS]", is_list=True)
"""Mistral and Mixtral up to tokenizer v7: `[TOOL_CALLS][{"name": ..., "arguments": ...}, ...]`."""
LLAMA3 = ToolFormat(name="llama3", opening="<|python_tag|>", arguments="parameters", is_bare=True)
"""Llama 3.1 to 3.3: the answer is `{"name": ..., "parameters": ...}`."""
DESCRIBED = ToolFormat(name="described", opening="<tool_call>", closing="</tool_call>", in_prompt=True)
"""For templates without tools: the Hermes format, described to the model in a system message."""


def format_of(template: str) -> ToolFormat:
    """Return the format that a chat template uses. Raises RequestError (400) if Baton cannot parse that format."""
    if "tools" not in template:
        return DESCRIBED
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return MISTRAL
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if '"parameters"' in template and "ipython" in template:
        return LLAMA3
    raise RequestError(
        "this model writes tool calls in a way that Baton does not read (it reads those of Hermes, Qwen, Llama 3 and "
        'Mistral); describe the tools in a message, and use response_format, or send tool_choice "none"',
        param="tools",
        code="unsupported_parameter",
    )
