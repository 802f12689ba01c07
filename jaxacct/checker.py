"""Second implementation of plan certificates: reads a plan's claim and decides anew whether it holds.

It shares no code with the rest of jaxacct, imports NumPy, SciPy and the standard library only, computes in
float64, and draws its own samples with a seed from the operating system:

    python checker.py plan.json [--json]

Exit codes: 0 certified, 1 not certified or the two implementations disagree, 2 bad input, 3 not covered.

Notation: y = C x + sigma z over the rows of C; Q is the distribution of y at x = 0 and P at the random
participation vector x of one example; f = P/Q, L = ln f. Remove direction: H(P, Q) = E_P (1 - e^(eps-L))_+;
add direction: H(Q, P) = E_Q (1 - e^(eps+L))_+. Arrays of samples have shape (steps, samples).
"""

import argparse
import json
import math
import sys
from collections import namedtuple
from typing import Any

import numpy as np
from scipy import fft, optimize, special

DIRECTIONS = REMOVE, ADD = "remove", "add"
CERTIFIED, FAILED, BAD_INPUT, NOT_COVERED = 0, 1, 2, 3
FALSE_ALARM = 1e-6  # probability that a true claim is refuted
SLACK = 1e-9  # thresholds are lowered by this part of them, far above float64's rounding
MAX_STEPS = 4e9  # limit on steps x samples of one direction
BLOCK = 1 << 20  # steps x samples that are scored at once
FRACTIONS = 2.0 ** -np.arange(0, 14, 0.6)  # of the largest bets
MALFORMED = (LookupError, TypeError, AttributeError, ValueError, OSError, ArithmeticError, RecursionError)


class NotCovered(Exception):
    """A claim for which the checker has no method."""


# verified: what both divergences may be; failure: probability of a wrong verdict, 0 for an analytic bound;
# reserved: part of delta for a batch above max_batch_size; stored: evidence by direction, its terms as
# (bin, count) pairs, bin 0 for zeros and bin k > 0 for terms up to 2^((k - 5121) / 128).
NAMES = "scheme strategy sigma epsilon delta verified failure reserved dataset_size max_batch_size"
Claim = namedtuple("Claim", [*NAMES.split(), "accountant", "bound", "stored"])


def _number(value, name: str, low: float, high: float, kinds=(int, float)) -> Any:
    if type(value) not in kinds or not low <= value <= high:
        what = "an integer" if kinds == (int,) else "a number"
        raise ValueError(f"{name} must be {what} in [{low:g}, {high:g}], got {value!r:.60}")
    return value if kinds == (int,) else float(value)


def _read_claim(data) -> Claim:
    """Read a plan of schema version 1; its notes, which loading does not read, are compared here."""
    if (data.get("schema"), data.get("schema_version")) != ("jaxacct-plan", 1) or "claim" not in data:
        raise NotCovered(f"schema {data.get('schema')!r:.40}, version {data.get('schema_version')!r:.20}")
    claim, evidence, notes = data["claim"], data["evidence"], data["notes"]
    known = {"adjacency": ("zero-out", "add-or-remove-one"), "compose_with": (None,), "truncate_to": (None,)}
    for name, values in known.items():
        if claim[name] not in values:
            raise NotCovered(f"{name} {claim[name]!r:.60}")
    sigma = _number(claim["noise_multiplier"], "noise_multiplier", 1e-6, 1e9)
    epsilon, delta = _number(claim["epsilon"], "epsilon", 0, 700), _number(claim["delta"], "delta", 1e-300, 1)
    reserved = _number(notes["overflow_delta"] or 0.0, "overflow_delta", 0, delta)
    stored, how, names = {}, [None, None], ("delta_v", "failure_probability")
    budget = [_number(claim["budget"][name], name, 1e-300, delta) for name in names]
    if evidence["kind"] == "accountant":
        budget, how = [delta - reserved, 0.0], [evidence["accountant"], notes["verdict"]["delta"]]
    elif evidence["kind"] == "sampled":
        share = _number(evidence["share"], "share", 1e-300, 1)
        for name in ("remove", "add"):
            stored[name] = _stored(evidence[name], notes["verdict"][name], evidence["rule"], share)
    else:
        raise NotCovered(f"evidence {evidence['kind']!r:.40}")
    sizes = [claim["dataset_size"], notes["max_batch_size"]]
    for size in sizes if sizes != [None, None] else ():
        _number(size, "dataset_size, max_batch_size", 1, 1e15, (int,))
    what = claim["scheme"], claim["strategy"], sigma
    return Claim(*what, epsilon, delta, *budget, reserved, *sizes, *how, stored)


def _stored(side: dict, verdict: dict, rule: str, share: float) -> dict:
    """Evidence of one direction, with what the notes say of it."""
    found = dict(verdict)  # proposal, scale, threshold, certified and errors
    found |= {"terms": side.get("term_counts", []), "bets": side.get("bets", []), "share": share}
    if (side["kind"], verdict["outcome"]) == ("weight-bound", "exactly-zero"):
        found["proposal"] = "zero"
    recomputed = side["kind"] == "weight-bound" or (side["kind"] == "mean" and rule == "anytime")
    return found | {"weights": side.get("bet_weights", []), "recomputed": recomputed}


