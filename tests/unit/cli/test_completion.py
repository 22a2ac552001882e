"""`baton completion`: the scripts complete what the parsers accept."""

from __future__ import annotations

import subprocess

import pytest

from baton.cli.commands import COMMANDS, build_parser
from baton.cli.completion import completion_script


def completed(*words: str) -> list[str]:
    """Return the words that bash offers for the last of `words`."""
    script = completion_script(build_parser(), "bash")
    line = " ".join(f"'{word}'" for word in words)
    script += f"COMP_WORDS=(baton {line})\nCOMP_CWORD={len(words)}\n_baton\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"\n"
    done = subprocess.run(["bash", "-u", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bash_completes_commands_flags_and_choices() -> None:
    assert set(completed("")) >= set(COMMANDS)
    assert completed("serve", "--dtyp") == ["--dtype"]
    assert {"auto", "float32", "bfloat16"} <= set(completed("serve", "--dtype", ""))
    assert completed("keys", "re") == ["revoke"]
    assert completed("completion", "f") == ["fish"]
    assert completed("sim", "--cluster", "") == [], "a file: bash completes its name itself"
    assert completed("serve", "hash", "--port", "8000", "--pref") == ["--prefill"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_flag_is_in_every_script(shell: str) -> None:
    script = completion_script(build_parser(), shell)
    for word in ("serve", "keys", "revoke", "chat", "doctor", "perfetto", "ttft-slo-s", "float32"):
        assert word in script
