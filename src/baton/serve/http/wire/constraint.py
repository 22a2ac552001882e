"""Turn the fields that constrain an output into one grammar, which is checked before the request starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from baton.compute.models.card import ModelCard
from baton.compute.sandbox.messages import GrammarProblem
from baton.core.errors import RequestError
from baton.core.types import Grammar
from baton.serve.http.wire.parsing import is_deeper
from baton.serve.http.wire.schemas import GenerateFields, JsonSchema, ResponseFormat, StructuredOutputs

GRAMMAR_CHARS_MAX = 131_072
"""Maximum length of a grammar. It is sent to every worker that runs the request, and is part of the decision log."""
SCHEMA_LEVELS_MAX = 200
"""Maximum depth of a schema, in nested objects and lists."""
_ANY_OBJECT: JsonSchema = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar that the output must match, and the field of the request that has it."""

    grammar: Grammar
    param: str
    parts: tuple[Constraint, ...] = ()
    """Schemas of which the grammar consists. They are checked first, so that errors name the right field."""

    def check_size(self, card: ModelCard) -> None:
        """Raise RequestError (400) if the grammar is too large, or the model has no token that ends a text."""
        if not card.eos_token_ids:
            raise RequestError(f"{card.name} has no token that ends a text, so it cannot follow {self.param}")
        for part in (*self.parts, self):
            size = len(part.grammar.text)
            if size > GRAMMAR_CHARS_MAX:
                message = (
                    f"{part.param} has {size} characters, at most {GRAMMAR_CHARS_MAX} are taken; send a smaller one"
                )
                raise RequestError(message, param=part.param)

    def error(self, problem: GrammarProblem) -> RequestError:
        """Return the error for an invalid grammar. `problem.index`: index of the part; the whole grammar comes last."""
        param = (*self.parts, self)[problem.index].param + (f".{problem.place}" if problem.place else "")
        return RequestError(f"{param} cannot be followed: {problem.reason}", param=param, code="invalid_grammar")


def constraint_of(body: GenerateFields) -> Constraint | None:
    """Return the constraint of a request. Raises RequestError (400) if it has several."""
    found = [*_from_format(body.response_format), *_from_structured(body.structured_outputs), *_from_guided(body)]
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise RequestError(f"{first} and {second} both constrain the output; send one of them", param=second)
    return found[0] if found else None


def schema_constraint(schema: JsonSchema, param: str) -> Constraint:
    """Return the constraint for a JSON schema. Raises RequestError (400) if it is nested too deeply."""
    check_depth(schema, param)
    return Constraint(Grammar(kind="json_schema", text=msgspec.json.encode(schema).decode()), param)


def check_depth(value: object, param: str) -> None:
    """Raise RequestError (400) for a schema that is nested too deeply for recursive functions."""
    if is_deeper(value, SCHEMA_LEVELS_MAX):
        limit = f"{param} is nested more than {SCHEMA_LEVELS_MAX} levels deep"
        raise RequestError(f"{limit}, which is the limit; use $ref, or nest it less", param=param)


def _from_format(sent: ResponseFormat | None) -> Iterator[Constraint]:
    if sent is None:
        return
    named = sent.json_schema
    if sent.schema is not None and sent.type != "text" and named is None:
        yield schema_constraint(sent.schema, "response_format.schema")
        return
    if sent.schema is not None:
        message = "response_format.schema needs type json_object or json_schema, and no response_format.json_schema"
        raise RequestError(message, param="response_format.schema")
    if (named is not None) != (sent.type == "json_schema"):
        message = f'response_format.type is "{sent.type}": send json_schema with the type "json_schema", and only then'
        raise RequestError(message, param="response_format.json_schema")
    if named is not None and named.schema is not None:
        yield schema_constraint(named.schema, "response_format.json_schema.schema")
    elif sent.type != "text":
        yield schema_constraint(_ANY_OBJECT, "response_format")


def _from_structured(sent: StructuredOutputs | None) -> Iterator[Constraint]:
    if sent is None:
        return
    found = [
        *_from_json(sent.json, "structured_outputs.json"),
        *_from_text("regex", sent.regex, "structured_outputs.regex"),
        *_from_choice(sent.choice, "structured_outputs.choice"),
        *_from_text("grammar", sent.grammar, "structured_outputs.grammar"),
    ]
    if sent.json_object:
        found.append(schema_constraint(_ANY_OBJECT, "structured_outputs.json_object"))
    if not found:
        raise RequestError(
            "structured_outputs is empty; send one of json, regex, choice, grammar and json_object",
            param="structured_outputs",
        )
    yield from found


def _from_guided(body: GenerateFields) -> Iterator[Constraint]:
    """Yield the constraints in the fields that vLLM had before 0.12, because clients still send them."""
    yield from _from_json(body.guided_json, "guided_json")
    yield from _from_text("regex", body.guided_regex, "guided_regex")
    yield from _from_choice(body.guided_choice, "guided_choice")
    yield from _from_text("grammar", body.guided_grammar, "guided_grammar")


def _from_json(sent: JsonSchema | str | None, param: str) -> Iterator[Constraint]:
    if isinstance(sent, str):
        try:
            sent = msgspec.json.decode(sent, type=JsonSchema)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise RequestError(f"{param} is not a JSON schema: {error}", param=param) from error
    if sent is not None:
        yield schema_constraint(sent, param)


def _from_text(kind: str, sent: str | None, param: str) -> Iterator[Constraint]:
    if sent is not None:
        yield Constraint(Grammar(kind="regex" if kind == "regex" else "grammar", text=sent), param)


def _from_choice(sent: Sequence[str] | None, param: str) -> Iterator[Constraint]:
    if sent is not None:
        yield Constraint(Grammar(kind="choice", text=msgspec.json.encode(sent).decode()), param)
