"""Choose the service class of an HTTP request, and check that its API key may use it."""

from __future__ import annotations

from baton.core.errors import RequestError
from baton.decide.policy.classes import ClassChoice, ClassTable, RouteFacts
from baton.serve.http.edge import RequestContext


def choose_class(context: RequestContext, model: str | None, classes: ClassTable) -> ClassChoice:
    """Return the class of a request by the configured routes. Raises RequestError (403) if the key may not use it.

    Requests of batches have a class of their own, so that they take no reserve.
    """
    if context.is_offline or not classes.classes:
        return classes.offline()
    identity = context.identity
    facts = RouteFacts(
        key=identity.key,
        tenant=identity.tenant,
        model=model or "",
        path=context.path,
        headers={name.decode("latin-1").lower(): value.decode("latin-1") for name, value in context.headers.items()},
    )
    choice, allowed = classes.choose(facts), identity.limits.classes
    is_bounded = identity.priority_min is not None
    if is_bounded and not classes.is_allowed(facts, None if allowed is None else set(allowed)):
        name = choice.service.name if choice.service is not None else ""
        raise RequestError(
            f"the request has the class {name!r}, which the key {identity.key} does not allow; the limit `classes` of"
            " the key in the key file allows more",
            status=403,
            code="class_not_allowed",
        )
    return choice
