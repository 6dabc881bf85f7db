"""A small tokenizer, and an engine that answers with given texts, for tests of agents' sessions."""

import json
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_components.agents.requests import read_chat
from grpo_components.agents.session import Session
from grpo_components.rewards.pool import Score
from grpo_components.rollout.samples import Sample
from grpo_components.settings import GeneratorSettings
from lib.engine import StandInEngine, completion

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
DROPS_THOUGHTS = CHATML.replace(
    "{{ m.content }}", "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}"
)


def build_tokenizer():
    """A byte-level tokenizer in which `ab` is one token, and so are two control tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate([*letters, "ab", "abab"])}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("ab", "ab")]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


class Script:
    """Answers with the given texts, one token for each character or control token."""

    def __init__(self, chat, *texts):
        self.chat, self.texts, self.number = chat, list(texts), 0

    def __call__(self, request):
        self.number += 1
        ids = tokens_of(self.chat, self.texts.pop(0) if self.texts else "x<|im_end|>")
        reason = "stop" if ids[-1] in self.chat.stop_token_ids else "length"
        return replace(completion(ids, self.number, -self.number, reason), cached_tokens=3)


def scripted_engine(chat, *texts, **options):
    return StandInEngine(Script(chat, *texts), **options)


def tokens_of(chat, text):
    """Tokens of a text as a policy may sample them: never the merged ones."""
    body, stop, _ = text.partition("<|im_end|>")
    letters = [chat.encode(letter)[0] for letter in body]
    return letters + (chat.encode(stop) if stop else [])


SETTINGS = GeneratorSettings(max_model_len=400, max_response_tokens=120, temperature=1.0)


def make_session(chat, engine):
    name = "group 0 sample 0"
    submit, seed_of = partial(engine.submit, temperature=1.0), lambda *key: hash(key) % 2**31
    allowed = {"any_temperature": False, "has_parser": chat.parse is not None}
    read = partial(read_chat, temperature=1.0, **allowed)
    return Session(name, chat, submit, seed_of, read, SETTINGS, max_calls=20)


def parts_of(recorded):
    """The trajectories that a session or its conversation recorded."""
    sample, score = Sample({"prompt_index": 0}, "", 0), Score(0.0, {}, False, None)
    return [sample.record(*part, score) for part in recorded.parts()]


async def ask(session, messages, *, deliver=True, **body):
    """Send a chat to a session; return the message of the answer."""
    answer = await session.answer({"messages": messages, **body})
    if deliver:
        session.deliver(answer)
    return answer.body["choices"][0]["message"]


class Named(NamedTuple):
    """What vLLM's tool parsers return: the text beside the tool calls, and the calls."""

    content: str
    calls: list[tuple[str, str]]


class Parser:
    """Stands for vLLM's tool parser: finds tool calls that are JSON between `<tool_call>` tags."""

    def __call__(self, text, tools):
        inside = text.partition("<tool_call>")[2].partition("</tool_call>")[0]
        if not inside:
            return Named(text, [])
        call = json.loads(inside)
        found = (call["name"], json.dumps(call["arguments"]))
        return Named(text.partition("<tool_call>")[0], [found])

    def same(self, one, other):
        if "<tool_call>" not in one:
            return False
        (a, x), (b, y) = self(one, []), self(other, [])
        return (a, [(n, json.loads(v)) for n, v in x]) == (b, [(n, json.loads(v)) for n, v in y])
