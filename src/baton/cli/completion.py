"""`baton completion`: write a script that completes commands and flags in a shell, from the argument parsers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from baton.cli.commands import build_parser

SHELLS = ("bash", "zsh", "fish")
DESCRIPTION = """Write a completion script for a shell to standard output.

bash: baton completion bash > ~/.local/share/bash-completion/completions/baton
zsh: baton completion zsh > FOLDER/_baton, in a FOLDER of $fpath
fish: baton completion fish > ~/.config/fish/completions/baton.fish"""
_BASH = """_baton() {{
    local path=baton previous="${{COMP_WORDS[COMP_CWORD-1]}}" current="${{COMP_WORDS[COMP_CWORD]}}" index words=""
    for ((index = 1; index < COMP_CWORD; index++)); do
        case "$path ${{COMP_WORDS[index]}}" in
            {commands}) path="$path ${{COMP_WORDS[index]}}" ;;
        esac
    done
    case "$path $previous" in
{values}
        *) case "$path" in
{words}
        esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _baton baton
"""
"""Where no word fits, `-o default` completes file names."""
_ZSH = "#compdef baton\nautoload -U +X bashcompinit && bashcompinit\n"


@dataclass(frozen=True, slots=True)
class _Flag:
    names: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...]


@dataclass(slots=True)
class _Command:
    """A command with its flags. `path`: its words, such as `baton keys add`."""

    path: str
    help: str
    flags: list[_Flag] = field(default_factory=list[_Flag])
    words: list[str] = field(default_factory=list[str])
    """Its sub-commands, and the choices of its arguments."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=SHELLS, help="shell that reads the script")


def run(args: argparse.Namespace) -> int:
    print(completion_script(build_parser(), args.shell), end="")  # noqa: T201
    return 0


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for one of `SHELLS`."""
    commands = list(_commands(parser, "baton", ""))
    if shell == "fish":
        return "".join(_fish_lines(commands))
    return (_ZSH if shell == "zsh" else "") + _bash_script(commands)


def _commands(parser: argparse.ArgumentParser, path: str, purpose: str) -> Iterator[_Command]:
    """Yield a parser's command, and those below it. Its help flag is left out."""
    command = _Command(path, purpose)
    inner: list[tuple[argparse.ArgumentParser, str, str]] = []
    for action in parser._actions:
        choices = tuple(str(choice) for choice in action.choices or ())
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            inner += [(action.choices[name], name, text) for name, text in helps.items()]
            command.words += helps
        elif action.option_strings and action.help != argparse.SUPPRESS:
            text = (action.help or "") % {**vars(action), "prog": parser.prog}
            command.flags.append(_Flag(tuple(action.option_strings), text, action.nargs != 0, choices))
        elif not action.option_strings:
            command.words += choices
    yield command
    for below, name, text in inner:
        yield from _commands(below, f"{path} {name}", text)


def _bash_script(commands: Sequence[_Command]) -> str:
    values: list[str] = []
    words: list[str] = []
    for command in commands:
        for flag in command.flags:
            if flag.takes_value:
                names = "|".join(f'"{command.path} {name}"' for name in flag.names)
                values.append(f'        {names}) words="{" ".join(flag.choices)}" ;;')
        every = [*command.words, *(name for flag in command.flags for name in flag.names)]
        words.append(f'            "{command.path}") words="{" ".join(every)}" ;;')
    paths = "|".join(f'"{command.path}"' for command in commands[1:])
    return _BASH.format(commands=paths, values="\n".join(values), words="\n".join(words))


def _fish_lines(commands: Sequence[_Command]) -> Iterator[str]:
    for command in commands:
        names = command.path.split()[1:]
        seen = "; and ".join(f"__fish_seen_subcommand_from {name}" for name in names) or "__fish_use_subcommand"
        below = [each for each in commands if each.path.rpartition(" ")[0] == command.path]
        for each in below:
            yield f"complete -c baton -n '{seen}' -f -a {each.path.split()[-1]} -d {_quoted(each.help)}\n"
        if command.words and not below:
            yield f"complete -c baton -n '{seen}' -f -a '{' '.join(command.words)}'\n"
        for flag in command.flags:
            spelled = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
            value = f" -x -a '{' '.join(flag.choices)}'" if flag.choices else " -r" if flag.takes_value else ""
            yield f"complete -c baton -n '{seen}' {spelled}{value} -d {_quoted(flag.help)}\n"


def _quoted(text: str) -> str:
    """Return the first words of a help text in single quotes."""
    short = re.split(r"[;(\n]", text)[0].strip()
    return "'" + short.replace("\\", "\\\\").replace("'", "\\'") + "'"
