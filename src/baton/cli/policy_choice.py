"""Which policies a command is to play: a set by name, or those of a configuration that `baton serve` takes."""

from __future__ import annotations

from pathlib import Path

from baton.core.config import PolicyConfig
from baton.core.config_file import load
from baton.core.files import in_file
from baton.decide.policy.policy_sets import POLICY_SETS, policy_set, resolve

HELP = f"{', '.join(POLICY_SETS)}; or a FILE.toml: the [policy] section of a configuration, with policies of your own"


def policy_of(asked: str) -> PolicyConfig:
    """Return the policies of a name or of a `.toml` file. Raises ConfigError for what is neither."""
    if not asked.endswith(".toml"):
        return policy_set(asked)
    with in_file(asked, "the policies"):
        return resolve(load(Path(asked).read_text(encoding="utf-8")).policy)
