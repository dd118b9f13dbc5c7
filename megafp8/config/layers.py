"""Collect the layers of a configuration: default job, YAML files, presets and command line.

Hydra resolves `defaults:` lists, search paths, packages and config groups: it finds the files and
their order, and reads each file once. `load` merges the settings, and not Hydra, so that every
value has its origin and every mistake is reported. The imports from `hydra._internal` were tried
with Hydra 1.3.2 to 1.3.8.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from hydra import version
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.importlib_resources_config_source import (
    ImportlibResourcesConfigSource,
)
from hydra._internal.core_plugins.structured_config_source import StructuredConfigSource
from hydra._internal.defaults_list import create_defaults_list
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

from megafp8.config.errors import COMMAND_LINE, DEFAULT, PRESET, Origin, SettingError
from megafp8.config.hydra_section import HYDRA, choices
from megafp8.config.overrides import PRESET_GROUPS, ParsedOverride, hydras_parser
from megafp8.config.schema import copied
from megafp8.config.settings import Setting, as_text, flatten, is_text
from megafp8.files import paths_reported
from megafp8.foreign import ForeignFileError, parse_yaml, read_yaml_text
from megafp8.secrets import HIDDEN, hide_values

DEFAULT_CONFIG = "pretrain_gpt"
ROOT_CONFIG = "megafp8_root"
"""The name of the config that is made for each composition: the user's YAML, then the presets."""


def _product(*factors: float) -> float:
    return math.prod(_numbers(factors))


def _sum(*terms: float) -> float:
    return sum(_numbers(terms))


def _numbers(values: Sequence[object]) -> list[float]:
    wrong = [v for v in values if isinstance(v, bool) or not isinstance(v, (int, float))]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is not a number")
    return [v for v in values if isinstance(v, (int, float))]


# NeMo's files use these two resolvers, as `${multiply:...}` and `${sum:...}`.
OmegaConf.register_new_resolver("multiply", _product, replace=True)
OmegaConf.register_new_resolver("sum", _sum, replace=True)


def conf_dir() -> Path:
    """Return the project's own directory `conf/`, which megafp8/conf is or links to.

    Raises:
        SettingError: The directory is missing: it was deleted, or links were not kept.
    """
    folder = (Path(__file__).parents[1] / "conf").resolve()
    if not (folder / f"{DEFAULT_CONFIG}.yaml").is_file():
        raise SettingError(
            "conf",
            folder,
            f"{DEFAULT_CONFIG}.yaml is missing",
            "Install megafp8 again; a clone needs links (git config core.symlinks true)",
        )
    return folder


@dataclass(frozen=True)
class ComposedFile:
    """Name the YAML that is composed, and the directories where it is searched, in this order."""

    name: str
    directories: tuple[Path, ...]

    @property
    def file(self) -> Path:
        """Return the YAML's path; one that does not exist if no directory has the file."""
        candidates = [folder / f"{self.name}.yaml" for folder in self.directories]
        return next((file for file in candidates if file.is_file()), candidates[0])

    @property
    def is_ours(self) -> bool:
        """Whether the YAML is one of `conf/`."""
        return self.file.parent == conf_dir()


@dataclass(frozen=True)
class Layer:
    """Hold the settings of one file, or of the command line."""

    origin: Origin
    settings: tuple[Setting, ...]


def find_source(config_dir: Path | None, config_name: str) -> ComposedFile:
    """Return the YAML named `config_name`, in `config_dir` or else among the project's own.

    Raises:
        SettingError: There is no such file; the hint lists the files that exist.
    """
    with paths_reported():
        return _found(config_dir, config_name)


def _found(config_dir: Path | None, config_name: str) -> ComposedFile:
    ours = conf_dir()
    if config_dir is not None and not config_dir.is_dir():
        hint = "Give an existing directory"
        raise SettingError("--config-dir", config_dir, "is not a directory", hint)
    theirs = () if config_dir is None or config_dir.resolve() == ours else (config_dir.resolve(),)
    source = ComposedFile(config_name.removesuffix(".yaml"), (*theirs, ours))
    if "\0" in config_name or not source.file.is_file():
        there = sorted({f.stem for folder in source.directories for f in folder.glob("*.yaml")})
        raise SettingError(
            "--config-name",
            config_name,
            f"there is no such YAML in {' or '.join(str(f) for f in source.directories)}",
            f"Give one of {', '.join(there)}; --config-dir names a directory of your own",
        )
    return source


