"""An empirical audit: the trainer, attacked with the likelihood ratio, obeys the certified epsilon.

Every coordinate of the model is a run of its own: example j moves coordinate j alone, at full clip norm, and
as many coordinates have no example. Participation is independent between examples and noise between
coordinates, so one `fit` gives thousands of independent trials of the released sequence with the canary and
without.

A threshold on the privacy loss, chosen on the first half of the trials, has on the second half a true and a
false positive rate; Clopper-Pearson bounds on both bound epsilon from below, wrongly with probability 1e-6.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import train.loop
from jaxacct import BandedToeplitz, BMinSep, Mechanism, calibrate
from jaxacct.batch_sizes import max_batch_size
from jaxacct.likelihood.loss import privacy_loss
from jaxacct.plan import Plan
from train.loop import fit
from train.sampler import Sampler

pytestmark = pytest.mark.optimized  # many draws from few programs

FALSE_ALARM = 1e-6
# Fixed, as only tests may: what the audit sees is then the same at every run.
KEYS = ((1, 2, 3, 4), np.arange(8, dtype=np.uint32))
CLIP = 0.5
EPSILON, DELTA = 1.0, 0.1
SCHEME = BMinSep(8, 4, 0.8, warm_start=False)
STRATEGY = BandedToeplitz.square_root(4)


def certified_plan(dataset_size: int) -> Plan:
    return calibrate(
        SCHEME, STRATEGY, epsilon=EPSILON, delta=DELTA, dataset_size=dataset_size, key=jax.random.key(5)
    )


def record(num_steps: int) -> optax.GradientTransformation:
    """Leave the model where it is and write every private gradient into the parameter "log"."""

    def update(updates, count, params=None):
        row = (jnp.arange(num_steps) == count)[:, None] * updates["model"]
        return {"model": jnp.zeros_like(updates["model"]), "log": row}, count + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


def released(plan: Plan, trials: int) -> np.ndarray:
    """(steps, 2 trials): private gradients; the first `trials` coordinates have a canary each."""
    steps = plan.mechanism.scheme.iterations
    params = {"model": jnp.zeros(2 * trials), "log": jnp.zeros((steps, 2 * trials))}

    def loss(params, example):
        return 10.0 * params["model"][example["coordinate"]]

    data = {"coordinate": np.arange(trials, dtype=np.int32)}
    # Only the coordinate's own gradient entry is not zero, so microbatches of a few rows suffice.
    options = dict(clip_norm=CLIP, microbatch_size=16, keys=KEYS)
    result = fit(plan, params, loss, data, record(steps), **options)
    return np.asarray(result.params["log"])


def losses(plan: Plan, updates: np.ndarray) -> np.ndarray:
    """(coordinates,) privacy losses of the released sequences: multiplied by C, then as accounted."""
    c = plan.mechanism.strategy.array
    outputs = updates * plan.expected_batch_size / CLIP
    rows = [sum(c[k] * outputs[i - k] for k in range(min(i + 1, c.size))) for i in range(len(outputs))]
    return np.asarray(privacy_loss(plan.mechanism, np.stack(rows, axis=1).astype(np.float32)))


def epsilon_lower_bound(present: np.ndarray, absent: np.ndarray, delta: float) -> float:
    """At most the true epsilon at `delta`, but with probability 1e-6."""
    half = len(present) // 2
    thresholds = np.quantile(np.concatenate([present[:half], absent[:half]]), np.linspace(0.02, 0.98, 97))

    def bound(threshold, p, q, confidence):
        hits, false = (p > threshold).sum(), (q > threshold).sum()
        true_rate = stats.beta.ppf(confidence, hits, len(p) - hits + 1) if hits else 0.0
        false_rate = stats.beta.isf(confidence, false + 1, len(q) - false) if false < len(q) else 1.0
        return np.log(max(true_rate - delta, 1e-300) / false_rate)

    best = max(thresholds, key=lambda t: bound(t, present[:half], absent[:half], FALSE_ALARM / 2))
    return float(bound(best, present[half:], absent[half:], FALSE_ALARM / 2))


def audit(plan: Plan, trials: int) -> float:
    found = losses(plan, released(plan, trials))
    return epsilon_lower_bound(found[:trials], found[trials:], plan.delta)


def halve_the_noise(monkeypatch):
    real = train.loop.privatize

    def broken(mechanism, **options):
        halved = Mechanism(mechanism.scheme, mechanism.strategy, mechanism.noise_multiplier / 2)
        return real(halved, **options)

    monkeypatch.setattr(train.loop, "privatize", broken)


def ignore_the_separation(monkeypatch):
    real = Sampler.from_plan

    def broken(plan, key=None, graph=None, state=None):
        scheme = BMinSep(SCHEME.iterations, 1, SCHEME.sampling_probability, False)
        return Sampler(scheme, plan.dataset_size, plan.dataset_size, key)

    assert real is not broken
    monkeypatch.setattr(train.loop.Sampler, "from_plan", broken)


def widened(plan: Plan) -> Plan:
    """The same plan with room for the batches of a sampler that ignores the separation."""
    fields = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    largest = max_batch_size(plan.dataset_size, SCHEME.sampling_probability, SCHEME.iterations)
    return Plan(**fields | {"max_batch_size": largest})


@pytest.mark.parametrize(("trials", "seen"), [(4000, 0.2), pytest.param(40_000, 0.6, marks=pytest.mark.slow)])
def test_the_trainer_stays_under_the_certified_epsilon_and_broken_ones_do_not(trials, seen, monkeypatch):
    plan = certified_plan(trials)
    honest = audit(plan, trials)
    # `seen` shows that the audit has power; the rest is what so many trials leave unknown.
    assert seen < honest <= EPSILON
    with monkeypatch.context() as patch:
        halve_the_noise(patch)
        assert audit(plan, trials) > EPSILON
    with monkeypatch.context() as patch:
        ignore_the_separation(patch)
        # `fit` would refuse the room that the broken sampler needs.
        patch.setattr(Plan, "certified", True)
        assert audit(widened(plan), trials) > EPSILON


def test_the_lower_bound_is_one():
    """On a Gaussian shift whose epsilon is known, it stays below it and comes near."""
    generator = np.random.default_rng(0)
    present, absent = generator.normal(1.5, 1, 20_000), generator.normal(0, 1, 20_000)
    from scipy.optimize import brentq

    def delta(epsilon):
        return stats.norm.cdf(0.75 - epsilon / 1.5) - np.exp(epsilon) * stats.norm.cdf(-0.75 - epsilon / 1.5)

    exact = brentq(lambda e: delta(e) - DELTA, 0.1, 20)
    assert 0.5 * exact < epsilon_lower_bound(present, absent, DELTA) < exact
