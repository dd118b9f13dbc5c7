"""Name the paths that NeMo's launcher gives, and gather the problems where they have no value."""

from __future__ import annotations

from collections.abc import Sequence

from megafp8.config.errors import SettingError

LAUNCHER_GIVES = "NeMo's launcher gives the value"

LAUNCHER_PATHS = ("data_dir", "base_results_dir", "launcher_scripts_path")
"""Names that the launcher's files refer to, as `${data_dir}`; the launcher gives their values."""


def launcher_paths_once(problems: Sequence[SettingError]) -> list[SettingError]:
    """Return the problems with one for all settings that refer to a path of the launcher's.

    NeMo's launcher fills in `${data_dir}` and others; without it they have no value.
    """
    names: dict[str, None] = {}
    users: dict[str, None] = {}
    others: list[SettingError] = []
    origin = ""
    for problem in problems:
        missing = [n for n in LAUNCHER_PATHS if f"mandatory value: {n}" in problem.reason]
        if not missing:
            others.append(problem)
            continue
        names |= dict.fromkeys(missing)
        users[problem.key] = None
        origin = origin or problem.origin
    if not names:
        return others
    give = " and ".join(f"{name}=PATH" for name in names)
    found = SettingError(
        " and ".join(names),
        None,
        f"{LAUNCHER_GIVES}, and {', '.join(users)} refer to it",
        f"Give {give} on the command line, or write the paths into the file",
        origin=origin,
    )
    return [found, *others]
