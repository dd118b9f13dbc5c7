"""Print what makes a shell complete commands, options, and the names and values of settings.

eval "$(megafp8 completion bash)"           in ~/.bashrc
eval "$(megafp8 completion zsh)"            in ~/.zshrc, after compinit
megafp8 completion fish | source            in ~/.config/fish/config.fish
"""

from __future__ import annotations

from collections.abc import Sequence

from megafp8.cli import recipe
from megafp8.cli.commands import all_commands
from megafp8.cli.help import shown_value
from megafp8.cli.job import command_parser, reports_errors, show
from megafp8.config.keys import Key
from megafp8.config.layers import conf_dir
from megafp8.config.overrides import PRESET_GROUPS, preset_names
from megafp8.config.schema import all_keys
from megafp8.errors import ExitCode
from megafp8.plan.hardware import KNOWN

WITH_SETTINGS = ("pretrain", "finetune", "plan", "dryrun", "compare")
"""The commands whose arguments are settings; those of the others are files and options."""
BASH = """\
_megafp8() {
    local word=${COMP_WORDS[COMP_CWORD]} key= before=
    COMPREPLY=()
    if [ "$word" = = ]; then  # bash takes KEY=VALUE apart, and zsh does not
        key=${COMP_WORDS[COMP_CWORD-1]} word=
    elif [ "${COMP_WORDS[COMP_CWORD-1]}" = = ]; then
        key=${COMP_WORDS[COMP_CWORD-2]}
    elif [[ "$word" == *=* ]]; then
        key=${word%%=*} before=${word%%=*}= word=${word#*=}
    fi
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "@COMMANDS@" -- "$word"))
        return
    fi
    if [[ "$word" == -* ]]; then
        COMPREPLY=($(compgen -W "$(megafp8 "${COMP_WORDS[1]}" --help 2>/dev/null \
            | grep -E '^ +-' | cut -c1-24 | grep -oE -- '--[a-z][a-z-]+')" -- "$word"))
        return
    fi
    case "${COMP_WORDS[1]}" in
        recipe)
            [ "$COMP_CWORD" -ne 2 ] || COMPREPLY=($(compgen -W "@ACTIONS@" -- "$word")) ;;
        @WITH_SETTINGS@)
            if [ -n "$key" ]; then
                case "$key" in
@VALUES@
                esac
                return
            fi
            COMPREPLY=($(compgen -W "@SETTINGS@" -- "$word"))
            [ ${#COMPREPLY[@]} -eq 0 ] || compopt -o nospace 2>/dev/null || true ;;
    esac
}
complete -o default -F _megafp8 megafp8
"""
_CASE = '            {name}) COMPREPLY=($(compgen -P {before} -W "{values}" -- "$word")) ;;'
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Print the lines for one shell; return 0, or 2 after printing an error."""
    parser = command_parser("completion", __doc__)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    shell = parser.parse_args(argv).shell
    show(_fish() if shell == "fish" else (ZSH if shell == "zsh" else "") + _bash())
    return ExitCode.FINISHED


def _settings() -> list[str]:
    """Return every key and group of presets, with the `=` that follows it."""
    return [f"{name}=" for name in (*PRESET_GROUPS, *all_keys(), "hardware")]


def _values() -> dict[str, list[str]]:
    """Return the values of the keys that take one of a few, and the presets, by name."""
    values = {group: preset_names(group, [conf_dir()]) for group in PRESET_GROUPS}
    few = {path: values_of(key) for path, key in all_keys().items()}
    return (
        values
        | {"hardware": list(KNOWN)}
        | {path: all_of for path, all_of in few.items() if all_of}
    )


def values_of(key: Key) -> list[str]:
    """Return the values that a key takes, in the spelling of a setting; none if it takes many."""
    if key.valid is not None:
        null = ["null"] if key.valid.values and key.valid.accepts(None) else []
        return [*dict.fromkeys(map(shown_value, key.valid.values)), *null]
    flags = {"True or False": [], "True or False, or null": ["null"]}
    return ["True", "False", *flags[key.type_text]] if key.type_text in flags else []


def _bash() -> str:
    words = {
        "COMMANDS": " ".join(all_commands()),
        "WITH_SETTINGS": " | ".join(WITH_SETTINGS),
        "SETTINGS": " ".join(_settings()),
        "ACTIONS": " ".join(recipe.ACTIONS),
        "VALUES": "\n".join(
            _CASE.format(name=name, before='"$before"', values=" ".join(of))
            for name, of in _values().items()
        ),
    }
    text = BASH
    for name, value in words.items():
        text = text.replace(f"@{name}@", value)
    return text


def _fish() -> str:
    rest = f"__fish_seen_subcommand_from {' '.join(WITH_SETTINGS)}"
    both = [f"{name}={value}" for name, values in _values().items() for value in values]
    return "".join(
        [
            *(
                f"complete -c megafp8 -n __fish_use_subcommand -f -a {name} -d '{about}'\n"
                for name, about in all_commands().items()
            ),
            f"complete -c megafp8 -n '{rest}' -a '{' '.join(_settings())}'\n",
            f"complete -c megafp8 -n '{rest}' -f -a '{' '.join(both)}'\n",
            "complete -c megafp8 -n '__fish_seen_subcommand_from recipe' -f "
            f"-a '{' '.join(recipe.ACTIONS)}'\n",
        ]
    )
