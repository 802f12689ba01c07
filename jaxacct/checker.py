"""Second implementation of plan certificates: reads a plan's claim and decides anew whether it holds.

It shares no code with the rest of jaxacct, imports NumPy, SciPy and the standard library only, computes in
float64 and draws its own samples: python checker.py plan.json [--json]. Exit codes: 0 certified, 1 not
certified or the two implementations disagree, 2 bad input, 3 not covered. It certifies a false claim with at
most the failure probability of the claim's budget, and refutes a true one with FALSE_ALARM a test at most.

Notation: y = C x + sigma z over the rows of C; Q is the distribution of y at x = 0 and P at the random
participation vector x of one example; f = P/Q, L = ln f. Remove direction: H(P, Q) = E_P (1 - e^(eps-L))_+;
the add direction, H(Q, P), is at most that (proofs/add_direction.md, theorem 1). Replace-one: Q has -C x in
place of 0, L = ln f(y) - ln f(-y), and one direction suffices by symmetry. Arrays of samples have shape
(steps, samples).
"""

import argparse
import hashlib
import itertools
import json
import math
import sys
from collections import namedtuple
from typing import Any

import numpy as np
from scipy import fft, optimize, signal, sparse, special

REMOVE, ADD = "remove", "add"
CERTIFIED, FAILED, BAD_INPUT, NOT_COVERED = 0, 1, 2, 3
FALSE_ALARM = 1e-6  # probability that a true claim is refuted
SLACK = 1e-9  # thresholds are lowered by this part of them, far above float64's rounding
MAX_STEPS, BLOCK = 4e9, 1 << 20  # steps x samples: limit of one direction; scored at once
MAX_NUMBERS = 1e8  # limit on the numbers of one table
FRACTIONS = 2.0 ** -np.arange(0, 14, 0.6)  # of the largest bets
MALFORMED = (LookupError, TypeError, AttributeError, ValueError, OSError, ArithmeticError, RecursionError)
_B, _K, _P, _C = "min_separation", "participations", "sampling_probability", "cycle_length"
# Fields of schemes, besides name and iterations.
FIELDS = {"poisson": {_P}, "cyclic-poisson": {_C, _P}, "balls-in-bins": {_C}}
FIELDS |= {"custom": {"join", "lockout", "turns", "start", "keep"}}
FIELDS |= {"b-min-sep": {_B, _P, "warm_start"}, "epochwise-allocation": {_B, "epoch_steps"}}
FIELDS |= {"balanced-min-sep": {_B, _K}, "fixed-order": {_B, _K, "batch_size", "steps_per_epoch"}}

CLAIM = (
    "adjacency budget compose_with dataset_size delta epsilon noise_multiplier scheme strategy truncate_to"
)


class NotCovered(Exception):
    """A claim for which the checker has no method."""


# verified: what both divergences may be; failure: probability of a wrong verdict, 0 for an analytic bound;
# reserved: part of delta for runs that stop at an oversized batch; mirrored: whether it is of replace-one.
NAMES = "scheme strategy sigma mirrored epsilon delta verified failure reserved dataset_size accountant"
Claim = namedtuple("Claim", [*NAMES.split()])
# terms(rng, samples) are in [0, 1], their mean times the scale is the divergence; cost: of a sample.
Proposal = namedtuple("Proposal", "name log_scale terms cost", defaults=(1.0,))


def _number(value, name: str, low: float, high: float, kinds=(int, float)) -> Any:
    if type(value) not in kinds or not low <= value <= high:
        raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {value!r:.60}")
    return value if kinds == (int,) else float(value)


def _read_claim(data) -> Claim:
    """Read the claim of a plan of schema version 2."""
    if (data.get("schema"), data.get("schema_version")) != ("jaxacct-plan", 2) or "claim" not in data:
        raise NotCovered(f"schema {data.get('schema')!r:.40}, version {data.get('schema_version')!r:.20}")
    claim, evidence = data["claim"], data["evidence"]
    if sorted(claim) != CLAIM.split():
        raise ValueError(f"claim must have the fields {CLAIM}, got {sorted(claim)}")
    covered = (None,), (None,), ("zero-out", "add-or-remove-one", "replace-one")
    for name, values in zip(("compose_with", "truncate_to", "adjacency"), covered, strict=True):
        if claim[name] not in values:
            raise NotCovered(f"{name} {claim[name]!r:.60}")
    named, fields = FIELDS.get(claim["scheme"]["name"]), claim["scheme"].keys() - {"name", "iterations"}
    if named is not None and fields != named:  # those of another scheme would be read as its own
        raise ValueError(f"scheme must have the fields {sorted(named)}, got {sorted(fields)}")
    sigma = _number(claim["noise_multiplier"], "noise_multiplier", 1e-6, 1e9)
    epsilon, delta = _number(claim["epsilon"], "epsilon", 0, 1e4), _number(claim["delta"], "delta", 1e-300, 1)
    size, reserved, failure = claim["dataset_size"], 0.0, 0.0
    if size is not None and _number(size, "dataset_size", 1, 1e15, (int,)) and "batch_size" not in fields:
        reserved = min(1e-9, 1e-3 * delta)
    verified = delta - reserved
    if evidence["kind"] == "sampled":
        names = "delta_v", "failure_probability"
        verified, failure = (_number(claim["budget"][name], name, 1e-300, delta) for name in names)
    elif evidence["kind"] != "accountant":
        raise NotCovered(f"evidence {evidence['kind']!r:.40}")
    what = claim["scheme"], claim["strategy"], sigma, claim["adjacency"] == "replace-one", epsilon, delta
    return Claim(*what, verified, failure, reserved, size, evidence.get("accountant"))