def compose_layers(source: ComposedFile, overrides: Sequence[ParsedOverride]) -> list[Layer]:
    """Return all layers, from the weakest to the strongest.

    Raises:
        SettingError: A file is missing, or Hydra cannot read it.
    """
    groups = tuple(override.text for override in overrides if override.is_group)
    is_fixed = source.directories == (conf_dir(),)  # no file of a user belongs to it
    layers = (_composed_once if is_fixed else _composed)(source, groups)
    given = tuple(setting for override in overrides for setting in override.settings)
    return [*layers, Layer(COMMAND_LINE, given)]


def _composed(source: ComposedFile, groups: tuple[str, ...]) -> tuple[Layer, ...]:
    """Return the layers of files, of which `groups` choose some."""
    try:
        files = _files(source, groups)
        builds_on_default = any(_is_default_job(default, result) for default, result, _ in files)
        layers = []
        for strength, (default, result, text) in enumerate(files, start=1):
            origin = _origin(default, result, strength, is_users=builds_on_default)
            section = default.package or ""
            tree = OmegaConf.to_container(result.config, resolve=False)
            settings = _with_source_texts(list(flatten(section, tree, origin)), section, text)
            chosen = (Setting(key, value, origin) for key, value in choices(result.defaults_list))
            layers.append(Layer(origin, (*settings, *chosen)))
    except Exception as error:  # Hydra raises any kind of error at lists, `hydra: null` and so on
        raise hydra_problem(source, error) from error
    return tuple(layers)


_composed_once = cache(_composed)


def _with_source_texts(settings: list[Setting], section: str, text: str) -> list[Setting]:
    """Return a file's settings, where texts that YAML reads as numbers are as they are written.

    Args:
        settings: The settings as YAML reads them.
        section: The section that the file's settings go to.
        text: The file's text; "" for a file of Hydra's own.
    """
    if not any(is_text(s.key) and _has_number(s.value) for s in settings):
        return settings
    written = flatten(section, parse_yaml(text, as_texts=True))
    texts = {setting.key: setting.value for setting in written}
    return [replace(s, value=as_text(s.key, s.value, texts.get(s.key, s.value))) for s in settings]


def _has_number(value: Any) -> bool:
    """Whether a value is a number, True or False, or a list that has one."""
    return any(isinstance(v, (bool, int, float)) for v in (value if _is_list(value) else [value]))


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


@cache
def default_job() -> Mapping[str, Any]:
    """Return the settings of `conf/pretrain_gpt.yaml`, with interpolations as they are written."""
    (layer, *_) = compose_layers(find_source(None, DEFAULT_CONFIG), [])
    return {setting.key: setting.value for setting in layer.settings}


_FIXED: dict[object, ConfigResult | None] = {}
"""What the files of Hydra's and our own packages have, by source and path: they are read once."""


def _copied(read: ConfigResult | None) -> ConfigResult | None:
    """Return a copy of what a file has, since Hydra changes it where it composes."""
    if read is None:
        return None
    return replace(
        read, config=copied(read.config), defaults_list=copy.deepcopy(read.defaults_list)
    )


class Files(ConfigRepository):  # type: ignore[misc,unused-ignore]
    """Read each file once, after a check of its place, name, size, depth and aliases."""

    def __init__(self, source: ComposedFile) -> None:
        super().__init__(search_path(source))
        self._source = source
        self._read: dict[str, ConfigResult | None] = {}
        self.texts: dict[str, str] = {}  # of the files that were read from the disk

    def __deepcopy__(self, memo: object) -> Files:
        """Return what Hydra composes with, and changes; it has read the same files."""
        made = copy.copy(self)
        made._read = {path: _copied(read) for path, read in self._read.items()}
        made.texts = dict(self.texts)
        return made

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Return a file's content and its list of defaults; None if it does not exist."""
        if config_path not in self._read:
            source = self._checked(config_path)
            place = source and (source.scheme(), source.path, config_path)
            if place in _FIXED:
                self._read[config_path] = _copied(_FIXED[place])
            else:
                self._read[config_path] = super().load_config(config_path)
                if source and (source.scheme() == "pkg" or Path(source.path) == conf_dir()):
                    _FIXED[place] = _copied(self._read[config_path])
        return self._read[config_path]

    def _checked(self, config_path: str) -> ConfigSource | None:
        """Return the source of a file.

        Raises:
            ForeignFileError: A YAML file on the disk is not one to be parsed.
        """
        if hide_values(config_path) != config_path:
            raise ForeignFileError(f"{HIDDEN}: the name of a file in `defaults:` is a secret")
        is_named = config_path == self._source.name  # on the command line
        if not is_named and (PurePath(config_path).is_absolute() or self._climbs(config_path)):
            raise ForeignFileError(f"{config_path}: it is outside of the folder of YAML files")
        source = self._find_object_source(config_path=config_path, object_type=ObjectType.CONFIG)
        if source is None or source.scheme() != "file":
            return source
        file = Path(source.path, config_path.removesuffix(".yaml") + ".yaml")
        with suppress(OSError):  # Hydra reports it
            try:
                if not is_named:
                    self._refuse_outside(file, Path(source.path))
                self.texts[config_path] = read_yaml_text(file)
            except ForeignFileError as error:
                raise ForeignFileError(f"{file.name}: {error}") from error
        return source

    def _climbs(self, config_path: str) -> bool:
        """Whether a path leads to a folder above, and not to that of the named file."""
        path, named = (os.path.normpath(name) for name in (config_path, self._source.name))
        return path.startswith("..") and os.path.dirname(path) != os.path.dirname(named)

    def _refuse_outside(self, file: Path, folder: Path) -> None:
        """Raise `ForeignFileError` if a file is not in the folder of those that name it.

        Otherwise a YAML of others could copy a private file of the user into the record of a run.
        """
        real = file.resolve()
        if not any(real.is_relative_to(f.resolve()) for f in (folder, self._source.file.parent)):
            raise ForeignFileError(f"it is outside of {folder}, to which a link leads")


