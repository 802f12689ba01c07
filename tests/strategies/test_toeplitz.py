"""Strategy matrices against dense linear algebra, published optima; series against SciPy's filters."""

import json

import numpy as np
import pytest
import scipy
from jax_privacy.matrix_factorization import toeplitz as peer

from jaxacct.strategies import BandedToeplitz, prefix_sum_error, series
from jaxacct.strategies.banded_toeplitz import log_error_of
from jaxacct.strategies.workload import PREFIX_SUMS
from tests.oracles.enumeration import strategy_matrix
from tests.oracles.settings import slow
from tests.refusals import refused


def optimal(n, bands, separation=None, participations=1):
    return BandedToeplitz.optimal(
        iterations=n, bands=bands, min_separation=separation or bands, participations=participations
    )


# Mean squared error x sensitivity^2 by the peer's optimiser in float64 (design/PEERS.md, 3g).
def test_optimum_is_the_published_one():
    for n, bands, published in [
        (16, 1, 8.5),
        (16, 4, 3.754024),
        (16, 16, 3.063999),
        (64, 8, 7.096762),
        (256, 16, 13.231943),
        (1000, 1, 500.5),
        (1000, 32, 24.115187),
    ]:
        ours = prefix_sum_error(optimal(n, bands), iterations=n, noise_multiplier=1.0)
        assert ours == pytest.approx(published, rel=1e-5)
    assert optimal(64, 4, 16, 1) == optimal(64, 4, 8, 8), "it does not depend on participations"


@pytest.mark.parametrize(("n", "bands"), [(50, 5), (1024, 32), (7200, 256), (100_000, 64)])
def test_not_worse_than_the_square_root(n, bands):
    ours = prefix_sum_error(optimal(n, bands), iterations=n, noise_multiplier=1.0)
    assert ours < prefix_sum_error(BandedToeplitz.square_root(bands), iterations=n, noise_multiplier=1.0)


def test_gradient_against_differences():
    n, rng = 40, np.random.default_rng(0)
    point = np.append(1.0, rng.random(5))
    log_error = log_error_of(PREFIX_SUMS, n)
    _, gradient = log_error(point)
    for k in range(5):
        step = np.zeros(6)
        step[k + 1] = 1e-6
        slope = (log_error(point + step)[0] - log_error(point - step)[0]) / 2e-6
        assert gradient[k] == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("n", [7200, 10_000])
def test_the_search_survives_matrices_whose_inverse_explodes(n):
    """Its first step makes one: two bands were left where they began, 10 % above the optimum."""
    c = np.linspace(0.9, 0.99, 91)[:, None]
    # Of (1, c) of norm 1: sums of a row of the inverse, a geometric series.
    sums = np.sqrt(1 + c**2) * (1 - (-c) ** np.arange(1, n + 1)) / (1 + c)
    errors = sums**2 @ (n - np.arange(n)) / n
    some = [
        prefix_sum_error(BandedToeplitz((1.0, c)), iterations=n, noise_multiplier=1.0) for c in (0.9, 0.99)
    ]
    np.testing.assert_allclose(errors[[0, -1]], some, rtol=1e-12)
    assert prefix_sum_error(optimal(n, 2), iterations=n, noise_multiplier=1.0) <= errors.min()


def test_any_scale_and_the_square_root():
    exact = np.array([1, 1 / 2, 3 / 8, 5 / 16, 35 / 128, 63 / 256])
    np.testing.assert_allclose(BandedToeplitz.square_root(6).array, exact / np.linalg.norm(exact), rtol=1e-14)
    for scale in [1e-290, 1e-160, 1e-3, 3.0, 1e160, 1e289]:
        scaled = BandedToeplitz((4 * scale, 3 * scale))
        np.testing.assert_allclose(scaled.coefficients, (0.8, 0.6), rtol=1e-15)


def test_bad_coefficients():
    for coefficients, message in [
        ((), "non-empty"),
        ((0.0, 1.0), "must begin with a number above 0"),
        ((1.0, -0.5), r"at least 0, one was -0\.5$"),
        ((1.0, float("nan")), "finite"),
        ((float("inf"),), "finite"),
        (((1.0, 2.0), (3.0, 4.0)), "shape"),
        (5.0, "shape"),
        ((1e-320, 1e10), "must begin above"),
        (("a",), "list of numbers"),
        (("1.0",), "list of numbers"),
        ((True,), "list of numbers"),
        ((1.0, 1j), "list of numbers"),
        ((1.0, (2.0,)), "list of numbers"),
    ]:
        refused(message, BandedToeplitz, coefficients)


