"""Trainer ranks that stay alive over all tests, and the policy they start from."""

import pytest
from lib.trainer_ranks import Ranks, random_policy


@pytest.fixture(scope="session")
def ranks():
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return random_policy(tmp_path_factory.mktemp("base"))
