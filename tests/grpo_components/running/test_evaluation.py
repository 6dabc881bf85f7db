"""An evaluation covers every held-out prompt once, at one version, whoever is left to sample."""

import asyncio

import pytest

from grpo_components.exchange.turns import Turns
from grpo_components.objective.schedules import as_schedule
from grpo_components.running.evaluation import Evaluation
from grpo_components.running.supervision import RoleFailedError, RoleLostError


class FakeRole:
    """Answers every prompt; may be given up in its first evaluation, or fail."""

    def __init__(self, generator, fails_with=None):
        self.generator, self.fails_with = generator, fails_with
        self.name = "generator_0"
        self.lost, self.asked, self.timeouts = False, [], []

    async def call(self, method, prompts, temperature, timeout_s, turn):
        assert method == "evaluate" and self.generator.pulling.locked()
        assert self.generator.version == 7, "weights are pulled first"
        await asyncio.sleep(0)
        if self.fails_with is not None:
            self.lost = isinstance(self.fails_with, RoleLostError)
            raise self.fails_with
        assert turn is None, "no replay"
        self.asked += prompts
        self.timeouts.append(timeout_s)
        return [
            {"reward": 1.0, "success": p % 2, "error": None, "oldest_version": 7}
            | {"newest_version": 7}
            for p in prompts
        ]


class FakeGenerator:
    def __init__(self, fails_with=None):
        self.role, self.pulling, self.version = FakeRole(self, fails_with), asyncio.Lock(), 0


def evaluate(*generators, rows=10):
    async def pull(generator, cause):
        assert cause == "evaluation 3"
        generator.version = 7

    temperature = as_schedule("generator.temperature", 1.0)
    evaluation = Evaluation(
        range(rows),
        batch=4,
        temperature=temperature,
        timeout_s=9.0,
        pull=pull,
        scored=lambda step, results: results,
        turns=Turns(),
    )
    return asyncio.run(evaluation(3, generators))


def test_prompts_are_shared_out_and_each_is_answered_once():
    generators = [FakeGenerator() for _ in range(3)]
    metrics = evaluate(*generators)
    assert sorted(p for g in generators for p in g.role.asked) == list(range(10))
    assert metrics["eval/success_rate"] == 0.5
    assert (metrics["eval/prompts"], metrics["eval/policy_version"]) == (10, 7)


def test_it_is_done_anew_without_a_generator_that_is_given_up_meanwhile():
    lost, left = FakeGenerator(RoleLostError("generator_0")), FakeGenerator()
    metrics = evaluate(lost, left)
    assert sorted(left.role.asked[-10:]) == list(range(10))
    assert metrics["eval/prompts"] == 10


def test_any_other_failure_is_the_runs():
    failure = RoleFailedError("generator_0", "died", "a.log", "died")
    with pytest.raises(RoleFailedError):
        evaluate(FakeGenerator(failure), FakeGenerator())
