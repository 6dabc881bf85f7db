"""Logprobs the plain way, for tests of every faster one."""

import numpy as np
import torch


def whole_logprobs(model, sequence, mask=None):
    """Return [2, R] logprobs and entropies of a response, from whole logits of it alone."""
    ids = torch.tensor(np.concatenate([sequence.prompt_ids, sequence.response_ids]))
    given, start = model(ids[None]), len(sequence.prompt_ids)
    logits = getattr(given, "logits", given)[0, start - 1 : -1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs = torch.log_softmax(logits / sequence.temperature, dim=-1)
    taken = logprobs.gather(1, ids[start:, None])[:, 0]
    values = torch.stack([taken, -(logprobs.exp() * logprobs).sum(-1)])
    return values if mask is None else values[:, torch.tensor(mask)]
