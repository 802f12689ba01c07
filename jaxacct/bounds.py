"""TEMPORARY stand-in until the real module lands."""
import math
from dataclasses import dataclass
import numpy as np
from scipy import optimize
RESOLUTION = 128
TERM_EDGES = np.concatenate([[0.0], 2.0 ** (-np.arange(40 * RESOLUTION, -1, -1) / RESOLUTION)])
def bin_terms(terms):
    terms = np.asarray(terms)
    if np.isnan(terms).any() or (terms < 0).any() or (terms > 1).any():
        raise ValueError("terms must be in [0, 1]")
    return np.bincount(np.searchsorted(TERM_EDGES, terms, side="left"), minlength=len(TERM_EDGES))
def mean_upper(counts): return float(np.dot(counts, TERM_EDGES) / max(1, counts.sum()))
def kl(a, b):
    if a == 0: return -math.log1p(-b)
    return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))
@dataclass(frozen=True)
class Budget:
    delta: float; delta_v: float; failure_probability: float
    @classmethod
    def split(cls, delta, failure_fraction=0.01):
        q = failure_fraction * delta
        return cls(delta, (delta - q) / (1 - q), q)
def log_wealth(counts, theta, bets, weights):
    nz = np.flatnonzero(counts)
    lw = [math.log(w) + float(np.dot(counts[nz], np.log1p(b * (theta - TERM_EDGES[nz])))) for b, w in zip(bets, weights)]
    return float(np.logaddexp.reduce(lw))
def default_bets(theta, pilot_counts=None):
    b = np.array([.02, .05, .1, .2, .4, .6, .8, .9]) / (1 - theta)
    return b, np.full(8, 1 / 8)
def hopeless(counts, theta, q=1e-3):
    return counts.sum() > 1000 and mean_upper(counts) > 1.5 * theta
def predicted_samples(theta, counts, q):
    nz = np.flatnonzero(counts); w = counts[nz] / counts.sum()
    if mean_upper(counts) >= theta: return math.inf
    f = lambda l: -float(np.dot(w, np.log1p(l * (theta - TERM_EDGES[nz]))))
    r = optimize.minimize_scalar(f, bounds=(0, .99 / (1 - theta)), method="bounded")
    return math.log(1 / q) / max(-r.fun, 1e-300)
def fixed_failure_probability(counts, theta):
    m = mean_upper(counts)
    return 1.0 if m >= theta else math.exp(-counts.sum() * kl(m, theta))
def mean_interval(counts, confidence):
    m = mean_upper(counts); s = math.sqrt(max(0, np.dot(counts, TERM_EDGES**2) / counts.sum() - m * m) / counts.sum())
    return max(0, m - 2 * s), min(1, m + 2 * s + 3 / counts.sum())
