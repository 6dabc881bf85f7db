"""Calls rewards as the pool does."""

import json


def judged(reward, response, answer="5", prompt=""):
    row = {"prompt_text": prompt, "answer": answer, "finish_reason": "stop"}
    return reward(response_text=response, **row)


def fenced(program):
    return f"I think of it like this.\n```python\n{program}\n```\nThat is all."


def scored(reward, response, **tests):
    return judged(reward, response, json.dumps(tests))
