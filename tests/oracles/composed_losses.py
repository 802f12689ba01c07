"""Divergences of composed Poisson-sampled Gaussians to 12 digits, by integrals in 60 digits.

`python -m tests.oracles.composed_losses` prints `REFERENCES`. With L the loss of a step, `M(z) = E_P e^{zL}`
and any t > 0, `H(epsilon) = (1 / 2 pi i) int_{Re z = t} M(z)^n e^{-z epsilon} / (z (z + 1)) dz`. The integral
and M, an integral over a normal variable, are sums by the trapezoidal rule, whose error falls exponentially
with the spacing: no lattice of losses, no Fourier transform, none of our code.
"""

from typing import NamedTuple

import mpmath as mp


class Reference(NamedTuple):
    """`delta` is H(epsilon) of `steps` steps at sampling probability q and noise sigma.

    A unit has `examples` examples, each with a coin of its own.
    """

    steps: int
    q: float
    sigma: float
    epsilon: float
    remove: bool
    delta: str
    examples: int = 1


NODES, DIGITS = 300, 60
REFERENCES = (
    Reference(1000, 0.1, 2.0, 10.0, True, "1.028695824766e-07"),
    Reference(1000, 0.1, 2.0, 10.0, False, "2.700500228437e-09"),
    Reference(1000, 0.1, 2.0, 16.0, True, "3.195176651595e-17"),
    Reference(1000, 0.1, 2.0, 16.0, False, "1.511723156333e-23"),
    Reference(10000, 0.01, 0.7, 12.0, True, "2.173563030762e-04"),
    Reference(10000, 0.01, 0.7, 12.0, False, "8.506447155727e-07"),
    Reference(100000, 0.01, 10.0, 1.0, True, "1.139220034305e-04"),
    Reference(100000, 0.01, 10.0, 1.0, False, "1.125104427546e-04"),
    Reference(100000, 0.01, 10.0, 2.0, True, "1.885287969474e-11"),
    Reference(100000, 0.01, 10.0, 2.0, False, "1.732143524957e-11"),
    Reference(100000, 0.9, 300.0, 7.5, True, "5.914717529429e-15"),
    Reference(100000, 0.9, 300.0, 7.5, False, "5.911504695126e-15"),
    Reference(1000000, 0.001, 0.8, 10.0, True, "5.014156305127e-06"),
    Reference(1000000, 0.001, 0.8, 10.0, False, "2.730601790292e-06"),
    Reference(1000000, 0.999, 1000.0, 8.0, True, "3.414995038525e-15"),
    Reference(1000000, 0.999, 1000.0, 8.0, False, "3.414993211520e-15"),
)
USERS = (
    Reference(2000, 0.00512, 4.48, 4.0, True, "9.800207356583e-07", 16),
    Reference(2000, 0.00512, 4.48, 4.0, False, "5.156012121006e-07", 16),
    Reference(50, 0.1, 3.0, 2.0, True, "6.369428603791e-02", 5),
    Reference(50, 0.1, 3.0, 2.0, False, "4.482422053493e-02", 5),
    Reference(300, 0.02, 8.0, 5.0, True, "9.686913638557e-03", 40),
    Reference(300, 0.02, 8.0, 5.0, False, "7.844057546211e-03", 40),
)


