"""Load a user's own policy or hook by `module:Class`. What is loaded is checked before anything starts."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from baton.core.errors import ConfigError


def load_plugin(spec: str, options: Mapping[str, Any], *, verbs: tuple[str, ...]) -> Any:  # noqa: ANN401
    """Import `module:Class` and build it with `options`.

    `verbs` are the methods that it must have. Raises ConfigError that names the module, class, option or method that is
    wrong and the nearest one that exists.
    """
    module_name, _, class_name = spec.partition(":")
    if not module_name or not class_name:
        raise ConfigError(f"plug-in {spec!r} is not of the form 'module:Class', such as 'my_policies:MyRouting'")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"plug-in {spec!r}: cannot import {module_name}: {error}; is it on PYTHONPATH?") from error
    found = vars(module).get(class_name)
    if not inspect.isclass(found):
        classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
        raise ConfigError(f"plug-in {spec!r}: {module_name} has no class {class_name}{_nearest(class_name, classes)}")
    missing = [verb for verb in verbs if not callable(inspect.getattr_static(found, verb, None))]
    if missing:
        raise ConfigError(f"plug-in {spec!r} lacks the method{'s' * (len(missing) > 1)} {', '.join(missing)}")
    _check_options(spec, found, options)
    return found(**options)


def _check_options(spec: str, found: type, options: Mapping[str, Any]) -> None:
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        known = list(inspect.signature(found).parameters)
        unknown = [name for name in options if name not in known]
        hint = _nearest(unknown[0], known) if unknown else f"; it takes {', '.join(known) or 'no options'}"
        raise ConfigError(f"plug-in {spec!r}: {error}{hint}") from error


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; it has {', '.join(known) or 'none'}"
