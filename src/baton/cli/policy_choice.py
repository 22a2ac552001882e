"""Read `--policy`: the name of a set of policies, or a configuration file of `baton serve`."""

from __future__ import annotations

from pathlib import Path

from baton.core.config import PolicyConfig, load
from baton.core.files import in_file
from baton.decide.policy.policy_sets import policy_set, resolve

HELP = "a set of docs/policies.md, or FILE.toml with the section [policy]"


def policy_of(asked: str) -> PolicyConfig:
    """Return the policies of a set or of a `.toml` file. Raises ConfigError if neither exists."""
    if not asked.endswith(".toml"):
        return policy_set(asked)
    with in_file(asked, "the policies"):
        return resolve(load(Path(asked).read_text(encoding="utf-8")).policy)