def divergence(steps: int, q: float, sigma: float, epsilon: float, remove: bool, examples: int = 1):
    """H(epsilon) as a number of mpmath."""
    mp.mp.dps = DIGITS
    q, sigma, epsilon = mp.mpf(q), mp.mpf(sigma), mp.mpf(epsilon)
    # The spacing keeps the nearest singularity, at an imaginary part of pi sigma for one example, 40 digits
    # away; of several it is nearer.
    gap = min(mp.mpf(1) / 8, 2 * mp.pi**2 * sigma / 92) / (1 if examples == 1 else 4)
    places = [gap * k for k in range(-int(17 / gap), int((17 + 2 * examples / sigma) / gap) + 1)]
    chances = [mp.binomial(examples, j) * q**j * (1 - q) ** (examples - j) for j in range(examples + 1)]
    logs = [
        mp.log(mp.fsum(w * mp.exp(j * z / sigma - j * j / (2 * sigma**2)) for j, w in enumerate(chances)))
        for z in places
    ]
    weights = [gap * mp.npdf(z) for z in places]
    signed = logs if remove else [-log for log in logs]
    if remove:
        weights = [weight * mp.exp(log) for weight, log in zip(weights, logs, strict=True)]

    def log_integrand(t):
        moment = sum(weight * mp.exp(t * log) for weight, log in zip(weights, signed, strict=True))
        return steps * mp.log(moment) - t * epsilon - mp.log(t) - mp.log(1 + t)

    low, high = mp.mpf("1e-3"), mp.mpf(1000)
    for _ in range(60):  # golden section: the function is convex
        left, right = low + (high - low) * mp.mpf("0.382"), low + (high - low) * mp.mpf("0.618")
        low, high = (low, right) if log_integrand(left) < log_integrand(right) else (left, high)
        if high - low < low / 1000:
            break
    t = (low + high) / 2
    around = [log_integrand(t * (1 + d)) for d in (mp.mpf("-0.01"), 0, mp.mpf("0.01"))]
    width = t / 100 / mp.sqrt(around[0] - 2 * around[1] + around[2])
    spacing = 24 * width / NODES
    terms = [weight * mp.exp(t * log) for weight, log in zip(weights, signed, strict=True)]
    turns = [mp.expj(spacing * log) for log in signed]
    scale = around[1]
    total = mp.mpf(0)
    for k in range(NODES):
        z = mp.mpc(t, k * spacing)
        value = mp.exp(steps * mp.log(mp.fsum(terms)) - z * epsilon - scale) / (z * (1 + z))
        total += (1 if k else mp.mpf(1) / 2) * value.real
        terms = [term * turn for term, turn in zip(terms, turns, strict=True)]
    return total * spacing / mp.pi * mp.exp(scale), abs(value)


def gaussian(epsilon: float, mu, digits: int = DIGITS):
    """H(epsilon) of N(mu, 1) against N(0, 1), by its definition in so many digits."""
    with mp.workdps(digits):
        mu, epsilon = mp.mpf(mu), mp.mpf(epsilon)
        return mp.ncdf(mu / 2 - epsilon / mu) - mp.exp(epsilon) * mp.ncdf(-mu / 2 - epsilon / mu)


def sampled(epsilon: float, q: float, sigma: float, remove: bool):
    """H(epsilon) of one sampled Gaussian, by its definition in 60 digits."""
    with mp.workdps(DIGITS):
        q, sigma, epsilon = mp.mpf(q), mp.mpf(sigma), mp.mpf(epsilon)
        ratio = mp.expm1(epsilon if remove else -epsilon) / q
        if ratio <= -1:  # the loss of all outputs is larger (remove) or smaller (add)
            return -mp.expm1(epsilon) if remove else mp.mpf(0)
        place = sigma * mp.log1p(ratio) + 1 / (2 * sigma)
        sign = -1 if remove else 1
        p_mass, q_mass = mp.ncdf(sign * (place - 1 / sigma)), mp.ncdf(sign * place)
        mixed = q * p_mass + (1 - q) * q_mass
        return mixed - mp.exp(epsilon) * q_mass if remove else q_mass - mp.exp(epsilon) * mixed


def antipodal(epsilon: float, q: float, sigma: float):
    """H(epsilon) of one sampled Gaussian of mean 1 against that of mean -1, in 60 digits."""
    with mp.workdps(DIGITS):
        q, sigma, epsilon = mp.mpf(q), mp.mpf(sigma), mp.mpf(epsilon)
        u, rest = q * mp.exp(-1 / (2 * sigma**2)), (1 - q) * mp.expm1(epsilon)
        root = mp.sqrt(rest**2 + 4 * u**2 * mp.exp(epsilon))
        # e^(y / sigma^2) at which the loss is epsilon, by the root that does not cancel.
        above = (rest + root) / (2 * u) if epsilon >= 0 else 2 * u * mp.exp(epsilon) / (root - rest)
        place = sigma * mp.log(above)
        p_mass, q_mass = ((1 - q) * mp.ncdf(-place) + q * mp.ncdf(s / sigma - place) for s in (1, -1))
        return p_mass - mp.exp(epsilon) * q_mass


if __name__ == "__main__":
    for row in REFERENCES + USERS:
        found, last = divergence(row.steps, row.q, row.sigma, row.epsilon, row.remove, row.examples)
        assert last < 1e-40  # of terms whose largest is about 1
        numbers = ", ".join(map(repr, row[:5]))
        users = f", {row.examples}" if row.examples > 1 else ""
        print(f'    Reference({numbers}, "{float(found):.12e}"{users}),', flush=True)
