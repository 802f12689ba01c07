"""Second implementation of plan certificates: reads a plan's claim and decides anew whether it holds.

It shares no code with the rest of jaxacct, imports NumPy, SciPy and the standard library only, computes in
float64 and draws its own samples: python checker.py plan.json [--json]. Exit codes: 0 certified, 1 not
certified or the two implementations disagree, 2 bad input, 3 not covered.

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
from scipy import fft, optimize, signal, special

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
Drawn = namedtuple("Drawn", "number hits mean error")  # samples, positive ones; of the mean of all
# terms(rng, samples) are in [0, 1], their mean times the scale is the divergence; cost: of a sample.
Proposal = namedtuple("Proposal", "name log_scale terms cost", defaults=(1.0,))


def _number(value, name: str, low: float, high: float, kinds=(int, float)) -> Any:
    if type(value) not in kinds or not low <= value <= high:
        raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {value!r:.60}")
    return value if kinds == (int,) else float(value)


def _read_claim(data) -> Claim:
    """Read a plan of schema version 1; its notes, which loading does not read, are compared here."""
    if (data.get("schema"), data.get("schema_version")) != ("jaxacct-plan", 1) or "claim" not in data:
        raise NotCovered(f"schema {data.get('schema')!r:.40}, version {data.get('schema_version')!r:.20}")
    claim, evidence, notes, stored = data["claim"], data["evidence"], data["notes"], {}
    for name in ("adjacency", "compose_with", "truncate_to"):
        if claim[name] not in (("zero-out", "add-or-remove-one") if name == "adjacency" else (None,)):
            raise NotCovered(f"{name} {claim[name]!r:.60}")
    sigma, verdict = _number(claim["noise_multiplier"], "noise_multiplier", 1e-6, 1e9), notes["verdict"]
    epsilon, delta = _number(claim["epsilon"], "epsilon", 0, 700), _number(claim["delta"], "delta", 1e-300, 1)
    reserved = _number(notes["overflow_delta"] or 0.0, "overflow_delta", 0, delta)
    sizes, kind = [claim["dataset_size"], notes["max_batch_size"]], evidence["kind"]
    for size in sizes if sizes != [None, None] else ():
        _number(size, "dataset_size, max_batch_size", 1, 1e15, (int,))
    what = claim["scheme"], claim["strategy"], sigma, epsilon, delta
    if kind == "accountant":
        return Claim(*what, delta - reserved, 0.0, reserved, *sizes, evidence[kind], verdict["delta"], {})
    if kind != "sampled":
        raise NotCovered(f"evidence {kind!r:.40}")
    budget = [_number(claim["budget"][k], k, 1e-300, delta) for k in ("delta_v", "failure_probability")]
    for name in DIRECTIONS:
        side = {"term_counts": [], "bets": [], "bet_weights": []} | evidence[name]
        found = side | verdict[name] | {"share": _number(evidence["share"], "share", 1e-300, 1)}
        if (side["kind"], found["outcome"]) == ("weight-bound", "exactly-zero"):
            found["proposal"] = "zero"
        recomputed = side["kind"] == "weight-bound" or (side["kind"], evidence["rule"]) == ("mean", "anytime")
        stored[name] = found | {"recomputed": recomputed}
    return Claim(*what, *budget, reserved, *sizes, None, None, stored)


class Columns:
    """A banded lower-triangular Toeplitz matrix C with `steps` columns, square where `rows` is steps."""

    def __init__(self, c, steps: int, rows: int):
        h, self.gram, self.rows = c.size, np.zeros((steps, c.size)), rows
        ends = np.minimum(rows - np.arange(steps), h)
        for d in range(h):  # <column t, column t - d>: both have entries in rows t .. t + ends[t] - 1
            self.gram[:, d] = np.cumsum(c[: h - d] * c[d:])[np.minimum(ends, h - d) - 1]
        self.apply = lambda x: signal.oaconvolve(x, c[:, None], axes=0)[:rows]
        self.transpose = lambda y: signal.oaconvolve(y, c[::-1, None], axes=0)[h - 1 :][:steps]


class Scheme:
    """A sampling scheme: log_ratio(r), L of samples by log-ratios; draw; and the class of its pairs."""

    cyclic, kept, virtual, k = False, 1.0, 0, 0

    def tilted(self: Any, r):
        """Return (ln f, mean participation under the distribution p(x) e^<x, r>) of one vector r."""
        if self.cyclic and not r.any():  # all steps have the same rate
            return 0.0, np.full(self.steps, self.k * self.kept / self.steps)
        parts, steps = np.array_split(np.arange(self.steps), -(-self.steps // 256)), np.arange(self.steps)
        found = [self.log_ratio(r[:, None] + 1e-30j * (steps[:, None] == part)) for part in parts]
        return float(found[0][0].real), np.concatenate(found).imag / 1e-30


class Renewal(Scheme):
    """b-min-sep sampling with b > 1."""

    # A warm start has b - 1 virtual steps in front, equally likely to have a participation, columns zero.

    def __init__(self, steps: int, separation: int, p: float, warm: bool):
        self.steps, self.b, self.virtual = steps, separation, separation - 1 if warm else 0
        before = p / (1 + (separation - 1) * p - np.arange(self.virtual) * p)
        self.p, self.pairs = np.append(before, np.full(steps, p)), RenewalPairs

    def log_ratio(self, r):
        ahead, scale = np.ones((self.p.size + self.b, r.shape[1]), r.dtype), 0.0
        joined = np.exp(np.append(np.zeros((self.virtual, r.shape[1])), r, axis=0)) * self.p[:, None]
        for t in range(self.p.size - 1, -1, -1):  # f of what follows each step, over e^scale
            ahead[t] = (1 - self.p[t]) * ahead[t + 1] + joined[t] * ahead[t + self.b]
            if t % self.b == 0:
                top = np.where(ahead[t] == 0, 1.0, abs(ahead[t]))
                ahead[t : t + self.b] /= top
                scale = scale + np.log(top)
        return np.log(ahead[0]) + scale

    def draw(self, rng, samples: int):
        x, eligible = np.zeros((self.p.size, samples), np.int8), np.zeros(samples, int)
        for t, p in enumerate(self.p):
            x[t] = (rng.random(samples) < p) & (eligible <= t)
            eligible[x[t] > 0] = t + self.b
        return x[self.virtual :]


class RenewalPairs:
    """Pairs (x, x') with probability p(x) p(x') e^(strength <C x, C x'>) / Z, by forward sums."""

    # `sums[t, 0]` is the total weight of all pasts after which both are eligible at step t, `sums[t, s]` of
    # those after which one is and the other is locked out for s more steps. Draws go backwards in time.
    # Balanced, linear patterns, all kept, are those of a renewal process with count k: the normalizer is a
    # coefficient of the generating function of both counts, by roots of unity; other draws are rejected.

    def __init__(self, dist, gram, strength: float):
        stride, v = 1 + (dist.b == 1), dist.virtual  # b = 1 is b = 2 with a step between any two
        self.dist, self.b, stop = dist, max(dist.b, 2), v + stride * dist.steps
        self.end, self.steps = stop + self.b, slice(v, stop, stride)
        self.met = np.ones((self.end, self.b))  # by the later step and the lag
        for lag, factors in enumerate(np.exp(strength * gram).T):
            self.met[v + lag : stop : stride, lag] = factors[lag:]
        if dist.k:
            self.log_z = self._balance(dist, dist.k, np.arange(self.end))
        else:
            p = np.append(dist.p, np.zeros(self.b))
            self.log_z = self._fill(p, 1 - p)

    def _fill(self, p, q) -> float:  # p, q: weights of a participation, of an eligible step without one
        self.p, self.q = p, q
        self.sums = self._sums(np.ones((2, 1))).sum(2)[..., 0]
        return float(np.log(self.sums[self.end, 0]))

    def _sums(self, marks):
        """Return `sums` by the locked-out one, (times, b, 2, number); marks: (2, number) factors of p."""
        b, sums = self.b, np.zeros((self.end + self.b + 1, self.b, 2, marks.shape[1]), marks.dtype)
        sums[0, 0, 0], flat = 1.0, sums.reshape(-1, *sums.shape[2:])
        for t, (p, wait, met) in enumerate(zip(self.p, self.q, self.met, strict=True)):
            join, row, place = p * marks, sums[t], (t + 1) * b + b - 1  # of sums[t + s, b - s], s = 1, 2, ..
            sums[t + 1, 0, 0] += wait * (wait * row[0, 0] + row[1].sum(0))
            sums[t + b, 0, 0] += join[0] * join[1] * row[0, 0] * met[0]
            sums[t + 1, b - 1] += wait * join * row[0, 0]
            sums[t + 1, 1 : b - 1] += wait * row[2:]
            flat[place : place + (b - 1) ** 2 : b - 1] += join * met[:0:-1, None, None] * row[1:, ::-1]
        return sums

    def _balance(self, dist, k: int, times) -> float:
        eligible, most = times % self.steps.step == 0, -(-dist.steps // dist.b)
        waits = eligible.sum() - k * self.b // self.steps.step

        def cost(log_odds):  # ln of the total weight, where a pattern has weight 1
            p = special.expit(log_odds)
            total = self._fill(p * (eligible & (times < self.steps.stop)), 1 - p * eligible)
            return total - 2 * (k * np.log(p) + waits * np.log1p(-p))

        bounds = math.log(k / waits) - 6, math.log(k / waits) + 6
        log_total = cost(optimize.fminbound(cost, *bounds))
        count = min(max(k, most - k), k + 20 + math.ceil(10 * math.sqrt(k))) + 1
        first, second = np.triu_indices(count)
        marks = np.exp(2j * np.pi / count * np.stack([first, second]))
        parts = np.array_split(marks, 1 + marks.size * self.met.size // 10**7, axis=1)
        found = np.concatenate([self._sums(part)[self.end, 0, 0] for part in parts])
        share = (found * marks.prod(0) ** -k * (1 + (first < second))).sum().real / count**2
        return log_total + float(np.log(share / self.sums[self.end, 0])) - 2 * dist.log_number

    def draw(self, rng, samples: int):
        """Return (2, steps, samples) participations of both, and whether the scheme has them."""
        if not self.dist.k:
            return self._draw(rng, samples), True
        found, steps = [], self.dist.steps
        while sum(x.shape[2] for x in found) < samples:
            x = self._draw(rng, 4 * samples)
            found.append(x[:, :, (x.sum(1) == self.dist.k).all(0)])
        x = np.concatenate(found, axis=2)[:, :, :samples]
        span = steps - 1 - x[:, ::-1].argmax(1) - x.argmax(1)
        return x, ((span <= steps - self.dist.b) | (not self.dist.cyclic)).all(0)

    def _draw(self, rng, samples: int):
        b, sums, x = self.b, self.sums, np.zeros((2, self.end, samples), np.int8)
        at, state, who = (np.full(samples, start) for start in (self.end, 0, 0))
        for t in range(self.end, 0, -1):  # who: the replica that is locked out
            here, p, q, last = np.flatnonzero(at == t), self.p[t - 1], self.q[t - 1], sums[t - 1]
            s = state[here]
            free, first = s == 0, s == b - 1  # first: its lockout may begin with step t - 1
            alone = q * np.where(first, 2 * p * last[0], last[np.minimum(s + 1, b - 1)])
            u = rng.random(here.size) * sums[t, s] - alone
            jump, stay = (u >= np.where(free, q**2 * last[0], 0.0)) & (t >= b - s), free & (u >= 0)
            at[here], state[here] = t - 1, np.where(stay | first, 0, s + 1)
            locked, joined, far, lag = here[free & ~stay], here[first & ~jump], here[jump], b - s[jump]
            who[locked] = rng.integers(0, 2, locked.size)
            x[who[joined], t - 1, joined] = 1
            x[who[far], t - lag, far] = 1
            x[1 - who[far], t - lag, far] |= lag == b
            at[far], state[far], who[far] = t - lag, lag % b, 1 - who[far]
        return x[:, self.steps]


class Balanced(Scheme):
    """Uniform patterns of k > 1 participations at least b steps apart, each kept with one probability."""

    # Cyclic: the last one and the first one of the next turn are b steps apart, too. Participation j at step
    # s is in column s - j (b - 1): columns increase, and otherwise are free.

    def __init__(self, steps: int, separation: int, participations: float, rotated: bool):
        self.steps, self.b, self.k = steps, separation, math.ceil(participations)
        self.kept, self.pairs = participations / self.k, RenewalPairs
        self.cyclic, self.others = rotated and separation > 1, steps - self.k * (separation - 1) - 1
        self.columns = steps - (self.k - 1) * (separation - 1)
        around = steps * math.comb(self.others, self.k - 1) // self.k if self.cyclic else 0
        self.log_number = math.log(around or math.comb(self.columns, self.k))

    def log_ratio(self, r):
        if r.shape[1] > 256:
            return np.concatenate([self.log_ratio(part) for part in np.array_split(r, r.shape[1] // 128, 1)])
        k, m, top = self.k, self.columns, np.maximum(r.real.max(0), 0.0)
        w = (1 - self.kept) * np.exp(-top) + self.kept * np.exp(r - top)
        mean = np.maximum(w.real.mean(0), 1e-300) * math.e * m / k  # sums of products of w / mean are near 1
        width = m - self.b + 1 if self.cyclic else m + 1
        shape = -(-m // width) + self.cyclic, width, r.shape[1]  # blocks of columns
        lag, pad = self.b - 1, ((0, shape[0] * width - m), (0, 0))
        parts = (np.pad(w[j * lag : j * lag + m] / mean, pad).reshape(shape) for j in range(k))

        def chains(parts):  # sums over participations in columns before each one of its block
            found = np.ones((1, width, 1))
            for one in parts:
                found = np.pad(np.cumsum(one * found, axis=1)[:, :-1], ((0, 0), (1, 0), (0, 0)))
            return found

        if self.cyclic:  # a window of `width` columns, from the first participation on, meets two blocks
            parts, f = list(parts), 0.0
            for j in range(1, k + 1):  # of which participations 1 .. j - 1 are in the first block
                after = chains(one[:-1, ::-1] for one in parts[j - 1 : 0 : -1])[:, ::-1]
                f = f + after * chains(one[1:] for one in parts[j:])
            f = (f * parts[0][:-1]).sum((0, 1))
        else:
            f = chains(parts)[0, -1]
        return np.log(f) + k * (top + np.log(mean)) - self.log_number

    def draw(self, rng, samples: int):
        size, m = (self.k - 1, self.others) if self.cyclic else (self.k, self.columns)
        steps = np.sort(np.argpartition(rng.random((samples, m)), size - 1, axis=1)[:, :size])
        steps = steps + np.arange(size) * (self.b - 1)
        if self.cyclic:
            steps = np.append(steps + self.b, np.zeros((samples, 1), int), axis=1)
            steps = (steps + rng.integers(0, self.steps, (samples, 1))) % self.steps
        x = np.zeros((self.steps, samples), np.int8)
        x[steps, np.arange(samples)[:, None]] = rng.random(steps.shape) < self.kept
        return x


class Phases(Scheme):
    """A hidden phase, uniform on `cycle` values; at its steps an example participates with probability p."""

    # Cycle 1 is Poisson sampling, p = 1 balls-in-bins, a cycle of all steps at most one participation.

    def __init__(self, steps: int, cycle: int, p: float):
        self.steps, self.b, self.p, self.turns, self.pairs = steps, cycle, p, -(-steps // cycle), PhasePairs

    def log_ratio(self, r):
        top, padded = np.maximum(r.real, 0.0), np.zeros((self.turns * self.b, r.shape[1]), r.dtype)
        padded[: self.steps] = top + np.log((1 - self.p) * np.exp(-top) + self.p * np.exp(r - top))
        sums = padded.reshape(self.turns, self.b, -1).sum(0)
        top = np.maximum(sums.real.max(0), -1e300)
        return top + np.log(np.exp(sums - top).sum(0)) - math.log(self.b)

    def draw(self, rng, samples: int):
        own = np.arange(self.steps)[:, None] % self.b == rng.integers(0, self.b, samples)
        return (own & (rng.random(own.shape) < self.p)).astype(np.int8)


class PhasePairs:
    """Pairs (x, x') of hidden-phase schemes with probability p(x) p(x') e^(strength <C x, C x'>) / Z."""

    # Given phases i <= j possible participations alternate in time, and only neighbours interact: a chain.

    def __init__(self, dist: Phases, gram, strength: float):
        if dist.b > (2500 if dist.turns > 1 else 8000):
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
        chosen = np.minimum(np.searchsorted(self.cdf, rng.random(samples)), self.cdf.size - 1)
        sites, chain = self._chain(self.first[chosen], self.second[chosen])
        x, later = np.zeros((2, len(self.met), samples), np.int8), np.ones(samples)
        for (steps, lags, who), (off, on) in zip(sites[::-1], chain[:0:-1], strict=True):
            joined = rng.random(samples) * (off + on * later) >= off
            x[who, steps, np.arange(samples)] = joined
            later = np.where(joined, self.met[steps, lags], 1.0)
        swapped = rng.random(samples) < 0.5  # the two are exchangeable
        return np.where(swapped, x[::-1], x)[:, : self.dist.steps], True


def distribution_of(scheme: dict) -> Any:
    """Return the sampling scheme that a plan names."""
    name, steps = scheme["name"], _number(scheme["iterations"], "iterations", 1, 1e6, (int,))
    if name not in ("poisson", "b-min-sep", "cyclic-poisson", "balls-in-bins", "balanced-min-sep"):
        raise NotCovered(f"scheme {name!r:.60}")
    number = {"balls-in-bins": None, "balanced-min-sep": "participations"}.get(name, "sampling_probability")
    balanced = number == "participations"
    field = None if name == "poisson" else "min_separation" if "min-sep" in name else "cycle_length"
    p = _number(scheme[number], number, 1e-300, steps if balanced else 1) if number else 1.0
    b = _number(scheme[field], field, 1, 1e6, (int,)) if field else 1
    flag = scheme["rotated" if balanced else "warm_start"] if "min-sep" in name else False
    if type(flag) is not bool:
        raise ValueError(f"rotated, warm_start must be true or false, got {flag!r:.60}")
    if balanced:
        return Balanced(steps, b, p, flag) if p > 1 else Phases(steps, steps, p)
    return Renewal(steps, b, p, flag) if name == "b-min-sep" and b > 1 else Phases(steps, b, p)


def columns_of(strategy: dict, dist) -> Columns:
    """Return the strategy matrix that a plan names: n + bands - 1 rows unless it states a finite horizon."""
    kind, c = strategy.get("kind", "banded-toeplitz"), strategy.get("coefficients", ())
    if kind not in ("banded-toeplitz", "finite-toeplitz"):
        raise NotCovered(f"strategy {kind!r:.60}")
    c = np.array([_number(value, "coefficients", 0, 1 + SLACK) for value in c])
    if not abs(c @ c - 1) < 1e-12 * (1 + c.size) or c[0] == 0:
        raise ValueError(f"coefficients must have norm 1, got {math.sqrt(c @ c)!r}")
    if c.size > dist.b:
        raise NotCovered(f"{c.size} bands with a minimum separation of {dist.b}")
    rows = dist.steps if kind == "finite-toeplitz" else dist.steps + c.size - 1
    if rows == dist.steps and (strategy.get("iterations", rows) != rows or c.size > rows):
        raise ValueError(f"strategy iterations must be {rows}, got {strategy.get('iterations')!r:.60}")
    return Columns(c, dist.steps, rows)


class Mechanism:
    """A distribution of participations, a strategy matrix, sigma and epsilon."""

    def __init__(self, dist, columns: Columns, sigma: float, epsilon: float):
        self.dist, self.columns, self.sigma, self.epsilon = dist, columns, sigma, epsilon
        self.log_none = float(dist.log_ratio(np.full((dist.steps, 1), -np.inf))[0])  # ln P(no participation)
        self.log_rest = math.log(max(-math.expm1(min(epsilon + self.log_none, 0.0)), 1e-300))
        # r, with a_x = e^<x, r> for participations whose columns share no row; terms of Q over e^log_rest.
        self.log_ratios = lambda y: (columns.transpose(y) - columns.gram[:, :1] / 2) / sigma**2
        self.terms = lambda loss: -np.expm1(np.minimum(epsilon + loss, 0.0))
        self.absent = lambda y: self.terms(self.loss(y)) / math.exp(self.log_rest)

    def outputs(self, rng, samples: int, x=None):  # at given participations, or none
        noise = self.sigma * rng.standard_normal((self.columns.rows, samples))
        return noise if x is None else noise + self.columns.apply(x)

    def loss(self, y):
        loss = self.dist.log_ratio(self.log_ratios(y))
        if not np.isfinite(loss).all():
            raise NotCovered("losses beyond the range of float64")
        return loss

    def remove(self):
        """Proposals of the remove direction, in the order of replicas."""
        outputs, draw = self.outputs, self.dist.draw
        yield Proposal("plain", 0.0, lambda rng, n: self.terms(-self.loss(outputs(rng, n, draw(rng, n)))))
        for m in (2, 4, 6, 8, 12, 18, 26):
            pairs = self.dist.pairs(self.dist, self.columns.gram, (m - 1) / self.sigma**2)
            if not math.isfinite(pairs.log_z):
                return
            yield self._replicas(m, pairs)

    def _replicas(self, m: int, pairs) -> Proposal:
        """Return m / 2 pairs, with attraction times m - 1; m = 2 has the density Q f^2 / Z."""
        # Weights divide by the mean over rounds of a tournament of all pairs (Jensen's inequality).
        log_z, columns = m / 2 * pairs.log_z, self.columns
        log_scale = log_z - math.log(m - 1) + m * math.log((m - 1) / m) + (1 - m) * self.epsilon
        js, thinned = range(1, m // 2), self.dist.kept < 1
        rounds = [[(m - 1, i), *(((i + j) % (m - 1), (i - j) % (m - 1)) for j in js)] for i in range(m - 1)]

        def shared(x):
            y = [columns.apply(replica) / self.sigma for replica in x]
            return np.array([sum(np.einsum("ts,ts->s", y[i], y[j]) for i, j in one) for one in rounds])

        def terms(rng, samples):
            x, log_share, fits = np.zeros((m, self.dist.steps, samples), np.int8), 0.0, True
            for pair in rounds[0]:
                x[list(pair)], has = pairs.draw(rng, samples)
                fits = fits & has
            if m > 2 or thinned:
                sums, x = shared(x), x * (rng.random(x.shape) < self.dist.kept)
                log_share = shared(x).sum(0) - special.logsumexp((m - 1) * sums, axis=0) + math.log(m - 1)
            loss = self.loss(self.outputs(rng, samples, x.sum(0)))
            weights = fits * np.exp(log_z + (1 - m) * loss + log_share - log_scale)
            return weights * self.terms(-loss)

        name = "thinned " * thinned + (f"replicas:{m}" if m == 2 else f"pairs:{m},0")
        return Proposal(name, log_scale, terms, (m + 2) / 4)

    def add(self):
        """Proposals of the add direction where it is not exactly zero: Q, and Q below a half-space's edge."""
        columns, sigma, log_rest, found = self.columns, self.sigma, self.log_rest, []
        yield Proposal("plain-bounded", log_rest, lambda rng, size: self.absent(self.outputs(rng, size)))
        point = np.zeros(self.dist.steps)
        for _ in range(6):  # tangents of ln(f - P0), as a function of the scores convex
            log_f, mean = self.dist.tilted(point)
            rest = -math.expm1(min(self.log_none - log_f, 0.0))  # (f - P0) / f
            if rest < 1e-6:
                break
            m = mean / rest
            constant = log_f + math.log(rest) - m @ point - m @ columns.gram[:, 0] / (2 * sigma**2)
            normal = columns.apply(m[:, None])
            edge = (log_rest - self.epsilon - constant) * sigma / np.linalg.norm(normal)
            found.append((edge, normal / np.linalg.norm(normal)))
            # The next tangent touches where the ray against the normal enters the event {L < -epsilon}.
            y = -sigma * np.linspace(0.0, 2 * abs(edge) + 20, 200) * found[-1][1]
            inside = np.flatnonzero(self.loss(y) <= -self.epsilon)
            point = self.log_ratios(y[:, inside[:1] if inside.size else [-1]])[:, 0]
        edge, unit = min(found, key=lambda one: one[0]) if found else (math.inf, 0.0)

        def terms(rng, samples):
            y = self.outputs(rng, samples)
            t = special.ndtri_exp(np.log(rng.random(samples)) + special.log_ndtr(edge))
            return self.absent(y + unit * (sigma * t - (unit * y).sum(0)))

        if found:
            yield Proposal("half-space", log_rest + special.log_ndtr(edge), terms)


def decide(proposal: Proposal, theta: float, alarms, steps: int, rng, max_steps: float):
    """(verdict, `Drawn` or None) on whether the mean is below theta, by bets against that and against not."""
    # Each is a mixture of bets with fixed fractions, a non-negative supermartingale under the hypothesis it
    # is against, so it ever reaches 1 / q with probability q at most (Ville's inequality); alarms: both q.
    theta *= 1 - SLACK
    if theta >= 1:
        return "certified", None
    sums, grown, parts, verdict = np.zeros(4), np.zeros((2, FRACTIONS.size)), FRACTIONS[:, None], "undecided"
    gains = (lambda x: (theta - x) / (1 - theta)), (lambda x: x / theta - 1)
    while sums[0] * steps < max_steps and verdict == "undecided":
        terms = proposal.terms(rng, max(1024, BLOCK // steps))
        if not (np.isfinite(terms).all() and terms.min() >= -1e-6 and terms.max() <= 1 + 1e-6):
            raise NotCovered(f"{proposal.name}, which had a term of {terms.max()!r}, not in [0, 1]")
        positive, zeros = np.clip(terms[terms > 0], 0.0, 1.0), int((terms <= 0).sum())
        sums += terms.size, positive.size, positive.sum(), positive @ positive
        for one, gain in zip(grown, gains, strict=True):
            one += np.log1p(parts * gain(positive)).sum(1) + zeros * np.log1p(FRACTIONS * gain(0.0))
        wealth = special.logsumexp(np.where(np.isnan(grown), -np.inf, grown), axis=1)
        won = wealth - math.log(FRACTIONS.size) >= -np.log(alarms)
        verdict = "certified" if won[0] else "refuted" if won[1] else verdict
    number, hits, mean, square = sums[0], sums[1], *sums[2:] / sums[0]
    return verdict, Drawn(int(number), hits, mean, math.sqrt(max(square - mean**2, 0.0) / number))


def by_line(mechanism: Mechanism, claim: Claim, rng, max_steps: float) -> dict | None:
    """Return what was found in the add direction from two common events, if that certifies."""
    # With X = (1 - e^(epsilon + L))_+ / e^log_rest and noise pushed down by t along C m, Phi^-1(E X) is
    # concave in t (Ehrhard's inequality): a line above it at one t and below it at a larger one is so at 0.
    steps, pilot, outputs = mechanism.dist.steps, [], mechanism.outputs
    along = mechanism.columns.apply(mechanism.dist.tilted(np.zeros(steps))[1][:, None])
    along *= mechanism.sigma / np.linalg.norm(along)
    target, pushed = (
        special.ndtri_exp(math.log(claim.verified) - mechanism.log_rest),
        lambda t: Proposal("line", 0.0, lambda rng, n: mechanism.absent(outputs(rng, n) - t * along)),
    )
    for t in np.arange(0.5, 40, 0.5):  # a pilot: it only chooses
        terms = pushed(t).terms(rng, 4096)
        pilot.append((t, terms.mean() - terms.std() / 32, terms.mean() + terms.std() / 32 + 1e-3))
        if pilot[-1][1] > 0.6:
            break
    t, low, high = np.clip(np.array(pilot).T, 1e-9, [[40], [1], [1 - 1e-9]])
    i, j = np.triu_indices(t.size, 1)
    slope = ((special.ndtri(high) - target) / t)[i] / 2 + ((special.ndtri(low) - target) / t)[j] / 2
    a, b = special.ndtr(target + slope * t[i]), special.ndtr(target + slope * t[j])
    margins = np.minimum((a - high[i]) / np.sqrt(high[i]), (low[j] - b) / np.sqrt(low[j]))
    best = int(np.argmax(margins)) if i.size else 0
    if not (i.size and margins[best] > 3e-3):  # up to about 2e6 samples
        return None
    tests = (t[i][best], a[best]), (t[j][best], b[best] * (1 + 2 * SLACK))
    found = [decide(pushed(at), theta, [claim.failure] * 2, steps, rng, max_steps) for at, theta in tests]
    if [verdict for verdict, _ in found] != ["certified", "refuted"]:
        return None
    return {"verdict": "certified", "proposal": "line", "samples": sum(one.number for _, one in found if one)}


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Both divergences of two normal distributions, mu standard deviations apart."""
    near, far = special.log_ndtr(mu / 2 - epsilon / mu), epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)
    return float(-math.exp(near) * np.expm1(min(far - near, 0.0)))


def _lattice(p: float, sigma: float, h: float, reach: float):
    """Move f = P/Q of a Poisson-sampled Gaussian onto the points e^(h i), i >= first, with the same mean."""
    # That raises every divergence. Returns (first, masses under Q, mass of P beyond the last point).
    log_q, log_most = math.log1p(-p), math.log(p) + (1 + 2 * sigma * reach) / (2 * sigma**2)
    first, top = math.floor(log_q / h), np.logaddexp(log_q, log_most)
    losses = h * np.arange(first, math.ceil(top / h) + 1)
    excess = (1 - p) * np.expm1(losses - log_q)  # e^loss - (1 - p)
    y = 0.5 + sigma**2 * np.log(np.maximum(excess, 0.0) / p)
    below, above = ([special.ndtr(side * (y - m) / sigma) for m in (0, 1)] for side in (1, -1))
    q_mass, p_mass = (np.where(y[:-1] < m, np.diff(below[m]), -np.diff(above[m])) for m in (0, 1))
    up = np.clip((p * p_mass - excess[:-1] * q_mass) / (np.exp(losses[:-1]) * math.expm1(h)), 0.0, q_mass)
    mass = np.append(q_mass - up, above[0][-1])
    mass[1:] += up
    return first, mass, float((1 - p) * above[0][-1] + p * above[1][-1])


def _composed(first, masses, h, n, epsilon, sign):
    """Return a divergence of n independent steps, by one transform of masses times e^(t loss)."""
    # The tilt t centres the sum at sign * epsilon, where the mean comes from: rounding is relative to that.
    losses, ends = h * (first + np.arange(masses.size)), (1.0, 1e5) if sign > 0 else (-1e5, 0.0)
    logs, log_mass = np.log(masses), lambda t: n * float(special.logsumexp(logs + t * losses))
    t = optimize.fminbound(lambda t: log_mass(t) - sign * t * epsilon, *ends)
    weights = np.exp(logs + t * losses - log_mass(t) / n)
    mean = float(weights @ losses)
    spread = math.sqrt(n * max(float(weights @ (losses - mean) ** 2), h * h))
    size = 1 << math.ceil(math.log2(max(masses.size, 60 * spread / h, 1024)))
    sums = fft.irfft(fft.rfft(weights, size) ** n, size)
    places = round(n * mean / h) + np.arange(-size // 2, size // 2)
    s = h * places
    gains = np.log(-np.expm1(np.minimum(epsilon - sign * s, 0.0)))
    gains = np.exp(log_mass(t) - t * s + gains + (s if sign > 0 else 0.0))
    rounding = 1e-15 * math.log2(size) * (n + 1) * float(np.linalg.norm(gains))
    edge, others = s[-1] if sign > 0 else s[0], [t + sign * 2.0**k / spread for k in range(-5, 6)]
    beyond = min(log_mass(other) - (other - (sign > 0)) * edge for other in others)
    beyond = 0.0 if sign * (n * losses[-1 if sign > 0 else 0] - edge) <= 0 else math.exp(min(beyond, 0.0))
    return float(np.maximum(sums[(places - n * first) % size], 0.0) @ gains) + rounding + beyond


def poisson_delta(n: int, p: float, sigma: float, epsilon: float, delta: float) -> float:
    """Upper bound on both divergences of n Poisson-sampled Gaussians, for one of about delta."""
    if p == 1:
        return gaussian_delta(epsilon, math.sqrt(n) / sigma)
    reach, found = math.sqrt(2 * math.log(1e8 * n / delta)), []
    h = float(np.logaddexp(0, math.log(p) + (1 + 2 * sigma * reach) / (2 * sigma**2))) / 512
    while len(found) < 2 or (min(found[:-1]) > 1.0005 * found[-1] and len(found) < 14):
        first, masses, lost = _lattice(p, sigma, h, reach)
        both = [_composed(first, masses, h, n, epsilon, sign) + (sign > 0) * n * lost for sign in (1, -1)]
        found, h = [*found, max(both)], h / 2
    return min(found)


def stored_flaws(side: dict, claim: Claim, zero: bool, scales: dict, log_scale: float, drawn) -> list[str]:
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
    bins, counts = np.array(side["term_counts"], dtype=np.int64).reshape(-1, 2).T
    values = np.where(bins > 0, np.exp2((bins - 5121) / 128), 0.0)
    parts, weights = (np.array(side[name], float) for name in ("bets", "bet_weights"))
    theta = min(threshold, top)
    if not ((abs(parts - 0.5) <= 0.5).all() and (weights >= 0).all() and weights.sum() <= 1 + SLACK):
        return [*flaws, "bets must be in [0, 1] and their weights must add up to 1"]
    gains = np.maximum(parts[:, None] * (theta - values) / max(1 - theta, 1e-300), -1.0)
    wealth = special.logsumexp(np.log1p(gains) @ counts, b=weights) if counts.size else 0.0
    if not (side["certified"] is True and (counts >= 0).all() and (wealth >= q * (1 - SLACK) or theta >= 1)):
        flaws.append(f"stored samples have log wealth {wealth:.6g}, below {q:.6g}")
    number, hits = counts.sum(), counts[bins > 0].sum()
    if drawn and drawn.hits >= 100 and (hits >= 100 or not number):
        mean = float(values @ counts / number) if number else 1.0  # a scale that needs no samples
        own, error = math.exp(log_scale) * np.array([drawn.mean, drawn.error])
        spread = scale * math.sqrt(float((values - mean) ** 2 @ counts)) / max(number, 1)
        if own - scale * mean > 6 * math.hypot(error, spread):
            flaws.append(f"stored evidence has a mean of {scale * mean:.6g}, {own:.6g} was found")
    return flaws


def _direction(name: str, claim: Claim, mechanism: Mechanism, rng, max_steps: float):
    """Return (what was found, where the stored evidence differs) of one direction."""
    zero, choices, steps = name == ADD and claim.epsilon + mechanism.log_none >= 0, [], mechanism.dist.steps
    said, log_scale, drawn = {"verdict": "certified", "proposal": "exactly zero", "samples": 0}, 0.0, None
    for choice in mechanism.remove() if name == REMOVE else () if zero else mechanism.add():
        theta = math.exp(min(math.log(claim.verified) - choice.log_scale, 1.0))
        needed = math.log(FRACTIONS.size / claim.failure) / (
            0.153 * theta
        )  # of KL(theta / 2, theta) at least
        choices.append((needed * choice.cost if theta < 1 else 0.0, theta, choice))
        if len(choices) > 2 and choices[-1][0] > choices[-2][0] > choices[-3][0]:
            break
    scales = {choice.name: choice.log_scale for *_, choice in choices if ":" in choice.name}
    if choices:
        expected, theta, choice = min(choices, key=lambda one: one[0])
        line = by_line(mechanism, claim, rng, max_steps) if name == ADD and expected > 3e5 else None
        if not line:
            if expected * steps > max_steps:
                raise NotCovered(f"the {name} direction, which takes about {expected:.2g} samples")
            verdict, drawn = decide(choice, theta, [claim.failure, FALSE_ALARM], steps, rng, max_steps)
            log_scale = choice.log_scale
            line = {"verdict": verdict, "proposal": choice.name, "scale": math.exp(log_scale), "samples": 0}
            line |= {"samples": drawn.number, "mean": drawn.mean} if drawn else {}
        said = line
    side = claim.stored[name]
    flaws = stored_flaws(side, claim, zero, scales, log_scale, drawn) if side["recomputed"] else []
    said["stored"] = "recomputed" if side["recomputed"] else "not recomputed"
    return said, [f"{name}: {flaw}" for flaw in flaws]


@np.errstate(all="ignore")  # what is not finite is refused
def check(data, rng=None, max_steps: float = MAX_STEPS) -> dict:
    """Decide a plan's claim anew; {"verdict": .., "differences": [..], ..}, or raise NotCovered."""
    claim, differences, found = _read_claim(data), [], {}
    dist = distribution_of(claim.scheme)
    columns, rng = columns_of(claim.strategy, dist), np.random.default_rng() if rng is None else rng
    spent = claim.verified + claim.failure * (1 - claim.verified) + claim.reserved
    if not spent <= claim.delta * (1 + 1e-12):
        differences.append(f"the budget spends {spent!r} of delta {claim.delta!r}")
    if claim.dataset_size is not None:
        size, most, rates = claim.dataset_size, claim.max_batch_size, dist.tilted(np.zeros(dist.steps))[1]
        larger = float(special.betainc(most + 1, size - most, rates).sum()) if most < size else 0.0
        if not larger <= claim.reserved * (1 + 1e-6):
            differences.append(f"batches above {most}: probability {larger:.3g}, reserved {claim.reserved!r}")
    for name in DIRECTIONS if claim.failure else ():
        mechanism = Mechanism(dist, columns, claim.sigma, claim.epsilon)
        found[name], flaws = _direction(name, claim, mechanism, rng, max_steps)
        differences += flaws
    if not claim.failure:
        if claim.accountant == "unamplified":
            ours = gaussian_delta(claim.epsilon, math.sqrt(dist.k or -(-dist.steps // dist.b)) / claim.sigma)
        elif claim.accountant == "pld" and hasattr(dist, "turns"):  # independent given the phase
            ours = poisson_delta(dist.turns, dist.p, claim.sigma, claim.epsilon, claim.verified)
        else:
            raise NotCovered(f"accountant {claim.accountant!r:.60}")
        found["bound"] = {"verdict": "certified" if ours <= claim.verified else "refuted", "delta": ours}
        if not (type(claim.bound) is float and ours * (1 - 2e-3) <= claim.bound <= claim.verified):
            differences.append(f"bound of {claim.accountant}: {claim.bound!r} stored, {ours!r} found")
    certified = not differences and all(side["verdict"] == "certified" for side in found.values())
    said = {"verdict": "certified" if certified else "not certified", "differences": differences} | found
    return said | {"epsilon": claim.epsilon, "delta": claim.delta}


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
    if options.json or "reason" in found:
        file = sys.stderr if code == BAD_INPUT and not options.json else sys.stdout
        print(json.dumps(found) if options.json else found["reason"], file=file)
        return code
    print(f"{found['verdict']}: ({found['epsilon']:g}, {found['delta']:g}) by the second implementation")
    for name in [name for name in (*DIRECTIONS, "bound") if name in found]:
        print(f"{name:8}" + ", ".join(f"{key} {value}" for key, value in found[name].items()))
    print(*(f"differs {line}\n" for line in found["differences"]), sep="", end="")
    return code


if __name__ == "__main__":
    sys.exit(main())
