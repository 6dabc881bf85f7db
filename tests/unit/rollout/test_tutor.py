"""The tutor asks for the answer after the first right line; each wrong line costs the same."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_components.rollout.tutor import Tutor


@given(st.lists(st.integers(0, 18).filter(lambda result: result != 7), max_size=5))
def test_wrong_lines_cost_and_the_first_right_line_leads_to_the_answer(wrong):
    respond = Tutor(penalty=0.5, hint="No.")({"answer": "7"}, seed=0)
    for result in wrong:
        reply = respond(f"3+4={result}")
        assert (reply.text, reply.done, reply.rewards) == ("No.", False, {"wrong_lines": -0.5})
    reply = respond("3+4=7")
    assert (reply.text, reply.done, reply.rewards) == ("#### ", False, {})
    assert respond("7").done


def test_conversations_are_independent():
    tutor = Tutor()
    first, second = tutor({"answer": "7"}, 0), tutor({"answer": "8"}, 0)
    assert first("3+4=7").text == second("4+4=8").text == "#### "
    assert first("7").done and not tutor({"answer": "7"}, 0)("7").done
