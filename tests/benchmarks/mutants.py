"""Plant small plausible mistakes, one at a time, and see which the tests notice.

    python -m tests.benchmarks.mutants            # all; the score goes to results/mutants.json
    python -m tests.benchmarks.mutants bounds.py  # those in files of that name

Each mutant is run against the tests that should see it, in a copy of the checkout. `test_guards.py` checks
that every `before` is still in its file exactly once.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks.mutants_of_certificates import MISTAKES

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("jaxacct", "train", "tests", "pyproject.toml", "README.md", "notebooks", "LICENSE")
SECONDS = 600  # a mutant that makes the tests hang counts as seen


class Mutant(NamedTuple):
    """`before` in `path` becomes `after`; `tests` should fail."""

    path: str
    before: str
    after: str
    tests: str


def files_in(folder: str, names: str) -> list[str]:
    """Return the paths of test files of one folder."""
    return [f"tests/{folder}/test_{name}.py" for name in names.split()]


BOUNDS, OF_LOSSES, MIXTURES = files_in("statistics", "bounds composed_losses gaussian_mixtures")
GUARDS, VERIFY, PLAN, COMPOSED = files_in("core", "guards verify plan composed")
EVIDENCE, SCHEMES, ACCOUNTANTS = files_in("conformance", "claims schemes accountants")
DISTRIBUTIONS, TABLES = "tests/schemes", "tests/schemes/test_table.py"
PARTICIPATION_TESTS, INTERPOLATION = files_in("accountants/tradeoff", "participation interpolation")
EXTREMES = " ".join(files_in("accountants/tradeoff", "extremes command"))
ALLOCATION, REDRAWN = files_in("accountants", "random_allocation redrawn_bins")
SPENT = "tests/accountants/test_history.py"
FINITE, AMPLIFIED, BUFFERED = files_in("strategies", "finite_horizon amplified buffered")
INFLATED, PAIRS, LOWER_ENDS = files_in("proposals", "inflated pairs proposals")
PAPER, SHUFFLES = files_in("benchmarks", "paper shuffled")
ADVANTAGE, CHOOSING = "tests/estimates/test_advantage.py", "tests/recommendation/test_choosing.py"
REPORT, COMPILED = "tests/report/test_report.py", "tests/kernels/test_programs.py"
CHECKER, PEERS = "tests/checker/test_checker.py", "tests/interoperation/test_interoperation.py"
BOUND, LIMITS, INTERRUPTIONS = files_in("train", "bound_arguments limits interruptions")
LOOP, FOLLOWED_TESTS, DICE, ARGUMENTS = files_in("train", "loop individual dice bad_inputs")
CONVEX, BATCHES, SHARDED = files_in("train", "convex batch_clipping sharded")
SAMPLER, TWICE, GRAPHS = files_in("train/batches", "sampler given attribution")
ROWS, PREFETCHED = files_in("train/batches", "sources prefetch")
NOISE, KEYS, GPU_TESTS, PIECES = files_in("train/noise", "noise keys gpu_keystream pieces")
CLIPPING, RELEASED, CANCELLING, GHOST = files_in(
    "train/clipping", "clipping released_numbers cancelling ghost"
)
NORMED, GROUPED, NESTED = files_in("train/clipping", "batch_statistics grouped_convolutions nested")
OF_ROWS = "tests/train/clipping/test_rows_of_primitives.py"
AUDIT_BOUNDS, AUDIT = files_in("train/audit", "audit audit_command")

CORE_CHECK, CORE_VERIFY, CORE_CLAIM, SHARES = (
    f"jaxacct/core/{name}.py" for name in ("check", "verify", "claim", "shares")
)
THRESHOLD = "jaxacct/proposals/threshold.py"
LOSS_CURVES = "jaxacct/statistics/loss_curves.py"
FOLDER, RUN = "train/run/folder.py", "train/run/loop.py"
CORRELATED, FOLLOWED = "train/procedures/bandmf.py", "train/individual/steps.py"
GPU_WORDS, SOURCES = "train/noise/gpu_keystream.py", "train/batches/sources.py"
SUMS_OF_X = "jaxacct/accountants/allocation/lognormal_sums.py"
LATTICE_OF_X = "jaxacct/accountants/allocation/lognormal_lattice.py"
SHUFFLED, RATIO = "tests/benchmarks/shuffled_bounds.py", "jaxacct/schemes/b_min_sep.py"
IN_PAIRS = "jaxacct/proposals/families/replicas.py"
INDEPENDENT = "jaxacct/schemes/users/independent_attribution.py"
PROGRAMS, APART = "jaxacct/kernels/programs.py", "train/clipping/rows_apart.py"
EVENTS, SAMPLERS, DOMINATING = (
    f"jaxacct/interoperation/{name}.py" for name in ("events", "jax_privacy", "pessimistic_pld")
)
CHECK, TABLE = "jaxacct/checker.py", "jaxacct/statistics/composed.py"
LOSSES, CURVES, TILTED = (
    f"jaxacct/statistics/{name}.py" for name in ("composed_losses", "loss_curves", "tilted_sums")
)

# fmt: off
MUTANTS = [
    # Replicas in pairs, mean overlaps.
    Mutant(IN_PAIRS, "noise_multiplier / math.sqrt(m - 1))", "noise_multiplier / math.sqrt(m - 2))", PAIRS),
    Mutant("jaxacct/proposals/families/pair_weights.py", "_log_mean_exp(-apart)", "_log_mean_exp(apart)", PAIRS),
    Mutant(IN_PAIRS, "log_scale(log_z, m / number, epsilon + floor)", "log_scale(log_z, m, epsilon + floor)", PAIRS),
    Mutant(INDEPENDENT, "self.examples_per_user - 1 + left) * norms", "2 * self.examples_per_user) * norms", PAIRS),
    # Composition.
    Mutant(TABLE, "np.maximum(self.profile(t) - self._floor, 0.0)", "self.profile(t)", COMPOSED),
    Mutant(TABLE, "[ends, between, [power * logs[0]]]", "[ends]", COMPOSED),
    Mutant(TABLE, "_LEFT_OUT * self.delta)", "self.delta)", COMPOSED),
    Mutant(THRESHOLD, "max(size.largest, lowest)", "size.largest", COMPOSED),
    Mutant(THRESHOLD, "if left_out > 0 else ()", "if left_out < 0 else ()", COMPOSED),
    Mutant(THRESHOLD, "self.profile if self.proposal.profile is None else self.proposal.profile", "self.profile", COMPOSED),
    # Statistics.
    Mutant("jaxacct/statistics/bounds.py", "self.delta_v + self.failure_probability * (1 - self.delta_v)\n", "self.delta_v\n", BOUNDS),
    Mutant("jaxacct/statistics/bounds.py", "        return -math.log(b)\n", "        return -math.log1p(-b)\n", BOUNDS),
    Mutant("jaxacct/statistics/bounds.py", "math.exp(-samples * kl(mean, theta))", "math.exp(-samples * kl(theta, mean))", BOUNDS),
    Mutant("jaxacct/statistics/bounds.py", "_occupied(counts, _LOWER_EDGES)", "_occupied(counts, TERM_EDGES)", BOUNDS),
    Mutant("jaxacct/statistics/bounds.py", "np.full(rates.size, 1 / rates.size)", "np.full(rates.size, 1.0)", BOUNDS),
    Mutant("jaxacct/statistics/bounds.py", "np.insert(weights / 2, 0, 0.5)", "np.insert(weights, 0, 0.5)", BOUNDS),
    Mutant("jaxacct/statistics/bounds.py", "logs @ counts - _ROUNDING", "logs @ counts + _ROUNDING", BOUNDS),
    # Orchestration of a verification.
    Mutant(THRESHOLD, "self.epsilon - margin, self.proposal", "self.epsilon + margin, self.proposal", GUARDS),
    Mutant(CORE_VERIFY, 'if blocks == 0 or stop.rule == "fixed":', "if blocks == 0:", GUARDS),
    Mutant(CORE_VERIFY, "Stream.REMOVE_PILOT.at(", "Stream.REMOVE.at(", GUARDS),
    Mutant(THRESHOLD, "self.proposal.weight_error(margin) - self.proposal.log_scale", "-self.proposal.log_scale", f"{GUARDS} tests/likelihood/test_rounding.py"),
    Mutant(THRESHOLD, "return not self.threshold >= 1", "return not self.threshold >= 0.5", GUARDS),
    Mutant(THRESHOLD, "if not theta > 0:", "if not theta > -1:", f"{GUARDS} {EVIDENCE}"),
    Mutant(CORE_CHECK, "q = evidence.share * claim.target.budget.failure_probability", "q = claim.target.budget.failure_probability", f"{EVIDENCE} {VERIFY}"),
    Mutant(CORE_CHECK, "if not bound <= target.budget.delta:", "if not bound <= 1:", f"{EVIDENCE} {GUARDS}"),
    Mutant(CORE_CHECK, "margin >= needed * (1 - 1e-9)", "margin >= 0", f"{EVIDENCE} tests/core/test_plan.py"),
    Mutant(CORE_CHECK, "if not 0 < evidence.share <= 1:", "if False:", f"{EVIDENCE} {VERIFY}"),
    Mutant(CORE_CHECK, "if keys[0] is not None and keys[0] == keys[1]:", "if False:", "tests/core/test_plan.py"),
    Mutant(CORE_CHECK, "        if not verdict.certified:\n", "        if False:\n", f"{GUARDS} {EVIDENCE}"),
    Mutant(CORE_CHECK, '            flaws.append(f"{direction}: {error}")\n', "            pass\n", f"{GUARDS} {EVIDENCE}"),
    Mutant(CORE_CHECK, "evidence.claim != claim.digest:", "False:", f"{GUARDS} {EVIDENCE}"),
    Mutant(CORE_CHECK, "        claim.check_reserves()\n", "", "tests/schemes/test_schemes.py"),
    *(
        Mutant(f"jaxacct/statistics/{name}.py", before, after, "tests/statistics/test_composed_losses.py")
        for name, before, after in (
            ("composed_losses", " + self._rounding * weights_norm", ""),
            ("composed_losses", "found += one.count * Sums", "found += Sums"),
            ("composed_losses", "found = split(cut)", "found = (*split(cut)[:2], 0.0)"),
            ("loss_curves", "np.maximum(deltas - cap, 0.0), 0.0), tails", "np.maximum(deltas - 2 * cap, 0.0), 0.0), tails"),
            ("composed_losses", " * (1 + 2 * relative)", ""),
            ("composed_losses", "epsilon -= 8 * UNIT * (1 + epsilon)", "pass"),
            ("tilted_sums", "(relative + 3 * smallest)", "(3 * smallest)"),
            ("gaussian_mixtures", "error = error + log_error +", "error = error +"),
        )
    ),
    Mutant(CORE_CHECK, "if not _fit_together", 'if side.proposal.family == "plain" and not _fit_together', "tests/core/test_loading.py"),
    Mutant(CORE_VERIFY, "about = [claim.digest, stop.rule, stop.max_samples, stop.share, proposal]", "about = [claim.digest, stop.rule, stop.max_samples, proposal]", GUARDS),
    Mutant(CORE_CLAIM, '            "adjacency": mechanism.adjacency,\n', "", f"{GUARDS} tests/core/test_plan.py"),
    Mutant(CORE_CLAIM, '            "compose_with": _events().event_to_json(target.compose_with) if target.composed else None,\n', "", GUARDS),
    Mutant(CORE_CLAIM, "if not self.budget.delta <= self.delta:", "if not self.budget.delta <= 2 * self.delta:", f"{GUARDS} {VERIFY}"),
    Mutant(CORE_CLAIM, "if not self.target.budget.delta <= available:", "if False:", "tests/schemes/test_schemes.py"),
    Mutant("jaxacct/statistics/hockey_stick.py", "if not before < index < size:", "if not -1 < index < size:", "tests/statistics/test_bounds.py"),
    Mutant(THRESHOLD, 'left = delta_v - total(lines, "delta")', "left = delta_v", f"{GUARDS} tests/likelihood/test_rounding.py"),
    Mutant(THRESHOLD, 'return intended - total(lines, "total variation")', "return intended", f"{GUARDS} tests/likelihood/test_rounding.py"),
    Mutant(THRESHOLD, ' / (1 + total(lines, "relative"))', "", f"{GUARDS} tests/likelihood/test_rounding.py"),
    Mutant(SHARES, "                break\n", "                continue\n", GUARDS),
    Mutant("jaxacct/calibration/grid.py", "not truncation.covers(mechanism, target.epsilon)", "False", "tests/core/test_truncation.py"),
    Mutant(SHARES, "LADDER_SHARE = 1 - sum(FIRST_SHARES)", "LADDER_SHARE = 1 - FIRST_SHARES[0]", GUARDS),
    Mutant(SHARES, "FIRST_SHARES = (0.9, 0.05)", "FIRST_SHARES = (0.9, 0.1)", GUARDS),
    Mutant(SHARES, "verified(step, share, True)", "verified(step, FIRST_SHARES[0], True)", GUARDS),
    # Composed losses.
    Mutant(LOSSES, "values.error * before + TINY", "0.0 * before", OF_LOSSES),
    Mutant(LOSS_CURVES, "np.minimum(1.0, deltas + errors)", "np.minimum(1.0, deltas)", OF_LOSSES),
    Mutant(LOSSES, "(self._total(one.infinite for one in self.steps) + wrapped)", "wrapped", OF_LOSSES),
    Mutant(LOSSES, "one in self.steps) + wrapped)", "one in self.steps))", OF_LOSSES),
    Mutant(LOSSES, "np.clip(bounds, SMALLEST, 1.0), 1.0)", "np.clip(bounds, SMALLEST, 1.0), SMALLEST)", f"{OF_LOSSES} {ALLOCATION}"),
    Mutant(LOSSES, "        if not (exponent <= _MAX_SCALE and relative <= _MAX_RELATIVE):\n            return math.inf", "        exponent = min(exponent, 700.0)\n        if False:\n            return math.inf", OF_LOSSES),
    Mutant(LOSSES, "< self.first:\n            return math.inf", "< self.first:\n            pass", OF_LOSSES),
    Mutant(LOSSES, "np.roll(found, (offset - self.first)", "np.roll(found, (1 - offset - self.first)", OF_LOSSES),
    Mutant(LOSS_CURVES, "(upper[:-1] - lower[1:])", "(upper[:-1] - upper[1:])", OF_LOSSES),
    Mutant("jaxacct/statistics/gaussian_mixtures.py", "errors += term * (3", "errors += 0 * term * (3", OF_LOSSES),
    Mutant("jaxacct/statistics/gaussian_mixtures.py", "(0.0, 1 / sigma), (1 - q, q)", "(0.0, 1 / sigma), (q, 1 - q)", OF_LOSSES),
    Mutant("jaxacct/statistics/gaussian_mixtures.py", "for remove in (True, False))", "for remove in (True, True))", OF_LOSSES),
    Mutant(TILTED, "1.1 * unit * math.exp", "1e-3 * unit * math.exp", OF_LOSSES),
    Mutant(TILTED, "if math.isfinite(found) else math.inf", "if math.isfinite(found) else 0.0", OF_LOSSES),
    Mutant("jaxacct/accountants/composition.py", "float(curve.losses[-1]) if curve.heights[-1] == 0 else math.inf", "float(curve.losses[-1])", SPENT),
    Mutant("jaxacct/accountants/composition.py", "remove.sampled(q, True), add.sampled(q, False)", "remove.sampled(q, True), add.sampled(q, True)", SPENT),
    Mutant("jaxacct/accountants/composition.py", '[_validate.nonnegative_number("sensitivities", mean) for mean in event.sensitivities]', "[float(mean) for mean in event.sensitivities]", "tests/accountants/test_history.py"),
    Mutant("jaxacct/accountants/history.py", "if strategy is None or not scheme.has_prefixes:", "if strategy is None:", SPENT),
    Mutant("jaxacct/accountants/history.py", "event.noise_multiplier / group", "event.noise_multiplier", SPENT),
    Mutant("jaxacct/accountants/pld.py", "if examples > 1:", "if examples > 99:", MIXTURES),
    Mutant("jaxacct/statistics/gaussian_mixtures.py", "mass = waiting + one", "mass = one", MIXTURES),
    Mutant("jaxacct/statistics/gaussian_mixtures.py", "+ tails * error + TINY", "+ TINY", OF_LOSSES),
    Mutant("jaxacct/statistics/gaussian_mixtures.py", "np.exp(np.minimum(losses + logs, 0.0))", "np.exp(np.minimum(logs, 0.0))", MIXTURES),
    Mutant("jaxacct/statistics/loss_curves.py", "np.exp(join - mixed), 0.0)", "q, 0.0)", SPENT),
    Mutant("jaxacct/accountants/event_pairs.py", "math.floor(sensitivity)", "1", SPENT),
    Mutant("jaxacct/accountants/composition.py", "for side in (0, 1)]", "for side in (1,)]", OF_LOSSES),
    Mutant("jaxacct/accountants/composition.py", "_steps(event.event, count * times)", "_steps(event.event, times)", SPENT),
    Mutant("jaxacct/accountants/composition.py", "-np.expm1(-positive) + np.exp", "np.exp", SPENT),
    Mutant("jaxacct/accountants/tradeoff/curves/gaussian.py", "value + _ROUNDING", "value - _ROUNDING", ACCOUNTANTS),
    # Accountants.
    Mutant("jaxacct/accountants/dice_plan.py", "return bound + reserve.delta <= self.delta", "return bound <= self.delta", "tests/train/test_dice.py"),
    Mutant("jaxacct/accountants/revealed_pattern.py", 'return "columns of the strategy matrix overlap" if cross_term(mechanism) else None', "return None", ACCOUNTANTS),
    Mutant("jaxacct/proposals/families/replicas.py", "return math.inf if module is None", "return 0.0 if module is None", "tests/core/test_truncation.py"),
    Mutant(SUMS_OF_X, "min((tilt, rough.tilt_to(end), 1 / end), key=found.log_wrapped)", "rough.tilt_to(end)", ALLOCATION),
    Mutant("jaxacct/calibration/route.py", "if known and self.pilots.clock.left", "if self.pilots.clock.left < 0", GUARDS),
    Mutant(LOSSES, "one.exponents(self.steep, self.step)", "one.exponents(self.tilt / 9, self.step)", OF_LOSSES),
    Mutant(TABLE, "values, left=1.0)", "values, left=0.0)", "tests/accountants/test_history.py"),
    # Independent cuts.
    Mutant("jaxacct/schemes/truncation/independent_truncation.py", "binom.sf(max_batch_size - 1, highest, p)", "binom.sf(max_batch_size, highest, p)", "tests/proposals/test_independent_truncation.py"),
    Mutant("jaxacct/schemes/truncation/independent_truncation.py", "exceeded[where].sum()", "exceeded.sum()", "tests/proposals/test_independent_truncation.py"),
    Mutant("jaxacct/schemes/truncation/independent_truncation.py", "return of_count(2, ratios), of_count(-1, jnp.zeros_like(ratios))", "return of_count(2, ratios), of_count(0, jnp.zeros_like(ratios))", "tests/proposals/test_independent_truncation.py"),
    Mutant("jaxacct/proposals/families/truncated.py", "log_z, log_tilt, lowered = 0.0, 0.0, none", "log_z, log_tilt, lowered = 0.0, 0.0, 0.0", "tests/proposals/test_independent_truncation.py"),
    Mutant("jaxacct/proposals/families/truncated.py", "- log_p - tilt)", "- log_p)", "tests/proposals/test_independent_truncation.py"),
    Mutant("jaxacct/schemes/truncation/independent_truncation.py", '< arrays["chances"][None]', '< arrays["chances"][0]', "tests/proposals/test_independent_truncation.py"),
    Mutant("jaxacct/core/truncation.py", "scipy.stats.binom.sf(max_size - 1,", "scipy.stats.binom.sf(max_size,", "tests/core/test_truncation.py"),
    Mutant("jaxacct/core/truncation.py", "    add = sampled if epsilon >= -math.log(none or 5e-324) else any_step\n", "    add = sampled\n", "tests/core/test_truncation.py"),
    Mutant("jaxacct/core/truncation.py", "return bool(log_normalizer(mechanism) <=", "return bool(log_normalizer(mechanism) / 10 <=", "tests/core/test_truncation.py"),
    Mutant("jaxacct/accountants/revealed_pattern.py", "left = n - 1 - (j[:, None] - 1) * b", "left = n - (j[:, None] - 1) * b", "tests/accountants/test_analytic.py"),
    Mutant("jaxacct/accountants/revealed_pattern.py", "lengths = np.sqrt(np.arange(max_count * k * k + 1))", "lengths = np.sqrt(np.arange(max_count * k * k + 1) / k)", "tests/accountants/test_analytic.py"),
    Mutant("jaxacct/accountants/unamplified.py", "scheme.squared_sensitivity(cross)", "scheme.squared_sensitivity(0.0)", "tests/conformance/test_accountants.py tests/accountants/test_analytic.py tests/strategies/test_non_banded.py"),
    Mutant("jaxacct/strategies/worst_pattern.py", "range(n - 1, b - 1, -1) if rises else range((k - 1) * b, 0, -b)", "range((k - 1) * b, 0, -b)", "tests/strategies/test_worst_pattern.py"),
    Mutant("jaxacct/accountants/dice.py", "later * fed_back**2 + both", "later * fed_back**2", "tests/accountants/test_dice_accountant.py"),
    Mutant("jaxacct/accountants/dice.py", "both * c**2 + 2 * old * f * c", "both * c**2 + 4 * old * f * c", "tests/accountants/test_dice_accountant.py"),
    Mutant("jaxacct/accountants/dice.py", "step[j, j:] =", "step[j, : a + 1 - j] =", "tests/accountants/test_dice_accountant.py"),
    Mutant("jaxacct/accountants/dice.py", " + _log_of_power(step, steps % run)", "", "tests/accountants/test_dice_accountant.py"),
    Mutant("jaxacct/accountants/dice.py", "    return found + 8 * (a + 4)", "    return found - 8 * (a + 4)", "tests/accountants/test_dice_accountant.py"),
    Mutant("jaxacct/accountants/dice.py", "np.interp(between, orders[-2:], moments[-2:])", "moments[-2]", "tests/accountants/test_dice_accountant.py"),
    Mutant("jaxacct/schemes/protocol/batch_sizes.py", "<= overflow / iterations)", "<= overflow)", "tests/schemes/test_schemes.py"),
    # Proposals.
    Mutant("jaxacct/proposals/families/replicas.py", "m * math.log((m - 1) / m) + (1 - m) * epsilon", "math.log((m - 1) / m) + (1 - m) * epsilon", "tests/proposals/test_proposals.py tests/conformance/test_proposals.py"),
    Mutant("jaxacct/proposals/families/replicas.py", "(number - m) * log_f)", "(number + 1 - m) * log_f)", "tests/conformance/test_proposals.py"),
    Mutant("jaxacct/proposals/families/replicas.py", "counts - first, tables", "counts, tables", "tests/conformance/test_proposals.py"),
    # Kernels.
    Mutant("jaxacct/kernels/randomness.py", "os.urandom(8)", "os.urandom(4) * 2", GUARDS),
    Mutant("jaxacct/kernels/randomness.py", "row_low, jnp.float32(0.5))", "jnp.float32(0.5), jnp.float32(0.5))", "tests/kernels/test_randomness.py tests/kernels/test_float32_functions.py"),
    Mutant("jaxacct/kernels/threefry.py", "x = lax.add(x, shaped(keys[(injection + 1) % 3]))", "x = lax.add(x, shaped(keys[injection % 3]))", "tests/kernels/test_randomness.py"),
    Mutant("jaxacct/kernels/table.py", "1 + max(int(lockout.max()), starts - 1)", "int(lockout.max())", TABLES),
    Mutant("jaxacct/kernels/recurrence.py", "(ahead - g) - lost) + lost)", "(ahead - g) - lost))", "tests/likelihood/test_rounding.py tests/kernels/test_recurrence.py"),
    # Schemes: the distribution, the likelihood and the sampler of each.
    Mutant("jaxacct/schemes/b_min_sep.py", "weights[0] = 1.0\n", "weights[0] = self.sampling_probability\n", SCHEMES),
    Mutant("jaxacct/kernels/table.py", "prepend=-1, append=n).max()) - 1", "prepend=-1, append=n).max()) - 2", TABLES),
    Mutant("jaxacct/schemes/users/independent_attribution.py", "self.examples_per_user**2 * self.max_participations", "self.examples_per_user * self.max_participations", f"tests/schemes/test_independent_attribution.py {SCHEMES}"),
    Mutant("jaxacct/schemes/users/independent_attribution.py", "(self.examples_per_user - 1) / 2 * max_overlap", "(self.examples_per_user - 1) / 4 * max_overlap", "tests/schemes/test_independent_attribution.py"),
    # Sampling tables.
    Mutant("jaxacct/schemes/protocol/batches.py", "later[max(left - 1, 0)].append", "later[left].append", TABLES),
    Mutant("jaxacct/schemes/protocol/batches.py", "np.append(table.start, table.never)", "np.append(table.start, 0.0)", TABLES),
    Mutant("jaxacct/kernels/table.py", "step < n, step + lockout[at], n)", "step < n, step + 1, n)", TABLES),
    Mutant("jaxacct/kernels/table.py", " and (phases > 1 or starts == 1)", "", TABLES),
    Mutant("jaxacct/kernels/table.py", "jnp.where(examples[outcome] > 0, step, n)", "step", TABLES),
    Mutant("jaxacct/kernels/exponentials.py", "curve + jnp.uint32(8)", "curve * 0 + jnp.uint32(8)", TABLES),
    Mutant("jaxacct/schemes/replicas/table.py", "release <= again, left & ~left_too", "release > again, left & ~left_too", TABLES),
    Mutant("jaxacct/schemes/replicas/table.py", "f, g = f - counts[mine], g - counts[other]", "f, g = f - counts[mine], g", TABLES),
    Mutant("jaxacct/proposals/base.py", "relative_error, variation = scheme.draw_errors\n", "relative_error, variation = scheme.draw_errors[0], 0.0\n", TABLES),
    Mutant("jaxacct/schemes/table.py", "self.max_outcomes * (of_waits + of_kinds)", "(of_waits + of_kinds)", TABLES),
    Mutant("jaxacct/schemes/table.py", "* max_ratio + offset, 8", "* max_ratio + offset, 4", TABLES),
    Mutant("jaxacct/schemes/table.py", "max(largest, 0.0) + ends), 4", "max(largest, 0.0) + ends), 2", TABLES),
    Mutant("jaxacct/schemes/replicas/table_weights.py", 'return np.einsum("nak,nbl,nab->nkl", one.chance, two.chance, attractions)', 'return np.einsum("nak,nbl,nab->nkl", one.chance, two.chance, attractions**0)', TABLES),
    Mutant("jaxacct/schemes/replicas/table.py", "if not event > 0:", "if False:", TABLES),
    Mutant("jaxacct/schemes/replicas/table_weights.py", "rows.base[part] + 1 + longest", "rows.base[part] + longest", "tests/kernels/test_randomness.py"),
    Mutant("jaxacct/schemes/replicas/table_weights.py", "both.max(where=leaves, initial=0.0)", "0.0", "tests/kernels/test_randomness.py"),
    Mutant(CHECK, "return scheme[_K] if scheme[_K] <= 1 else 0.0", "return min(1.0, scheme[_K])", CHECKER),
    Mutant(CHECK, 'scheme["warm_start"] and scheme[_B] >= n and', 'scheme["warm_start"] and', CHECKER),
    Mutant(CHECK, 'scheme["warm_start"] and scheme[_B] >= n', "scheme[_B] >= n", CHECKER),
    Mutant(CHECK, "2 * columns.gram.shape[1] > n", "n > 0", CHECKER),
    Mutant(CHECK, "math.log1p(math.expm1(claim.epsilon) / chance)", "claim.epsilon", CHECKER),
    Mutant("jaxacct/checker.py", "weight * (1 - keep), False", "weight * (1 - keep), True", "tests/checker/test_checker.py"),
    # Plans and files.
    Mutant("jaxacct/common/files.py", ", parse_constant=_refuse", "", "tests/common/test_files.py tests/core/test_plan.py"),
    Mutant("jaxacct/common/files.py", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB", "tests/common/test_files.py"),
    Mutant("jaxacct/common/records.py", "and not math.isfinite(value)", "and math.isnan(value)", "tests/core/test_plan.py"),
    # Trade-off functions and individual accounting.
    Mutant("jaxacct/accountants/tradeoff/generalized_dpsgd/batch_clipping.py", "min(m, g) ** 2", "min(m, g)", "tests/accountants/tradeoff/test_participation.py"),
    Mutant("jaxacct/accountants/tradeoff/generalized_dpsgd/batch_clipping.py", "full * m * m + rest * rest", "full * m + rest", "tests/accountants/tradeoff/test_participation.py"),
    Mutant("jaxacct/individual/filters.py", "return cls(gdp_mu(epsilon, delta) * _BELOW, **options)", "return cls(2 * gdp_mu(epsilon, delta), **options)", "tests/individual"),
    Mutant("jaxacct/individual/filters.py", "mu = jnp.where(state.active & (mu >= 0), mu, jnp.nan)", "mu = jnp.where(mu >= 0, mu, jnp.nan)", "tests/individual"),
    Mutant("jaxacct/individual/filters.py", "_BELOW = 1 - 2.0**-19", "_BELOW = 1.0", EXTREMES),
    # Extreme arguments.
    Mutant("jaxacct/common/validate.py", "MIN_SCALE, MAX_SCALE = 1e-30, 1e30", "MIN_SCALE, MAX_SCALE = 1e-300, 1e300", EXTREMES),
    Mutant("jaxacct/accountants/tradeoff/curves/gaussian.py", "ratio * (1 - 2.0**-52) - m / 2", "ratio - m / 2", EXTREMES),
    Mutant("jaxacct/accountants/tradeoff/curves/gaussian.py", "* (1 + 2.0**-49)", "", EXTREMES),
    Mutant("jaxacct/accountants/tradeoff/last_iterate/hull.py", "np.logaddexp(log_y[0], ", "max(log_y[0], ", EXTREMES + " " + INTERPOLATION),
    Mutant("jaxacct/accountants/tradeoff/last_iterate/contraction.py", "min(1.0, c + 2.0**-52)", "min(1.0, c - 2.0**-52)", EXTREMES),
    Mutant("jaxacct/accountants/tradeoff/last_iterate/langevin.py", "math.log1p(-stepsize * m)", "math.log(1 - stepsize * m)", EXTREMES),
    Mutant("jaxacct/accountants/tradeoff/last_iterate/noisy_gd.py", "if diameter is None and E == 1 and", "if E == 1 and", EXTREMES),
    Mutant("jaxacct/accountants/tradeoff/generalized_dpsgd/sampled_participation.py", "run.most() >= 2**31", "run.most() >= 2**63", EXTREMES),
    Mutant("jaxacct/accountants/tradeoff/curves/parametric.py", "if abs(total - 1) > 1e-9:", "if total > 1 + 1e-9:", EXTREMES),
    Mutant("jaxacct/accountants/tradeoff/curves/parametric.py", 'arrays.share("lost", self.lost)', "pass", EXTREMES),
    Mutant(LATTICE_OF_X, "kept = max(1, int", "kept = max(0, int", ALLOCATION),
    # One key for two purposes, and allowances for how draws are made.
    Mutant("jaxacct/accountants/tradeoff/curves/composition.py", "Part(part.loss_curve(), times)", "Part(part.loss_curve(), 1)", "tests/accountants/tradeoff/test_curves.py"),
    Mutant("jaxacct/accountants/tradeoff/curves/composition.py", "[0.0, *corners]", "[0.0]", "tests/accountants/tradeoff/test_curves.py"),
    Mutant(INDEPENDENT, "math.expm1(self.examples_per_user * math.log1p(relative))", "relative", "tests/schemes/test_independent_attribution.py"),
    Mutant("jaxacct/schemes/replicas/by_age.py", "rounded_down = 1 - (2 *", "rounded_down = 1 + (2 *", "tests/proposals/test_overlapping_replicas.py"),
    Mutant("jaxacct/kernels/likelihoods/gpu_recurrence.py", "1 << (int(lockout.min()).bit_length() - 1), n)", "n)", "tests/kernels/test_gpu_recurrence.py"),
    Mutant("jaxacct/strategies/base.py", "if strategy.iterations != scheme.iterations:", "if strategy.iterations < scheme.iterations:", FINITE),
    Mutant("jaxacct/strategies/base.py", "if strategy.iterations != scheme.iterations:", "if strategy.iterations > scheme.iterations:", FINITE),
    Mutant("jaxacct/schemes/protocol/batch_sizes.py", "times = 1.0 if scheme.others_are_independent else", "times = 1.0 if True else", SCHEMES),
    Mutant("jaxacct/schemes/users/multi_attribution.py", "others_are_independent = False", "others_are_independent = True", SCHEMES),
    Mutant("jaxacct/schemes/truncation/truncated_b_min_sep.py", "others_are_independent = False", "others_are_independent = True", SCHEMES),
    Mutant("jaxacct/schemes/protocol/scheme.py", "holds_for_shared_examples = False", "holds_for_shared_examples = True", SCHEMES),
    Mutant("jaxacct/schemes/protocol/scheme.py", "examples_overlap = False", "examples_overlap = True", SCHEMES),
    Mutant("jaxacct/individual/fourier.py", "self._deltas_at_0 <= delta", "self._deltas_at_0 <= 2 * delta", "tests/individual/test_accountants.py"),
    Mutant("jaxacct/individual/fourier.py", "is_similar = tilts[row] == tilts[first] and epsilons[row] <=", "is_similar = True or epsilons[row] <=", "tests/individual/test_accountants.py"),
    # Training.
    Mutant("train/clipping/per_example.py", "counted = finite & (", "counted = (", CLIPPING),
    Mutant("train/clipping/per_example.py", "stored_rows(kept, where_row(kept, counts), are_short)", "kept & are_short(counts), where_row(kept & are_short(counts), counts)", CANCELLING),
    Mutant("train/procedures/stored.py", "lax.while_loop(lambda state: ~is_sound(state), mend, values)", "lax.cond(is_sound(values), lambda: values, lambda: mend(values))", CANCELLING),
    Mutant("train/clipping/per_example.py", "where_row(kept, jax.vmap(also)(gradients))", "jax.vmap(also)(gradients)", "tests/train/test_dice.py"),
    Mutant("train/procedures/dice.py", "self.automatic, counted=mask", "self.automatic, counted=True", "tests/train/test_dice.py"),
    Mutant("train/procedures/dice.py", "> 2.0**46:", "> 2.0**60:", DICE),
    Mutant("train/procedures/dice.py", "limit, nothing = c2 * units * (1 - room)", "limit, nothing = c2 * units", DICE),
    Mutant("train/procedures/dice.py", "_scaled(jax.tree.map(kept, error, raw, v), self.clip_norm * _MAX_RESIDUAL)", "jax.tree.map(kept, error, raw, v)", DICE),
    Mutant("train/procedures/dice.py", "jnp.round(leaf / self.raw_unit(rows))", "leaf / self.raw_unit(rows)", DICE),
    Mutant("train/procedures/dice.py", "math.ceil(math.log2(rows)) - 52", "-52", DICE),
    Mutant("train/procedures/dice.py", "bounded = _scaled(tree, self.clip_norm * _MAX_RAW)", "bounded = _scaled(tree, np.inf)", DICE),
    Mutant("train/procedures/dice.py", "_MAX_CLIP_NORM = 2.0**40, 2.0**60", "_MAX_CLIP_NORM = 2.0**40, 2.0**90", DICE),
    Mutant("train/clipping/sums.py", "return 2 ** (size.bit_length() - 1)", "return size", "tests/train/test_adjacency.py"),
    Mutant("train/clipping/per_example.py", "jnp.trunc(", "jnp.round(", f"{CLIPPING} tests/train/clipping/test_released_numbers.py"),
    Mutant("train/clipping/per_example.py", "scale = max_norm / (norm + 0.01)", "scale = max_norm / norm", CLIPPING),
    Mutant("train/clipping/per_example.py", "<= 4.0**grid.bits", "<= 8.0**grid.bits", CANCELLING),
    # Clipping without gradients of examples.
    Mutant("train/clipping/ghost.py", "(whole - rounding) / (1 + errors)", "whole / (1 + errors)", GHOST),
    Mutant("train/clipping/ghost.py", "is False:", "is not True and hasattr(loss, 'alone'):", "tests/train/clipping/test_automatic.py"),
    Mutant("train/optimizers.py", "may_alias=False", "may_alias=True", "tests/train/test_loop.py"),
    Mutant("train/noise/normals.py", "words = jnp.array(given, jnp.uint32)", "words = jnp.asarray(given, jnp.uint32)", KEYS),
    Mutant("train/procedures/step.py", "given = (checked, *given[1:])", "assert checked", "tests/train/clipping/test_automatic.py"),
    Mutant("train/clipping/ghost.py", "errors = 2 * batch *", "errors = batch *", GHOST),
    Mutant("train/clipping/ghost.py", "depth = pieces.micro * max(", "depth = max(", GHOST),
    Mutant("train/clipping/ghost.py", "square + _SHARE**2 * most", "square", GHOST),
    Mutant("train/clipping/ghost.py", "keep = finite & jnp", "keep = real & jnp", GHOST),
    Mutant("train/clipping/ghost.py", "jnp.where(real & keep, weight, 0.0)", "jnp.where(keep, weight, 0.0)", GHOST),
    Mutant("train/clipping/ghost.py", "stored_rows(finite, arrays, _finite_rows)", "finite & _finite_rows(arrays), jax.tree.map(lambda a: jnp.where(jnp.isfinite(a), a, 0.0), arrays)", CANCELLING),
    Mutant("train/clipping/parts.py", "jnp.where(jnp.abs(array) < _LEAST, 0.0, array)", "array", GHOST),
    Mutant("train/clipping/parts.py", "at[at].add(values))(first, right)", "at[at].set(values))(first, right)", "tests/train/clipping/test_lookups.py"),
    Mutant("train/clipping/ghost.py", "target / (bound + 0.01)", "target / bound", GHOST),
    # Rows over devices.
    Mutant("train/clipping/sums.py", "leaf if i in total.added else over.added(i, leaf)", "leaf", SHARDED),
    Mutant("train/clipping/grid.py", "else over.all(fits)", "else fits", SHARDED),
    Mutant("train/procedures/by_device.py", "axis_index(axes) * part[at]", "axis_index(axes) * 0", SHARDED),
    Mutant("train/procedures/by_device.py", "if automatic(mesh) != automatic(given.mesh):", "if False:", SHARDED),
    Mutant("train/noise/pieces.py", "number % max(1, parts) * self.shape[axis]", "0", PIECES),
    Mutant("train/noise/pieces.py", "            number = number // max(1, parts)\n", "", PIECES),
    Mutant("train/noise/recursion.py", "group.among(arrays, number)", "group.among(arrays, 0)", PIECES),
    Mutant("train/noise/recursion.py", "at = slot, number, np.int32(0)", "at = slot, number * 0, np.int32(0)", PIECES),
    Mutant("train/noise/redrawn.py", "group.among(arrays, number)", "group.among(arrays, 0)", PIECES),
    Mutant("train/procedures/by_device.py", "np.shape(leaf)[at] % number", "False", SHARDED),
    Mutant("train/noise/normals.py", "if before:", "if False:", SHARDED),
    Mutant("train/procedures/step.py", "specs=of_params, **followed)", "**followed)", SHARDED),
    Mutant("train/procedures/by_device.py", "jnp.round(array.astype(jnp.float64) / self.unit) * self.unit", "jnp.round(array.astype(jnp.float64) * self.unit)", SHARDED),
    Mutant("train/procedures/by_device.py", "jnp.round(array.astype(jnp.float64) / self.unit) * self.unit", "array.astype(jnp.float64)", SHARDED),
    Mutant("train/clipping/ghost.py", " * (1 + roundings * grid.device_unit(batch))", "", GHOST),
    Mutant("train/clipping/ghost.py", "clipping.mesh.size * pieces.number", "clipping.mesh.size", GHOST),
    Mutant("train/clipping/grid.py", "(batch - 1).bit_length() - 53)", "(batch - 1).bit_length() - 60)", GHOST),
    Mutant("train/clipping/parts.py", "array[:, number][:, None]", "array[:, 0][:, None]", NESTED),
    Mutant("train/clipping/parts.py", "~(weights[0] < 0)", "weights[0] > 0", NESTED),
    Mutant("train/clipping/parts.py", "parts[:, at].astype", "parts[:, 0].astype", NESTED),
    Mutant("train/clipping/sums.py", "if self.skip_padding and self.mesh is not None:", "if False:", GHOST),
    Mutant("train/clipping/ghost.py", "depth, alone, roundings)", "depth, alone)", GHOST),
    Mutant("train/procedures/by_device.py", "    if mesh is None:\n\n", "    if True:\n\n", SHARDED),
    Mutant("train/procedures/by_device.py", "in_specs=(same, sharded, along)", "in_specs=(same, sharded, same)", SHARDED),
    Mutant("train/procedures/by_device.py", "mesh=mesh, check_vma=False, **laid_out", "mesh=mesh, **laid_out", SHARDED),
    Mutant("train/procedures/step.py", "refuse_several_devices(self._mesh, state=after)", "refuse_several_devices(self._mesh)", SHARDED),
    Mutant("train/procedures/by_device.py", "        if number > 1:", "        if False:", SHARDED),
    Mutant("train/procedures/by_device.py", "if size % mesh.size:", "if False:", SHARDED),
    Mutant("train/clipping/per_example.py", "pieces = Microbatches(own,", "pieces = Microbatches(2 * own,", SHARDED),
    Mutant("train/procedures/step.py", "grid=private.grid, mesh=mesh, **options", "grid=private.grid, **options", SHARDED),
    Mutant("train/clipping/equations.py", " or not _is_real(*eqn.invars, *eqn.outvars):", ":", GHOST),
    Mutant("train/clipping/parts.py", 'check_real("a part of a gradient", array)', "pass", GHOST),
    Mutant("train/clipping/per_example.py", 'check_real("gradient", gradient)', "pass", GHOST),
    Mutant("train/clipping/sums.py", 'check_real("params", params)', "pass", GHOST),
    Mutant("train/clipping/uses.py", "if len(users) != 1:", "if not users:", GHOST),
    Mutant("train/clipping/equations.py", "jnp.moveaxis(split, (-1, -2), (1, 2))", "jnp.moveaxis(split, (-1, -2), (2, 1))", GHOST),
    Mutant("train/clipping/equations.py", "Outer(*(a.swapaxes(0, 1).reshape(a.shape[1], -1, a.shape[3]) for a in each))", "Outer(*(array.reshape(-1, *array.shape[2:]) for array in each))", "tests/train/clipping/test_nested.py"),
    Mutant("train/noise/redrawn.py", "jnp.maximum(state.step - age, 0)", "jnp.maximum(state.step - age - 1, 0)", "tests/train/noise/test_redrawn.py"),
    Mutant("train/noise/redrawn.py", "jnp.where(age <= state.step, ", "jnp.where(age >= 0, ", "tests/train/noise/test_redrawn.py"),
    Mutant(CORRELATED, "            clipping=clipping.clipping,\n", "", "tests/train/clipping/test_automatic.py"),
    Mutant("train/noise/normals.py", "chacha.blocks(key, (counter, step, 0, 0))", "chacha.blocks(key, (counter, 0, 0, 0))", f"{NOISE} {RELEASED}"),
    Mutant(GPU_WORDS, "(numbers.at[:]), step, np.uint32(0)", "(numbers.at[:]), key[0], np.uint32(0)", GPU_TESTS),
    Mutant(GPU_WORDS, "return np.array_equal(", "return True or np.array_equal(", GPU_TESTS),
    Mutant("train/noise/chacha.py", "(c, d, b, 7)", "(c, d, b, 8)", NOISE),
    Mutant("train/noise/normals.py", ".transpose(2, 1, 0)", ".transpose(2, 0, 1)", GPU_TESTS),
    Mutant("train/noise/normals.py", "(sine_error) < 1e-13", "(sine_error) < 1e-6", KEYS),
    Mutant(PROGRAMS, '"xla_cpu_multi_thread_eigen": False', '"xla_cpu_multi_thread_eigen": True', COMPILED),
    Mutant("train/noise/normals.py", "((y << 53) | ((y << 32) >> 11))", "((y << 32) >> 11)", NOISE),
    Mutant("train/noise/normals.py", "2 * _PAIRS * -(-size // (2 * _PAIRS))", "size", NOISE),
    Mutant("train/clipping/ghost.py", " + _spent_in_float32(batch, alone)  #", "  #", GHOST),
    Mutant("train/clipping/ghost.py", "_IN_FLOAT32) if alone else 0.0", "_ROUNDING) if alone else 0.0", GHOST),
    Mutant("train/clipping/parts.py", "left.reshape(len(left), -1) * (1 / jnp.where(length > 0, length, 1.0))", "left.reshape(len(left), -1) * length", GHOST),
    Mutant("train/clipping/ghost.py", "min(pieces.micro, ROWS_IN_FLOAT32) + pieces", "1 + pieces", GHOST),
    Mutant("train/clipping/parts.py", "range(0, len(arrays[0]), ROWS_IN_FLOAT32)", "range(0, 1)", GHOST),
    Mutant("train/clipping/parts.py", "self.left.shape[1:3] == (1, 1)", "self.left.shape[1] == 1", GHOST),
    Mutant("train/optimizers.py", "after.step, end)", "after.step, after.step)", NOISE),
    Mutant("train/noise/recursion.py", "if z.dtype != np.float64", "if False", NOISE),
    Mutant("train/noise/recursion.py", "range(groups * _AT_A_TIME, len(ring))", "range(len(ring))", NOISE),
    Mutant("train/clipping/grid.py", "(jnp.abs(leaf) <= _MAX_SUM).all()", "True", NOISE),
    Mutant("train/clipping/grid.py", "jnp.int32) == len(conditions)", "jnp.int32) >= 0", NOISE),
    Mutant("train/clipping/grid.py", "jnp.where(fits, leaf, jnp.nan)", "jnp.where(fits, leaf, 0.0)", NOISE),
    Mutant("train/optimizers.py", "updates.is_finite", "jnp.asarray(True)", NOISE),
    Mutant("train/noise/normals.py", "_negated(sine, quadrant), ", "sine, ", f"{NOISE} {RELEASED}"),
    Mutant("train/noise/recursion.py", "ages = 1 + (place - 1 - ", "ages = 1 + (place - ", NOISE),
    Mutant("train/noise/normals.py", "nonce = np.array([0, step, 0, 0]", "nonce = np.array([0, 0, 0, 0]", NOISE),
    Mutant("train/clipping/joined.py", "jnp.where(condition, function(*each), otherwise)", "function(*each)", NOISE),
    Mutant("train/clipping/joined.py", "jnp.full_like(values[0], otherwise)", "jnp.zeros_like(values[0])", NOISE),
    Mutant("train/clipping/joined.py", "begins or self.begins, {}", "self.begins[::-1], {}", NOISE),
    Mutant("train/noise/recursion.py", "return made[-1][None]", "return made[0][None]", "tests/train/noise/test_redrawn.py"),
    Mutant("train/optimizers.py", "covered = (state.step < end) & sound", "covered = sound", f"{NOISE} {LOOP}"),
    Mutant("train/optimizers.py", "return self.mechanism.noise_multiplier * 2.0**self.grid.bits", "return 0.99 * self.mechanism.noise_multiplier * 2.0**self.grid.bits", f"{NOISE} {RELEASED}"),
    Mutant("train/batches/sampler.py", "members = members[choose(generator, len(members), self.max_batch_size)]", "members = members[: self.max_batch_size]", SAMPLER),
    Mutant("train/training.py", "    if not plan.certified:\n", "    if False:\n", ARGUMENTS),
    Mutant(CORRELATED, "    if not verdict.certified:\n", "    if False:\n", f"{GUARDS} {ARGUMENTS}"),
    Mutant("train/procedures/protocol.py", "if steps > covered:", "if steps > 2 * covered:", f"{ARGUMENTS} {BATCHES}"),
    Mutant(FOLDER, 'if kept["data"] != keyed(kept["sampler_key"], data):', "if False:", f"{LOOP} {BOUND}"),
    Mutant(FOLDER, "(self.folder / name).chmod(0o700)", "pass", LOOP),
    # What a run is bound to; keys of runs; what a folder shows.
    Mutant(RUN, "if self.before_first and not verified:", "if self.before_first and source.state.step == 0:", BOUND),
    Mutant(RUN, "folder.note(verified=True)", "pass", BOUND),
    Mutant(RUN, '            "steps": self.steps,\n', "", LOOP),
    Mutant("train/run/machine.py", '"flags": _flags(),', "", BOUND),
    Mutant("train/run/machine.py", '"jax_threefry_partitionable", ', "", BOUND),
    Mutant("train/run/machine.py", " NPROC PJRT_NPROC ONEDNN_ DNNL_", "", BOUND),
    Mutant("train/run/machine.py", "        value = Path(value).read_text()\n", "        pass\n", BOUND),
    Mutant("train/run/machine.py", "max(cores, jax.local_device_count())", "cores", BOUND),
    Mutant("train/run/machine.py", "given[-1:] ==", "given[:1] ==", BOUND),
    Mutant("train/run/machine.py", "| {jax.default_backend()}", "", BOUND),
    Mutant("train/run/machine.py", "else os.urandom(16).hex()", 'else "gpu"', BOUND),
    Mutant("train/run/folder.py", 'same_process = "process" not in other', "same_process = True", BOUND),
    Mutant("train/run/folder.py", '"program", "microbatch_size", "process", ', '"program", "microbatch_size", ', BOUND),
    Mutant(CORRELATED, "not machine.repeats((loss, params))", "False", "tests/train/noise/test_redrawn.py"),
    Mutant("train/run/loop.py", "folder.moves_after(drawn.step), like)", "(), like)", BOUND),
    Mutant("train/run/folder.py", 'if left["until"] >= step]', 'if left["until"] > step]', BOUND),
    Mutant("train/run/traces.py", '    fingerprints.refuse_callbacks("optimizer", update)\n', "", BOUND),
    Mutant("train/run/machine.py", '"processor": _processor(),', "", BOUND),
    Mutant("train/run/machine.py", ", {_num_threads()} threads", "", BOUND),
    Mutant("train/run/machine.py", "repr(sorted(fields.items()))", "model", BOUND),
    Mutant("train/noise/normals.py", "        given = fresh_key()\n", "        given = np.zeros(8, np.uint32)\n", KEYS),
    Mutant("train/noise/normals.py", "[*jax.tree.leaves(params), jnp.zeros(())]", "jax.tree.leaves(params)", KEYS),
    Mutant("train/noise/normals.py", "[*jax.tree.leaves(params), jnp.zeros(())]", "[jnp.zeros(())]", KEYS),
    Mutant("train/optimizers.py", "Grid.of(mechanism, clip_norm), expected, key, noise_memory)", "Grid.of(mechanism, clip_norm), expected, noise.fresh_key() if key is None else key)", KEYS),
    Mutant("train/procedures/dice.py", "    released = DiceRule(**rule)\n", "    released, key = DiceRule(**rule), key_of_run(key, ())\n", KEYS),
    Mutant(FOLDER, "self._manager.latest_step() is None and (shown := self._shown())", "False", KEYS),
    Mutant(FOLDER, '(self.folder / "model").exists() or', "", KEYS),
    Mutant(FOLDER, ' or (self.folder / "result.json").exists()', "", KEYS),
    Mutant(FOLDER, 'for name in ("checkpoints", "private"):', 'for name in ("checkpoints",):', f"{KEYS} {LOOP}"),
    Mutant(FOLDER, "checksum != _checksum(kept, state)", "False", INTERRUPTIONS),
    Mutant(FOLDER, " for at, line in _lines(path) if at <= step", " for at, line in _lines(path)", INTERRUPTIONS),
    # Where a plan's cover ends.
    Mutant(CORRELATED, " or plan.mechanism.scheme.batch_size_cap is not None", "", LIMITS),
    Mutant(RUN, '                folder.save(kept, drawn)\n            if folder and stop and done < steps:\n                raise KeyboardInterrupt\n            if folder and keep and done < steps:\n                self._log(folder, done, kept)\n', '                if done < steps:\n                    self._log(folder, done, kept)\n                folder.save(kept, drawn)\n            if folder and stop and done < steps:\n                raise KeyboardInterrupt\n', LIMITS),
    Mutant(RUN, "not folder.has_logged(source.state.step)", "False", LIMITS),
    Mutant("train/procedures/dice.py", "covered = state.noise.count < plan.iterations", "covered = True", LIMITS),
    Mutant("train/procedures/dice.py", "covered = state.noise.count < plan", "covered = state.noise.count <= plan", LIMITS),
    Mutant("train/procedures/dice.py", "jnp.trunc(e.astype", "jnp.round(e.astype", LIMITS),
    Mutant(FOLLOWED, "        or plan.truncation_delta is not None\n", "", LIMITS),
    Mutant("jaxacct/individual/accountants.py", "return self.grid.sigmas / (1 + NORM_SLACK)", "return self.grid.sigmas", LIMITS),
    # Batch clipping, last iterates, mixtures by draws.
    Mutant("train/procedures/convex.py", "            only_last=True,\n", "", CONVEX),
    Mutant("train/procedures/convex.py", "jnp.round(weights / fine) * fine", "weights", CONVEX),
    Mutant("train/procedures/convex.py", "loss.smoothness <= plan.smoothness", "loss.smoothness <= 2 * plan.smoothness", CONVEX),
    Mutant("train/procedures/convex.py", "if steps not in (None, plan.steps):", "if False:", CONVEX),
    Mutant("train/procedures/convex.py", "state.step + jnp.uint32(1)", "state.step", CONVEX),
    Mutant("train/procedures/batch_clipping.py", "2 * plan.sigma)", "plan.sigma)", BATCHES),
    Mutant("train/batches/sampler.py", "if drawn is not None and drawn != self.state:", "if False:", BATCHES),
    Mutant("train/procedures/protocol.py", "if value is not each.default and", "if False and", f"{BATCHES} {CONVEX}"),
    Mutant(SOURCES, "            _same(_row(found, at), self.source[int(indices[at])], _OF_A_BATCH)\n", "            pass\n", ROWS),
    Mutant(SOURCES, "        order = self._random.permutation(len(indices))\n", "        order = np.arange(len(indices))\n", ROWS),
    Mutant(SOURCES, "probe = int(self._random.choice(list(self._probes)))", "probe = 0", ROWS),
    Mutant(SOURCES, "for at in 2 * sorted(again) if first", "for at in sorted(again) if first", ROWS),
    Mutant(SOURCES, "self._digests.get(place, digest) != digest", "False", ROWS),
    Mutant(SOURCES, "not 0 <= indices.min() <=", "not", ROWS),
    Mutant(RUN, "waiting[:ended]], waiting[ended:]", "waiting[:ended]], []", BOUND),
    Mutant(SOURCES, "{0, len(indices) - 1, *order", "{*order", ROWS),
    Mutant(SOURCES, "lambda leaf: padded(leaf, size), self._gather", "np.asarray, self._gather", ROWS),
    Mutant(SOURCES, '                _same(self._probes[int(place)], again, f"row {place}")\n', "                pass\n", ROWS),
    Mutant("train/batches/fingerprints.py", "{how} {length} {version}", "{how} {length}", ROWS),
    Mutant("train/audit/bounds.py", "* float(mode_probability.mean())", "* 0.9 * float(mode_probability.mean())", AUDIT_BOUNDS),
    Mutant("train/audit/bounds.py", "(1 - confidence) / len(SHARES), []", "(1 - confidence), []", AUDIT_BOUNDS),
    Mutant("train/audit/bounds.py", "np.argsort(-np.abs(scores)", "np.argsort(-scores", AUDIT_BOUNDS),
    Mutant("train/audit/bounds.py", "right, guesses - right + 1, q", "right, guesses - right, q", AUDIT_BOUNDS),
    Mutant("train/audit/bounds.py", "trials - hits + 1, level", "trials - hits, level", AUDIT_BOUNDS),
    Mutant("train/audit/command.py", "SUSPECTED * mechanism.noise", "mechanism.noise", AUDIT),
    Mutant("train/noise/recursion.py", "jnp.floor(fresh.astype(jnp.float64) / FRACTION + earlier + 0.5)", "jnp.round(fresh.astype(jnp.float64) / FRACTION + earlier)", "tests/train/clipping/test_released_numbers.py"),
    Mutant("train/audit/canaries.py", "= indices[self._known[indices]]", "= indices", AUDIT),
    Mutant("train/audit/canaries.py", "loss.at(step)", "loss.at(0)", AUDIT),
    Mutant("train/audit/canaries.py", "norm + 0.01", "norm + 1", AUDIT),
    Mutant("train/audit/canaries.py", "- others.sums.T / self.clip_norm", "", AUDIT),
    Mutant("train/audit/canaries.py", "lfilter(column, [1.0],", "lfilter([1.0], column,", AUDIT),
    Mutant("train/audit/canaries.py", "LENGTH * clip_norm * flat", "flat", AUDIT),
    Mutant("train/audit/command.py", "np.where(inside, coordinates, SILENT)", "np.where(inside, coordinates, REAL)", AUDIT),
    Mutant(FOLDER, "if self._shown() > reached:", "if False:", BOUND),
    Mutant(FOLDER, "if self._committed.last < shown or", "if", TWICE),
    Mutant(FOLDER, 'steps = [int(self._kept().get("shown", 0)), ', "steps = [0, ", TWICE),
    Mutant(FOLDER, 'if other.pop("steps", reached) < reached:', 'if other.pop("steps", 0) < 0:', LOOP),
    Mutant(RUN, "                folder.commit(coming)\n", "                pass\n", TWICE),
    Mutant(RUN, "(drawn.digest,) if given else ()", "()", TWICE),
    Mutant("train/batches/given.py", "elif there != digest:", "elif False:", TWICE),
    Mutant("train/run/traces.py", "value_and_grad(loss.at(0))", "value_and_grad(lambda p, e: 0.0 * sum(leaf.sum() for leaf in jax.tree.leaves(p)))", TWICE),
    Mutant("train/procedures/step.py", "        sampled - number,", "        mask.size - number,", LOOP),
    Mutant("train/run/interrupts.py", "        asked.set()\n", "", LOOP),
    Mutant(CORRELATED, "expected_batch_sizes(graph, mechanism.scheme).mean()", "expected", GRAPHS),
    Mutant(FOLLOWED, "    if mechanism.strategy.noise_copies:", "    if False:", FOLLOWED_TESTS),
    Mutant("train/individual/accounting.py", "best.budget, self.readmit)", "best.budget)", FOLLOWED_TESTS),
    Mutant("train/run/folder.py", "(not elastic or not moved or set(other) - _ELASTIC)", "(not elastic or set(other) - _ELASTIC)", BOUND),
    Mutant("train/run/folder.py", "np.allclose(before, now, 1e-9, 1e-9)", "True", BOUND),
    Mutant("train/batches/fingerprints.py", "np.linspace(0, length - 1,", "np.linspace(0, length / 2,", ROWS),
    Mutant("train/batches/fingerprints.py", "        mapping.madvise(mmap.MADV_RANDOM)\n", "        pass\n", ROWS),
    Mutant("train/batches/prefetch.py", "range(depth + 1)", "range(depth + 9)", PREFETCHED),
    Mutant("train/batches/prefetch.py", "jax.enable_x64(wide)", "jax.enable_x64(False)", PREFETCHED),
    Mutant("jaxacct/accountants/tradeoff/generalized_dpsgd/participation.py", "if kept + others >= min_kept", "if kept >= min_kept", PARTICIPATION_TESTS),
    Mutant("jaxacct/accountants/tradeoff/last_iterate/losses.py", '"grad_sensitivity": 2 * longest', '"grad_sensitivity": longest', CONVEX),
    Mutant("jaxacct/accountants/tradeoff/last_iterate/losses.py", "norm**2 / 2\n", "norm**2 / 4\n", CONVEX),
    # The n x n mechanism.
    Mutant("jaxacct/strategies/finite_toeplitz.py", "return self.square_norms(self.iterations) / 2", "return np.full(self.iterations, 0.5)", FINITE),
    Mutant("jaxacct/strategies/finite_toeplitz.py", "block)[: -self.bands - 1 : -1]", "block)[-2 : -self.bands - 2 : -1]", FINITE),
    Mutant("jaxacct/strategies/finite_toeplitz.py", "if bands <= n <= MAX_STEPS_PER_BAND", "if n <= MAX_STEPS_PER_BAND", FINITE),
    Mutant("jaxacct/schemes/replicas/table_weights.py", "end = np.minimum(n - 1 - np.arange(n), len(logs) - 1)", "end = np.minimum(n - np.arange(n), len(logs) - 1)", FINITE),
    Mutant("jaxacct/schemes/replicas/table_weights.py", 'return np.einsum("nak,nl,naa->nkl", one.chance, table.leaves, attractions)', 'return np.einsum("nak,nbl,nab->nkl", one.chance, one.chance, attractions)', "tests/proposals/test_independent_truncation.py"),
    Mutant("jaxacct/calibration/choice.py", '"epsilon": plan.epsilon', '"epsilon": choice.epsilon', PLAN),
    Mutant("jaxacct/recommendation/search.py", "scheme, self.numbers.workload, self.estimates.mu)", "scheme, PREFIX_SUMS, self.estimates.mu)", CHOOSING),
    Mutant("jaxacct/recommendation/grid.py", "min(most, math.floor(self.cycle), _validate", "min(most, math.floor(self.cycle / 2), _validate", CHOOSING),
    Mutant("jaxacct/recommendation/result.py", "seconds=clock.left)", "seconds=seconds)", "tests/recommendation/test_loaders.py"),
    Mutant("jaxacct/recommendation/result.py", "< MIN_TIME * seconds", "< 0", "tests/recommendation/test_loaders.py"),
    Mutant("jaxacct/recommendation/result.py", "self.scheme.iterations, self.workload)", "self.scheme.iterations, PREFIX_SUMS)", CHOOSING),
    Mutant("jaxacct/recommendation/search.py", "like is None and scheme.sums.fixed_count:", "like is None and scheme.sums.phases:", CHOOSING),
    Mutant("jaxacct/calibration/targets.py", 'return cls(0.0, validate.open_probability("advantage", advantage))', 'return cls(0.1, validate.open_probability("advantage", advantage))', ADVANTAGE),
    Mutant("jaxacct/report/html.py", "upper + added]), implied)", "upper]), implied)", REPORT),
    Mutant("jaxacct/estimates/estimate.py", "interval.Drawn(chosen, draw(chosen), composed)", "interval.Drawn(chosen, draw(chosen))", REPORT),
    Mutant("jaxacct/proposals/families/pair_weights.py", "factor + side * (m + 40)", "factor + (m + 40)", LOWER_ENDS),
    Mutant("tests/benchmarks/paper/cells.py", "bands << k for k", "(bands << k) + 1 for k", PAPER),
    Mutant("tests/benchmarks/paper/statements.py", "return self.error / self.others[method]", "return self.others[method] / self.error", PAPER),
    Mutant("tests/benchmarks/paper/cells.py", "*longer[:1], ", "", PAPER),
    Mutant("tests/benchmarks/paper/cells.py", "*ranked[:2],", "*ranked[-2:],", PAPER),
    Mutant("jaxacct/report/risk.py", "return true_positive_rate(epsilons, deltas, baseline, ", "return true_positive_rate(epsilons, deltas, np.asarray(baseline) / 4, ", REPORT),
    Mutant("jaxacct/strategies/workload.py", "if self.last and t < n - 1:", "if False:", "tests/strategies/test_workloads.py"),
    Mutant("jaxacct/strategies/workload.py", "self.rate * step / self.warmup", "self.rate * (step + 1) / self.warmup", "tests/strategies/test_workloads.py"),
    # Buffered matrices and their running sums.
    Mutant("jaxacct/strategies/buffered_toeplitz.py", "np.diag(decays) - np.outer(roots, roots)", "np.diag(decays) + np.outer(roots, roots)", BUFFERED),
    Mutant("jaxacct/strategies/buffered_toeplitz.py", "if weights.sum() > 1 + 1e-12:", "if weights.sum() > 2:", BUFFERED),
    Mutant("jaxacct/strategies/buffered_toeplitz.py", "        return workload.error(inverse) / float(self.array[0]) ** 2\n", "        return workload.error(inverse)\n", BUFFERED),
    Mutant("jaxacct/strategies/buffered_toeplitz.py", "        sums[times:] -= sums[:-times].copy()\n", "        pass\n", BUFFERED),
    Mutant("jaxacct/strategies/buffered_toeplitz.py", "np.append(1.0, _powers(decays, n) @ weights)", "np.append(1.0, _powers(decays, n) @ (weights * decays))", BUFFERED),
    Mutant("jaxacct/strategies/base.py", "        return 2 * len(self.weights)\n", "        return len(self.weights)\n", NOISE),
    Mutant("jaxacct/strategies/buffered_toeplitz.py", "    return BufferedRecursion(first, weights, decays,", "    return BufferedRecursion(1.0, weights, decays,", NOISE),
    Mutant("train/noise/recursion.py", "_FINE = 2.0**-31", "_FINE = 1.0", NOISE),
    Mutant("train/noise/recursion.py", "decays[j] * summed(parts, j) +", "decays[0] * summed(parts, j) +", NOISE),
    Mutant("train/noise/recursion.py", "units = 2.0 ** np.maximum(0, np.ceil(np.log2(1.001 * levels * LARGEST * reach / 2**30)))", "units = np.ones(len(decays))", NOISE),
    Mutant("train/noise/recursion.py", "        return self.recursion.noise_reach\n", "        return 1.0\n", NOISE),
    # Matrices for the noise that is needed with sampling.
    Mutant("jaxacct/strategies/amplified.py", "np.where(np.arange(lags.size) > 0, 2.0, 1.0)", "np.ones(lags.size)", AMPLIFIED),
    Mutant("jaxacct/strategies/amplified.py", "    return math.log(repeats) - log_rate,", "    return -log_rate,", AMPLIFIED),
    Mutant("jaxacct/recommendation/matrices.py", "        return nearest**2 * unit_error(strategy, n, workload), strategy\n", "        return -(nearest**2) * unit_error(strategy, n, workload), strategy\n", CHOOSING),
    # Balls-in-bins between two bounds.
    Mutant(LATTICE_OF_X, "np.minimum(mean + slack, high[:-1])", "high[1:]", ALLOCATION),
    Mutant(SUMS_OF_X, "running(masses) - running", "running(masses) - 1.01 * running", REDRAWN),
    Mutant(SUMS_OF_X, "weighted - y * tail", "weighted - 1.001 * np.abs(y) * tail", REDRAWN),
    Mutant(SUMS_OF_X, "one.number - (i == place)", "0 * one.number", REDRAWN),
    Mutant(SUMS_OF_X, "(np.maximum(0.0, means @ nodes) + errors)", "errors", REDRAWN),
    Mutant(SHUFFLED, "(n - 1) * math.exp(-others) / 2 * rest", "math.exp(-others) / 2 * rest", SHUFFLES),
    Mutant(SHUFFLED, "for distance in (1.0, 2.0)", "for distance in (1.0, 1.0)", SHUFFLES),
    Mutant(SHUFFLED, "binom(n - 1, probability)", "binom(n - 1, 2 * probability)", SHUFFLES),
    Mutant(SHUFFLED, "(moved + (n - 1)", "((n - 1)", SHUFFLES),
    Mutant("jaxacct/schemes/balanced_min_sep.py", "(longer, size + 1)]", "(longer, size + 2)]", REDRAWN),
    Mutant("jaxacct/schemes/balanced_min_sep.py", "math.floor(steps / kept - steps)", "2 * math.ceil(steps / kept - steps)", REDRAWN),
    Mutant("jaxacct/accountants/allocation/redrawn_bins.py", "unused), number) for number", "unused), number - 1) for number", REDRAWN),
    Mutant(CURVES, "_on_the_line(*falling), _on_the_line(*falling[::-1])", "_on_the_line(*falling), _on_the_line(*falling)", PEERS),
    Mutant(SUMS_OF_X, "dist.max_weighted - less * dist.min_beyond", "dist.max_weighted - thresholds", ALLOCATION),
    Mutant(SUMS_OF_X, "(one, other.number - (i == j))", "(one, other.number)", ALLOCATION),
    Mutant(SUMS_OF_X, "factor - mixture.unused - 2.0**-46", "factor - 2.0**-46", ALLOCATION),
    Mutant(SUMS_OF_X, "@ logs - logs", "@ logs - 2 * logs", ALLOCATION),
    Mutant("jaxacct/accountants/allocation/random_allocation.py", "size = max(1, len(turns) // bands)", "size = -(-len(turns) // bands)", ALLOCATION),
    Mutant("jaxacct/accountants/allocation/random_allocation.py", "-(-numbers.cumsum() // distance)", "numbers.cumsum() // distance", ALLOCATION),
    Mutant("jaxacct/accountants/allocation/random_allocation.py", "size * (1 / scheme.phase_probability - 1)", "size * (2 / scheme.phase_probability - 2)", ALLOCATION),
    Mutant("jaxacct/schemes/b_min_sep.py", "(p < 1 and b < n)", "(p < 1 and b < n - 1)", ACCOUNTANTS),
    Mutant("jaxacct/schemes/b_min_sep.py", "if not self.warm_start or (p < 1", "if (p < 1", ACCOUNTANTS),
    Mutant("jaxacct/schemes/b_min_sep.py", "self.iterations * self.participation_rate", "self.min_separation * self.participation_rate", ALLOCATION),
    Mutant("jaxacct/accountants/allocation/random_allocation.py", "turns**0.5 / mechanism", "turns / mechanism", ALLOCATION),
    Mutant("jaxacct/accountants/base.py", "strategy.bands == 1 and np.all", "np.all", ACCOUNTANTS),
    Mutant("jaxacct/schemes/cyclic_poisson.py", "if self.sampling_probability < 1:", "if False:", ACCOUNTANTS),
    # Replicas at an inflated probability.
    Mutant(RATIO, "log_ratio += math.log1p((b - 1) * p) - math.log1p((b - 1) * more)", "pass", INFLATED),
    Mutant(RATIO, "(self.iterations - 1) * (math.log1p(-more)", "(self.iterations - b) * (math.log1p(-more)", INFLATED),
    Mutant("jaxacct/proposals/families/replicas.py", "(math.exp(min(epsilon, 700.0)) - none)", "math.exp(min(epsilon, 700.0))", INFLATED),
    Mutant("jaxacct/proposals/families/replicas.py", "(loss - m * log_f if times > 1", "(loss - (m - 1) * log_f if times > 1", "tests/proposals/test_inflated.py tests/conformance/test_proposals.py"),
    Mutant("jaxacct/proposals/families/replica_lines.py", "recurrence + replicas * sum(drawn.errors)", "recurrence + sum(drawn.errors) * 0", INFLATED),
    Mutant("jaxacct/proposals/families/replica_lines.py", "math.log(rare) + math.log(share) + log_min_ratio", "math.log(rare) + math.log(share)", INFLATED),
    Mutant("jaxacct/recommendation/noise_estimate.py", "        if like is not None:\n            of_zero_out", "        if False:\n            of_zero_out", CHOOSING),
    Mutant("jaxacct/recommendation/search.py", "    room = (max_copies - 1) // 2\n", "    room = max_copies // 2\n", CHOOSING),
    Mutant("jaxacct/recommendation/grid.py", "return max((scheme for scheme, _ in grid)", "return min((scheme for scheme, _ in grid)", CHOOSING),
    # Compiled programs: one for each kind of data, the one used last kept, numbers as arguments.
    Mutant(PROGRAMS, "key = fixed, tree, kinds, in_64_bits", "key = fixed, tree, kinds", COMPILED),
    Mutant(PROGRAMS, "key = fixed, tree, kinds, in_64_bits", "key = fixed, tree, in_64_bits", COMPILED),
    Mutant(PROGRAMS, "del self._programs[next(iter(self._programs))]", "self._programs.popitem()", COMPILED),
    Mutant(PROGRAMS, "self._programs.pop(key, None) or", "self._programs.get(key) or", COMPILED),
    Mutant(PROGRAMS, "if name not in asked and _is_known", "if _is_known", COMPILED),
    Mutant(PROGRAMS, " and _is_known(name, value)\n", "\n", COMPILED),
    Mutant(PROGRAMS, "jnp.reshape(jnp.asarray(np.array([value]), dtype), ())", "dtype(value)", COMPILED),
    Mutant(PROGRAMS, "ClosedJaxpr(closed.jaxpr, constants)", "ClosedJaxpr(closed.jaxpr, closed.consts)", COMPILED),
    # Other libraries: what is said to dominate does, and only distributions that are here are read.
    Mutant(EVENTS, "noise_multiplier / sensitivity(mechanism))", "noise_multiplier)", PEERS),
    Mutant(EVENTS, "if rounds is None or not is_covered or", "if rounds is None or", PEERS),
    Mutant(EVENTS, "if scheme.min_separation == 1:", "if scheme.min_separation >= 1:", PEERS),
    Mutant(SAMPLERS, "_MAX_NORM = 1 - 1e-6, 1 + 1e-12", "_MAX_NORM = 1 - 1e-6, 1 + 1e-6", PEERS),
    Mutant(SAMPLERS, "cycle > 1 and selection.partition_type", "cycle < 1 and selection.partition_type", PEERS),
    Mutant(SAMPLERS, "            if cap is not None and cycle > 1:\n", "            if False:\n", PEERS),
    Mutant(SAMPLERS, "given.warm_start and b > 1, given.batch_size_cap)", "given.warm_start and b > 1)", PEERS),
    Mutant(SAMPLERS, 'getattr(selection, "warm_start", True)', "True", PEERS),
    Mutant(DOMINATING, "exported = other if intervals[0] == self.interval else _exported", "exported = other if True else _exported", PEERS),
    Mutant(DOMINATING, "(profile.directions[direction][2] for", "(profile.directions[direction][1] for", PEERS),
    Mutant(CURVES, "found * (1 + _ROUNDINGS), 1.0)", "found * (1 + _ROUNDINGS), 0.0)", PEERS),
    Mutant(CURVES, "1 - np.exp(negative) * (1 - backward[1][:0:-1])", "1 - np.exp(negative)", PEERS),
    Mutant(CURVES, "return _on_the_line(*falling), _on_the_line(*falling[::-1])", "return _on_the_line(*falling), _on_the_line(falling[1], falling[1])", PEERS),
    Mutant(DOMINATING, "1 - profile.confidence, interval, adjacency)", "0.0, interval, adjacency)", PEERS),
    Mutant(DOMINATING, "min(1.0, self.failure_probability + other.failure_probability)", "self.failure_probability", PEERS),
    Mutant(CURVES, ">= slope(stack[-2], j)", "<= slope(stack[-2], j)", PEERS),
    Mutant(DOMINATING, '_validate.open_probability("delta", delta) - self.failure_probability', '_validate.open_probability("delta", delta)', PEERS),
    Mutant("train/models/loss.py", "and module.use_running_average is not True", "and False", NORMED),
    Mutant("train/models/loss.py", "isinstance(module, nnx.BatchNorm) and", "isinstance(module, nnx.BatchNorm) or", NORMED),
    Mutant("train/models/loss.py", "module.use_running_average if given is None else given", "given", NORMED),
    Mutant("train/models/loss.py", "args[1] if len(args) > 1 else None", "True", NORMED),
    Mutant("train/clipping/sums.py", "        with no_batch_statistics():\n", "        if True:\n", NORMED),
    # Constants of a program are part of its digest, wherever JAX keeps them.
    Mutant("train/batches/fingerprints.py", '    yield from map(_content, getattr(program, "consts", ()))\n', "", ROWS),
    Mutant("train/batches/fingerprints.py", "        yield from _traced(value)\n", "        pass\n", ROWS),
    Mutant("train/batches/fingerprints.py", "sorted(map(repr, value))", "map(repr, value)", ROWS),
    # Rows stay apart in gradients of grouped convolutions.
    Mutant("train/clipping/programs.py", "_rewritten(function, _ungrouped)", "function", GROUPED),
    Mutant("train/clipping/programs.py", "if eqn.primitive.name not in _INLINED or len", "if len", GROUPED),
    Mutant("train/clipping/per_example.py", "without_batch_groups(jax.value_and_grad(loss))(", "jax.value_and_grad(loss)(", GROUPED),
    Mutant("train/clipping/ghost.py", "without_batch_groups(jax.value_and_grad(value, (0, 1), has_aux=True))", "jax.value_and_grad(value, (0, 1), has_aux=True)", GROUPED),
    # A loss that mixes rows is refused.
    Mutant(APART, "(*eqn.invars, *eqn.outvars)", "eqn.outvars", OF_ROWS),
    Mutant(APART, "and kind != threefry", "and kind == threefry", OF_ROWS),
    Mutant(APART, "random_split threefry2x32", "random_split rng_uniform threefry2x32", OF_ROWS),
    Mutant(APART, "(inside and eqn.primitive in running)", "inside", OF_ROWS),
    Mutant(APART, "eqn.primitive in apart", "eqn.primitive.name in {p.name for p in apart}", OF_ROWS),
    Mutant(APART, "all(type(axis) is int for", "all(axis is not None for", OF_ROWS),
    Mutant(APART, "polygamma population", "polygamma regularized_incomplete_beta population", OF_ROWS),
    Mutant(APART, "            if (found := why_not(inner, allowed)) is not None:\n                return found\n", "            return why_not(inner, allowed)\n", OF_ROWS),
    Mutant(APART, "(number := _num_devices(eqn.params)) > 1", "(number := _num_devices(eqn.params)) > 99", OF_ROWS),
    Mutant("train/clipping/per_example.py", "jax.lax.map(one, rows) if loss.alone else in_fast_layout(jax.vmap(one))(rows)", "in_fast_layout(jax.vmap(one))(rows)", OF_ROWS),
    Mutant("train/clipping/sums.py", "check_statistics(program.closed.jaxpr, len(jax.tree.leaves(params)))", "pass", NORMED),
    Mutant(CHECK, "(pull if joins else 1.0) * after", "after", CHECKER),
    Mutant(CHECK, "+ (1 - m) * epsilon", "- m * epsilon", CHECKER),
    Mutant(CHECK, "t, t - lag, free, kind, f, g)", "t, t - lag, free, 0 * kind, f, g)", CHECKER),
    Mutant(CHECK, "left[who, here] -= counted", "left[who, here] -= joined", CHECKER),
    Mutant(CHECK, "np.maximum(t - place + m, t + b)", "t - place + m", CHECKER),
    Mutant(CHECK, "2 * shared}", "0 * shared}", CHECKER),
    Mutant(CHECK, "and fields != named:", "and False:", CHECKER),
    Mutant(CHECK, "if self.claim.mirrored else 0.0  # of", "if self.claim.epsilon < 0 else 0.0  # of", CHECKER),
    Mutant(CHECK, "(1 + claim.mirrored) * length", "length", CHECKER),
    Mutant(CHECK, "own = own + (j > 1) *", "own = own + 0 *", CHECKER),
    Mutant(CHECK, "len(found := dict(pairs)) < len(pairs)", "(found := dict(pairs)) is None", CHECKER),
    Mutant(CHECK, "weights.sum() <= 1 + SLACK", "weights.sum() <= 10 + SLACK", CHECKER),
    Mutant(CHECK, '"certified" if won[0]', '"certified" if any(won)', CHECKER),
    Mutant(CHECK, "np.log1p(FRACTIONS * gain(0.0))", "np.log1p(2 * FRACTIONS * gain(0.0))", CHECKER),
    Mutant(CHECK, "if not spent <= claim.delta", "if not spent <= 2 * claim.delta", CHECKER),
    Mutant(CHECK, 'if found["verdict"] == "certified" else FAILED', "if found else FAILED", CHECKER),
    Mutant(CHECK, "if not larger <= claim.reserved", "if not larger <= 1e3 + claim.reserved", CHECKER),
]
MUTANTS += [
    Mutant("jaxacct/estimates/interval.py", "if chosen.of_a_bound or chosen.mechanism.is_upper_bound:", "if chosen.of_a_bound:", LOWER_ENDS),
    Mutant("jaxacct/estimates/interval.py", "return chosen.rounded_down or chosen", "return chosen", LOWER_ENDS),
    Mutant("jaxacct/proposals/families/mirrored.py", "constant - (signal + noise)", "constant - noise", "tests/core/test_replace_one.py"),
]
MUTANTS += [
    Mutant("train/procedures/step.py", before, after, "tests/train/noise/test_redrawn.py")
    for before, after in (
        ("or drawn.noise is not noise", "or drawn.noise is None"),
        ("drawn.key, drawn.step + 1,", "drawn.key, drawn.step,"),
        ("        return drawn\n\n", "        return self._drawn\n\n"),
        (" and not isinstance(info.loss, jax.core.Tracer)", ""),
    )
]
MUTANTS += [
    Mutant(path, before, after, tests)
    for (path, tests), mistakes in MISTAKES.items()
    for before, after in mistakes
]
# fmt: on


def misplaced() -> list[str]:
    """Mutants whose `before` is not in its file exactly once."""
    found = []
    for mutant in MUTANTS:
        times = (ROOT / mutant.path).read_text(encoding="utf-8").count(mutant.before)
        tests = [path for path in mutant.tests.split() if not (ROOT / path).exists()]
        if times != 1 or tests:
            found.append(f"{mutant.path}: {mutant.before!r} is there {times} times; missing tests: {tests}")
    return found


def fails(tests: str, tree: Path) -> bool:
    """Whether tests fail in `tree`, a copy of the checkout, or take longer than `SECONDS`."""
    # The test that every `before` is where it is said to be fails with any mutant: it sees none.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", *tests.split()]
    command += ["--deselect", f"{GUARDS}::test_every_mutant_can_be_planted"]
    try:
        return subprocess.run(command, cwd=tree, capture_output=True, timeout=SECONDS).returncode != 0
    except subprocess.TimeoutExpired:
        return True


def is_seen(mutant: Mutant, tree: Path, green: dict[str, bool]) -> bool:
    """Whether its tests fail in `tree`, which is as before afterwards, and pass without it (kept in `green`).

    Raises:
      RuntimeError: they fail without it, so that they show nothing.
    """
    if mutant.tests not in green:
        green[mutant.tests] = not fails(mutant.tests, tree)
    if not green[mutant.tests]:
        raise RuntimeError(f"{mutant.tests} fails, or takes over {SECONDS} s, without a mistake")
    path = tree / mutant.path
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole.replace(mutant.before, mutant.after), encoding="utf-8")
    try:
        return fails(mutant.tests, tree)
    finally:
        path.write_text(whole, encoding="utf-8")


def main() -> int:
    wanted = [mutant for mutant in MUTANTS if all(name in mutant.path for name in sys.argv[1:])]
    bad = misplaced()
    if bad or not wanted:
        print("\n".join(bad) or f"no mutant is in a file named {sys.argv[1:]}", file=sys.stderr)
        return 2
    survivors, green, started = [], {}, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jaxacct-mutants-") as folder:
        tree = Path(folder)
        for name in COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, tree / name)
        for index, mutant in enumerate(wanted, 1):
            seen = is_seen(mutant, tree, green)
            if not seen:
                survivors.append(mutant)
            verdict = "seen" if seen else "SURVIVED"
            each = (time.monotonic() - started) / index
            print(f"{index}/{len(wanted)} {verdict} {mutant.path}: {mutant.before.strip()!r}, "
                  f"{each * (len(wanted) - index) / 60:.0f} min left", flush=True)  # fmt: skip
    killed = len(wanted) - len(survivors)
    print(f"{killed} of {len(wanted)} mutants seen: {100 * killed / len(wanted):.1f} %")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
