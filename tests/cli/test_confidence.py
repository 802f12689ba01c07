"""The confidence that an estimate is asked for is that of its interval."""

import json
import re

import pytest

from jaxacct.accountants import pld
from jaxacct.cli.main import run


def test_intervals_of_the_command_have_the_confidence_that_is_given(monkeypatch, capsys):
    asked = []

    def estimated(mechanism, at, *, confidence, **options):
        asked.append(confidence)
        return real(mechanism, at, confidence=confidence, **options)

    from jaxacct.cli.commands import estimate

    real = estimate.estimate_delta
    monkeypatch.setattr(estimate, "estimate_delta", estimated)
    command = "estimate --iterations 1 --scheme poisson --sampling-probability 0.5 --bands 1"
    command += " --noise-multiplier 1 --epsilon 1 --samples 256 --confidence 0.625 --json"
    assert run(command.split()) == 0
    assert asked == [0.625] and json.loads(capsys.readouterr().out)["confidence"] == 0.625


@pytest.mark.parametrize("given", [["--epsilon", "1"], ["--delta", "1e-5"]], ids=" ".join)
def test_both_ends_of_an_exact_accountant_are_printed(given, capsys, monkeypatch):
    """And where no lower end is proven that is said, in place of 0."""
    words = "estimate --scheme poisson --sampling-probability 0.01 --iterations 200 --noise-multiplier 1"
    assert run([*words.split(), *given]) == 0
    said = capsys.readouterr().out
    low, high = (float(each) for each in re.findall(r"between (\S+) and (\S+) without samples", said)[0])
    assert 0.99 * high < low < high
    monkeypatch.setattr(pld, "is_exact", lambda _: False)
    assert run([*words.split(), *given]) == 0
    said = capsys.readouterr().out
    assert f"at most {high:.4g} (without samples; upper bound only)" in said and "between" not in said
