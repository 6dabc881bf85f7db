"""Checks a whole config before anything starts; the first problem becomes a one-line error."""

from __future__ import annotations

import functools
from collections.abc import Callable

from omegaconf import DictConfig, OmegaConf
from torchtune.config._parse import TuneRecipeArgumentParser

from grpo_components.config.checks import check_gpus, check_together, default_bound, needs_reference
from grpo_components.config.command_line import merge_overrides
from grpo_components.config.components import check_components
from grpo_components.config.files import check_files, check_output
from grpo_components.config.reading import plain_values, read_settings
from grpo_components.config.replay_check import check_replay
from grpo_components.errors import fail
from grpo_components.offline.partial_runs import check_partial_run
from grpo_components.quiet import quiet_libraries
from grpo_components.records.resume import check_resume
from grpo_components.settings import Settings


def parse(recipe_main: Callable[[DictConfig], None]) -> Callable[[], None]:
    """Decorate a recipe's main, which then gets the config of the command line.

    Does what torchtune's `config.parse` does; in addition, a value may contain `=`.
    """

    @functools.wraps(recipe_main)
    def main() -> None:
        parser = TuneRecipeArgumentParser(description=main.__doc__)
        try:
            given, overrides = parser.parse_known_args()
        except (OSError, UnicodeError) as error:
            fail("--config", str(error), "a YAML file, or a name that `tune ls` shows")
        recipe_main(merge_overrides(vars(given), overrides))

    return main


def read_config(cfg: DictConfig) -> Settings:
    """Check a config, and silence libraries according to its `log_level`."""
    settings = check(cfg)
    quiet_libraries(settings.log_level)
    return settings


def check(cfg: DictConfig) -> Settings:
    """Return a config as typed settings with all defaults, or raise the reason it cannot run.

    Quick checks come first: no file is opened and nothing imported before all values fit their
    types and each other. Adds the current folder to `sys.path`, from which users' components are
    imported.
    """
    settings = settings_of(cfg)
    if settings.device == "cuda":
        check_gpus(settings, here=settings.ray.address is None)
    check_files(settings)
    check_output(settings)
    check_resume(settings.model_dump(), needs_reference)
    check_replay(settings)
    check_partial_run(settings)
    check_components(settings)
    return settings


def settings_of(cfg: DictConfig) -> Settings:
    """Return a config as typed settings with all defaults, without opening a file."""
    settings = read_settings(plain_values(cfg))
    _fill_in(settings)
    check_together(settings)
    return settings


def _fill_in(settings: Settings) -> None:
    """Replace null by defaults that depend on other keys."""
    is_cuda = settings.device == "cuda"
    if settings.generator.enforce_eager is None:
        settings.generator.enforce_eager = not is_cuda
    if settings.generator.kv_cache_gib is None and not is_cuda:
        settings.generator.kv_cache_gib = 1.0
    if settings.max_generator_kl is None:
        settings.max_generator_kl = default_bound(settings)
    if settings.profiler.enabled:
        profile = {"output_dir": f"{settings.output_dir}/profile", "xpu": False, "cuda": is_cuda}
        settings.profiler = OmegaConf.create({**profile, **settings.profiler})
