"""Bad arguments of the trade-off accountants are refused in one line that names them."""

import math

import numpy as np
import pytest

from jaxacct.accountants import tradeoff
from jaxacct.cli.commands import tradeoff as command
from jaxacct.cli.usage import parse
from tests.refusals import refused

GD = dict(steps=5, stepsize=0.05, noise_std=1.0, grad_sensitivity=1.0, num_examples=10)
GD |= dict(strong_convexity=1.0, smoothness=10.0)
CGD = dict(epochs=5, batches_per_epoch=40, batch_size=1500, stepsize=0.05, noise_std=0.01)
CGD |= dict(grad_sensitivity=10.0, smoothness=32.5, strong_convexity=0.002)
SGD = dict(steps=6, batch_size=2, num_examples=10, stepsize=0.1, noise_std=1.0, grad_sensitivity=1.0)
SGD |= dict(smoothness=1.0)
SIZES = dict(dataset_size=12, num_microbatches=3, microbatch_size=2, num_epochs=1, group_size=2)
SIZES |= dict(sampling="shuffling")
THIN = tradeoff.Subsampled(tradeoff.Gaussian(1.0), 0.1)

CHANGES = [
    (tradeoff.noisy_gd_gdp, GD, dict(steps=[0], noise_std=[0.0], grad_sensitivity=[-1.0], diameter=[0.0])),
    (tradeoff.noisy_gd_gdp, GD, dict(stepsize=[0.0, math.nan, 0.2, [0.1, 0.1]], num_examples=[2.5])),
    (tradeoff.noisy_gd_gdp, GD, dict(strong_convexity=[11.0])),
    (tradeoff.noisy_gd_gdp, GD | dict(strong_convexity=0.0), dict(stepsize=[0.21])),
    (tradeoff.noisy_cgd_gdp, CGD, dict(batch_index=[41], epochs=[0])),
    (tradeoff.noisy_sgd_accountant, SGD, dict(batch_size=[11], window=[7, 0], noise_split=[1.0])),
    (tradeoff.noisy_sgd_accountant, SGD, dict(noise_std=[-1.0], steps=[0], stepsize=[3.0])),
    (tradeoff.participation_pmf, SIZES, dict(dataset_size=[0], num_microbatches=[0], microbatch_size=[-1])),
    (tradeoff.participation_pmf, SIZES, dict(num_epochs=[1.5], group_size=[13, True], sampling=["random"])),
    (tradeoff.filtered_participation_pmf, SIZES | dict(num_microbatches=1), dict(min_kept=[0, 2])),
    (
        tradeoff.mixture_delta,
        dict(epsilon=1.0, pmf=tradeoff.participation_pmf(**SIZES)),
        dict(sigma=[0.0, -1.0, math.nan, math.inf]),
    ),
]
CALLS = [
    ("batch_size", lambda: tradeoff.noisy_cgd_gdp(**CGD, num_examples=60001)),
    ("delta", lambda: tradeoff.rdp_to_epsilon(1.0, 1.0)),
    ("method", lambda: tradeoff.rdp_to_epsilon(1.0, 0.1, "magic")),
    ("contractions", lambda: tradeoff.shifted_interpolation_gdp([0.0], [1.0], 1.0)),
    ("sensitivities", lambda: tradeoff.shifted_interpolation_gdp([1.0], [math.nan], 1.0)),
    ("method", lambda: tradeoff.calibrate_noise(1.0, 1e-5, method="x")),
    ("noise_std", lambda: tradeoff.calibrate_noise(1.0, 1e-5, method="gd", noise_std=1.0)),
    ("diameter", lambda: tradeoff.exponential_mechanism_gdp(lipschitz=1.0)),
    ("strong_convexity", lambda: tradeoff.contraction_factor(0.1, 2.0, 1.0)),
    ("divide", lambda: tradeoff.participation_pmf(**SIZES | {"dataset_size": 13})),
    ("sum to 1", lambda: tradeoff.ParticipationPMF(np.array([1, 2]), np.array([0.5, 0.4]))),
    ("at least 0", lambda: tradeoff.ParticipationPMF(np.array([1, 2]), np.array([1.5, -0.5]))),
    ("ascending", lambda: tradeoff.ParticipationPMF(np.array([2, 1]), np.array([0.5, 0.5]))),
    ("pmf", lambda: tradeoff.mixture_delta(1.0, None, 1.0)),
    ("tail_mass", lambda: tradeoff.tail_lower_tradeoff(0.1, 1.0, 1.5)),
    ("head_mass", lambda: tradeoff.tail_upper_tradeoff(0.1, 1.0, 1.0)),
    ("mu", lambda: tradeoff.tail_upper_tradeoff(0.1, 0.0, 0.1)),
    ("alpha", lambda: tradeoff.tail_lower_tradeoff(-0.1, 1.0, 0.1)),
    ("weights must", lambda: tradeoff.GaussianMixture(np.array([1.0, 2.0]), np.array([0.3, 0.3]))),
    ("lost must", lambda: tradeoff.GaussianMixture(np.array([1.0, 2.0]), np.array([0.75, 0.75]), -0.5)),
    ("weights must", lambda: tradeoff.GaussianMixture(np.array([1.0, 2.0]), np.array([1.5, -0.5]))),
    ("weights must", lambda: tradeoff.GaussianMixture(np.array([1.0]), np.array([0.5, 0.5]))),
    ("mus must", lambda: tradeoff.GaussianMixture(np.array([math.nan]), np.array([1.0]))),
    ("count must be at most 1000000000", lambda: tradeoff.Composed(((THIN, 10**9 + 1),)).delta(1.0)),
    ("size must be at most 1000, got 1000000", lambda: THIN.group(1_000_000)),
]


@pytest.mark.parametrize(("function", "base", "changes"), CHANGES)
def test_bad_arguments(function, base, changes):
    for name, value in [(name, value) for name, values in changes.items() for value in values]:
        with pytest.raises(ValueError, match=name) as caught:
            function(**base | {name: value})
        assert "\n" not in str(caught.value), name


def test_bad_calls():
    for word, call in CALLS:
        with pytest.raises(ValueError, match=word) as caught:
            call()
        assert "\n" not in str(caught.value), word


@pytest.mark.parametrize("kind", [tradeoff.participation_pmf, tradeoff.filtered_participation_pmf])
def test_poisson_sampling_has_another_place(kind):
    with pytest.raises(NotImplementedError, match=r"jaxacct\.Poisson"):
        kind(**SIZES | {"sampling": "poisson"})


@pytest.mark.parametrize(
    "words",
    [
        "general --dataset-size 100 --num-epochs 2 --delta 1e-5 --epsilon 1e308",
        "general --dataset-size 100 --num-epochs 2 --delta 1e-5 --sigma 1e-160",
        "general --dataset-size 9 --num-epochs 112589990684262 --delta 1e-5 --sigma 1 --sampling subsampling",
        "last-iterate gd --num-examples 10 --steps 5 --stepsize 1e-300 --grad-sensitivity 1 --smoothness 1 "
        "--diameter 1 --noise-std 1 --delta 1e-5",
        "last-iterate sgd --num-examples 10 --steps 5 --batch-size 2 --stepsize .1 --grad-sensitivity 1 "
        "--smoothness 1 --diameter 1 --epsilon 1e200 --delta 1e-5",
    ],
)
def test_commands_refuse_in_one_line(words):
    refused("must", lambda: parse(command.app, words.split())())
