"""On-policy distillation: a teacher's reverse KL at each sampled token, as part of its advantage.

The policy samples, and a teacher grades every token: the advantage A_t is lowered by coeff times

    log pi(a_t | s_t) - log pi_teacher(a_t | s_t),

the k1 estimate of KL(pi || pi_teacher) at that token (Lu and Thinking Machines Lab 2025,
"On-Policy Distillation"; reverse KL on the student's own samples: Agarwal et al. 2023, arXiv
2306.13649). A token is graded for itself alone, not for those after it, as in the former.

log pi is the trainer's at the update, without gradient; the former takes the sampler's. On fresh
tokens both are the same. On older ones, under the loss's ratio to the generator, only the trainer's
gives the gradient of KL(pi || pi_teacher) at the weights in training. The sampler's gives that of
KL(pi || pi_teacher) - KL(pi || pi_generator), which also drives the policy away from the generator.
With the trainer's, a policy that equals its teacher has no gradient, whatever it sampled.
"""

from __future__ import annotations

from dataclasses import replace

from grpo_components.objective.kl import k1, k3
from grpo_components.objective.losses import LossInputs, TokenMetrics


def with_teacher(inputs: LossInputs, coeff: float) -> tuple[LossInputs, TokenMetrics]:
    """Add the teacher's term to the advantages of a micro-batch."""
    teacher = inputs.teacher_logprobs
    if teacher is None:
        return inputs, {}
    policy = inputs.trainer_logprobs.detach()
    kl = k1(policy, teacher)
    metrics = {"teacher/kl": kl, "teacher/kl_k3": k3(policy, teacher)}
    return replace(inputs, advantages=inputs.advantages - coeff * kl), metrics