def search_path(source: ComposedFile) -> ConfigSearchPathImpl:
    """Return the places where Hydra looks for files, in their order."""
    version.setbase(None)
    if source.is_ours:  # it chooses no plugin, and looking for all takes a fifth of a load's time
        for kind in (FileConfigSource, ImportlibResourcesConfigSource, StructuredConfigSource):
            SourcesRegistry.instance().register(kind)
    else:
        Plugins.instance()
    path = ConfigSearchPathImpl()
    path.append("hydra", "pkg://hydra.conf")
    for folder in source.directories:
        path.append("main", f"file://{folder}")
    path.append("schema", "structured://")
    return path


def root_defaults(source: ComposedFile, files: ConfigRepository | None = None) -> list[Any]:
    """Return the `defaults:` of a composition: the user's YAML, then the groups of presets.

    A group from which the YAML itself chooses is left out, since Hydra overrides it there.
    """
    files = files or Files(source)
    primary = files.load_config(source.name)
    items = primary.defaults_list if primary is not None else None
    chosen = [getattr(item, "group", None) for item in items or ()]
    group, _, option = source.name.rpartition("/")
    yaml: Any = {f"/{group}@_global_": option} if group else source.name
    return [yaml, *({f"optional {name}": None} for name in PRESET_GROUPS if name not in chosen)]


def _files(
    source: ComposedFile, groups: Sequence[str]
) -> list[tuple[ResultDefault, ConfigResult, str]]:
    """Return the files in the order of merging, each with its place in the tree and its text."""
    files = Files(source)
    ConfigStore.instance().store(
        ROOT_CONFIG, {"defaults": ["_self_", *root_defaults(source, files)]}
    )
    defaults = create_defaults_list(
        repo=files,
        config_name=ROOT_CONFIG,
        overrides_list=hydras_parser().parse_overrides(list(groups)),
        prepend_hydra=not source.is_ours,  # our own files do not change Hydra's settings
        skip_missing=False,
    ).defaults
    found = []
    for default in defaults:
        name = default.config_path
        if name in (None, ROOT_CONFIG) or default.package == HYDRA or name.startswith("hydra/"):
            continue
        result = files.load_config(name)
        assert result is not None, name
        found.append((default, result, files.texts.get(name, "")))
    return found


def _is_default_job(default: ResultDefault, result: ConfigResult) -> bool:
    return default.config_path == DEFAULT_CONFIG and result.path == f"file://{conf_dir()}"


def _origin(
    default: ResultDefault, result: ConfigResult, strength: int, *, is_users: bool
) -> Origin:
    """Return the origin of a file's settings.

    `is_users` says whether the configuration builds on the default job; otherwise it is NeMo's.
    """
    if _is_default_job(default, result):
        return DEFAULT
    group, _, option = str(default.config_path).rpartition("/")
    if group in PRESET_GROUPS:
        return Origin(f"{PRESET} {group}={option}", strength)
    return Origin(f"{option}.yaml", strength, is_users=is_users)


def hydra_problem(source: ComposedFile, error: Exception) -> SettingError:
    """Return the error that a user reads if Hydra cannot compose the files and overrides."""
    text = str(error).partition("Config search path")[0].partition("Search path")[0]
    lines = [line.strip().rstrip(".:") for line in text.splitlines()]
    useful = [line for line in lines if line and not line.startswith(("reference_type", "object_"))]
    reason = "; ".join(useful[:4]) or type(error).__name__
    return SettingError(
        "configuration",
        None,
        f"Hydra cannot compose {source.file.name} and the overrides: {reason}",
        "Correct what the message names",
    )
