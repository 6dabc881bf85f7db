"""The arithmetic of the contract, at its edges."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_components.exchange.staleness import StalenessContract


def test_synchronous_admits_one_batch_per_version():
    contract = StalenessContract(max_staleness=0, groups_per_step=4)
    assert [contract.needed_version(3, ahead) for ahead in (0, 3, 4, 8)] == [3, 3, 4, 5]


def test_a_bound_of_two_admits_two_more_batches():
    contract = StalenessContract(max_staleness=2, groups_per_step=4)
    assert [contract.needed_version(3, ahead) for ahead in (0, 11, 12)] == [1, 3, 4]


@given(st.integers(0, 5), st.integers(1, 9), st.integers(0, 50), st.integers(0, 60))
def test_a_group_trained_in_its_turn_is_never_too_old(eta, groups_per_step, version, ahead):
    contract = StalenessContract(eta, groups_per_step)
    needed = contract.needed_version(version, ahead)
    turn = (version * groups_per_step + ahead) // groups_per_step
    assert contract.may_train(needed, turn)
    assert not contract.may_train(needed - 1, turn)


def test_a_step_waits_only_where_those_in_flight_could_not_all_be_trained_later():
    contract = StalenessContract(max_staleness=1, groups_per_step=2)
    assert contract.must_wait([5, 5], [4], policy_version=5)  # now or never
    assert not contract.must_wait(
        [5, 5], [5, 5], policy_version=5
    )  # the next step has room for two
    assert contract.must_wait([5, 5], [5, 5, 5], policy_version=5)  # but not for three
    assert not contract.must_wait([5, 5, 5], [], policy_version=5)  # nothing to wait for
