"""Data sets of prompts that have little but a `prompt_index`, and mixes of them."""

from grpo_components.data.prompt_mix import MixedPart, PromptMix


class Prompts(list):
    """A part of a `PromptMix`."""

    max_prompt_length = 1


class Mix(PromptMix):
    """A mix of parts, each (values of prompt_index, weight), whose prompts keep these values."""

    def __init__(self, parts):
        self.given = parts
        rows = [(Prompts({"prompt_index": i} for i in indices), w) for indices, w in parts]
        self.parts = {str(n): MixedPart(own, w, own) for n, (own, w) in enumerate(rows)}

    def __repr__(self):
        return f"Mix({self.given})"  # shown by hypothesis


def next_index(prompts):
    """Draw a prompt; return its prompt_index and epoch."""
    prompt, epoch = next(prompts)
    return prompt["prompt_index"], epoch
