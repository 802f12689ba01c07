"""Second implementation of plan certificates: reads a plan's claim and decides anew whether it holds.

It shares no code with the rest of jaxacct, imports NumPy, SciPy and the standard library only, computes in
float64, and draws its own samples with a seed from the operating system:

    python checker.py plan.json [--json]

Exit codes: 0 certified, 1 not certified or the two implementations disagree, 2 bad input, 3 not covered.

Notation: y = C x + sigma z over the rows of C; Q is the distribution of y at x = 0 and P at the random
participation vector x of one example; f = P/Q, L = ln f. The remove direction is H(P, Q) = E_P (1 - e^(eps-L))_+
and the add direction H(Q, P) = E_Q (1 - e^(eps+L))_+. Arrays of samples have shape (steps, samples).
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass

import numpy as np
from scipy import fft, optimize, special

CERTIFIED, FAILED, BAD_INPUT, NOT_COVERED = 0, 1, 2, 3
FALSE_ALARM = 1e-6  # probability that a comparison with stored samples reports a difference by chance
SLACK = 1e-9  # epsilon and thresholds are tightened by this, far above float64's rounding
MAX_STEPS = 4e9  # limit on steps x samples of one direction
BLOCK = 1 << 20  # steps x samples that are scored at once
MAX_ORDER = 64


NUMBERS = ("scale", "threshold", "relative_error", "total_variation", "margin")


class NotCovered(Exception):
    """A claim for which the checker has no method."""


# --- The claim: the only part that depends on the layout of a plan file ---


@dataclass(frozen=True)
class Claim:
    """What a plan claims, and the evidence that it stores.

    Attributes:
      verified: bound on both divergences that is to be verified.
      failure: probability with which the verification may be wrong; 0 for an analytic bound.
      reserved: part of delta for a batch above max_batch_size.
      accountant, bound: name of the analytic accountant and its bound, or None.
      stored: evidence by direction; terms are (bin, count) pairs, bin 0 for zeros and bin k > 0 for terms up
        to 2^((k - 5121) / 128).
    """

    scheme: dict
    strategy: dict
    sigma: float
    epsilon: float
    delta: float
    verified: float
    failure: float
    reserved: float
    dataset_size: int | None
    max_batch_size: int | None
    accountant: str | None
    bound: float | None
    stored: dict


def _number(value, name: str, low: float, high: float, kinds=(int, float)):
    if type(value) not in kinds or not low <= value <= high:
        what = "an integer" if kinds == (int,) else "a number"
        raise ValueError(f"{name} must be {what} in [{low:g}, {high:g}], got {value!r:.60}")
    return value if kinds == (int,) else float(value)


def _read_claim(data) -> Claim:
    """Read a plan of schema version 3; ValueError for malformed fields, NotCovered for another kind of plan."""
    if not isinstance(data, dict):
        raise ValueError("plan must be a JSON object")
    if data.get("schema") != "jaxacct-plan" or data.get("schema_version") not in (2, 3):
        raise NotCovered(f"schema {data.get('schema')!r:.40}, version {data.get('schema_version')!r:.20}")
    for name, known in (("adjacency", "zero-out"), ("compose_with", None), ("truncation_delta", None)):
        if data[name] != known:
            raise NotCovered(f"{name} {data[name]!r:.60}")
    delta, evidence, stored = _number(data["delta"], "delta", 1e-300, 1 - 1e-16), data["evidence"], {}
    reserved = _number(data.get("overflow_delta") or 0.0, "overflow_delta", 0, delta)
    verified, failure = delta - reserved, 0.0
    if evidence is not None:
        verified = _number(evidence["budget"]["delta_v"], "delta_v", 1e-300, delta)
        failure = _number(evidence["budget"]["failure_probability"], "failure_probability", 1e-300, delta)
    for name in ("remove", "add") if evidence else ():
        side = evidence[name]
        stored[name] = {key: _number(side[key], key, 0, 1e300) for key in NUMBERS}
        stored[name] |= {
            "proposal": side["proposal"],
            "accepted": side["accepted"],
            "order": side["replicas"],
        }
        stored[name] |= {"terms": side["term_counts"], "bets": side["bets"], "weights": side["bet_weights"]}
        stored[name]["known"] = evidence["rule"] == "anytime" and side["extrapolation"] is None
    sizes = [data["dataset_size"], data["max_batch_size"]]
    for size in sizes[: 0 if sizes[0] is None else 2]:
        _number(size, "dataset_size, max_batch_size", 1, 1e15, (int,))
    sigma = _number(data["noise_multiplier"], "noise_multiplier", 1e-6, 1e9)
    epsilon, how = _number(data["epsilon"], "epsilon", 0, 1e6), ("analytic_accountant", "analytic_delta")
    how = [data[name] if evidence is None else None for name in how]
    return Claim(
        data["scheme"],
        data["strategy"],
        sigma,
        epsilon,
        delta,
        verified,
        failure,
        reserved,
        *sizes,
        *how,
        stored,
    )


# --- The strategy matrix ---


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
        if self.c.size == 1:
            return self.c[0] * x
        return fft.irfft(fft.rfft(x, self.length, axis=0) * self.transform, self.length, axis=0)[: self.rows]

    def transpose(self, y):
        """C^T y."""
        if self.c.size == 1:
            return self.c[0] * y
        spectrum = fft.rfft(y, self.length, axis=0) * self.transform.conj()
        return fft.irfft(spectrum, self.length, axis=0)[: self.steps]

    def log_ratios(self, y, sigma: float):
        """r, with a_x = e^<x, r> for participations whose columns share no row."""
        return (self.transpose(y) - self.norms[:, None] / 2) / sigma**2


# --- Sampling schemes: one class each ---


class Renewal:
    """b-min-sep sampling, cold or warm; separation 1 is Poisson.

    A warm start is a cold one with b - 1 virtual steps in front, whose columns are zero and whose hazards give
    every virtual step the same probability of a participation.
    """

    def __init__(self, steps: int, separation: int, p: float, warm: bool):
        self.steps, self.b, self.virtual = steps, separation, separation - 1 if warm else 0
        before = p / (1 + (separation - 1) * p - np.arange(self.virtual) * p)
        self.p = np.append(before, np.full(steps, p))
        with np.errstate(divide="ignore"):
            self.log_p, self.log_q = np.log(self.p)[:, None], np.log1p(-self.p)
        self.q = 1 - self.p

    def _ahead(self, r):
        """ln f of what follows each step, (virtual + steps + b, samples)."""
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
        """L of each sample, (samples,)."""
        return self._ahead(r)[0]

    def tilted(self, r):
        """(ln f, mean participation under the law p(x) e^<x, r>) of one vector r."""
        ahead, v = self._ahead(r[:, None])[:, 0], self.virtual
        reach = np.full(ahead.size, -np.inf)
        reach[0], lift = 0.0, np.append(np.zeros(v), r) + self.log_p[:, 0]
        for t in range(self.p.size):
            reach[t + 1] = np.logaddexp(reach[t + 1], reach[t] + self.log_q[t])
            reach[t + self.b] = np.logaddexp(reach[t + self.b], reach[t] + lift[t])
        joins = reach[: self.p.size] + lift + ahead[self.b :] - ahead[0]
        return ahead[0], np.exp(joins[v:])

    def draw(self, rng, samples: int):
        """Participation vectors, (steps, samples)."""
        x, eligible = np.zeros((self.p.size, samples), np.int8), np.zeros(samples, int)
        for t, p in enumerate(self.p):
            x[t] = (rng.random(samples) < p) & (eligible <= t)
            eligible[x[t] > 0] = t + self.b
        return x[self.virtual :]

    def pairs(self, gram, strength: float):
        """Two replicas that attract each other by e^(strength <C x, C x'>)."""
        return RenewalPairs(self, gram, strength)


class RenewalPairs:
    """Pairs (x, x') with probability p(x) p(x') e^(strength <C x, C x'>) / Z, by forward sums.

    `sums[t, 0]` is the total weight of all pasts after which both are eligible at step t, `sums[t, s]` of
    those after which one is and the other is locked out for s more steps. Draws go backwards in time.
    """

    def __init__(self, law: Renewal, gram, strength: float):
        self.law, b, total, v = law, law.b, law.p.size, law.virtual
        self.sums = np.zeros((total + 2 * b + 1, b))
        self.sums[0, 0], flat = 1.0, self.sums.reshape(-1)
        self.p = np.append(law.p, np.zeros(b))
        with np.errstate(over="ignore", invalid="ignore"):
            factors = np.exp(strength * gram)
            for t, p in enumerate(self.p):
                q, row = 1 - p, self.sums[t]
                met = np.ones(b + 1)  # by the lag to an earlier participation
                if v <= t < total:
                    lags = min(gram.shape[1], t - v + 1, b)
                    met[:lags] = factors[t - v, :lags]
                both, one = p * p * met[0] * row[0], 2 * p * q * row[0]
                self.sums[t + 1, 0] += q * q * row[0]
                self.sums[t + 1, b - 1] += one
                self.sums[t + b, 0] += both
                if b > 1:
                    self.sums[t + 1, : b - 1] += q * row[1:]
                    place = (t + 1) * b + b - 1
                    flat[place : place + (b - 1) ** 2 : b - 1] += p * met[b - 1 : 0 : -1] * row[1:]
            self.end = total + b
            self.log_z = float(np.log(self.sums[self.end, 0]))

    def draw(self, rng, samples: int):
        """(2, steps, samples) participations of both."""
        b, v, sums = self.law.b, self.law.virtual, self.sums
        x = np.zeros((2, self.p.size, samples), np.int8)
        at, state = np.full(samples, self.end), np.zeros(samples, int)
        who = np.zeros(samples, int)  # the replica that is locked out
        for t in range(self.end, 0, -1):
            here = np.flatnonzero(at == t)
            if not here.size:
                continue
            s, p = state[here], self.p[t - 1]
            q, last = 1 - p, sums[t - 1]
            free = s == 0
            shift = np.where(s < b - 1, q * last[np.minimum(s + 1, b - 1)], 0.0)
            alone = np.where(s == b - 1, 2 * p * q * last[0], 0.0)
            wait = np.where(free, q * q * last[0], 0.0)
            u = rng.random(here.size) * sums[t, s]
            jump = (u >= shift + alone + wait) & (t >= b - s)
            single = ~jump & (u >= shift + wait) & (alone > 0)
            stay = ~jump & ~single & (u >= shift) & free
            moved = ~jump & ~single & ~stay
            at[here] = t - 1
            state[here[single | stay]] = 0
            newly = here[moved & free]
            who[newly] = rng.integers(0, 2, newly.size)
            state[here[moved]] = s[moved] + 1
            starts = here[single & free]  # b = 1: a participation locks nobody out
            who[starts] = rng.integers(0, 2, starts.size)
            x[who[here[single]], t - 1, here[single]] = 1
            far, lag = here[jump], b - s[jump]
            at[far] = t - lag
            x[who[far], t - lag, far] = 1
            twice = far[lag == b]
            x[1 - who[twice], t - b, twice] = 1
            who[far] = 1 - who[far]
            state[far] = np.where(lag == b, 0, lag)
        return x[:, v : self.law.p.size]


class Phases:
    """A hidden phase, uniform on `cycle` values; at its steps an example participates with probability p.

    p < 1 is cyclic Poisson sampling, p = 1 is balls-in-bins.
    """

    def __init__(self, steps: int, cycle: int, p: float):
        self.steps, self.b, self.p, self.turns = steps, cycle, p, -(-steps // cycle)
        with np.errstate(divide="ignore"):
            self.log_p, self.log_q = math.log(p), np.log1p(-p)

    def _by_phase(self, values):
        padded = np.zeros((self.turns * self.b, values.shape[1]))
        padded[: self.steps] = values
        return padded.reshape(self.turns, self.b, -1).sum(0)

    def log_ratio(self, r):
        """L of each sample, (samples,)."""
        steps = r + self.log_p if self.p == 1 else np.logaddexp(self.log_q, r + self.log_p)
        return special.logsumexp(self._by_phase(steps), axis=0) - math.log(self.b)

    def tilted(self, r):
        """(ln f, mean participation under the law p(x) e^<x, r>) of one vector r."""
        steps = np.logaddexp(self.log_q, r + self.log_p)
        sums = self._by_phase(steps[:, None])[:, 0]
        log_f = special.logsumexp(sums)
        phases = np.tile(np.exp(sums - log_f), self.turns)[: self.steps]
        return float(log_f - math.log(self.b)), phases * np.exp(r + self.log_p - steps)

    def draw(self, rng, samples: int):
        """Participation vectors, (steps, samples)."""
        phases = rng.integers(0, self.b, samples)
        own = np.arange(self.steps)[:, None] % self.b == phases
        return (own & (rng.random(own.shape) < self.p)).astype(np.int8)

    def pairs(self, gram, strength: float):
        """Two replicas that attract each other by e^(strength <C x, C x'>)."""
        return PhasePairs(self, gram, strength)


class PhasePairs:
    """Pairs (x, x') of hidden-phase schemes with probability p(x) p(x') e^(strength <C x, C x'>) / Z.

    Given phases i <= j the possible participations alternate in time, and only neighbours interact: a chain.
    """

    def __init__(self, law: Phases, gram, strength: float):
        if law.b > 2500:
            raise NotCovered(f"hidden phases of more than 2500 values, got {law.b}")
        self.law, h = law, gram.shape[1]
        with np.errstate(over="ignore", invalid="ignore"):
            factors = np.exp(strength * gram)
            self.met = np.ones((law.turns * law.b, law.b + 1))  # by the later step and the lag
            self.met[: law.steps, : min(h, law.b)] = factors[:, : law.b]
            first, second = np.triu_indices(law.b)
            weights = np.where(first == second, 1.0, 2.0) * self._chain(first, second)[-1].sum(0)
            self.log_z = float(np.log(weights.sum() / law.b**2))
        self.first, self.second, self.cdf = first, second, np.cumsum(weights / weights.sum())

    def _sites(self, first, second):
        """(step, lag to the site before) of each possible participation in order of time."""
        for turn in range(self.law.turns):
            offset = turn * self.law.b
            yield first + offset, first + self.law.b - second, 0
            yield second + offset, second - first, 1

    def _chain(self, first, second):
        """(sites + 1, 2, pairs): weight of all pasts after which the last site was off or on."""
        p, found = self.law.p, [np.stack([np.ones(first.size), np.zeros(first.size)])]
        for steps, lags, _ in self._sites(first, second):
            off, on = found[-1]
            joins = np.where(steps < self.law.steps, p, 0.0)
            met = self.met[np.minimum(steps, len(self.met) - 1), lags]
            found.append(np.stack([(1 - joins) * (off + on), joins * (off + on * met)]))
        return found

    def draw(self, rng, samples: int):
        """(2, steps, samples) participations of both."""
        chosen = np.minimum(np.searchsorted(self.cdf, rng.random(samples)), self.cdf.size - 1)
        first, second = self.first[chosen], self.second[chosen]
        chain, sites = self._chain(first, second), list(self._sites(first, second))
        x = np.zeros((2, self.law.turns * self.law.b, samples), np.int8)
        every, met_next = np.arange(samples), np.ones(samples)
        for (steps, lags, who), (off, on) in zip(sites[::-1], chain[:0:-1], strict=True):
            joined = rng.random(samples) * (off + on * met_next) >= off
            x[who, steps, every] = joined
            met_next = np.where(joined, self.met[steps, lags], 1.0)
        swapped = rng.random(samples) < 0.5  # the two are exchangeable
        return np.where(swapped, x[::-1], x)[:, : self.law.steps]


def law_of(scheme: dict):
    """The sampling scheme that a plan names."""
    name, steps = scheme.get("name"), _number(scheme.get("iterations"), "iterations", 1, 1e6, (int,))
    known = {"poisson", "b-min-sep", "cyclic-poisson", "balls-in-bins"}
    if name not in known:
        raise NotCovered(f"scheme {name!r:.60}")
    p = 1.0
    if name != "balls-in-bins":
        p = _number(scheme.get("sampling_probability"), "sampling_probability", 1e-300, 1)
    if name == "poisson":
        return Renewal(steps, 1, p, False)
    if name == "b-min-sep":
        if type(scheme.get("warm_start")) is not bool:
            raise ValueError(f"warm_start must be true or false, got {scheme.get('warm_start')!r:.60}")
        separation = _number(scheme.get("min_separation"), "min_separation", 1, 1e6, (int,))
        return Renewal(steps, separation, p, scheme["warm_start"])
    return Phases(steps, _number(scheme.get("cycle_length"), "cycle_length", 1, 1e6, (int,)), p)


def columns_of(strategy: dict, law) -> Columns:
    """The strategy matrix that a plan names: n + bands - 1 rows unless it states a finite horizon."""
    kind = strategy.get("kind", "banded-toeplitz")
    if kind not in ("banded-toeplitz", "finite-toeplitz"):
        raise NotCovered(f"strategy {kind!r:.60}")
    c = strategy.get("coefficients")
    if not isinstance(c, list) or not c:
        raise ValueError(f"coefficients must be a list of numbers, got {c!r:.60}")
    c = np.array([_number(value, "coefficients", 0, 1 + SLACK) for value in c])
    if not abs(c @ c - 1) < 1e-12 * c.size + 1e-12 or c[0] == 0:
        raise ValueError(f"coefficients must have norm 1, got {math.sqrt(c @ c)!r}")
    if c.size > law.b:
        raise NotCovered(f"{c.size} bands with a minimum separation of {law.b}")
    if kind == "banded-toeplitz":
        return Columns(c, law.steps, law.steps + c.size - 1)
    if strategy.get("iterations") != law.steps or c.size > law.steps:
        raise ValueError(f"strategy iterations must be {law.steps}, got {strategy.get('iterations')!r:.60}")
    return Columns(c, law.steps, law.steps)


# --- Proposal distributions: each draws terms in [0, 1] whose mean times `scale` is the divergence ---


@dataclass(frozen=True)
class Proposal:
    """One way to draw a direction; `terms(rng, samples)` are in [0, 1] up to rounding."""

    name: str
    order: int
    log_scale: float
    terms: object
    cost: float = 1.0  # of a sample, in plain ones


class Mechanism:
    """A law of participations, a strategy matrix, sigma and epsilon."""

    def __init__(self, law, columns: Columns, sigma: float, epsilon: float):
        self.law, self.columns, self.sigma, self.epsilon = law, columns, sigma, epsilon

    def loss(self, y):
        """L of outputs."""
        return self.law.log_ratio(self.columns.log_ratios(y, self.sigma))

    def noise(self, rng, samples: int):
        """sigma z."""
        return self.sigma * rng.standard_normal((self.columns.rows, samples))

    def log_none(self) -> float:
        """ln P(no participation)."""
        with np.errstate(invalid="ignore"):
            return float(self.law.log_ratio(np.full((self.law.steps, 1), -np.inf))[0])

    def remove(self):
        """Proposals of the remove direction, in the order of replicas."""
        yield Proposal("plain", 1, 0.0, self._plain)
        m = 2
        while m <= MAX_ORDER:
            found = self._replicas(m)
            if found is None:
                return
            yield found
            m += 2 if m < 8 else m // 2

    def _plain(self, rng, samples):
        t = self.epsilon - self.loss(
            self.columns.apply(self.law.draw(rng, samples)) + self.noise(rng, samples)
        )
        return -np.expm1(np.minimum(t, 0.0))

    def _replicas(self, m: int) -> Proposal | None:
        """m replicas: of density Q f^m / Z_m where steps are independent, else m / 2 pairs.

        Pairs attract each other m - 1 times as much; draws are weighted by their share of a round-robin
        tournament, in each round of which every replica is in one pair (Jensen's inequality).
        """
        law, columns, strength = self.law, self.columns, 1 / self.sigma**2
        independent = isinstance(law, Renewal) and law.b == 1
        if independent:
            k = np.arange(m + 1)
            with np.errstate(divide="ignore"):
                log_q = np.where(k < m, (m - k) * np.log1p(-law.p[0]), 0.0)
            logs = np.log(special.comb(m, k)) + k * np.log(law.p[0]) + log_q
            logs = logs + k * (k - 1) / 2 * columns.norms[0] * strength
            each = special.logsumexp(logs)
            cdf, log_z = np.cumsum(np.exp(logs - each)), law.steps * each
        else:
            pairs = law.pairs(columns.gram, (m - 1) * strength)
            log_z = m / 2 * pairs.log_z
        if not math.isfinite(log_z):
            return None
        log_scale = log_z - math.log(m - 1) + m * math.log((m - 1) / m) + (1 - m) * self.epsilon
        rounds = [
            [(m - 1, i)] + [((i + j) % (m - 1), (i - j) % (m - 1)) for j in range(1, m // 2)]
            for i in range(m - 1)
        ]

        def draw(rng, samples):
            if independent:
                return np.searchsorted(cdf[:-1], rng.random((law.steps, samples)), side="right"), 0.0
            each = np.zeros((m, law.steps, samples), np.int8)
            for pair in rounds[0]:
                each[list(pair)] = pairs.draw(rng, samples)
            if m == 2:
                return each.sum(0), 0.0
            placed = [columns.apply(x) for x in each]
            shared = {
                frozenset(pair): strength * np.einsum("ts,ts->s", placed[pair[0]], placed[pair[1]])
                for one in rounds
                for pair in one
            }
            logs = [(m - 1) * sum(shared[frozenset(pair)] for pair in one) for one in rounds]
            return each.sum(0), sum(shared.values()) - special.logsumexp(logs, axis=0) + math.log(m - 1)

        def terms(rng, samples):
            counts, log_share = draw(rng, samples)
            loss = self.loss(columns.apply(counts) + self.noise(rng, samples))
            log_weight = log_z + (1 - m) * loss + log_share - log_scale
            return np.exp(log_weight) * -np.expm1(np.minimum(self.epsilon - loss, 0.0))

        return Proposal(f"{m} replicas", m, log_scale, terms, 1.0 if independent else (m + 2) / 4)

    def add(self):
        """Proposals of the add direction, which is not exactly zero."""
        log_rest = math.log1p(-math.exp(min(self.epsilon + self.log_none(), 0.0)))
        yield Proposal(
            "plain, less none",
            0,
            log_rest,
            lambda rng, samples: self._absent(self.noise(rng, samples), log_rest),
        )
        found = self._half_space(log_rest)
        if found is not None:
            yield found

    def _absent(self, y, log_rest):
        return -np.expm1(np.minimum(self.epsilon + self.loss(y), 0.0)) / math.exp(log_rest)

    def _half_space(self, log_rest: float) -> Proposal | None:
        """Outputs below a hyperplane that bounds the event {L < -epsilon}, by a tangent of ln(f - P0)."""
        law, columns, sigma, log_none = self.law, self.columns, self.sigma, self.log_none()
        point, best = np.zeros(law.steps), None
        for _ in range(6):
            log_f, mean = law.tilted(point)
            rest = -math.expm1(min(log_none - log_f, 0.0))  # (f - P0) / f
            if rest < 1e-6:
                break
            m = mean / rest
            constant = log_f + math.log(rest) - m @ point - m @ columns.norms / (2 * sigma**2)
            direction = columns.apply(m[:, None])[:, 0]
            slope = float(np.linalg.norm(direction)) / sigma
            edge = -(self.epsilon - log_rest + constant) / slope
            logs = special.log_ndtr(edge), slope**2 / 2 - slope * edge + special.log_ndtr(edge - slope)
            log_scale = log_rest + logs[0] + math.log(max(-math.expm1(min(logs[1] - logs[0], 0.0)), 1e-300))
            if best is None or log_scale < best[0]:
                best = log_scale, slope, edge, direction / np.linalg.norm(direction)
            # The next tangent touches where the ray against this direction enters the event.
            far = np.linspace(0.0, 2 * abs(edge) + 20, 200)
            y = -sigma * far * (direction / np.linalg.norm(direction))[:, None]
            inside = np.flatnonzero(law.log_ratio(columns.log_ratios(y, sigma)) <= -self.epsilon)
            point = columns.log_ratios(y[:, inside[:1] if inside.size else [-1]], sigma)[:, 0]
        if best is None:
            return None
        log_scale, slope, edge, unit = best

        def terms(rng, samples):
            t = np.zeros(0)
            while t.size < samples:  # rejection from the normal distribution below the edge
                below = special.ndtri_exp(np.log(rng.random(4 * samples)) + special.log_ndtr(edge))
                t = np.append(t, below[rng.random(below.size) < -np.expm1(slope * (below - edge))])
            t, y = t[:samples], self.noise(rng, samples)
            y += unit[:, None] * (sigma * t - unit @ y)
            return self._absent(y, log_rest) / -np.expm1(slope * (t - edge))

        return Proposal("half-space", 1, log_scale, terms)


# --- The anytime-valid test ---

FRACTIONS = 2.0 ** -np.arange(0, 14, 0.6)


class Bets:
    """Wealth of bets against "the mean is at least theta" and against "the mean is below theta".

    A mixture with equal weights of bets with fixed fractions: a non-negative supermartingale each, so by
    Ville's inequality the wealth of a bet against a true hypothesis ever reaches 1 / q with probability q.
    """

    def __init__(self, theta: float):
        self.theta, self.count, self.hits, self.sum, self.squares = theta, 0, 0, 0.0, 0.0
        self.above, self.below = np.zeros(FRACTIONS.size), np.zeros(FRACTIONS.size)

    def add(self, terms):
        """Count terms in [0, 1]."""
        positive, theta = terms[terms > 0], self.theta
        zeros = terms.size - positive.size
        self.count, self.sum = self.count + terms.size, self.sum + positive.sum()
        self.squares, self.hits = self.squares + positive @ positive, self.hits + positive.size
        with np.errstate(divide="ignore"):
            for wealth, gains in (
                (self.above, (theta - positive) / (1 - theta)),
                (self.below, positive / theta - 1),
            ):
                none = theta / (1 - theta) if wealth is self.above else -1.0
                for j, part in enumerate(FRACTIONS):
                    wealth[j] += np.log1p(part * gains).sum() + zeros * np.log1p(part * none)

    def log_wealth(self) -> tuple[float, float]:
        """Of both bets."""
        return tuple(
            float(special.logsumexp(np.where(np.isnan(wealth), -np.inf, wealth)) - math.log(wealth.size))
            for wealth in (self.above, self.below)
        )

    @property
    def mean(self) -> float:
        return self.sum / max(self.count, 1)

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return math.sqrt(max(self.squares / max(self.count, 1) - self.mean**2, 0.0) / max(self.count, 1))


def samples_expected(log_scale: float, verified: float, failure: float) -> float:
    """Samples that a mean of half the threshold takes, about."""
    theta = math.exp(min(math.log(verified) - log_scale, 0.0))
    if theta >= 1:
        return 0.0
    gain = theta * (0.5 - 0.5 * math.log(2))  # KL(theta / 2 || theta) is at least this
    return math.log(FRACTIONS.size / failure) / max(gain, 1e-300)


def decide(proposal: Proposal, claim: Claim, law, rng, max_steps: float) -> tuple[str, Bets | None]:
    """Draw until one of both bets is won: "certified", "refuted" or "undecided"."""
    theta = math.exp(min(math.log(claim.verified) - proposal.log_scale, 1.0)) * (1 - SLACK)
    if theta >= 1:
        return "certified", None
    bets, size = Bets(theta), max(64, int(BLOCK / law.steps))
    while bets.count * law.steps < max_steps:
        terms = proposal.terms(rng, size)
        if not (np.isfinite(terms).all() and terms.min() >= -1e-6 and terms.max() <= 1 + 1e-6):
            raise ArithmeticError(f"{proposal.name}: a term of {terms.max()!r} is outside of [0, 1]")
        bets.add(np.clip(terms, 0.0, 1.0))
        above, below = bets.log_wealth()
        if above >= math.log(1 / claim.failure):
            return "certified", bets
        if below >= math.log(1 / FALSE_ALARM):
            return "refuted", bets
    return "undecided", bets


# --- Analytic bounds ---


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Both divergences of two normal distributions, mu standard deviations apart."""
    near, far = special.log_ndtr(mu / 2 - epsilon / mu), epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)
    return float(-math.exp(near) * np.expm1(min(far - near, 0.0)))


def _lattice(p: float, sigma: float, h: float, reach: float):
    """f = P/Q of one Poisson-sampled Gaussian, moved onto the points e^(h i), i >= first.

    What lies between two points is split between them with the same mean: every divergence grows.
    Returns (first, masses under Q, mass of P beyond the last point).
    """
    log_q = math.log1p(-p)
    top = np.logaddexp(log_q, math.log(p) + (1 + 2 * sigma * reach) / (2 * sigma**2))
    first, last = math.floor(log_q / h), math.ceil(top / h)
    losses = h * np.arange(first, last + 1)
    excess = (1 - p) * np.expm1(losses - log_q)  # e^loss - (1 - p)
    with np.errstate(divide="ignore"):
        y = 0.5 + sigma**2 * np.log(np.maximum(excess, 0.0) / p)
    absent, present = (
        np.where(y < m, special.ndtr((y - m) / sigma), special.ndtr((m - y) / sigma)) for m in (0, 1)
    )
    q_mass, p_mass = (
        np.abs(np.diff(np.where(y < m, side, 1 - side))) for m, side in ((0, absent), (1, present))
    )
    up = np.clip((p * p_mass - excess[:-1] * q_mass) / (np.exp(losses[:-1]) * math.expm1(h)), 0.0, q_mass)
    mass = np.append(q_mass - up, absent[-1])
    mass[1:] += up
    return first, mass, float((1 - p) * absent[-1] + p * present[-1])


def _tilted(logs, losses, t):
    """(ln of the mass, the distribution, its mean) of masses times e^(t loss)."""
    top = special.logsumexp(logs + t * losses)
    weights = np.exp(logs + t * losses - top)
    return top, weights, float(weights @ losses)


def _composed(first, masses, h, n, epsilon, sign, t=None):
    """(a divergence of n independent steps, its tilt) by one transform of the tilted masses.

    The tilt centres the sum at sign * epsilon, where the mean comes from, so that the transform's rounding is
    relative to the result; it is added, and so is what lies beyond the window (Chernoff).
    """
    with np.errstate(divide="ignore"):
        losses, logs = h * (first + np.arange(masses.size)), np.log(masses)
    if t is None:
        ends = (1.0, 1e5) if sign > 0 else (-1e5, 0.0)
        past = [_tilted(logs, losses, end)[2] - sign * epsilon / n for end in ends]
        t = ends[past[0] < 0]
        if past[0] < 0 < past[1]:
            t = optimize.brentq(lambda t: _tilted(logs, losses, t)[2] - sign * epsilon / n, *ends)
    top, weights, mean = _tilted(logs, losses, t)
    spread = math.sqrt(n * max(float(weights @ (losses - mean) ** 2), h * h))
    size = 1 << math.ceil(math.log2(max(masses.size, 60 * spread / h, 1024)))
    law = fft.irfft(fft.rfft(weights, size) ** n, size)
    places = round(n * mean / h) + np.arange(-size // 2, size // 2)
    s = h * places
    with np.errstate(divide="ignore"):
        gains = np.log(-np.expm1(np.minimum(epsilon - sign * s, 0.0)))
    gains = np.exp(n * top - t * s + gains + (s if sign > 0 else 0.0))
    rounding = 1e-15 * math.log2(size) * (n + 1) * float(np.linalg.norm(gains))
    edge = s[-1] if sign > 0 else s[0]
    others = [t + sign * 2.0**k / spread for k in range(-5, 6)]
    beyond = min(n * _tilted(logs, losses, other)[0] - (other - (sign > 0)) * edge for other in others)
    beyond = 0.0 if sign * (n * losses[-1 if sign > 0 else 0] - edge) <= 0 else math.exp(min(beyond, 0.0))
    return float(np.maximum(law[(places - n * first) % size], 0.0) @ gains) + rounding + beyond, t


def poisson_delta(n: int, p: float, sigma: float, epsilon: float, delta: float) -> float:
    """Upper bound on both divergences of n Poisson-sampled Gaussians, for one of about delta."""
    if p == 1:
        return gaussian_delta(epsilon, math.sqrt(n) / sigma)
    reach, found, tilts = math.sqrt(2 * math.log(1e8 * n / delta)), [], (None, None)
    h = float(np.logaddexp(0, math.log(p) + (1 + 2 * sigma * reach) / (2 * sigma**2))) / 512
    while len(found) < 2 or (min(found[:-1]) > 1.0005 * found[-1] and len(found) < 14):
        first, masses, lost = _lattice(p, sigma, h, reach)
        both = [
            _composed(first, masses, h, n, epsilon, sign, t) for sign, t in zip((1, -1), tilts, strict=True)
        ]
        tilts, h = [t for _, t in both], h / 2
        found.append(max(both[0][0] + n * lost, both[1][0]))
    return min(found)


def analytic_delta(claim: Claim, law, sigma: float) -> float:
    """The bound that the named accountant is to give, by another way."""
    turns = -(-law.steps // law.b)
    if claim.accountant == "unamplified":
        return gaussian_delta(claim.epsilon, math.sqrt(turns) / sigma)
    if claim.accountant == "pld" and (law.b == 1 or isinstance(law, Phases)):
        p = float(law.p if isinstance(law, Phases) else law.p[0])
        return poisson_delta(turns, p, sigma, claim.epsilon, claim.verified)
    raise NotCovered(f"accountant {claim.accountant!r:.60}")


# --- The stored evidence ---


def stored_flaws(name: str, side: dict, claim: Claim, zero: bool, scales: dict, bets: tuple) -> list[str]:
    """Where the stored evidence of one direction does not follow, or differs from what was found here."""
    if side["proposal"] == "zero":
        return [] if zero else [f"{name}: stored as exactly zero, which it is not"]
    flaws, scale, own = [], side["scale"], scales.get(side["proposal"])
    if own is not None and not abs(math.log(max(scale, 1e-300)) - own) < 1e-6:
        flaws.append(f"{name}: scale {scale!r} stored, {math.exp(min(own, 700)):.9g} found")
    top = (
        claim.verified / scale / (1 + side["relative_error"]) - side["total_variation"] if scale else math.inf
    )
    if not side["threshold"] <= top * (1 + SLACK):
        flaws.append(f"{name}: threshold {side['threshold']!r} stored, at most {top:.9g} follows")
    bins, counts = np.array(side["terms"], dtype=np.int64).reshape(-1, 2).T
    values = np.where(bins > 0, np.exp2((bins - 5121) / 128), 0.0)
    parts, weights, theta = (
        np.array(side["bets"], float),
        np.array(side["weights"], float),
        min(side["threshold"], top),
    )
    if not (((parts >= 0) & (parts <= 1)).all() and (weights >= 0).all() and weights.sum() <= 1 + SLACK):
        return [*flaws, f"{name}: bets must be in [0, 1] and their weights must add up to 1"]
    wealth = math.inf
    if theta < 1:
        with np.errstate(divide="ignore"):
            grown = np.log1p(np.maximum(parts[:, None] * (theta - values) / (1 - theta), -1.0)) @ counts
        wealth = special.logsumexp(grown, b=weights) if counts.size else 0.0
    if not (side["accepted"] is True and wealth >= math.log(1 / claim.failure) * (1 - SLACK)):
        flaws.append(
            f"{name}: stored samples have log wealth {wealth:.6g}, not {-math.log(claim.failure):.6g}"
        )
    if bets is not None and counts.sum():
        log_scale, found = bets
        mean = float(values @ counts / counts.sum())
        error = scale * math.sqrt(max(float(values**2 @ counts / counts.sum()) - mean**2, 0.0) / counts.sum())
        ours, ours_error = math.exp(log_scale) * found.mean, math.exp(log_scale) * found.error
        hits = min(counts[bins > 0].sum(), found.hits)
        if hits >= 100 and ours - scale * mean > 6 * math.hypot(error, ours_error):
            flaws.append(f"{name}: stored samples estimate {scale * mean:.6g}, {ours:.6g} was found")
    return flaws


# --- The verdict ---


def check(data, rng=None, max_steps: float = MAX_STEPS) -> dict:
    """Decide a plan's claim anew; returns {"verdict": .., "differences": [..], ..}.

    Raises:
      ValueError: for a malformed plan.
      NotCovered: for a claim that the checker has no method for.
    """
    try:
        claim = _read_claim(data)
        law = law_of(claim.scheme)
        columns = columns_of(claim.strategy, law)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"malformed field: {type(error).__name__} {error}") from None
    rng = np.random.default_rng() if rng is None else rng
    differences, found, certified = [], {}, True
    spent = claim.verified + claim.failure * (1 - claim.verified) + claim.reserved
    if not spent <= claim.delta * (1 + 1e-12):
        differences.append(f"the budget spends {spent!r} of delta {claim.delta!r}")
    if claim.dataset_size is not None:
        size, most, rates = claim.dataset_size, claim.max_batch_size, law.tilted(np.zeros(law.steps))[1]
        larger = float(special.betainc(most + 1, size - most, rates).sum()) if most < size else 0.0
        if not larger <= claim.reserved * (1 + 1e-6):
            differences.append(
                f"a batch above {most} has probability {larger:.3g}, reserved {claim.reserved!r}"
            )
    if not claim.failure:
        ours = analytic_delta(claim, law, claim.sigma)
        found["bound"], certified = ours, ours <= claim.verified
        if not (isinstance(claim.bound, float) and ours * (1 - 2e-3) <= claim.bound <= claim.verified):
            differences.append(f"bound of {claim.accountant}: {claim.bound!r} stored, {ours!r} found")
    else:
        mechanism = Mechanism(law, columns, claim.sigma, claim.epsilon)
        for name in ("remove", "add"):
            found[name], flaws = _direction(name, claim, mechanism, rng, max_steps)
            certified &= found[name]["verdict"] == "certified"
            differences += flaws
    verdict = "certified" if certified and not differences else "not certified"
    return {
        "verdict": verdict,
        "epsilon": claim.epsilon,
        "delta": claim.delta,
        "differences": differences,
    } | found


def _direction(
    name: str, claim: Claim, mechanism: Mechanism, rng, max_steps: float
) -> tuple[dict, list[str]]:
    zero = name == "add" and claim.epsilon + mechanism.log_none() >= 0
    scales, choices, bets, said = (
        {"plain": 0.0} if name == "remove" else {},
        [],
        None,
        {"verdict": "certified"},
    )
    if zero:
        said |= {"proposal": "exactly zero", "samples": 0}
    else:
        for choice in mechanism.remove() if name == "remove" else mechanism.add():
            choices.append(
                (samples_expected(choice.log_scale, claim.verified, claim.failure) * choice.cost, choice)
            )
            if choice.order == 2 or mechanism.law.b == 1:
                scales[choice.name] = choice.log_scale
            if len(choices) > 2 and choices[-1][0] > choices[-2][0] > choices[-3][0]:
                break
        expected, choice = min(choices, key=lambda pair: pair[0])
        if expected * mechanism.law.steps > max_steps:
            raise NotCovered(f"the {name} direction, which takes about {expected:.2g} samples")
        verdict, bets = decide(choice, claim, mechanism.law, rng, max_steps)
        said = {"verdict": verdict, "proposal": choice.name, "scale": math.exp(choice.log_scale)}
        said |= {
            "samples": bets.count if bets else 0,
            "estimate": said["scale"] * (bets.mean if bets else 1.0),
        }
        bets = bets and (choice.log_scale, bets)
    side = claim.stored[name]
    return said, stored_flaws(name, side, claim, zero, scales, bets) if side["known"] else []


def main(arguments=None) -> int:
    """Check the plan of a file; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("plan")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, code = parser.parse_args(arguments), FAILED
    try:
        with open(options.plan, encoding="utf-8") as file:
            found = check(json.load(file))
        code = CERTIFIED if found["verdict"] == "certified" else FAILED
    except NotCovered as error:
        found, code = (
            {"verdict": "not covered", "reason": f"not covered by the checker: {error}"},
            NOT_COVERED,
        )
    except (ValueError, OSError, ArithmeticError, RecursionError) as error:
        found, code = (
            {"verdict": "bad input", "reason": f"plan cannot be read: {error}".splitlines()[0]},
            BAD_INPUT,
        )
    if options.json:
        print(json.dumps(found))
        return code
    if "reason" in found:
        print(found["reason"], file=sys.stderr if code == BAD_INPUT else sys.stdout)
        return code
    print(f"{found['verdict']}: ({found['epsilon']:g}, {found['delta']:g}) by the second implementation")
    for name in ("remove", "add", "bound"):
        if name in found:
            print(f"{name:8}{found[name]}")
    for line in found["differences"]:
        print(f"differs {line}")
    return code


if __name__ == "__main__":
    sys.exit(main())
