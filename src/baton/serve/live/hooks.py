"""Plug-ins around a request: one kind changes its body before it is read, the other its text before it is sent.

Hooks are foreign code. One that raises fails the request that it was called for, with a 500 or with the status of the
RequestError that it raised; the server goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from baton.core.config import HooksConfig
from baton.core.errors import RequestError
from baton.core.plugin import load_plugin

log = logging.getLogger("baton.serve.live.hooks")
Made = TypeVar("Made")


@runtime_checkable
class RequestHook(Protocol):
    """Changes requests before they are validated."""

    def before(self, body: dict[str, Any], route: str) -> dict[str, Any]:
        """Return the body to serve instead of `body`, which it may change. `route` is the path: `/v1/completions`.

        Raise RequestError to refuse the request. Runs on the event loop: it must not block.
        """
        ...


class OutputFilter(Protocol):
    """Changes the text of one choice while it streams. What it cannot decide yet it keeps until it can."""

    def push(self, text: str) -> str:
        """Take the next piece of text, return what may be sent now."""
        ...

    def flush(self) -> str:
        """Return what was kept: the text is over."""
        ...


@runtime_checkable
class OutputHook(Protocol):
    """Makes the filters that change output text."""

    def begin(self, body: Mapping[str, Any], route: str) -> OutputFilter:
        """Make a filter for one choice of the request `body`."""
        ...


@dataclass(frozen=True, slots=True)
class Hooks:
    """The hooks of a server, in the order in which they run."""

    request: tuple[RequestHook, ...] = ()
    output: tuple[OutputHook, ...] = ()

    def before(self, body: dict[str, Any], route: str) -> dict[str, Any]:
        """Run every request hook over the body. Raises RequestError where one refuses or fails."""
        for hook in self.request:
            body = _guarded(hook, lambda hook=hook, body=body: hook.before(body, route))
            if not isinstance(body, dict):
                raise _failure(hook, f"it returned a {type(body).__name__} where a dict was expected")
        return body

    def begin(self, body: Mapping[str, Any], route: str) -> Filters:
        """Make one choice's filters."""
        made = [(hook, _guarded(hook, lambda hook=hook: hook.begin(body, route))) for hook in self.output]
        return Filters(tuple(made))


@dataclass(frozen=True, slots=True)
class Filters:
    """The output filters of one choice, chained. No filter: text passes as it is."""

    chain: tuple[tuple[OutputHook, OutputFilter], ...]

    def push(self, text: str) -> str:
        for hook, part in self.chain:
            if not text:
                break
            text = _guarded(hook, lambda part=part, text=text: part.push(text))
        return text

    def flush(self) -> str:
        """End every filter in order: what the first kept goes through the next ones."""
        text = ""
        for hook, part in self.chain:
            pushed = _guarded(hook, lambda part=part, text=text: part.push(text)) if text else ""
            text = pushed + _guarded(hook, part.flush)
        return text


def load_hooks(config: HooksConfig) -> Hooks:
    """Make the hooks that the configuration names. Raises ConfigError."""
    return Hooks(
        request=tuple(load_plugin(plugin.use, plugin.options, expects=RequestHook) for plugin in config.request),
        output=tuple(load_plugin(plugin.use, plugin.options, expects=OutputHook) for plugin in config.output),
    )


def _guarded(hook: RequestHook | OutputHook, call: Callable[[], Made]) -> Made:
    """Call foreign code: whatever it raises becomes a RequestError of this one request."""
    try:
        return call()
    except RequestError:
        raise
    except Exception as error:  # a plug-in may raise anything, and must only fail its own request
        log.exception("hook %s failed", type(hook).__name__)
        raise _failure(hook, f"{type(error).__name__} in it; the server's log has the traceback") from error


def _failure(hook: RequestHook | OutputHook, what: str) -> RequestError:
    return RequestError(f"the server's plug-in {type(hook).__name__} failed: {what}", status=500, code="hook_failed")
