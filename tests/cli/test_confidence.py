"""The confidence that an estimate is asked for is that of its interval."""

import json

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
