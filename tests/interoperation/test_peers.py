"""Test suites of peers, as installed, on our accountants: an adapter for each interface, none of their code.

dp-accounting installs its tests. Those of jax-privacy are in no wheel: `test_jax_privacy_suites.py` states
what they assert.
"""

import re
import unittest

import pytest
from dp_accounting import dp_event, privacy_accountant, privacy_accountant_test
from dp_accounting.pld import pld_privacy_accountant, pld_privacy_accountant_test

import jaxacct
from jaxacct.accountants.history import joined

Relation = privacy_accountant.NeighboringRelation
NEXT_TO_ZERO = 1e-100
"""A bound that small is 0 to a suite that asks for 0 itself."""


class OurAccountant(privacy_accountant.PrivacyAccountant):
    """`jaxacct.epsilon` and `jaxacct.delta` as an accountant of dp-accounting."""

    def __init__(self, neighboring_relation=Relation.ADD_OR_REMOVE_ONE, *_, **__):
        super().__init__(neighboring_relation)
        self.events: list = []

    def _maybe_compose(self, event, count, do_compose):
        repeated = dp_event.SelfComposedDpEvent(event, count)
        try:
            joined([event, repeated])  # `supports` asks for a count of 0
        except ValueError as error:
            while isinstance(event, dp_event.ComposedDpEvent | dp_event.SelfComposedDpEvent):
                event = event.events[0] if isinstance(event, dp_event.ComposedDpEvent) else event.event
            return self.CompositionErrorDetails(event, str(error))
        if do_compose:
            self.events.append(repeated)
        return None

    def get_epsilon(self, target_delta):
        return jaxacct.epsilon(self.events, delta=min(max(target_delta, NEXT_TO_ZERO), 1 - 2**-53))

    def get_delta(self, target_epsilon):
        found = jaxacct.delta(self.events, epsilon=min(target_epsilon, 1e4))
        return found if found > NEXT_TO_ZERO else 0.0


class Suite(privacy_accountant_test.PrivacyAccountantTest):
    """Abstract suite of dp-accounting."""

    __test__ = False  # of pytest itself

    def _make_test_accountants(self):
        return [OurAccountant()]


def failures(suite: type[unittest.TestCase], names: str = "") -> dict[str, str]:
    """Return {method: last line} of the tests of a class that do not pass, of names that match."""
    loader, result = unittest.TestLoader(), unittest.TestResult()
    for name in loader.getTestCaseNames(suite):
        if re.match(names, name):
            suite(name).run(result)
    assert result.testsRun > 10
    bad = [*result.failures, *result.errors]
    return {test._testMethodName: text.strip().splitlines()[-1] for test, text in bad}


def test_the_abstract_suite_of_dp_accounting():
    assert failures(Suite) == {}


KEPT = (
    "test_(additive_noise|gaussian_basic|poisson_subsampled_gaussian|poisson_subsampling_with|"
    "self_composed|supports_gaussian|randomized_response_with_zero)"
)


@pytest.mark.slow
def test_the_suite_of_the_pld_accountant(monkeypatch):
    """Left out: other adjacencies, and values to a millionth that ours bound from above.

    The latter are within 1e-5 for the Laplace mechanism and mixtures, and 3 % for truncated batches; at delta
    0 the discrete Laplace mechanism has no finite bound here.
    """
    monkeypatch.setattr(pld_privacy_accountant, "PLDAccountant", OurAccountant)
    assert failures(pld_privacy_accountant_test.PldPrivacyAccountantTest, KEPT) == {}
