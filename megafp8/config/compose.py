"""Hydra's part: find the YAML files and put schema, YAML and overrides together."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped,unused-ignore]  # as OmegaConf raises it

from megafp8.config.nemo import nemo_keys
from megafp8.config.overrides import PRESET_GROUPS, Setting, flatten, setting_problem
from megafp8.config.problems import PRESET, SettingError
from megafp8.config.schema import schema_tree

DEFAULT_CONFIG = "pretrain_gpt"
ROOT_CONFIG = "megafp8_root"
"""Made anew for each composition: schema, then the YAML asked for, then Hydra's own settings."""

_SCHEMA = "megafp8_schema"
_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)


def _product(*factors: float) -> float:
    return math.prod(_numbers(factors))


def _sum(*terms: float) -> float:
    return sum(_numbers(terms))


def _numbers(values: Sequence[object]) -> list[float]:
    wrong = [v for v in values if isinstance(v, bool) or not isinstance(v, (int, float))]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is not a number")
    return [v for v in values if isinstance(v, (int, float))]


# NeMo's own, for `${multiply:...}` and `${sum:...}` in its files.
OmegaConf.register_new_resolver("multiply", _product, replace=True)
OmegaConf.register_new_resolver("sum", _sum, replace=True)
COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, YAMLError, ValueError, OverflowError)


def conf_dir() -> Path:
    """The directory `conf/` that comes with the project."""
    folder = Path(__file__).resolve().parents[2] / "conf"
    if not (folder / f"{DEFAULT_CONFIG}.yaml").is_file():
        raise SettingError(
            "conf",
            folder,
            f"{DEFAULT_CONFIG}.yaml is not there",
            "Install with `pip install -e .` from the repository, which brings conf/ along",
        )
    return folder


@dataclass(frozen=True)
class Source:
    """Which YAML is composed, and from where. The first directory wins."""

    name: str
    directories: tuple[Path, ...]

    @property
    def file(self) -> Path:
        candidates = [folder / f"{self.name}.yaml" for folder in self.directories]
        return next((file for file in candidates if file.is_file()), candidates[0])

    @property
    def is_default(self) -> bool:
        return self.file == conf_dir() / f"{DEFAULT_CONFIG}.yaml"


def find_source(config_dir: Path | None, config_name: str) -> Source:
    """The YAML asked for; refused with the list of those there are."""
    ours = conf_dir()
    if config_dir is not None and not config_dir.is_dir():
        raise SettingError("--config-dir", config_dir, "is not a directory", "Give an existing one")
    theirs = () if config_dir is None or config_dir.resolve() == ours else (config_dir.resolve(),)
    source = Source(config_name.removesuffix(".yaml"), (*theirs, ours))
    if "\0" in config_name or not source.file.is_file():
        there = sorted({f.stem for folder in source.directories for f in folder.glob("*.yaml")})
        raise SettingError(
            "--config-name",
            config_name,
            f"no such YAML in {' or '.join(str(folder) for folder in source.directories)}",
            f"There are: {', '.join(there)}; --config-dir names a directory of your own",
        )
    return source


def register(source: Source) -> None:
    """Put the root of the composition where Hydra finds it."""
    group, _, option = source.name.rpartition("/")
    yaml: Any = {f"/{group}@_global_": option} if group else source.name
    store = ConfigStore.instance()
    if f"{_SCHEMA}.yaml" not in store.repo:
        store.store(name=_SCHEMA, node=tree_with_nemo_keys())
    hydra_settings = {
        "run": {"dir": "."},
        "output_subdir": None,
        "job": {"name": "megafp8", "chdir": False},
        "sweep": {"dir": "multirun/${now:%Y-%m-%d_%H-%M-%S}", "subdir": "${hydra.job.num}"},
        "searchpath": [f"file://{folder}" for folder in source.directories[1:]],
    }
    quiet = [{"override hydra/job_logging": "none"}, {"override hydra/hydra_logging": "none"}]
    chosen = {group for group, _ in yaml_presets(source)}  # there, and overridden there
    presets = [{f"optional {group}": None} for group in PRESET_GROUPS if group not in chosen]
    root = {"defaults": [_SCHEMA, "_self_", yaml, *presets, *quiet], "hydra": hydra_settings}
    store.store(name=ROOT_CONFIG, node=root)


