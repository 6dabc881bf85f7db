"""An agent for the tiny policy: the policy writes a sum, a tool computes it, the policy answers.

This module does not import grpo_components. It calls the policy with OpenAI's client, which reads
the server's address and key from environment variables. `run` returns the reward.
"""

from __future__ import annotations

import re
from typing import Any

from openai import AsyncOpenAI


def calculator(expression: str) -> str:
    """Compute a sum or a difference of two numbers, such as `3+4`."""
    found = re.fullmatch(r"\s*(\d{1,6})\s*([+-])\s*(\d{1,6})\s*", expression)
    if found is None:
        return "?"
    left, sign, right = found.groups()
    return str(int(left) + int(right) if sign == "+" else int(left) - int(right))


async def run(task: dict[str, Any]) -> dict[str, float]:
    """Answer one task; return the reward, and whether the calculator could compute the sum.

    Args:
        task: a row of the data set; its `prompt_text` is the question.
    """
    async with AsyncOpenAI() as client:
        messages: list[Any] = [{"role": "user", "content": task["prompt_text"]}]
        ask = client.chat.completions.create
        first = await ask(model="policy", messages=messages, stop=["="], max_tokens=8)
        expression = first.choices[0].message.content or ""
        result = calculator(expression)
        messages += [
            {"role": "assistant", "content": expression},
            {"role": "tool", "content": f"={result}\n#### "},
        ]
        last = await ask(model="policy", messages=messages, stop=["\n"], max_tokens=6)
    answer = (last.choices[0].message.content or "").strip()
    return {"reward": float(answer == task["answer"].rpartition(" ")[2]), "used": result != "?"}
