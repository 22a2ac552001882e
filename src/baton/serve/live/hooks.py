"""Plug-ins that change the body of a request before it is parsed, or its output text before it is sent.

Hooks are code of the user. A hook that raises RequestError fails its request with that error's status; any other
exception fails it with status 500. The server goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from baton.core.config import HooksConfig
from baton.core.errors import RequestError
from baton.core.plugin import load_plugin

log = logging.getLogger("baton.server")
Made = TypeVar("Made")


@runtime_checkable
class RequestHook(Protocol):
    """Changes the bodies of requests before they are validated."""

    def before(self, body: dict[str, Any], route: str) -> dict[str, Any]:
        """Return the body to serve instead of `body`, which may be changed in place. `route`: e.g. `/v1/completions`.

        Raise RequestError to reject the request. The method runs on the event loop, so it must not block.
        """
        ...


class OutputFilter(Protocol):
    """Changes the text of one choice while it streams. May hold text back until it can decide."""

    def push(self, text: str) -> str:
        """Filter the next piece of text. Return the text to send now."""
        ...

    def flush(self) -> str:
        """End the text. Return the text that was held back."""
        ...


@runtime_checkable
class OutputHook(Protocol):
    """Makes the filters of output text."""

    def begin(self, body: Mapping[str, Any], route: str) -> OutputFilter:
        """Return a filter for one choice of the request `body`."""
        ...


@dataclass(frozen=True, slots=True)
class Hooks:
    """The hooks of a server, in the order in which they run."""

    request: tuple[RequestHook, ...] = ()
    output: tuple[OutputHook, ...] = ()

    def before(self, body: dict[str, Any], route: str) -> dict[str, Any]:
        """Return the body after every request hook. Raises RequestError if one rejects it or fails."""
        for hook in self.request:
            body = _guarded(hook, lambda hook=hook, body=body: hook.before(body, route))
            if not isinstance(body, dict):
                raise _failure(hook, f"it returned a {type(body).__name__} where a dict was expected")
        return body

    def begin(self, body: Mapping[str, Any], route: str) -> Filters:
        """Return new filters for one choice. Raises RequestError if a hook fails."""
        made = [(hook, _guarded(hook, lambda hook=hook: hook.begin(body, route))) for hook in self.output]
        return Filters(tuple(made))


@dataclass(frozen=True, slots=True)
class Filters:
    """The output filters of one choice, chained."""

    chain: tuple[tuple[OutputHook, OutputFilter], ...]

    def push(self, text: str) -> str:
        for hook, part in self.chain:
            if not text:
                break
            text = _guarded(hook, lambda part=part, text=text: part.push(text))
        return text

    def flush(self) -> str:
        """End every filter in order. Text that a filter held back passes through the filters after it."""
        text = ""
        for hook, part in self.chain:
            pushed = _guarded(hook, lambda part=part, text=text: part.push(text)) if text else ""
            text = pushed + _guarded(hook, part.flush)
        return text


def load_hooks(config: HooksConfig) -> Hooks:
    """Load the configured hooks. Raises ConfigError if a hook cannot be imported or created."""
    return Hooks(
        request=tuple(load_plugin(plugin.use, plugin.options, expects=RequestHook) for plugin in config.request),
        output=tuple(load_plugin(plugin.use, plugin.options, expects=OutputHook) for plugin in config.output),
    )


def _guarded(hook: RequestHook | OutputHook, call: Callable[[], Made]) -> Made:
    """Call a hook. Turn any exception into a RequestError, which fails the request."""
    try:
        return call()
    except RequestError:
        raise
    except Exception as error:  # a plug-in may raise anything, and must fail only its own request
        log.exception("hook %s failed", type(hook).__name__)
        raise _failure(hook, f"{type(error).__name__} in it; the server's log has the traceback") from error


def _failure(hook: RequestHook | OutputHook, what: str) -> RequestError:
    return RequestError(f"the server's plug-in {type(hook).__name__} failed: {what}", status=500, code="hook_failed")
