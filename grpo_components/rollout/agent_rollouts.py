"""Rolls out responses with agents, which call the served policy: one session per response."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from transformers import AutoTokenizer

from grpo_components.agents.chat import Chat
from grpo_components.agents.environment import AgentEnvironment
from grpo_components.agents.processes import AgentProcesses
from grpo_components.agents.requests import read_chat
from grpo_components.agents.server import AgentServer
from grpo_components.agents.session import Session
from grpo_components.data.columns import other_columns, reward_input
from grpo_components.errors import ReplayError
from grpo_components.rewards.pool import RewardPool
from grpo_components.rollout.engine import Engine, EngineStoppedError
from grpo_components.rollout.generator_options import EnvironmentOptions
from grpo_components.rollout.samples import Sample, Scored, sampling_seed
from grpo_components.settings import GeneratorSettings


class AgentServerError(RuntimeError):
    """The HTTP server for agents has ended; no session gets an answer."""


class AgentRollouts:
    """Serves a policy to agents, and records and scores their sessions."""

    def __init__(
        self,
        engine: Engine,
        rewards: RewardPool,
        settings: GeneratorSettings,
        environment: EnvironmentOptions,
        model_path: str,
        data_tokenizer: Any,
    ) -> None:
        self._engine, self._rewards, self._settings = engine, rewards, settings
        self._timeout_s = environment.timeout_s
        self._options: AgentEnvironment = environment.build_environment()
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        name, parse = self._options.tool_parser, None
        if name is not None:
            from grpo_components.agents.tool_calls import TurnParser  # imports vLLM

            parse = TurnParser(name, tokenizer)
        template, stops = self._options.chat_template, settings.stop_token_ids or ()
        # Encode a letter, because some tokenizers add no beginning to an empty text.
        letter = data_tokenizer.encode("a", add_bos=True, add_eos=False)
        beginning = letter[: -len(tokenizer("a", add_special_tokens=False)["input_ids"])]
        self._chat = Chat(tokenizer, template, stops, parse, beginning)
        self._processes = AgentProcesses(self._options.agent)
        self._server = AgentServer()

    async def collect(self, samples: Sequence[Sample]) -> list[Scored]:
        """Run one agent session per sample, all at once; return the scored responses."""
        try:
            running = [self._server.submit(self._one(*each)) for each in enumerate(samples)]
            return await asyncio.gather(*map(asyncio.wrap_future, running))
        except (asyncio.CancelledError, RuntimeError) as error:  # or its loop is closed
            task = asyncio.current_task()
            if self._server.ended is None or (task and task.cancelling()):
                raise
            ended = f"the agents' server ended: {self._server.ended}"
            raise AgentServerError(ended) from error

    async def _one(self, number: int, sample: Sample) -> Scored:
        try:
            return await self._rolled_out(number, sample)
        finally:
            sample.ended()

    async def _rolled_out(self, number: int, sample: Sample) -> Scored:
        session = self._session(sample)
        base_url = self._server.open(session)
        variables = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": session.key}
        task = _task(sample.prompt)
        try:
            outcome = await self._processes.run(task, variables, self._timeout_s, session.failure)
        finally:
            self._server.close_session(session)
        await session.settle()
        if isinstance(session.error, EngineStoppedError):
            raise session.error
        if isinstance(session.error, ReplayError):
            hint = "; give equal requests at the same time a seed each"
            where = session.failure.result() + (hint if session.has_equal_requests else "")
            raise ReplayError(f"{sample.name}: the agent differs at {where}")
        problem, parts = outcome.error, session.parts()
        if problem is None and not parts:
            problem = "agent: it ended without an answer"
        facts = {"sample": number, **session.facts()}
        if problem is not None:
            return sample.failed(problem, facts)
        answered = reward_input(sample.prompt, session.last_text, session.finish_reason)
        given = outcome.reward or session.reward
        more = {"agent_reward": given, "transcript": session.transcript}
        score = await asyncio.wrap_future(self._rewards.begin({**answered, **more}))
        first, *others = parts
        records = [sample.record(*first, score, facts)]
        records += [sample.record(*part, score, {"sample": number}) for part in others]
        return records, score, None

    def _session(self, sample: Sample) -> Session:
        temperature, truncation = sample.temperature, self._settings.truncation
        submit = partial(self._engine.submit, temperature=temperature, truncation=truncation)
        seed_of, has_parser = partial(sampling_seed, sample.seed), self._chat.parse is not None
        allowed = {"any_temperature": sample.evaluates, "has_parser": has_parser}
        read = partial(read_chat, temperature=temperature, **allowed)
        return Session(
            sample.name, self._chat, submit, seed_of, read, self._settings, self._options.max_calls
        )

    def close(self) -> None:
        """End all agents and the server."""
        self._processes.close()
        self._server.close()


def _task(prompt: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a prompt that an agent gets."""
    own = {name: prompt[name] for name in ("prompt_text", "answer", "seed", "prompt_index")}
    return {**other_columns(prompt), **own}