def test_files(tmp_path):
    strategy = BandedToeplitz.square_root(5)
    path = tmp_path / "c.txt"
    strategy.save(path)
    assert BandedToeplitz.from_file(path) == strategy
    (tmp_path / "c.json").write_text(json.dumps(list(strategy.coefficients)))
    assert BandedToeplitz.from_file(tmp_path / "c.json") == strategy
    assert {file.name for file in tmp_path.iterdir()} == {"c.txt", "c.json"}
    for text in ("1, 0.5,0.375\n", "1 0.5 0.375", "1,\n0.5,\n0.375\n", "1\n0.5\n\n0.375"):
        path.write_text(text)
        assert BandedToeplitz.from_file(path).coefficients == BandedToeplitz((1, 0.5, 0.375)).coefficients


def test_bad_files(tmp_path):
    for name, content, message in [
        ("c.txt", b"", "non-empty"),
        ("c.txt", b"1\n-0.5\n", r"one was -0\.5$"),
        ("c.txt", b"1\nnan\n", "one was nan"),
        ("c.txt", b"1\nhalf\n", "half"),
        ("c.txt", b"1,0\n0,5\n", "one a line or all in one line, with a point for decimals"),
        ("c.txt", b"1,,0.5\n,", "one a line or all in one line"),
        ("c.txt", b"\xff\xfe\x00", "decode"),
        ("c.json", b"[]", "non-empty"),
        ("c.json", b"[1.0, 0.5", "delimiter"),
        ("c.json", b"[[1.0]]", "shape"),
        ("c.json", b"[true]", "list of numbers"),
    ]:
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message) as caught:
            BandedToeplitz.from_file(path)
        assert str(caught.value).startswith(f"strategy file {path}: ")
        assert "\n" not in str(caught.value)
    for path in (tmp_path / "absent.txt", tmp_path):
        refused("cannot be read", BandedToeplitz.from_file, path)


def dense_error(strategy, n, sigma=1.0):
    sums = np.tril(np.ones((n, n))) @ np.linalg.inv(strategy_matrix(strategy.coefficients, n, n))
    return (sums**2).sum() / n * sigma**2


@pytest.mark.parametrize(("n", "bands"), [(16, 16), (64, 8)])
def test_error_of_optima_against_dense_and_peer(n, bands, x64):
    strategy = optimal(n, bands)
    ours = prefix_sum_error(strategy, iterations=n, noise_multiplier=1.0)
    assert ours == pytest.approx(dense_error(strategy, n), rel=1e-10)
    assert ours == pytest.approx(float(peer.loss(strategy.array, n)), rel=1e-10)


@pytest.mark.parametrize(("n", "bands"), [(100, 7), slow(333, 20)])
@pytest.mark.usefixtures("default_promotion")
def test_not_worse_than_the_peers_optimiser(n, bands, x64):
    theirs = BandedToeplitz(tuple(np.asarray(peer.optimize_banded_toeplitz(n, bands)).tolist()))
    ours = prefix_sum_error(optimal(n, bands), iterations=n, noise_multiplier=1.0)
    assert ours <= prefix_sum_error(theirs, iterations=n, noise_multiplier=1.0) * (1 + 1e-6)


@pytest.mark.parametrize(("n", "bands"), [(1, 1), (5, 16), (40, 40), (300, 7), (700, 300)])
def test_quotients_are_what_filters_do(n, bands, monkeypatch):
    """Forwards and backwards, for a first coefficient that is not 1, and beyond what is written out."""
    rng = np.random.default_rng(n)
    divisor = np.append(2.5, rng.uniform(-1, 1, bands - 1) / bands)
    values = rng.normal(size=n)
    wanted = scipy.signal.lfilter([1.0], divisor, values)
    backwards = scipy.signal.lfilter([1.0], divisor, values[::-1])[::-1]
    kept = values.copy()
    for most in (series._MOST, 0):
        monkeypatch.setattr(series, "_MOST", most)
        np.testing.assert_allclose(series.quotient(values, divisor), wanted, rtol=0, atol=1e-13)
        np.testing.assert_allclose(series.quotient(values, divisor, transposed=True), backwards, atol=1e-13)
    assert (values == kept).all()


@pytest.mark.parametrize(("n", "m"), [(1, 1), (9, 4), (700, 300)])
def test_products_and_sums_at_lags(n, m):
    """By the definition, one by one and by FFT."""
    rng = np.random.default_rng(m)
    a, b = rng.normal(size=n), rng.normal(size=m)
    np.testing.assert_allclose(series.product(a, b), scipy.signal.convolve(a, b, method="direct"), atol=1e-12)
    sums = [sum(a[t + k] * b[t] for t in range(min(m, n - k))) for k in range(n)]
    np.testing.assert_allclose(series.sums_at_lags(a, b, n), sums, atol=1e-12)


def test_a_quotient_without_bound_is_not_finite():
    """A search that comes upon one goes back part of the way."""
    assert not np.isfinite(series.quotient(np.ones(2000), np.array([1.0, -3.0]))[-1])
