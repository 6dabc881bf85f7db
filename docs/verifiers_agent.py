"""Plays one task of a taskset of verifiers against the policy and posts its reward.

With a number of rows, writes that many tasks as a data set instead.
"""

import asyncio
import json
import os
import sys

from openai import OpenAI


def load(name):
    """Load an environment of verifiers whose programs run as processes of this machine."""
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils import generic, loaders

    kind = loaders.environment_class(name)
    config = generic.concrete_type(kind, vf.EnvConfig, origin=vf.Env) or vf.EnvConfig
    taskset = {"taskset": {"id": name}}
    roles = agent_config_fields(config.model_validate(taskset))
    local = {role: {"runtime": {"type": "subprocess"}} for role in roles}
    return loaders.load_environment(config.model_validate({**taskset, **local}))


async def play(env, number):
    """Play the task of a row and return its reward."""
    import verifiers.v1 as vf

    address = os.environ["OPENAI_BASE_URL"]
    endpoint = vf.EvalClientConfig(base_url=address, api_key_var="OPENAI_API_KEY")
    task = next(iter(env.taskset.include(idx=[str(number)])))
    async with env.serving():
        episode = await env.run_episode(task, vf.ModelContext(model="policy", client=endpoint))
    if not episode.ok:
        raise RuntimeError([*episode.errors, *(trace.errors for trace in episode.traces)])
    return episode.traces[0].reward


if __name__ == "__main__":
    name, *rows = sys.argv[1:]
    env = load(name)
    if rows:  # write the tasks as a data set
        for task in env.taskset.take(int(rows[0])):
            row = {"question": str(task.data.prompt), "answer": "-"}
            sys.stdout.write(json.dumps(row) + "\n")
    else:
        reward = asyncio.run(play(env, json.load(sys.stdin)["prompt_index"]))
        OpenAI().post("/reward", cast_to=object, body={"reward": reward})