class Columns:
    """A lower-triangular Toeplitz matrix C >= 0 with `steps` columns, square where `rows` is steps."""

    def __init__(self, c, steps: int, rows: int):
        h, self.c, self.gram, self.rows = c.size, c, np.zeros((steps, c.size)), rows
        ends = np.minimum(rows - np.arange(steps), h)
        for d in range(min(h, steps)):  # <column t, column t - d>, of entries in rows t .. t + ends[t] - 1
            self.gram[d:, d] = np.cumsum(c[: h - d] * c[d:])[np.minimum(ends[d:], h - d) - 1]
        self.apply = lambda x: signal.oaconvolve(x, c[:, None], axes=0)[:rows]
        self.transpose = lambda y: signal.oaconvolve(y, c[::-1, None], axes=0)[h - 1 :][:steps]
        if h <= 64:  # few enough that a Fourier transform takes longer
            band = sparse.diags_array(list(c), offsets=-np.arange(h), shape=(rows, steps), format="csr")
            self.apply, self.transpose = band.__matmul__, band.T.tocsr().__matmul__


def columns_of(strategy: dict, steps: int) -> Columns:
    """Return the strategy matrix that a plan names: n + bands - 1 rows unless it states a finite horizon."""
    kind = strategy.get("kind", "banded-toeplitz")
    if strategy.get("iterations", steps) != steps:
        raise ValueError(f"strategy iterations must be {steps}, got {strategy['iterations']!r:.60}")
    names = [name for name in ("coefficients", "inverse", "decays", "weights") if name in strategy]
    given = {name: np.array([_number(x, name, -10, 10) for x in strategy[name]]) for name in names}
    if kind == "banded-inverse":
        c = signal.lfilter([1.0], given["inverse"], np.eye(1, steps)[0])
    elif kind == "buffered-toeplitz":
        c = np.append(1.0, given["weights"] @ given["decays"][:, None] ** np.arange(steps - 1))
        c /= np.linalg.norm(c)
    elif kind in ("banded-toeplitz", "toeplitz", "finite-toeplitz"):
        c = given["coefficients"]
    else:
        raise NotCovered(f"strategy {kind!r:.60}")
    if not (abs(c @ c - 1) < 1e-12 * (1 + c.size) and c.min() >= 0 and c[0] > 0):
        raise ValueError(f"coefficients must be at least 0 with norm 1, got {math.sqrt(c @ c)!r}")
    if (kind == "finite-toeplitz" and c.size > steps) or steps * c.size > MAX_NUMBERS:
        raise NotCovered(f"{c.size} bands with {steps} steps")
    return Columns(c, steps, steps if kind == "finite-toeplitz" else steps + c.size - 1)