class Columns:
    """A banded lower-triangular Toeplitz matrix with `steps` columns; `rows` is steps where it is square."""

    def __init__(self, coefficients, steps: int, rows: int):
        self.c, self.steps, self.rows = np.asarray(coefficients, float), steps, rows
        h, ends = self.c.size, np.minimum(rows - np.arange(steps), self.c.size)
        # gram[t, d] = <column t, column t - d>: both have entries in the rows t .. t + ends[t] - 1.
        self.gram = np.zeros((steps, h))
        for d in range(h):
            products = np.cumsum(self.c[: h - d] * self.c[d:])
            self.gram[:, d] = products[np.minimum(ends, h - d) - 1]
        self.norms = self.gram[:, 0]
        self.length = fft.next_fast_len(rows + h, real=True)
        self.transform = fft.rfft(self.c, self.length)[:, None]

    def apply(self, x):
        """C x."""
        return fft.irfft(fft.rfft(x, self.length, axis=0) * self.transform, self.length, axis=0)[: self.rows]

    def transpose(self, y):
        """C^T y."""
        spectrum = fft.rfft(y, self.length, axis=0) * self.transform.conj()
        return fft.irfft(spectrum, self.length, axis=0)[: self.steps]

    def log_ratios(self, y, sigma: float):
        """r, with a_x = e^<x, r> for participations whose columns share no row."""
        return (self.transpose(y) - self.norms[:, None] / 2) / sigma**2


# --- Sampling schemes: a class each, with log_ratio, tilted, draw and the class of its pairs ---


