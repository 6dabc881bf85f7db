"""Which recorded runs a simulation takes its settings from."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from grpo_tools.simulate.settings import setup_of

CONFIG = Path(__file__).parents[3] / "recipes/configs/tiny_async_grpo.yaml"


@pytest.mark.parametrize("key", ["colocate", "teacher", "replay_generation"])
def test_a_run_with_what_is_not_simulated_is_refused(key):
    config = OmegaConf.to_container(OmegaConf.load(CONFIG), resolve=True)
    assert setup_of(config, has_references=False).num_references == 0
    with pytest.raises(ValueError, match=rf"^{key}: "):
        setup_of(config | {key: {"path": "/models/a"}}, has_references=False)