class Scheme:
    """A process of visits, which are participations or not, and have a count or not.

    Who is eligible visits step t with probability p[t] and is eligible again at release[t]; kinds: of visits,
    (weight, whether it participates, whether it counts). Patterns have k counts, and weights that need not
    add up to 1: log_total is ln of their sum. Steps in front of the first one are virtual. p, q and weights
    may depend on the step and the counts left, (end, k + 1); spare: fewer counts than k are patterns, too.
    """

    def __init__(self, steps, b, p, release, kinds=((1.0, True, 0),), k=0, q=None, spare=False):
        self.steps, self.b, self.k, self.end, self.spare = steps, b, k, len(p), spare
        self.q = self._by_count(1 - p if q is None else q)
        self.kinds = [(self._by_count(p) * self._by_count(w), *rest) for w, *rest in kinds if np.any(w)]
        self.release, self.virtual, self.log_total = np.minimum(release, self.end), self.end - steps, 0.0
        self.lags = int((self.release - np.arange(self.end)).max())
        self.log_total = float(self.log_ratio(np.zeros((steps, 1)))[0])

    def _by_count(self, x):
        return np.broadcast_to(np.reshape(x, (np.shape(x) + (1, 1))[:2]), (self.end, self.k + 1))

    def log_ratio(self, r):
        """Return ln f of samples, by log-ratios r of a participation at each step, (steps, samples)."""
        # ahead[t % size, 1 + counts]: total weight of what follows a step, over e^scale; none below 0 counts.
        size, scale = self.lags + 1, 0.0
        ahead = np.zeros((size, self.k + 2, r.shape[1]), r.dtype)
        ahead[self.end % size, 1 : self.k + 2 if self.spare else 2] = 1.0
        x = np.exp(np.append(np.zeros((self.virtual, r.shape[1])), r, axis=0))
        kinds = [(self._narrow(weight), *rest) for weight, *rest in self.kinds]
        q = self._narrow(self.q)
        for t in range(self.end - 1, -1, -1):
            then, total = ahead[self.release[t] % size], q[t] * ahead[(t + 1) % size, 1:]
            for weight, joins, counts in kinds:
                total += weight[t] * (x[t] if joins else 1.0) * (then[:-1] if counts else then[1:])
            ahead[t % size, 1:] = total
            if t % self.lags == 0:
                top = np.maximum(abs(total).max(0), 1e-300)
                ahead /= top
                scale = scale + np.log(top)
        return np.log(ahead[0, -1]) + scale - self.log_total

    def _narrow(self, weight):
        """Return weights by step and count, (end, k + 1 or 1, 1)."""
        return (weight[:, :1] if (weight == weight[:, :1]).all() else weight)[..., None]

    def participation(self):
        """Return the probability of participation by step."""
        steps = np.arange(self.steps)[:, None]
        parts = np.array_split(steps[:, 0], -(-self.steps // 256))
        found = [self.log_ratio(1e-30j * (steps == part)) for part in parts]  # derivatives of ln f at r = 0
        return np.concatenate(found).imag / 1e-30

    def draw(self, rng, samples: int):
        """Return participations, (steps, samples)."""
        pairs = Pairs(self, np.zeros((self.steps, 1)), 0.0)
        return np.concatenate(pairs.draw(rng, -(-samples // 2)), axis=1)[:, :samples]


def pick(rng, weights):
    """Return an index for every column, with probabilities in proportion to its weights."""
    cumulative = np.cumsum(weights, axis=0)
    return (cumulative <= rng.random(cumulative.shape[1:]) * cumulative[-1]).sum(0)


class Pairs:
    """Pairs (x, x') with probability p(x) p(x') e^(strength <C x, C x'>) / Z, drawn forward in time."""

    # ahead[t, lag, c, f, g]: total weight of the steps from t on, where one replica is eligible and has f
    # counts left, and the other one, which visited `lag` steps ago (c = 0: it participated), is locked out
    # and has g; at lag 0 both are eligible. An event is a visit or none, (number, *kind), of each.

    def __init__(self, dist: Scheme, gram, strength: float):
        none, kinds = (0, dist.q, False, 0), 2 - all(joins for _, joins, _ in dist.kinds)
        size = dist.end + 1, dist.lags, kinds, dist.k + 1, dist.k + 1
        if math.prod(size) > MAX_NUMBERS:
            raise NotCovered(f"pairs of patterns of {dist.steps} steps with {dist.k} participations")
        self.dist, self.ahead, self.met = dist, np.zeros(size), np.ones((dist.end, dist.lags))
        self.events = list(itertools.product([none, *((1, *kind) for kind in dist.kinds)], repeat=2))
        for lag in range(min(gram.shape[1], dist.lags)):  # attractions by the later step
            self.met[dist.virtual + lag :, lag] = np.exp(strength * gram[lag:, lag])
        self.ahead[-1, ..., 0, 0] = 1.0
        if dist.spare:
            self.ahead[-1] = 1.0
        for t in range(dist.end - 1, -1, -1):
            lags = np.arange(min(dist.lags, t + 1))
            lags = lags[(lags == 0) | (dist.release[t - lags] > t)]
            state = [x.ravel() for x in np.meshgrid(lags, *map(np.arange, size[2:]), indexing="ij")]
            lag, kind, f, g = state
            free = np.where(lag > 0, dist.release[t - lag], t)
            self.ahead[t, *state] = self._weights(t, t - lag, free, kind, f, g).sum(0)
        self.log_z = float(np.log(self.ahead[0, 0, 0, -1, -1])) - 2 * dist.log_total

    def _weights(self, t: int, since, free, absent, f, g):
        """Return total weights of all events at step t and of what follows, (events, states)."""
        # The other one visited at `since`, without participation if `absent`, and is eligible from `free` on.
        q, q_too, release, both = self.dist.q[t, f], self.dist.q[t, g], self.dist.release[t], free <= t
        then, once = np.where(both, t + 1, free), np.where(both, q_too, 1.0)
        lag = np.where(release > then, then - t, 0)  # of one visit at t; lasting: without a visit
        lasting = np.where(free > t + 1, t + 1 - since, 0)
        pull = np.where(both | (absent > 0), 1.0, self.met[t, np.where(both, 0, t - since)])

        def ahead(t, lag, kind, f, g):
            return np.where((f >= 0) & (g >= 0), self.ahead[t, lag, kind, f, g], 0.0)

        found = []
        for (visits, w, joins, counts), (too, v, join, count) in self.events:
            if visits and too:
                met = self.met[t, 0] if joins and join else 1.0
                found.append(both * w[t, f] * v[t, g] * met * ahead(release, 0, 0, f - counts, g - count))
            elif visits:
                after = ahead(then, lag, int(not joins), g, f - counts)
                found.append(once * w[t, f] * (pull if joins else 1.0) * after)
            elif too:
                found.append(both * q * v[t, g] * ahead(then, lag, int(not join), f, g - count))
            else:
                found.append(q * once * ahead(t + 1, lasting, absent, f, g))
        return np.array(found)

    def draw(self, rng, samples: int):
        """Return (2, steps, samples) participations of both."""
        dist, outcomes = self.dist, np.array([[a[0], *a[2:], b[0], *b[2:]] for a, b in self.events], int)
        x, left = np.zeros((2, dist.end, samples), np.int8), np.full((2, samples), dist.k)
        at, visited = np.zeros(samples, int), np.full((2, samples), -1)
        for t in range(dist.end):
            here = np.flatnonzero(at == t)
            two = visited[:, here].argmax(0)  # the last one to visit
            one, since = 1 - two, visited[two, here]
            free, absent = np.where(since < 0, 0, dist.release[since]), (x[two, since, here] < 0).astype(int)
            weights = self._weights(t, since, free, absent, left[one, here], left[two, here])
            visits, joins, counts, too, join, count = outcomes[pick(rng, weights)].T
            for who, on, joined, counted in ((one, visits, joins, counts), (two, too, join, count)):
                x[who, t, here] = 2 * joined - on  # -1: a visit without participation
                left[who, here] -= counted
                visited[who, here] = np.where(on, t, visited[who, here])
            at[here] = np.where(visits, np.where(too, dist.release[t], np.maximum(free, t + 1)), t + 1)
        return (x[:, dist.virtual :] > 0).astype(np.int8)


def distribution_of(scheme: dict) -> Scheme:
    """Return the sampling scheme that a plan names."""
    name, whole = scheme["name"], lambda field, most=1e6: _number(scheme[field], field, 1, most, (int,))
    if name == "custom":
        return _of_table(*_read_table(scheme))
    t, p = np.arange(n := whole("iterations")), _number(scheme.get(_P, 1.0), _P, 1e-300, 1)
    if name in ("poisson", "b-min-sep"):  # a warm start has b - 1 virtual steps in front, all equally likely
        b, warm_start = (1, False) if name == "poisson" else (whole(_B), scheme["warm_start"])
        virtual = (b - 1) * _number(warm_start, "warm_start", 0, 1, (bool,))
        before = p / (1 + (b - 1) * p - np.arange(virtual) * p)
        return Scheme(n, b, np.append(before, np.full(n, p)), np.arange(n + before.size) + b)
    if name in ("cyclic-poisson", "balls-in-bins"):  # all steps of a class are visited; all are as likely
        b = whole("cycle_length")
        return Scheme(n, b, 1 / np.maximum(b - t, 1.0), t + b, [(p, True, 0), (1 - p, False, 0)])
    if name == "epochwise-allocation":  # visits are equally likely until few steps are left, then uniform
        m = whole("epoch_steps")
        b, place = whole("min_separation", m) if n > m else m, t % m
        left = np.where((t < m) | (place >= b), m - place, m - b + 1)
        return Scheme(n, b, 1 / left, np.maximum(t - place + m, t + b))
    if name != "balanced-min-sep":
        raise NotCovered(f"scheme {name!r:.60}")
    b, total = whole("min_separation"), _number(scheme["participations"], "participations", 1e-300, n)
    k = _number(math.ceil(total), "participations", 1, -(-n // b), (int,))
    if k == 1:
        return Scheme(n, n, total / (n - total * t), np.full(n, n))
    kinds = [(total / k, True, 1), (1 - total / k, False, 1)]  # kept or not; all patterns have one weight
    return Scheme(n, b, np.full(n, k / n), t + b, kinds, k, np.ones(n))


def _read_table(scheme: dict) -> tuple:
    """Return the numbers of a table, by step and by how many participations are left, as arrays."""
    every, rows = (lambda x: x if isinstance(x, list) else [x]), scheme["join"]
    join = np.array([[_number(x, "join", 0, 1) for x in every(row)] for row in rows])
    steps = [_number(x, "lockout", 1, 2**31, (int,)) for x in every(scheme["lockout"])]
    lockout = np.full(len(join), steps) if len(steps) == 1 else np.array(steps)
    start = np.array([_number(x, "start", 0, 1) for x in every(scheme["start"])])
    turns, keep = _number(scheme["turns"], "turns", 0, 1, (bool,)), _number(scheme["keep"], "keep", 1e-300, 1)
    fits = lockout.shape == (n := len(join),) and start.size <= (lockout[0] if turns else n)
    if (
        not fits
        or (turns and np.ptp(lockout))
        or (join.shape[1] > 1 and join[:, 0].any())
        or sum(start) > 1 + 1e-9
    ):
        raise ValueError("join, lockout, turns and start must be those of one table")
    return join, lockout, turns, start, keep


def _of_table(join, lockout, turns: bool, start, keep: float) -> Scheme:
    """Return the scheme of a table: chances to join of eligible units, (steps, counts left)."""
    (n, k), v = join.shape, start.size if start.size > 1 else 0
    if math.fsum(start) < 1 - 1e-12 or (np.diff(np.arange(n) + lockout) < 0).any():
        raise NotCovered("units that are never eligible, or a lockout that ends before an earlier one")
    # In front each first step is a virtual visit. With turns every turn is a visit, participating or not.
    before = np.broadcast_to((start / np.maximum(np.cumsum(start[::-1])[::-1], 1e-300))[:v, None], (v, k))
    weight, none = np.broadcast_to(join if turns else 1.0, (n, k)), np.zeros((v, k))
    kinds = [
        (weight * keep, True, int(k > 1)),
        (weight * (1 - keep), False, int(k > 1)),
        (1 - weight, False, 0),
    ]
    kinds = [(np.append(none, one, axis=0), *rest) for one, *rest in kinds]
    kinds.append((np.append(none + 1, np.zeros((n, k)), axis=0), False, 0))
    visits = np.append(before, np.ones((n, k)) if turns else join, axis=0)
    release = np.append(v + np.arange(v), v + np.arange(n) + lockout)
    return Scheme(n, int(lockout.min()), visits, release, kinds, k - 1, spare=True)


class Mechanism:
    """The mechanism of a claim: likelihoods, and proposals."""

    # Where participations share rows of C, f is bounded: above without what they share, below with the most.

    def __init__(self, claim: Claim, dist: Scheme, columns: Columns):
        self.claim, self.dist, self.columns, self.sigma = claim, dist, columns, claim.sigma
        norms, self.exact = columns.gram[:, :1], columns.gram.shape[1] <= dist.b
        shared = np.maximum.accumulate(columns.gram.max(0)[::-1])[::-1][dist.b :: dist.b].sum()
        self.norms = {REMOVE: norms, ADD: norms + 2 * shared}
        self.log_none = float(dist.log_ratio(np.full((dist.steps, 1), -np.inf))[0])  # ln P(no participation)
        self.terms = lambda loss: -np.expm1(np.minimum(claim.epsilon + loss, 0.0))
        self.mirror = lambda y: self.log_f(-y, ADD) if claim.mirrored else 0.0

    def log_ratios(self, y, direction):  # r, with a_x = e^<x, r> for participations without a common row
        return (self.columns.transpose(y) - self.norms[direction] / 2) / self.sigma**2

    def outputs(self, rng, samples: int, x=None):  # at given participations, or none
        noise = self.sigma * rng.standard_normal((self.columns.rows, samples))
        return noise if x is None else noise + self.columns.apply(x)

    def log_f(self, y, direction=REMOVE):
        found = self.dist.log_ratio(self.log_ratios(y, direction))
        if not np.isfinite(found).all():
            raise NotCovered("losses beyond the range of float64")
        return found

    def proposals(self):
        """Proposals, in the order of replicas."""

        def plain(rng, samples):
            y = self.outputs(rng, samples, self.dist.draw(rng, samples))
            return self.terms(self.mirror(y) - self.log_f(y))

        yield Proposal("plain", 0.0, plain)
        least = self.log_none if self.claim.mirrored else 0.0  # of ln f(-y), or ln of what is in its place
        for m in (2, 4, 6, 8, 12, 16, 24) if self.exact and least > -math.inf else ():
            pairs = Pairs(self.dist, self.columns.gram, (m - 1) / self.sigma**2)
            if not math.isfinite(pairs.log_z):
                return
            yield self._replicas(m, pairs, self.claim.epsilon + least)

    def _replicas(self, m: int, pairs: Pairs, epsilon: float) -> Proposal:
        """Return m / 2 pairs, with attraction times m - 1; m = 2 has the density Q f^2 / Z."""
        # Weights divide by the mean over rounds of a tournament of all pairs (Jensen's inequality).
        log_z, columns, js = m / 2 * pairs.log_z, self.columns, range(1, m // 2)
        log_scale = log_z - math.log(m - 1) + m * math.log((m - 1) / m) + (1 - m) * epsilon
        rounds = [[(m - 1, i), *(((i + j) % (m - 1), (i - j) % (m - 1)) for j in js)] for i in range(m - 1)]

        def terms(rng, samples):
            x, log_share = np.zeros((m, self.dist.steps, samples), np.int8), 0.0
            for pair in rounds[0]:
                x[list(pair)] = pairs.draw(rng, samples)
            if m > 2:
                y = [columns.apply(replica) / self.sigma for replica in x]
                shared = np.array([sum(np.einsum("ts,ts->s", y[i], y[j]) for i, j in one) for one in rounds])
                log_share = shared.sum(0) - special.logsumexp((m - 1) * shared, axis=0) + math.log(m - 1)
            loss = self.log_f(y := self.outputs(rng, samples, x.sum(0)))
            weights = np.exp(log_z + (1 - m) * loss + log_share - log_scale)
            return weights * self.terms(self.mirror(y) - loss)

        name = "mirrored " * self.claim.mirrored + f"replicas:{m}"
        return Proposal(name, log_scale, terms, (m + 2) / 4)


def decide(proposal: Proposal, theta: float, failure: float, steps: int, rng, max_steps: float) -> dict:
    """Decide whether the mean is below theta by bets against that and against not, with new samples."""
    # Each is a mixture of bets with fixed fractions, a non-negative supermartingale under the hypothesis it
    # is against, so it ever reaches 1 / q with probability q at most (Ville's inequality).
    theta *= 1 - SLACK
    sums, grown, parts = np.zeros(4), np.zeros((2, FRACTIONS.size)), FRACTIONS[:, None]
    gains, won = ((lambda x: (theta - x) / (1 - theta)), (lambda x: x / theta - 1)), (theta >= 1, False)
    while sums[0] * steps < max_steps and not any(won):
        terms = proposal.terms(rng, max(2048, BLOCK // steps))
        if not (np.isfinite(terms).all() and terms.min() >= -1e-6 and terms.max() <= 1 + 1e-6):
            raise NotCovered(f"{proposal.name}, which had a term of {terms.max()!r}, not in [0, 1]")
        positive, zeros = np.clip(terms[terms > 0], 0.0, 1.0), int((terms <= 0).sum())
        sums += terms.size, positive.size, positive.sum(), positive @ positive
        for one, gain in zip(grown, gains, strict=True):
            one += np.log1p(parts * gain(positive)).sum(1) + zeros * np.log1p(FRACTIONS * gain(0.0))
        wealth = special.logsumexp(np.where(np.isnan(grown), -np.inf, grown), axis=1)
        won = wealth - math.log(FRACTIONS.size) >= -np.log([failure, FALSE_ALARM])
    verdict, number = "certified" if won[0] else "refuted" if won[1] else "undecided", max(sums[0], 1.0)
    mean, error = sums[2] / number, math.sqrt(max(sums[3] / number - (sums[2] / number) ** 2, 0.0) / number)
    drawn = dict(positive=int(sums[1]), mean=float(mean), error=error) if sums[0] else {}
    return dict(verdict=verdict, samples=int(sums[0])) | drawn


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Both divergences of two normal distributions, mu standard deviations apart."""
    near, far = special.log_ndtr(mu / 2 - epsilon / mu), epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)
    return float(-math.exp(near) * np.expm1(min(far - near, 0.0)))


def _lattice(p: float, sigma: float, h: float, reach: float):
    """Move f = P/Q of a Poisson-sampled Gaussian onto the points e^(h i), i >= first, with the same mean."""
    # That raises every divergence. Returns (first, masses under Q, mass of P beyond the last point).
    log_q, log_max = math.log1p(-p), math.log(p) + (1 + 2 * sigma * reach) / (2 * sigma**2)
    first, top = math.floor(log_q / h), np.logaddexp(log_q, log_max)
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
    s = h * (places := round(n * mean / h) + np.arange(-size // 2, size // 2))
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


def sensitivity(columns: Columns, k: int, b: int, epoch: int) -> float:
    """Return an upper bound on |C x|, x of k participations at most, b steps apart or more, one an epoch."""
    norms, (steps, h), at = columns.gram[:, 0], columns.gram.shape, np.arange(len(columns.gram))
    k, best, own = min(k, -(-steps // b), -(-steps // epoch)), norms, norms  # best[t]: the last one is at t
    latest = [np.minimum(at - j * b, (at // epoch - j + 1) * epoch - 1) for j in range(k * (h > b) + 2)]
    if h <= b:  # no overlaps
        for _ in range(1, k if b * epoch > 1 else 1):
            best = norms + np.where(latest[1] >= 0, np.maximum.accumulate(best)[latest[1]], 0.0)
        return math.sqrt(best.max() if b * epoch > 1 else np.sort(norms)[-k:].sum())
    shared, square = np.zeros((steps, steps)), norms.max()
    for d in range(min(steps, h)):  # the overlap with the one before is exact, with others the largest
        shared[at[d:], at[d:] - d] = 2 * columns.gram[d:, d]
    farther = np.maximum.accumulate(shared, axis=1)
    shared = np.where(at <= latest[1][:, None], shared, -np.inf)
    for j in range(1, k):
        own = own + (j > 1) * np.where(latest[j] >= 0, farther[at, np.maximum(latest[j], 0)], 0.0)
        best = own + (shared + best).max(1)
        square = max(square, best.max())
    return math.sqrt(square)


def order_of(scheme: dict, size: int | None) -> tuple[int, int, int]:
    """Return (most participations, fewest steps between two, steps of an epoch) of fixed-order batches."""
    free = {"batch_size": 0, "steps_per_epoch": 1}  # where not stated
    given = {name: free[name] if name in free and scheme[name] is None else scheme[name] for name in scheme}
    n, b, k, epoch = (
        _number(given[name], name, 1, 1e6, (int,)) for name in ("iterations", _B, _K, "steps_per_epoch")
    )
    batch = _number(given["batch_size"], "batch_size", 0, 1e15, (int,)) or k * (size or 0) / n
    # All of n batches are full, so that some example is in n batch / size of them.
    if size and (batch != int(batch) or batch * n > size * k or batch * min(n, max(b, epoch)) > size):
        raise ValueError(f"participations {k} do not fit {n} batches of {batch} from {size} examples")
    return k, b, epoch


def chance_of_one(scheme: dict, n: int) -> float:
    """Return the probability of participating; 0 where it is not known, or a second time is possible."""
    if scheme["name"] == "balanced-min-sep":
        return scheme[_K] if scheme[_K] <= 1 else 0.0
    if scheme["name"] == "b-min-sep" and scheme["warm_start"] and scheme[_B] >= n and scheme[_P] < 1:
        return n / (1 / scheme[_P] + scheme[_B] - 1)
    return 0.0


def analytic_delta(claim: Claim, columns: Columns) -> float:
    """Return an upper bound on both divergences by the accountant that a claim names, or raise NotCovered."""
    scheme, n = claim.scheme, len(columns.gram)
    if scheme["name"] == "fixed-order":
        k, b, epoch = order_of(scheme, claim.dataset_size)
    else:  # `distribution_of` has read these fields
        b, epoch = scheme.get(_B, scheme.get("cycle_length", 1)), scheme.get("epoch_steps", 1)
        k = math.ceil(scheme.get(_K, n))
    if claim.accountant == "unamplified":
        length = sensitivity(Columns(columns.c, n, n), k, b, epoch)  # rows shown
        return gaussian_delta(claim.epsilon, (1 + claim.mirrored) * length / claim.sigma)
    once = claim.accountant == "random-allocation" and not claim.mirrored and 2 * columns.gram.shape[1] > n
    if once and (chance := chance_of_one(scheme, n)):  # the step of the participation shown
        length, epsilon = math.sqrt(columns.gram[:, 0].max()), math.log1p(math.expm1(claim.epsilon) / chance)
        return chance * gaussian_delta(epsilon, length / claim.sigma)
    covered = scheme["name"] in ("poisson", "cyclic-poisson", "balls-in-bins") and columns.gram.shape[1] <= b
    if claim.accountant == "pld" and covered and not claim.mirrored:  # independent steps, given the class
        return poisson_delta(-(-n // b), scheme.get(_P, 1.0), claim.sigma, claim.epsilon, claim.verified)
    raise NotCovered(f"accountant {claim.accountant!r:.60}")


def stored_flaws(evidence: dict, said: dict, claim: Claim, scales: dict, found: dict):
    """Return (whether evidence was recomputed, where it does not follow); said: notes, scales: ln of ours."""
    side, said, flaws = evidence[REMOVE], said.get(REMOVE) or {}, []
    if evidence[ADD]["kind"] != "dominated":
        flaws.append(f"the other direction is {evidence[ADD]['kind']!r:.40}, not dominated")
    if side["kind"] in ("not-run", "dominated"):
        flaws.append(f"the remove direction is {side['kind']!r:.40}, which shows nothing")
    proposal = side.get("proposal", {"family": side["kind"], "parameters": []})
    name = ":".join([proposal["family"], ",".join(map(str, proposal["parameters"]))]).rstrip(":")
    log_scale = scales.get(name)
    if said.get("scale"):
        stated = math.log(_number(said["scale"], "scale", 1e-300, 1e300))
        if log_scale is not None and not abs(stated - log_scale) < 1e-6:
            flaws.append(f"scale {said['scale']!r} stored, {math.exp(min(log_scale, 700)):.9g} found")
        log_scale = stated if log_scale is None else log_scale
    known = log_scale is not None
    ours, error = (found.get("scale", 0.0) * found.get(name, 0.0) for name in ("mean", "error"))
    if side["kind"] == "weight-bound" and known:
        if not ours - 6 * error <= math.exp(log_scale) <= claim.verified * (1 + SLACK):
            flaws.append("stored as certified without samples, which its scale does not allow")
    if side["kind"] != "mean" or not known:
        return side["kind"] == "weight-bound" and known, flaws
    # An upper limit of the threshold, which is lower by the rounding of the samples.
    theta = math.exp(min(math.log(claim.verified) - log_scale, 1.0))
    threshold = _number(said.get("threshold") or theta, "threshold", 0, 1e300)
    if not threshold <= theta * (1 + SLACK):
        flaws.append(f"threshold {threshold!r} stored, at most {theta:.9g} follows")
    theta = min(theta, threshold)
    bins, counts = np.array(side["term_counts"], dtype=np.int64).reshape(-1, 2).T
    values = np.where(bins > 0, np.exp2((bins - 5121) / 128), 0.0)  # upper ends
    parts, weights = (np.array(side[name], float) for name in ("bets", "bet_weights"))
    fair = (abs(parts - 0.5) <= 0.5).all() and (weights >= 0).all() and weights.sum() <= 1 + SLACK
    if not (fair and counts.size and (counts > 0).all() and ((bins >= 0) & (bins <= 5121)).all()):
        return True, [*flaws, "counts must be positive, bets in [0, 1], and their weights must add up to 1"]
    number, hits, mean = counts.sum(), counts[bins > 0].sum(), float(values @ counts / counts.sum())
    if evidence["rule"] == "anytime":
        gains = np.maximum(parts[:, None] * (theta - values) / max(1 - theta, 1e-300), -1.0)
        wealth = special.logsumexp(np.log1p(gains) @ counts, b=weights)
    else:  # a fixed number of samples: Chernoff's bound
        wealth = number * special.rel_entr([mean, 1 - mean], [theta, 1 - theta]).sum() * (mean < theta)
    needed = -math.log(claim.failure * _number(evidence["share"], "share", 1e-300, 1))
    if not (wealth >= needed * (1 - SLACK) or theta >= 1):
        flaws.append(f"stored samples have log wealth {wealth:.6g}, below {needed:.6g}")
    if min(hits, found.get("positive", 0)) >= 100:
        theirs = math.exp(log_scale) * mean
        spread = math.exp(log_scale) * math.sqrt((values - mean) ** 2 @ counts) / number
        if ours - theirs > 6 * math.hypot(error, spread):
            flaws.append(f"stored evidence has a mean of {theirs:.6g}, {ours:.6g} was found")
    return True, flaws


def _of_samples(mechanism: Mechanism, rng, max_steps: float) -> tuple[dict, dict]:
    """Return (what was found, ln of the scales of own proposals by name) of the remove direction."""
    claim, choices, scales = mechanism.claim, [], {"plain": 0.0}
    for choice in mechanism.proposals():
        theta = math.exp(min(math.log(claim.verified) - choice.log_scale, 1.0))
        # Samples that suffice where the divergence is half of the claim: KL(theta / 2, theta) is above this.
        needed = math.log(FRACTIONS.size / claim.failure) / max(0.153 * theta, 1e-300)
        choices.append((needed * choice.cost if theta < 1 else 0.0, theta, choice))
        if len(choices) > 2 and choices[-1][0] > choices[-2][0] > choices[-3][0]:
            break
    scales |= {choice.name: choice.log_scale for *_, choice in choices if ":" in choice.name}
    samples, theta, choice = min(choices, key=lambda one: one[0])
    if samples * mechanism.dist.steps > max_steps:
        raise NotCovered(f"samples of which it takes about {samples:.2g}")
    found = decide(choice, theta, claim.failure, mechanism.dist.steps, rng, max_steps)
    return found | {"proposal": choice.name, "scale": math.exp(choice.log_scale)}, scales


def batch_flaws(claim: Claim, dist: Scheme, notes: dict) -> list[str]:
    """Return where batch sizes in the notes do not follow from the claim."""
    size, most, flaws = claim.dataset_size, notes.get("max_batch_size"), []
    stated = notes.get("overflow_delta")
    if stated is not None and not abs(stated - claim.reserved) <= 1e-6 * claim.reserved:
        flaws.append(f"overflow_delta {stated!r:.40} stored, {claim.reserved!r} found")
    if most is not None and size is not None and most < size:
        larger = float(special.betainc(most + 1, size - most, dist.participation()).sum())
        if not larger <= claim.reserved * (1 + 1e-6):
            flaws.append(f"batches above {most}: probability {larger:.3g}, reserved {claim.reserved!r}")
    return flaws


@np.errstate(all="ignore")  # what is not finite is refused
def check(data, rng=None, max_steps: float = MAX_STEPS) -> dict:
    """Decide a plan's claim anew; {"verdict": .., "differences": [..], ..}, or raise NotCovered."""
    claim, notes, found, differences = _read_claim(data), data.get("notes") or {}, {}, []
    said, rng = notes.get("verdict") or {}, np.random.default_rng() if rng is None else rng
    if claim.epsilon > 700 and claim.accountant != "unamplified":  # its exponential is no float64
        raise NotCovered(f"epsilon {claim.epsilon:g}, above 700")
    steps = claim.scheme.get("iterations", len(claim.scheme.get("join", ())))  # of a table: its length
    columns = columns_of(claim.strategy, _number(steps, "iterations", 1, 1e6, (int,)))
    spent = claim.verified + claim.failure * (1 - claim.verified) + claim.reserved
    if not spent <= claim.delta * (1 + 1e-12):
        differences.append(f"the budget spends {spent!r} of delta {claim.delta!r}")
    texts = [json.dumps(x, sort_keys=True) for x in (data["claim"], [data["claim"], data["evidence"]])]
    for text, stored in zip(texts, (data["evidence"].get("claim"), data.get("digest")), strict=True):
        if stored not in (None, own := hashlib.sha256(text.encode()).hexdigest()):
            differences.append(f"digest {stored!r:.70} stored, {own} found")
    dist: Any = None
    if claim.scheme["name"] != "fixed-order" or claim.accountant is None:
        dist = distribution_of(claim.scheme)
        differences += batch_flaws(claim, dist, notes)
    if claim.accountant is not None:
        ours, stored = analytic_delta(claim, columns), said.get("delta")
        found["bound"] = {"verdict": "certified" if ours <= claim.verified else "refuted", "delta": ours}
        if stored is not None and not ours * (1 - 2e-3) <= _number(stored, "delta", 0, 1) <= claim.verified:
            differences.append(f"bound of {claim.accountant}: {stored!r} stored, {ours!r} found")
    else:
        found[REMOVE], scales = _of_samples(Mechanism(claim, dist, columns), rng, max_steps)
        recomputed, flaws = stored_flaws(data["evidence"], said, claim, scales, found[REMOVE])
        found[REMOVE]["stored"] = "recomputed" if recomputed else "not recomputed"
        differences += flaws
    certified = not differences and all(side["verdict"] == "certified" for side in found.values())
    verdict = {"verdict": "certified" if certified else "not certified", "differences": differences} | found
    return verdict | {"epsilon": claim.epsilon, "delta": claim.delta}


def _object(pairs: list) -> dict:
    if len(found := dict(pairs)) < len(pairs):  # readers differ on such a key
        raise ValueError("an object has a key twice")
    return found


def check_file(path) -> tuple[int, dict]:
    """Return (exit code, what `check` found or {"verdict": .., "reason": ..}) of a plan file."""
    try:
        with open(path, encoding="utf-8") as file:
            found = check(json.load(file, object_pairs_hook=_object))
        return CERTIFIED if found["verdict"] == "certified" else FAILED, found
    except NotCovered as error:
        return NOT_COVERED, {"verdict": "not covered", "reason": f"not covered by the checker: {error}"}
    except MALFORMED as error:
        reason = " ".join(f"plan cannot be checked: {type(error).__name__}: {error}".split())
        return BAD_INPUT, {"verdict": "bad input", "reason": reason}


def main(arguments=None) -> int:
    """Check the plan of a file; the exit code."""
    parser = argparse.ArgumentParser(description="Check a plan by the second implementation.")
    parser.add_argument("plan", help="file of a plan, as plan.json")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    code, found = check_file(options.plan)
    lines = [json.dumps(found)] if options.json else [found["reason"]] if "reason" in found else []
    if not lines:
        lines = ["{verdict}: ({epsilon:g}, {delta:g}) by the second implementation".format(**found)]
        for name in [name for name in (REMOVE, "bound") if name in found]:
            lines.append(f"{name:8}" + ", ".join(f"{key} {value}" for key, value in found[name].items()))
        lines += [f"differs {line}" for line in found["differences"]]
    print(*lines, sep="\n", file=sys.stderr if code == BAD_INPUT and not options.json else sys.stdout)
    return code


if __name__ == "__main__":
    sys.exit(main())
