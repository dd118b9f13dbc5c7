"""Print what makes a shell complete the commands of megafp8 and the names of settings.

eval "$(megafp8 completion bash)"           in ~/.bashrc
eval "$(megafp8 completion zsh)"            in ~/.zshrc, after compinit
megafp8 completion fish | source            in ~/.config/fish/config.fish
"""

from __future__ import annotations

from collections.abc import Sequence

from megafp8.cli.commands import all_commands
from megafp8.cli.job import command_parser, reports_errors, show
from megafp8.config.overrides import PRESET_GROUPS
from megafp8.config.schema import all_keys
from megafp8.errors import ExitCode

WITH_SETTINGS = ("pretrain", "finetune", "plan", "dryrun", "compare")
"""The commands whose arguments are settings; those of the others are files and options."""
BASH = """\
_megafp8() {
    local word=${COMP_WORDS[COMP_CWORD]}
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "@COMMANDS@" -- "$word"))
        return
    fi
    case "${COMP_WORDS[1]}" in
        @WITH_SETTINGS@)
            COMPREPLY=($(compgen -W "@SETTINGS@" -- "$word"))
            [ ${#COMPREPLY[@]} -eq 0 ] || compopt -o nospace 2>/dev/null || true ;;
    esac
}
complete -o default -F _megafp8 megafp8
"""
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
    return [f"{name}=" for name in (*PRESET_GROUPS, *all_keys())]


def _bash() -> str:
    words = {
        "COMMANDS": " ".join(all_commands()),
        "WITH_SETTINGS": " | ".join(WITH_SETTINGS),
        "SETTINGS": " ".join(_settings()),
    }
    text = BASH
    for name, value in words.items():
        text = text.replace(f"@{name}@", value)
    return text


def _fish() -> str:
    rest = f"__fish_seen_subcommand_from {' '.join(WITH_SETTINGS)}"
    return "".join(
        [
            *(
                f"complete -c megafp8 -n __fish_use_subcommand -f -a {name} -d '{about}'\n"
                for name, about in all_commands().items()
            ),
            f"complete -c megafp8 -n '{rest}' -a '{' '.join(_settings())}'\n",
        ]
    )