class Renewal:
    """b-min-sep sampling with b > 1, cold or warm.

    A warm start is a cold one with b - 1 virtual steps in front, whose columns are zero and whose hazards
    give every virtual step the same probability of a participation.
    """

    def __init__(self, steps: int, separation: int, p: float, warm: bool):
        self.steps, self.b, self.virtual = steps, separation, separation - 1 if warm else 0
        before = p / (1 + (separation - 1) * p - np.arange(self.virtual) * p)
        self.p = np.append(before, np.full(steps, p))
        with np.errstate(divide="ignore"):
            self.log_p, self.log_q, self.pairs = np.log(self.p)[:, None], np.log1p(-self.p), RenewalPairs

    def _ahead(self, r):
        """Return ln f of what follows each step, (virtual + steps + b, samples)."""
        total, b, v = self.p.size, self.b, self.virtual
        ahead = np.zeros((total + b, r.shape[1]))
        for start in range((total - 1) // b * b, -1, -b):
            stop = min(start + b, total)
            joined = ahead[start + b : stop + b] + self.log_p[start:stop]
            real = max(start, v)
            joined[real - start :] += r[real - v : max(stop - v, 0)]
            for t in range(stop - 1, start - 1, -1):
                np.logaddexp(ahead[t + 1] + self.log_q[t], joined[t - start], out=ahead[t])
        return ahead

    def log_ratio(self, r):
        """L of each sample, r as `Columns.log_ratios`."""
        return self._ahead(r)[0]

    def tilted(self, r):
        """Return (ln f, mean participation under the distribution p(x) e^<x, r>) of one vector r."""
        ahead, v = self._ahead(r[:, None])[:, 0], self.virtual
        reach, lift = np.full(ahead.size, -np.inf), np.append(np.zeros(v), r) + self.log_p[:, 0]
        reach[0] = 0.0
        for t in range(self.p.size):
            reach[t + 1] = np.logaddexp(reach[t + 1], reach[t] + self.log_q[t])
            reach[t + self.b] = np.logaddexp(reach[t + self.b], reach[t] + lift[t])
        return ahead[0], np.exp(reach[: self.p.size] + lift + ahead[self.b :] - ahead[0])[v:]

    def draw(self, rng, samples: int):
        """Participation vectors, (steps, samples)."""
        x, eligible = np.zeros((self.p.size, samples), np.int8), np.zeros(samples, int)
        for t, p in enumerate(self.p):
            x[t] = (rng.random(samples) < p) & (eligible <= t)
            eligible[x[t] > 0] = t + self.b
        return x[self.virtual :]


class RenewalPairs:
    """Pairs (x, x') with probability p(x) p(x') e^(strength <C x, C x'>) / Z, by forward sums.

    `sums[t, 0]` is the total weight of all pasts after which both are eligible at step t, `sums[t, s]` of
    those after which one is and the other is locked out for s more steps. Draws go backwards in time.
    """

    def __init__(self, dist: Renewal, gram, strength: float):
        self.dist, b, total, v = dist, dist.b, dist.p.size, dist.virtual
        self.p, self.end = np.append(dist.p, np.zeros(b)), total + b
        self.sums = np.zeros((total + 2 * b + 1, b))
        self.sums[0, 0], flat, factors = 1.0, self.sums.reshape(-1), np.exp(strength * gram)
        for t, p in enumerate(self.p):
            q, row, met = 1 - p, self.sums[t], np.ones(b)  # met: by the lag to an earlier participation
            if v <= t < total:
                lags = min(gram.shape[1], t - v + 1)
                met[:lags] = factors[t - v, :lags]
            self.sums[t + 1, 0] += q * q * row[0]
            self.sums[t + 1, b - 1] += 2 * p * q * row[0]
            self.sums[t + b, 0] += p * p * met[0] * row[0]
            self.sums[t + 1, : b - 1] += q * row[1:]
            place = (t + 1) * b + b - 1  # of sums[t + s, b - s], s = 1, 2, ..
            flat[place : place + (b - 1) ** 2 : b - 1] += p * met[:0:-1] * row[1:]
        self.log_z = float(np.log(self.sums[self.end, 0]))

    def draw(self, rng, samples: int):
        """Return (2, steps, samples) participations of both."""
        b, sums, x = self.dist.b, self.sums, np.zeros((2, self.p.size, samples), np.int8)
        at, state, who = np.full(samples, self.end), np.zeros(samples, int), np.zeros(samples, int)
        for t in range(self.end, 0, -1):  # who: the replica that is locked out
            here = np.flatnonzero(at == t)
            s, p, last = state[here], self.p[t - 1], sums[t - 1]
            free, first = s == 0, s == b - 1  # first: its lockout may begin with step t - 1
            alone = np.where(first, 2 * p * (1 - p) * last[0], (1 - p) * last[np.minimum(s + 1, b - 1)])
            wait = np.where(free, (1 - p) ** 2 * last[0], 0.0)
            u = rng.random(here.size) * sums[t, s]
            jump, stay = (u >= alone + wait) & (t >= b - s), free & (u >= alone)
            at[here], state[here] = t - 1, np.where(stay | first, 0, s + 1)
            locked = here[free & ~stay]
            who[locked] = rng.integers(0, 2, locked.size)
            joined = here[first & ~jump]
            x[who[joined], t - 1, joined] = 1
            far, lag = here[jump], b - s[jump]
            x[who[far], t - lag, far] = 1
            x[1 - who[far], t - lag, far] |= lag == b
            at[far], state[far], who[far] = t - lag, lag % b, 1 - who[far]
        return x[:, self.dist.virtual : self.dist.p.size]


class Phases:
    """A hidden phase, uniform on `cycle` values; at its steps an example participates with probability p.

    Cyclic Poisson sampling; cycle 1 is Poisson sampling, and p = 1 is balls-in-bins.
    """

    def __init__(self, steps: int, cycle: int, p: float):
        self.steps, self.b, self.p, self.turns, self.pairs = steps, cycle, p, -(-steps // cycle), PhasePairs
        self.log_p, self.log_q = math.log(p), math.log1p(-p) if p < 1 else -math.inf

    def _by_phase(self, r):
        """Return ln of the likelihood ratio at each step, and its sums over each phase."""
        steps, padded = np.logaddexp(self.log_q, r + self.log_p), np.zeros((self.turns * self.b, r.shape[1]))
        padded[: self.steps] = steps
        return steps, padded.reshape(self.turns, self.b, -1).sum(0)

    def log_ratio(self, r):
        """L of each sample, r as `Columns.log_ratios`."""
        return special.logsumexp(self._by_phase(r)[1], axis=0) - math.log(self.b)

    def tilted(self, r):
        """Return (ln f, mean participation under the distribution p(x) e^<x, r>) of one vector r."""
        steps, sums = self._by_phase(r[:, None])
        log_f = float(special.logsumexp(sums))
        phases = np.tile(np.exp(sums[:, 0] - log_f), self.turns)[: self.steps]
        return log_f - math.log(self.b), phases * np.exp(r + self.log_p - steps[:, 0])

    def draw(self, rng, samples: int):
        """Participation vectors, (steps, samples)."""
        own = np.arange(self.steps)[:, None] % self.b == rng.integers(0, self.b, samples)
        return (own & (rng.random(own.shape) < self.p)).astype(np.int8)


class PhasePairs:
    """Pairs (x, x') of hidden-phase schemes with probability p(x) p(x') e^(strength <C x, C x'>) / Z.

    Given phases i <= j the possible participations alternate in time, and only neighbours interact: a chain.
    """

    def __init__(self, dist: Phases, gram, strength: float):
        if dist.b > 2500:
            raise NotCovered(f"hidden phases of more than 2500 values, got {dist.b}")
        self.dist, (self.first, self.second) = dist, np.triu_indices(dist.b)
        self.met = np.ones((dist.turns * dist.b, dist.b + 1))  # by the later step and the lag
        self.met[: dist.steps, : gram.shape[1]] = np.exp(strength * gram)
        weights = self._chain(self.first, self.second)[1][-1].sum(0) * (1.0 + (self.first < self.second))
        self.log_z = float(np.log(weights.sum() / dist.b**2))
        self.cdf = np.cumsum(weights / weights.sum())

    def _chain(self, first, second):
        """Possible participations in time, as (step, lag to the one before, replica), and forward sums."""
        sites, dist = [], self.dist
        for offset in range(0, dist.turns * dist.b, dist.b):
            sites += [(first + offset, first + dist.b - second, 0), (second + offset, second - first, 1)]
        found = [np.stack([np.ones(first.size), np.zeros(first.size)])]
        for steps, lags, _ in sites:
            (off, on), p = found[-1], np.where(steps < dist.steps, dist.p, 0.0)
            found.append(np.stack([(1 - p) * (off + on), p * (off + on * self.met[steps, lags])]))
        return sites, found

    def draw(self, rng, samples: int):
        """Return (2, steps, samples) participations of both."""
        chosen = np.minimum(np.searchsorted(self.cdf, rng.random(samples)), self.cdf.size - 1)
        sites, chain = self._chain(self.first[chosen], self.second[chosen])
        x, later = np.zeros((2, len(self.met), samples), np.int8), np.ones(samples)
        for (steps, lags, who), (off, on) in zip(sites[::-1], chain[:0:-1], strict=True):
            joined = rng.random(samples) * (off + on * later) >= off
            x[who, steps, np.arange(samples)] = joined
            later = np.where(joined, self.met[steps, lags], 1.0)
        swapped = rng.random(samples) < 0.5  # the two are exchangeable
        return np.where(swapped, x[::-1], x)[:, : self.dist.steps]


def distribution_of(scheme: dict):
    """Return the sampling scheme that a plan names."""
    name, steps = scheme["name"], _number(scheme["iterations"], "iterations", 1, 1e6, (int,))
    if name not in ("poisson", "b-min-sep", "cyclic-poisson", "balls-in-bins"):
        raise NotCovered(f"scheme {name!r:.60}")
    p = 1.0 if name == "balls-in-bins" else scheme["sampling_probability"]
    p, field = _number(p, "sampling_probability", 1e-300, 1), {"poisson": None, "b-min-sep": "min_separation"}
    field = field.get(name, "cycle_length")
    separation = _number(scheme[field], field, 1, 1e6, (int,)) if field else 1
    warm = scheme["warm_start"] if name == "b-min-sep" else False
    if type(warm) is not bool:
        raise ValueError(f"warm_start must be true or false, got {warm!r:.60}")
    renewal = name == "b-min-sep" and separation > 1
    return Renewal(steps, separation, p, warm) if renewal else Phases(steps, separation, p)


def columns_of(strategy: dict, dist) -> Columns:
    """Return the strategy matrix that a plan names: n + bands - 1 rows unless it states a finite horizon."""
    kind, c = strategy.get("kind", "banded-toeplitz"), strategy.get("coefficients")
    if kind not in ("banded-toeplitz", "finite-toeplitz"):
        raise NotCovered(f"strategy {kind!r:.60}")
    if not isinstance(c, list) or not c:
        raise ValueError(f"coefficients must be a list of numbers, got {c!r:.60}")
    c = np.array([_number(value, "coefficients", 0, 1 + SLACK) for value in c])
    if not abs(c @ c - 1) < 1e-12 * (1 + c.size) or c[0] == 0:
        raise ValueError(f"coefficients must have norm 1, got {math.sqrt(c @ c)!r}")
    if c.size > dist.b:
        raise NotCovered(f"{c.size} bands with a minimum separation of {dist.b}")
    rows = dist.steps if kind == "finite-toeplitz" else dist.steps + c.size - 1
    if rows == dist.steps and (strategy.get("iterations", rows) != rows or c.size > rows):
        raise ValueError(f"strategy iterations must be {rows}, got {strategy.get('iterations')!r:.60}")
    return Columns(c, dist.steps, rows)


# terms(rng, samples) are in [0, 1], their mean times the scale is the divergence; cost: of a sample.
Proposal = namedtuple("Proposal", "name log_scale terms cost", defaults=(1.0,))


class Mechanism:
    """A distribution of participations, a strategy matrix, sigma and epsilon."""

    def __init__(self, dist, columns: Columns, sigma: float, epsilon: float):
        self.dist, self.columns, self.sigma, self.epsilon = dist, columns, sigma, epsilon
        with np.errstate(invalid="ignore"):  # ln P(no participation)
            self.log_none = float(dist.log_ratio(np.full((dist.steps, 1), -np.inf))[0])

    def outputs(self, rng, samples: int, x=None):
        """Return outputs y at given participations, or none."""
        noise = self.sigma * rng.standard_normal((self.columns.rows, samples))
        return noise if x is None else noise + self.columns.apply(x)

    def loss(self, y):
        """L of outputs."""
        return self.dist.log_ratio(self.columns.log_ratios(y, self.sigma))

    def remove(self):
        """Proposals of the remove direction, in the order of replicas."""

        def terms(rng, samples):
            loss = self.loss(self.outputs(rng, samples, self.dist.draw(rng, samples)))
            return -np.expm1(np.minimum(self.epsilon - loss, 0.0))

        yield Proposal("plain", 0.0, terms)
        for m in (2, 4, 6, 8, 12, 18, 26):
            with np.errstate(over="ignore", invalid="ignore"):
                pairs = self.dist.pairs(self.dist, self.columns.gram, (m - 1) / self.sigma**2)
            if not math.isfinite(pairs.log_z):
                return
            yield self._replicas(m, pairs)

    def _replicas(self, m: int, pairs) -> Proposal:
        """Return m / 2 pairs, with attraction times m - 1; m = 2 has the density Q f^2 / Z.

        Weights divide by the mean over the rounds of a tournament of all pairs (Jensen's inequality).
        """
        log_z, strength, columns = m / 2 * pairs.log_z, 1 / self.sigma**2, self.columns
        log_scale = log_z - math.log(m - 1) + m * math.log((m - 1) / m) + (1 - m) * self.epsilon
        js = range(1, m // 2)
        rounds = [[(m - 1, i), *(((i + j) % (m - 1), (i - j) % (m - 1)) for j in js)] for i in range(m - 1)]

        def terms(rng, samples):
            x, log_share = np.zeros((m, self.dist.steps, samples), np.int8), 0.0
            for pair in rounds[0]:
                x[list(pair)] = pairs.draw(rng, samples)
            if m > 2:
                y = [columns.apply(replica) for replica in x]
                shared = [[strength * np.einsum("ts,ts->s", y[i], y[j]) for i, j in one] for one in rounds]
                sums = np.array([sum(one) for one in shared])
                log_share = sums.sum(0) - special.logsumexp((m - 1) * sums, axis=0) + math.log(m - 1)
            loss = self.loss(self.outputs(rng, samples, x.sum(0)))
            weights = np.exp(log_z + (1 - m) * loss + log_share - log_scale)
            return weights * -np.expm1(np.minimum(self.epsilon - loss, 0.0))

        return Proposal(f"replicas:{m}" if m == 2 else f"pairs:{m},0", log_scale, terms, (m + 2) / 4)

    def add(self):
        """Proposals of the add direction where it is not exactly zero."""
        dist, columns, sigma = self.dist, self.columns, self.sigma
        log_rest = math.log1p(-math.exp(min(self.epsilon + self.log_none, 0.0)))

        def absent(y):
            return -np.expm1(np.minimum(self.epsilon + self.loss(y), 0.0)) / math.exp(log_rest)

        yield Proposal("plain-bounded", log_rest, lambda rng, size: absent(self.outputs(rng, size)))
        point, best = np.zeros(dist.steps), None
        for _ in range(6):  # tangents of ln(f - P0), as a function of the scores convex
            log_f, mean = dist.tilted(point)
            rest = -math.expm1(min(self.log_none - log_f, 0.0))  # (f - P0) / f
            if rest < 1e-6:
                break
            m = mean / rest
            constant = log_f + math.log(rest) - m @ point - m @ columns.norms / (2 * sigma**2)
            normal = columns.apply(m[:, None])[:, 0]
            slope = float(np.linalg.norm(normal)) / sigma
            edge, unit = -(self.epsilon - log_rest + constant) / slope, normal / np.linalg.norm(normal)
            logs = special.log_ndtr(edge), slope**2 / 2 - slope * edge + special.log_ndtr(edge - slope)
            log_scale = log_rest + logs[0] + math.log(max(-math.expm1(min(logs[1] - logs[0], 0.0)), 1e-300))
            if best is None or log_scale < best[0]:
                best = log_scale, slope, edge, unit
            # The next tangent touches where the ray against the normal enters the event {L < -epsilon}.
            y = -sigma * np.linspace(0.0, 2 * abs(edge) + 20, 200) * unit[:, None]
            inside = np.flatnonzero(self.loss(y) <= -self.epsilon)
            point = columns.log_ratios(y[:, inside[:1] if inside.size else [-1]], sigma)[:, 0]
        if best is None:
            return
        log_scale, slope, edge, unit = best

        def terms(rng, samples):
            t = np.zeros(0)
            while t.size < samples:  # rejection from the normal distribution below the edge
                below = special.ndtri_exp(np.log(rng.random(4 * samples)) + special.log_ndtr(edge))
                t = np.append(t, below[rng.random(below.size) < -np.expm1(slope * (below - edge))])
            t, y = t[:samples], self.outputs(rng, samples)
            y += unit[:, None] * (sigma * t - unit @ y)
            return absent(y) / -np.expm1(slope * (t - edge))

        yield Proposal("half-space", log_scale, terms)


class Bets:
    """Wealth of bets of terms in [0, 1] against "the mean is at least theta" and "the mean is below theta".

    Each is a mixture of bets with fixed fractions, a non-negative supermartingale under the hypothesis it is
    against, so it ever reaches 1 / q with probability q at most (Ville's inequality).
    """

    def __init__(self, theta: float):
        self.theta, self.count, self.hits, self.sum, self.squares = theta, 0, 0, 0.0, 0.0
        self.grown = np.zeros((2, FRACTIONS.size))

    def add(self, terms):
        """Count terms in [0, 1]."""
        positive, theta = terms[terms > 0], self.theta
        zeros = terms.size - positive.size
        self.count, self.hits = self.count + terms.size, self.hits + positive.size
        self.sum, self.squares = self.sum + positive.sum(), self.squares + positive @ positive
        with np.errstate(divide="ignore", invalid="ignore"):
            gains = (lambda x: (theta - x) / (1 - theta)), (lambda x: x / theta - 1)
            for grown, gain in zip(self.grown, gains, strict=True):
                for j, part in enumerate(FRACTIONS):
                    grown[j] += np.log1p(part * gain(positive)).sum() + zeros * np.log1p(part * gain(0.0))

    def log_wealth(self):
        """Of both bets."""
        grown = np.where(np.isnan(self.grown), -np.inf, self.grown)
        return special.logsumexp(grown, axis=1) - math.log(FRACTIONS.size)

    def estimate(self, scale: float) -> tuple[float, float]:
        """Return (scale times the mean of the terms, its standard error)."""
        mean = float(self.sum) / self.count
        square = max(float(self.squares) / self.count - mean**2, 0.0)
        return scale * mean, scale * math.sqrt(square / self.count)


def samples_expected(log_scale: float, claim: Claim) -> float:
    """Return the samples for a mean of half the threshold: KL(theta / 2, theta) > .153 theta."""
    theta = math.exp(min(math.log(claim.verified) - log_scale, 0.0))
    return 0.0 if theta >= 1 else math.log(FRACTIONS.size / claim.failure) / max(0.153 * theta, 1e-300)


def decide(proposal: Proposal, claim: Claim, steps: int, rng, max_steps: float):
    """Draw until one of both bets is won: ("certified", "refuted" or "undecided", bets or None)."""
    theta = math.exp(min(math.log(claim.verified) - proposal.log_scale, 1.0)) * (1 - SLACK)
    if theta >= 1:
        return "certified", None
    bets = Bets(theta)
    while bets.count * steps < max_steps:
        terms = proposal.terms(rng, max(1024, BLOCK // steps))
        if not (np.isfinite(terms).all() and terms.min() >= -1e-6 and terms.max() <= 1 + 1e-6):
            raise NotCovered(f"{proposal.name}, which had a term of {terms.max()!r}, not in [0, 1]")
        bets.add(np.clip(terms, 0.0, 1.0))
        won = bets.log_wealth() >= -np.log([claim.failure, FALSE_ALARM])
        if won.any():
            return "certified" if won[0] else "refuted", bets
    return "undecided", bets


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Both divergences of two normal distributions, mu standard deviations apart."""
    near, far = special.log_ndtr(mu / 2 - epsilon / mu), epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)
    return float(-math.exp(near) * np.expm1(min(far - near, 0.0)))


def _lattice(p: float, sigma: float, h: float, reach: float):
    """Move f = P/Q of a Poisson-sampled Gaussian onto the points e^(h i), i >= first, with the same mean.

    That raises every divergence. Returns (first, masses under Q, mass of P beyond the last point).
    """
    log_q = math.log1p(-p)
    top = np.logaddexp(log_q, math.log(p) + (1 + 2 * sigma * reach) / (2 * sigma**2))
    first, last = math.floor(log_q / h), math.ceil(top / h)
    losses = h * np.arange(first, last + 1)
    excess = (1 - p) * np.expm1(losses - log_q)  # e^loss - (1 - p)
    with np.errstate(divide="ignore"):
        y = 0.5 + sigma**2 * np.log(np.maximum(excess, 0.0) / p)
    below, above = ([special.ndtr(side * (y - m) / sigma) for m in (0, 1)] for side in (1, -1))
    q_mass, p_mass = (np.where(y[:-1] < m, np.diff(below[m]), -np.diff(above[m])) for m in (0, 1))
    up = np.clip((p * p_mass - excess[:-1] * q_mass) / (np.exp(losses[:-1]) * math.expm1(h)), 0.0, q_mass)
    mass = np.append(q_mass - up, above[0][-1])
    mass[1:] += up
    return first, mass, float((1 - p) * above[0][-1] + p * above[1][-1])


def _tilted(logs, losses, t):
    """Return (ln of the mass, the distribution, its mean) of masses times e^(t loss)."""
    top = special.logsumexp(logs + t * losses)
    weights = np.exp(logs + t * losses - top)
    return top, weights, float(weights @ losses)


def _composed(first, masses, h, n, epsilon, sign, t=None):
    """Return (a divergence of n independent steps, its tilt) by one transform of the tilted masses.

    The tilt centres the sum at sign * epsilon, where the mean comes from, so that the transform's rounding is
    relative to it. Rounding is added, and so is what lies beyond the window (Chernoff).
    """
    with np.errstate(divide="ignore"):
        losses, logs = h * (first + np.arange(masses.size)), np.log(masses)
    if t is None:

        def tilt(t):
            return _tilted(logs, losses, t)[2] - sign * epsilon / n

        ends = (1.0, 1e5) if sign > 0 else (-1e5, 0.0)
        past = [tilt(end) for end in ends]
        t = optimize.brentq(tilt, *ends) if past[0] < 0 < past[1] else ends[past[0] < 0]
    top, weights, mean = _tilted(logs, losses, t)
    spread = math.sqrt(n * max(float(weights @ (losses - mean) ** 2), h * h))
    size = 1 << math.ceil(math.log2(max(masses.size, 60 * spread / h, 1024)))
    dist = fft.irfft(fft.rfft(weights, size) ** n, size)
    places = round(n * mean / h) + np.arange(-size // 2, size // 2)
    s = h * places
    with np.errstate(divide="ignore"):
        gains = np.log(-np.expm1(np.minimum(epsilon - sign * s, 0.0)))
    gains = np.exp(n * top - t * s + gains + (s if sign > 0 else 0.0))
    rounding = 1e-15 * math.log2(size) * (n + 1) * float(np.linalg.norm(gains))
    edge, others = s[-1] if sign > 0 else s[0], [t + sign * 2.0**k / spread for k in range(-5, 6)]
    beyond = min(n * _tilted(logs, losses, other)[0] - (other - (sign > 0)) * edge for other in others)
    beyond = 0.0 if sign * (n * losses[-1 if sign > 0 else 0] - edge) <= 0 else math.exp(min(beyond, 0.0))
    return float(np.maximum(dist[(places - n * first) % size], 0.0) @ gains) + rounding + beyond, t


def poisson_delta(n: int, p: float, sigma: float, epsilon: float, delta: float) -> float:
    """Upper bound on both divergences of n Poisson-sampled Gaussians, for one of about delta."""
    if p == 1:
        return gaussian_delta(epsilon, math.sqrt(n) / sigma)
    reach, found, tilts = math.sqrt(2 * math.log(1e8 * n / delta)), [], (None, None)
    h = float(np.logaddexp(0, math.log(p) + (1 + 2 * sigma * reach) / (2 * sigma**2))) / 512
    while len(found) < 2 or (min(found[:-1]) > 1.0005 * found[-1] and len(found) < 14):
        first, masses, lost = _lattice(p, sigma, h, reach)
        both = [_composed(first, masses, h, n, epsilon, sign, tilts[sign < 0]) for sign in (1, -1)]
        tilts, h = [t for _, t in both], h / 2
        found.append(max(both[0][0] + n * lost, both[1][0]))
    return min(found)


def analytic_delta(claim: Claim, dist) -> float:
    """Return the bound that the named accountant is to give, by another way."""
    if claim.accountant == "unamplified":
        return gaussian_delta(claim.epsilon, math.sqrt(-(-dist.steps // dist.b)) / claim.sigma)
    if claim.accountant == "pld" and hasattr(dist, "turns"):  # independent given the phase
        return poisson_delta(dist.turns, dist.p, claim.sigma, claim.epsilon, claim.verified)
    raise NotCovered(f"accountant {claim.accountant!r:.60}")


def stored_flaws(side: dict, claim: Claim, zero: bool, scales: dict, log_scale: float, bets) -> list[str]:
    """Where the stored evidence of one direction does not follow, or differs from what was found here."""
    if side["proposal"] == "zero":
        return [] if zero else ["stored as exactly zero, which it is not"]
    flaws, (scale, threshold) = [], (_number(side[name], name, 0, 1e300) for name in ("scale", "threshold"))
    own, q = scales.get(side["proposal"]), -math.log(claim.failure * side["share"])
    if own is not None and not abs(math.log(max(scale, 1e-300)) - own) < 1e-6:
        flaws.append(f"scale {scale!r} stored, {math.exp(min(own, 700)):.9g} found")
    relative, distance = (_number(side[name], name, 0, 1) for name in ("relative_error", "total_variation"))
    top = claim.verified / max(scale, 1e-300) / (1 + relative) - distance
    if not threshold <= top * (1 + SLACK):
        flaws.append(f"threshold {threshold!r} stored, at most {top:.9g} follows")
    bins, counts = np.array(side["terms"], dtype=np.int64).reshape(-1, 2).T
    values = np.where(bins > 0, np.exp2((bins - 5121) / 128), 0.0)
    parts, weights = (np.array(side[name], float) for name in ("bets", "weights"))
    theta = min(threshold, top)
    if not ((abs(parts - 0.5) <= 0.5).all() and (weights >= 0).all() and weights.sum() <= 1 + SLACK):
        return [*flaws, "bets must be in [0, 1] and their weights must add up to 1"]
    with np.errstate(divide="ignore"):
        gains = np.maximum(parts[:, None] * (theta - values) / max(1 - theta, 1e-300), -1.0)
        wealth = special.logsumexp(np.log1p(gains) @ counts, b=weights) if counts.size else 0.0
    if not (side["certified"] is True and (counts >= 0).all() and (wealth >= q * (1 - SLACK) or theta >= 1)):
        flaws.append(f"stored samples have log wealth {wealth:.6g}, below {q:.6g}")
    number, hits = counts.sum(), counts[bins > 0].sum()
    if bets and bets.hits >= 100 and (hits >= 100 or not number):
        mean = float(values @ counts / number) if number else 1.0  # a scale that needs no samples
        own, error = bets.estimate(math.exp(log_scale))
        spread = scale * math.sqrt(float((values - mean) ** 2 @ counts)) / max(number, 1)
        if own - scale * mean > 6 * math.hypot(error, spread):
            flaws.append(f"stored evidence has a mean of {scale * mean:.6g}, {own:.6g} was found")
    return flaws


def _direction(name: str, claim: Claim, mechanism: Mechanism, rng, max_steps: float):
    """Return (what was found, where the stored evidence differs) of one direction."""
    zero, choices = name == ADD and claim.epsilon + mechanism.log_none >= 0, []
    said, log_scale, bets = {"verdict": "certified", "proposal": "exactly zero", "samples": 0}, 0.0, None
    for choice in mechanism.remove() if name == REMOVE else () if zero else mechanism.add():
        choices.append((samples_expected(choice.log_scale, claim) * choice.cost, choice))
        if len(choices) > 2 and choices[-1][0] > choices[-2][0] > choices[-3][0]:
            break
    scales = {choice.name: choice.log_scale for _, choice in choices if ":" in choice.name}
    if choices:
        expected, choice = min(choices, key=lambda pair: pair[0])
        if expected * mechanism.dist.steps > max_steps:
            raise NotCovered(f"the {name} direction, which takes about {expected:.2g} samples")
        verdict, bets = decide(choice, claim, mechanism.dist.steps, rng, max_steps)
        log_scale, samples = choice.log_scale, bets.count if bets else 0
        said = {"verdict": verdict, "proposal": choice.name, "scale": math.exp(log_scale), "samples": samples}
        said["estimate"] = bets.estimate(math.exp(log_scale))[0] if bets else math.exp(log_scale)
    side = claim.stored[name]
    flaws = stored_flaws(side, claim, zero, scales, log_scale, bets) if side["recomputed"] else []
    said["stored"] = "recomputed" if side["recomputed"] else "not recomputed"
    return said, [f"{name}: {flaw}" for flaw in flaws]


def check(data, rng=None, max_steps: float = MAX_STEPS) -> dict:
    """Decide a plan's claim anew; {"verdict": .., "differences": [..], ..}, or raise NotCovered."""
    claim = _read_claim(data)
    dist = distribution_of(claim.scheme)
    columns, rng = columns_of(claim.strategy, dist), np.random.default_rng() if rng is None else rng
    differences, found = [], {}
    spent = claim.verified + claim.failure * (1 - claim.verified) + claim.reserved
    if not spent <= claim.delta * (1 + 1e-12):
        differences.append(f"the budget spends {spent!r} of delta {claim.delta!r}")
    if claim.dataset_size is not None:
        size, most, rates = claim.dataset_size, claim.max_batch_size, dist.tilted(np.zeros(dist.steps))[1]
        larger = float(special.betainc(most + 1, size - most, rates).sum()) if most < size else 0.0
        if not larger <= claim.reserved * (1 + 1e-6):
            differences.append(f"batches above {most}: probability {larger:.3g}, reserved {claim.reserved!r}")
    if claim.failure:
        mechanism = Mechanism(dist, columns, claim.sigma, claim.epsilon)
        for name in DIRECTIONS:
            found[name], flaws = _direction(name, claim, mechanism, rng, max_steps)
            differences += flaws
    else:
        ours = analytic_delta(claim, dist)
        found["bound"] = {"verdict": "certified" if ours <= claim.verified else "refuted", "delta": ours}
        if not (type(claim.bound) is float and ours * (1 - 2e-3) <= claim.bound <= claim.verified):
            differences.append(f"bound of {claim.accountant}: {claim.bound!r} stored, {ours!r} found")
    certified = not differences and all(side["verdict"] == "certified" for side in found.values())
    said = {"verdict": "certified" if certified else "not certified", "differences": differences}
    return said | {"epsilon": claim.epsilon, "delta": claim.delta} | found


def check_file(path) -> tuple[int, dict]:
    """Return (exit code, what `check` found or {"verdict": .., "reason": ..}) of a plan file."""
    try:
        with open(path, encoding="utf-8") as file:
            found = check(json.load(file))
        return CERTIFIED if found["verdict"] == "certified" else FAILED, found
    except NotCovered as error:
        return NOT_COVERED, {"verdict": "not covered", "reason": f"not covered by the checker: {error}"}
    except MALFORMED as error:
        reason = f"plan cannot be checked: {type(error).__name__}: {error}"
        return BAD_INPUT, {"verdict": "bad input", "reason": " ".join(reason.split())}


def main(arguments=None) -> int:
    """Check the plan of a file; the exit code."""
    parser = argparse.ArgumentParser(description="Check a plan by the second implementation.")
    parser.add_argument("plan")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    code, found = check_file(options.plan)
    if options.json:
        print(json.dumps(found))
    elif "reason" in found:
        print(found["reason"], file=sys.stderr if code == BAD_INPUT else sys.stdout)
    else:
        print(f"{found['verdict']}: ({found['epsilon']:g}, {found['delta']:g}) by the second implementation")
        for name in [name for name in (*DIRECTIONS, "bound") if name in found]:
            print(f"{name:8}" + ", ".join(f"{key} {value}" for key, value in found[name].items()))
        for line in found["differences"]:
            print(f"differs {line}")
    return code


if __name__ == "__main__":
    sys.exit(main())
