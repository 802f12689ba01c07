"""recommend for a loader of one's own: exact noise, all matrices, and the command that certifies it."""

import pytest

from jaxacct import BufferedToeplitz, FixedOrder, Toeplitz, calibrate, recommend
from jaxacct.accountants import unamplified
from jaxacct.cli.main import main

RUN = dict(dataset_size=500, batch_size=50, iterations=30, epsilon=4.0, delta=1e-5)


def exit_code(*arguments) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return int(stopped.value.code or 0)


@pytest.mark.parametrize("separation", [1, 10])
def test_candidates_have_the_noise_that_is_certified(separation):
    found = recommend(**RUN, scheme="fixed-order", min_separation=separation)
    assert {each.matrix for each in found.candidates} == {"optimal", "square-root", "buffered"}
    assert found.one_band is not None and found.chosen.error < found.one_band.error
    for each in found.candidates:
        assert isinstance(each.scheme, FixedOrder) and each.scheme.steps_per_epoch == 10
        assert each.predicted_samples == 0 and each.accountant == "unamplified"
        if each.matrix != "buffered" and each.strategy.bands > separation:
            assert isinstance(each.strategy, Toeplitz)
    plan = calibrate(found.chosen.scheme, found.chosen.strategy, epsilon=4.0, delta=1e-5, choice=found.choice,
                     dataset_size=500)  # fmt: skip
    least = unamplified.noise_multiplier_for(plan.mechanism, 4.0, plan.target.budget.delta)
    assert found.chosen.noise_multiplier <= least * (1 + 1e-3)
    assert least <= plan.noise_multiplier <= 1.011 * least


def test_a_fixed_order_of_epochs_needs_less_noise_than_shuffling_anew():
    anew, same = (recommend(**RUN, scheme="fixed-order", min_separation=b).chosen for b in (1, 10))
    assert isinstance(anew.strategy, BufferedToeplitz) and same.error < 0.9 * anew.error


@pytest.mark.parametrize("loader", ["shuffled", "fixed"])
def test_the_command_says_how_to_certify_and_what_sampling_saves(loader, capsys):
    numbers = "--dataset-size 500 --batch-size 50 --iterations 30 --epsilon 4 --delta 1e-5"
    assert exit_code("recommend", *numbers.split(), "--loader", loader) == 0
    said = capsys.readouterr().out
    assert f"--scheme fixed-order --min-separation {dict(shuffled=1, fixed=10)[loader]} " in said
    assert "batches at random (" in said and "% less" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--loader fixed --scheme poisson", "scheme must not be given together with --loader fixed"),
        ("--loader shuffled --strategy amplified", "strategy must be optimal, square-root, buffered"),
        ("--loader shuffled --strategy buffered --memory-copies 2", "memory_copies must be at least 3"),
        ("--loader other", "loader"),
    ],
)
def test_bad_loaders(options, said, capsys):
    numbers = "--dataset-size 500 --batch-size 50 --iterations 30 --epsilon 4 --delta 1e-5"
    assert exit_code("recommend", *numbers.split(), *options.split()) == 2
    assert said in capsys.readouterr().err