def tree_with_nemo_keys() -> DictConfig:
    """The schema, and NeMo's keys that do nothing here, which `load` checks and takes out."""
    tree = schema_tree()
    for path, key in nemo_keys().items():
        OmegaConf.update(tree, path, key.ours, force_add=True)
    return tree


def compose(source: Source, overrides: Sequence[str], *, with_hydra: bool = False) -> DictConfig:
    """One tree of the schema's types. The overrides have been checked one by one before.

    With `with_hydra` Hydra's own settings are in it too, as `hydra`.
    """
    register(source)
    outer = GlobalHydra.instance().hydra  # a sweep's, when this composes one of its jobs
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(source.directories[0]), version_base=None):
            composed = hydra_compose(ROOT_CONFIG, list(overrides), return_hydra_config=with_hydra)
    except Exception as error:  # Hydra's code alone: it stumbles over `hydra: null` and the like
        raise _hydra_problem(source, error) from error
    finally:
        GlobalHydra.instance().hydra = outer
    return composed


def yaml_settings(source: Source) -> list[Setting]:
    """What the YAML itself sets, without the files that it builds on. Empty if unreadable."""
    try:
        tree = OmegaConf.to_container(OmegaConf.load(source.file), resolve=False)
    except (*COMPOSE_ERRORS, OSError):
        return []
    if not isinstance(tree, dict):
        return []
    ours = {name: item for name, item in tree.items() if name not in ("defaults", "hydra")}
    return list(flatten("", ours, source.file.name))


def has_hydra_settings(source: Source) -> bool:
    """Whether the YAML has a `hydra:` section."""
    try:
        tree = OmegaConf.to_container(OmegaConf.load(source.file), resolve=False)
    except (*COMPOSE_ERRORS, OSError):
        return False
    return isinstance(tree, dict) and "hydra" in tree


def preset_settings(source: Source, group: str, option: str) -> list[Setting]:
    """What a preset sets. Empty if unreadable, which Hydra then reports."""
    if "\0" in group + option:
        return []
    files = (
        folder / group / f"{option.removesuffix('.yaml')}.yaml" for folder in source.directories
    )
    file = next((file for file in files if file.is_file()), None)
    try:
        text = "" if file is None else file.read_text(encoding="utf-8")
        tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (*COMPOSE_ERRORS, OSError):
        return []
    if not isinstance(tree, dict):
        return []
    package = _PACKAGE.search(text)
    section = group.replace("/", ".") if package is None else package[1]
    section = {"_global_": "", "_group_": group.replace("/", ".")}.get(section, section)
    ours = {name: item for name, item in tree.items() if name not in ("defaults", "hydra")}
    return list(flatten(section, ours, f"{PRESET} {group}={option}"))


def yaml_presets(source: Source) -> list[tuple[str, str]]:
    """The presets that the YAML's own `defaults:` choose."""
    try:
        tree = OmegaConf.to_container(OmegaConf.load(source.file), resolve=False)
    except (*COMPOSE_ERRORS, OSError):
        return []
    defaults = tree.get("defaults") if isinstance(tree, dict) else None
    items = [item for item in defaults if isinstance(item, dict)] if defaults else []
    return [
        (str(group), option)
        for item in items
        for group, option in item.items()
        if group in PRESET_GROUPS and isinstance(option, str)
    ]


def yaml_problems(source: Source) -> list[SettingError]:
    """Each setting of the YAML that Hydra would stop at."""
    found = (setting_problem(setting) for setting in yaml_settings(source))
    return [problem for problem in found if problem is not None]


def _hydra_problem(source: Source, error: Exception) -> SettingError:
    text = str(error).partition("Config search path")[0]
    lines = [line.strip().rstrip(".:") for line in text.splitlines()]
    useful = [line for line in lines if line and not line.startswith(("reference_type", "object_"))]
    reason = "; ".join(useful[:4]) or type(error).__name__
    return SettingError(
        "configuration",
        None,
        f"Hydra cannot compose {source.file.name} and the overrides: {reason}",
        "Mend what it names",
    )
