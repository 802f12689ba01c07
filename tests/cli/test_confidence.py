"""The confidence that an estimate is asked for is that of its interval."""

import json
import re

import pytest

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
def test_where_no_lower_end_is_proven_that_is_said(given, capsys):
    """In place of 0."""
    words = "estimate --scheme poisson --sampling-probability 0.01 --iterations 200 --noise-multiplier 1"
    assert run([*words.split(), *given]) == 0
    said = capsys.readouterr().out
    assert re.search(r"at most \S+ \(without samples; upper bound only\)", said) and "between" not in said
