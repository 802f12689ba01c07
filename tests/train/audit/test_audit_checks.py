"""Exact checks of what the trainer releases: p-values of honest runs, and mistakes planted into it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy

import train.procedures.bandmf
import train.procedures.step
from jaxacct import BandedInverse, BandedToeplitz, BMinSep, Mechanism
from tests.train.audit.exact_checks import FALSE_ALARM, Observed, examine, observe
from tests.train.plans import plan
from train.batches.sampler import Sampler
from train.clipping.grid import GridSum
from train.noise.normals import normals_of

KEYS = ((1, 2, 3, 4), np.arange(8, dtype=np.uint32))
ROWS, STEPS, CLIP = 400, 40, 0.5
PLAN = plan("b-min-sep", dataset_size=ROWS, iterations=STEPS, rate=0.15, separation=3, bands=3, sigma=0.5)
SCHEME = PLAN.mechanism.scheme
OFTEN = dataclasses.replace(SCHEME, sampling_probability=1.25 * SCHEME.sampling_probability)
PARAMS = {"a": jnp.zeros(500), "b": jnp.zeros(300)}


def refuted() -> set[str]:
    """What the checks of the trainer as it is refute, by name."""
    canary_of = np.arange(0, 2 * ROWS, 2, dtype=np.int32)
    observed = observe(PLAN, PARAMS, canary_of, np.arange(2 * ROWS), clip_norm=CLIP, keys=KEYS)
    checks = examine(PLAN.mechanism, observed, ROWS, ROWS)
    assert len(checks) == 13
    return {check.name for check in checks if check.refuted}


def other_mechanism(change):
    """Plant a trainer that adds the noise of another mechanism."""

    def plant(patch):
        real = train.procedures.bandmf.privatize
        patch.setattr(
            train.procedures.bandmf, "privatize", lambda mechanism, **named: real(change(mechanism), **named)
        )

    return plant


def other_batches(scheme):
    """Plant a sampler of another scheme."""

    def plant(patch):
        def broken(plan, key=None, graph=None, state=None, dataset_size=None):
            return Sampler(scheme, ROWS, plan.max_batch_size, key)

        patch.setattr(train.procedures.bandmf.Sampler, "from_plan", broken)

    return plant


def divided_by_the_batch_size(patch):
    """Plant means over the real batch, before noise is added."""
    real = train.procedures.step.advance

    def broken(private, optimizer, state, found, mask, *more):
        factor = private.expected_batch_size / jnp.maximum(1, mask.sum()).astype(jnp.float32)
        with jax.enable_x64(True):
            whole = jax.tree.map(lambda n: n * factor.astype(jnp.float64), found.total.whole)
        found = found._replace(total=GridSum.of(whole, found.total.grid))
        return real(private, optimizer, state, found, mask, *more)

    patch.setattr(train.procedures.step, "advance", broken)


def less(mechanism):
    return Mechanism(mechanism.scheme, mechanism.strategy, 0.96 * mechanism.noise_multiplier)


def twice_the_clip_norm(patch):
    """Plant gradients clipped at twice the clip norm beside the noise of one."""
    real = train.procedures.bandmf.privatize

    def broken(mechanism, *, clip_norm, **options):
        half = Mechanism(mechanism.scheme, mechanism.strategy, mechanism.noise_multiplier / 2)
        return real(half, clip_norm=2 * clip_norm, **options)

    patch.setattr(train.procedures.bandmf, "privatize", broken)


MISTAKES = {
    "4 % less noise": (other_mechanism(less), {"noise: variance"}),
    "clip norm": (twice_the_clip_norm, {"canary: amplitude", "canary: amplitude at each step"}),
    "another probability": (other_batches(OFTEN), {"batches: participations in all"}),
    "sum divided": (divided_by_the_batch_size, {"canary: amplitude against batch size"}),
}


@pytest.mark.parametrize("mistake", [None, *MISTAKES], ids=str)
def test_planted_mistakes_are_refuted_by_the_check_for_them_and_honest_runs_are_not(mistake, monkeypatch):
    if mistake is None:
        assert refuted() == set()
        return
    plant, expected = MISTAKES[mistake]
    plant(monkeypatch)
    assert expected <= refuted()


def honest(generator, steps=24, canaries=150, examples=400):
    """A run by NumPy alone, with its mechanism and C: batches of a cold start, canaries first, noise."""
    scheme = BMinSep(steps, 3, 0.2, warm_start=False)
    last, joined = np.full(examples, -3), np.zeros((examples, steps), bool)
    for step in range(steps):
        joined[:, step] = (step - last >= 3) & (generator.random(examples) < 0.2)
        last[joined[:, step]] = step
    mechanism = Mechanism(scheme, BandedToeplitz((0.8, 0.6)), 1.3)
    matrix = scipy.linalg.toeplitz([0.8, 0.6, *[0.0] * (steps - 2)], np.zeros(steps))
    seen = 1.3 * generator.normal(size=(2 * canaries, steps))
    seen[::2] += joined[:canaries] @ matrix.T
    batches = [np.flatnonzero(column) for column in joined.T]
    return mechanism, Observed(seen, batches, 0.0), matrix


def p_values(mechanism, observed) -> dict[str, float]:
    checks = examine(mechanism, observed, len(observed.outputs) // 2, 400)
    assert sum(check.level for check in checks) == pytest.approx(FALSE_ALARM)
    return {check.name: check.p_value for check in checks}


def test_p_values_of_honest_runs_are_no_smaller_than_they_say():
    """300 runs: p <= 0.05 in at most the 13 numbers that a rate of 0.05 exceeds with probability 1e-6.

    Those that are exact are that small at least as often as a rate of 0.02 falls short of with 1e-6.
    """
    generator = np.random.default_rng(0)
    found = [p_values(*honest(generator)[:2]) for _ in range(300)]
    small = {name: sum(each[name] <= 0.05 for each in found) for name in found[0]}
    assert max(small.values()) <= scipy.stats.binom.isf(FALSE_ALARM / 13, 300, 0.05), small
    tight = [name for name in small if name.startswith(("noise: var", "noise: corr", "canary"))]
    assert len(tight) == 9
    least = scipy.stats.binom.ppf(FALSE_ALARM, 300, 0.02)
    assert min(small[name] for name in tight) >= max(1, least), small


def altered(name, generator) -> tuple[Mechanism, Observed]:
    """A run that breaks what a check tests."""
    mechanism, observed, matrix = honest(generator)
    seen, batches = observed.outputs.copy(), list(observed.batches)
    silent, steps = seen[1::2], seen.shape[1]
    joined = np.array([[canary in batch for batch in batches] for canary in range(len(silent))])
    match name:
        case "noise: variance":
            silent *= 1.1
        case "noise: variance at each step":
            silent[:, 7] *= 1.6
        case "noise: normal distribution":
            silent[:] = 1.3 * np.sign(silent)
        case "noise: correlation of two steps":
            silent[:, 20] = -silent[:, 3]
        case "noise: correlation at each distance of steps":
            silent[:, 5:] += 0.2 * silent[:, :-5]
        case "noise: correlation of two coordinates":
            silent[100] = 3 * silent[17]
        case "noise: correlation at each distance of coordinates":
            silent[1:] += 0.2 * silent[:-1]
        case "canary: amplitude":
            seen[::2] += 0.6 * joined @ matrix.T
        case "canary: amplitude at each step":
            seen[::2] += (joined * (np.arange(steps) == 11) * 3) @ matrix.T
        case "canary: amplitude against batch size":
            sizes = np.array([len(batch) for batch in batches])
            seen[::2] -= (joined * (sizes - sizes.mean()) * 0.1) @ matrix.T
        case "batches: size at each step":
            batches[-1] = np.arange(150)
        case "batches: participations in all":
            batches[::2] = [batch[: len(batch) * 3 // 4] for batch in batches[::2]]
        case "batches: separation of participations":
            batches[5] = np.append(batches[5], batches[4][:1])
    return mechanism, Observed(seen, batches, 0.0)


def test_each_check_refutes_what_it_is_for():
    """And rounding as large as the change hides those changes that it could explain."""
    generator = np.random.default_rng(1)
    for name in p_values(*honest(generator)[:2]):
        mechanism, observed = altered(name, generator)
        assert p_values(mechanism, observed)[name] < FALSE_ALARM / 13, name
        if not name.startswith("batches"):
            hidden = dataclasses.replace(observed, rounding=5.0)
            assert p_values(mechanism, hidden)[name] > 0.1, name


def test_the_bound_on_rounding_holds():
    """Outputs of silent coordinates against the noise's own normals in float64."""
    strategy = BandedInverse.bisr(iterations=STEPS, bands=3)
    made = plan("b-min-sep", dataset_size=ROWS, iterations=STEPS, rate=0.15, sigma=0.8, strategy=strategy)
    silent = np.full(ROWS, -1, np.int32)
    observed = observe(made, PARAMS, silent, np.arange(800), clip_norm=CLIP, keys=KEYS)
    exact = [np.concatenate(normals_of(KEYS[1], step, [(500,), (300,)])) for step in range(STEPS)]
    exact = np.stack(exact, axis=1)
    worst = np.abs(observed.outputs - 0.8 * exact).max()
    assert 0.02 * observed.rounding < worst < observed.rounding < 1e-4
