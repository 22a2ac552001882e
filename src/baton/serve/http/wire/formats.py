"""How clients say what an output has to match: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

GrammarText = Annotated[str, Meta(min_length=1, max_length=65536)]
ChoiceList = Annotated[list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(min_length=1, max_length=1024)]
JsonSchema = dict[str, Any]


class NamedSchema(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema: JsonSchema | None = None
    """None: any JSON object."""
    description: str | None = None
    """Changes no answer."""
    strict: bool | None = None
    """Changes no answer: a schema is always followed."""


class ResponseFormat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    """With the type of the same name, and only with it."""


class StructuredOutputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of these. `json` may be a schema or the text of one; `grammar` is Lark or GBNF."""

    json: JsonSchema | GrammarText | None = None
    regex: GrammarText | None = None
    choice: ChoiceList | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
