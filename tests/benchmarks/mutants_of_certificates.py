"""Mistakes in what certificates depend on (budget items, proposals, stored plans), for `benchmarks.mutants`.

By file and the tests that should see them: (before, after) of each.
"""

# fmt: off
MISTAKES: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("jaxacct/likelihood/loss.py", "tests/core/test_replace_one.py"): [
        ("loss_of_scores(scheme, strategy, -scores_, sigma, Direction.ADD), log_f", "0.0, log_f"),
        ("-rows, batch_sizes, mechanism.cross_terms)", "-rows, batch_sizes)"),
    ],
    ("jaxacct/proposals/families/mirrored.py", "tests/core/test_replace_one.py"): [
        ("return float(np.logaddexp(log_none, log_rest)), _LEFT_OUT", "return log_rest + 1.0, _LEFT_OUT"),
        ("log_rest)), _LEFT_OUT", "log_rest)), 0.0"),
        ("tuple(map(sum, zip(one.errors, other.errors, strict=True)))", "one.errors"),
        ("for bound in (one, other))", "for bound in (one,))"),
    ],
    ("jaxacct/proposals/families/replicas.py", "tests/core/test_replace_one.py"): [
        ("m / number, epsilon + floor)", "m / number, epsilon)"),
        ("or is_special or mechanism.is_replace_one", "or is_special"),
    ],
    ("jaxacct/core/claim.py", "tests/core/test_replace_one.py"): [
        ("if self.mechanism.adjacency != ZERO_OUT:", "if self.mechanism.is_add_or_remove:"),
    ],
    ("jaxacct/mechanisms/mechanism.py", "tests/core/test_replace_one.py"): [
        ("if compose_with is not None and mechanism.is_replace_one:", "if False:"),
    ],
    ("jaxacct/proposals/registry.py", "tests/core/test_replace_one.py"): [
        ("        and mechanism.pair_adjacency in family.adjacencies\n", ""),
    ],
    ("jaxacct/accountants/unamplified.py", "tests/core/test_replace_one.py"): [
        ("mechanism.gradient_distance * math.sqrt(square)", "math.sqrt(square)"),
    ],
    ("jaxacct/likelihood/rounding.py", "tests/core/test_budget_lines.py"): [
        ("recurrence + share * exp_or_inf(sum(of_most))", "recurrence"),
        ("length = reach * math.sqrt(1 + 2 * float(np.max(mechanism.cross_terms)))  # |C x|", "length = reach"),
        ("    if _mixed(scheme):  # ln P/R and ln Q/R together\n        reach *= 1.5\n", ""),
        ("sigma * noise + replicas * 2 * at_once", "sigma * noise + 2 * at_once"),
        ("log_share += scheme.sums.log_none", "pass"),
        ("local += 2 * (5 * top + SOFTPLUS_ROUNDINGS)", "pass"),
        ("return lines + draw_lines(replicas * bound.share)", "return lines"),
        ("drawn = replicas * reach_of(scheme, count) * scheme.sums.times", "drawn = reach_of(scheme, count) * scheme.sums.times"),
        ("share * exp_or_inf(sum(of_most))", "share"),
        ('"total variation", 8 * RARE,', '"total variation", RARE,'),
        ("2 * at_once * (1 + cross)", "2 * at_once"),
        ("(score + 0.5 + cross) / sigma**2", "(score + 0.5) / sigma**2"),
        (" - (math.log(2) if _mixed(scheme) else 0.0)", ""),
        ("adds_windows(scheme, strategy, replicas) and not size.transformed", "adds_windows(scheme, strategy, replicas)"),
        ("product * scores) * (1 + 1e-3)", "product * scores)"),
        ("size.ratio + 6 * half, 2", "size.ratio + 6 * half, 1"),
    ],
    ("jaxacct/proposals/families/truncated.py", "tests/core/test_budget_lines.py"): [
        ("truncation.iterations - none", "truncation.iterations"),
    ],
    ("jaxacct/proposals/threshold.py", "tests/core/test_budget_lines.py"): [
        ("lambda share: rounding.sizes(mechanism, delta_v, replicas, share)", "lambda share: rounding.sizes(mechanism, delta_v, replicas, 2.0**-20)"),
        ("3 * rounding.UNIT * parts", "rounding.UNIT * parts"),
        ("max(size.largest, lowest)", "size.largest"),
        ("loss_lines(mechanism, delta_v, max(1, m))", "loss_lines(mechanism, delta_v, 1)"),
        ("        if m > 1:", "        if m > 2:"),
    ],
    ("jaxacct/proposals/families/replica_lines.py", "tests/core/test_budget_lines.py"): [
        ("rare = size.beyond + size.above + drawn.size.beyond + drawn.size.above", "rare = size.beyond + size.above"),
        ("+ drawn.size.beyond + drawn.size.above", "+ drawn.size.beyond"),
        ("+ replicas * sum(drawn.errors) + 4 *", "+ sum(drawn.errors) + 4 *"),
        ("rare**2, rounding.SOURCE", "0 * rare, rounding.SOURCE"),
        ("largest=2 * size.largest)", "largest=size.largest)"),
        ("math.sqrt(scheme.parts[1] - 1 + left)", "math.sqrt(scheme.parts[1] - 1)"),
        ("log_coincidence(mechanism, 2 * number)", "log_coincidence(mechanism, number)"),
        ("log_normalizer(inflated) - log_min_ratio", "log_normalizer(inflated)"),
        ("log_min_ratio = min(", "log_min_ratio = max("),
    ],
    ("jaxacct/kernels/likelihoods/interacting_recurrence.py", "tests/core/test_budget_lines.py"): [
        ("local += (number - 1) * (3 * (number * top + growth) + SOFTPLUS_ROUNDINGS)", "local += 0"),
        ("4 * (growth + together + number * shift)", "4 * (growth + together + shift)"),
    ],
    ("jaxacct/proposals/families/replicas.py", "tests/core/test_budget_lines.py"): [
        ("total_variation=pairs * variation", "total_variation=variation"),
        ("math.expm1(pairs * math.log1p(relative))", "relative"),
    ],
    ("jaxacct/schemes/replicas/table.py", "tests/core/test_budget_lines.py"): [
        ("* of_choices + _start_errors(mechanism)[1]", "* of_choices"),
        ("2.0**-43 + _start_errors(mechanism)[0]", "2.0**-43"),
    ],
    ("jaxacct/kernels/randomness.py", "tests/core/test_budget_lines.py"): [
        ("> math.log(rare / 16):", "> math.log(rare):"),
    ],
    ("jaxacct/strategies/stationary.py", "tests/core/test_budget_lines.py"): [
        ("lags[0] + 2 * float(np.max(lags[separation:]", "lags[0] + float(np.max(lags[separation:]"),
    ],
    ("jaxacct/proposals/families/replicas.py", "tests/core/test_loading.py"): [
        ("if one.is_upper_bound and (m > 2 or is_special", "if one.is_upper_bound and (False"),
    ],
    ("jaxacct/proposals/families/pair_weights.py", "tests/core/test_allowances.py"): [
        ("relative = side * (2 * slots + 2 * m + 20) * _UNIT", "relative = 0.0 * side"),
    ],
    ("jaxacct/proposals/families/overlaps.py", "tests/core/test_allowances.py"): [
        ("known = (far + off - jnp.maximum(own - own_off, 0.0)) * arrays", "known = (far - jnp.maximum(own, 0.0)) * arrays"),
        ("lifted * (1 - 16 * _UNIT)", "lifted"),
    ],
    ("jaxacct/statistics/composed.py", "tests/core/test_allowances.py"): [
        ("float(np.nanmax(candidates)) + _RAISED * (1 + power)", "float(np.nanmax(candidates))"),
        ("self._floor * (1 + _RAISED)", "self._floor"),
    ],
    ("jaxacct/statistics/hockey_stick.py", "tests/core/test_allowances.py"): [
        ('    if not np.all(np.isfinite(loss)):\n        raise NonFiniteLossError(\n            f"', '    if np.isnan(loss).any():\n        raise NonFiniteLossError(\n            f"'),
        ("if np.isnan(values).any() or np.isnan(draws.log_weight).any():", "if np.isnan(values).any():"),
        ("    if not np.all(np.isfinite(weighted)):", "    if np.isnan(weighted).any():"),
        ("        bounds[-1] = np.inf\n", "        pass\n"),
    ],
    ("jaxacct/statistics/lines.py", "tests/core/test_allowances.py"): [
        ("math.expm1(math.fsum(map(math.log1p, amounts)))", "math.expm1(max(map(math.log1p, amounts), default=0.0))"),
    ],
    ("jaxacct/proposals/families/replicas.py", "tests/core/test_allowances.py"): [
        ("left_out = composed.left_out + composed.exchanged(", "left_out = 0 * composed.exchanged("),
        ("composed.left_out + composed.exchanged(setting.epsilon, mechanism.scheme)", "composed.left_out"),
        ("lowest, largest = max(0.0, composed.end),", "lowest, largest = 0.0,"),
        ("ratio = math.exp(log_ratio) * (1 - _LOWERED)", "ratio = math.exp(log_ratio) * (1 + _LOWERED)"),
    ],
    ("jaxacct/proposals/families/truncated.py", "tests/core/test_allowances.py"): [
        ("math.fsum(sums) * (1 + 1e-12), log_tilt", "math.fsum(sums) * (1 - 1e-12), log_tilt"),
    ],
    ("jaxacct/statistics/bounds.py", "tests/core/test_allowances.py"): [
        ("wealth = logs @ counts - _ROUNDING * (1 + np.abs(logs) @ counts) + np.log(weights)", "wealth = logs @ counts + np.log(weights)"),
    ],
    ("jaxacct/proposals/threshold.py", "tests/core/test_allowances.py"): [
        ("        *end_lines(proposal.left_out, _LEFT_OUT[proposal.mechanism.is_replace_one]),\n", ""),
        ('lowest = proposal.lowest + (total(lines, "epsilon") if proposal.lowest else 0.0)', "lowest = proposal.lowest"),
        ('return intended - total(lines, "total variation")', "return intended"),
    ],
    ("jaxacct/core/claim.py", "tests/core/test_loading.py"): [
        ("self.truncate_to is not None and not truncation.covers(self.mechanism, self.target.epsilon)", "False"),
        ("            if self.target.composed:\n", "            if False:\n"),
        ("            if self.dataset_size is None:\n                raise", "            if False:\n                raise"),
        ("return (self.truncation_delta or 0.0) + (self.overflow.delta if self.overflow else 0.0)", "return self.truncation_delta or 0.0"),
        ("return (self.truncation_delta or 0.0) + (self.overflow.delta if self.overflow else 0.0)", "return self.overflow.delta if self.overflow else 0.0"),
        ("if not self.target.budget.delta <= available:", "if False:"),
    ],
    ("jaxacct/core/plan.py", "tests/core/test_loading.py"): [
        ("        if plan.flaws:\n            raise", "        if False:\n            raise"),
        ("return verify_claim(self.claim, Stop", 'return verify_claim(Claim(self.mechanism, ClaimedTarget.at(self.epsilon, self.delta), None, None), Stop'),
        ("proposal, again=self.evidence, **options)", "proposal, **options)"),
    ],
    ("jaxacct/verification/replay.py", "tests/core/test_loading.py"): [
        ("_CLOSE = 0.05\n", "_CLOSE = 0.95\n"),
        ("    if plan.flaws:\n        raise", "    if False:\n        raise"),
    ],
    ("jaxacct/core/verify.py", "tests/core/test_loading.py"): [
        ("kept = again if again is not None and proposal is None and again.rule == stop.rule else None", "kept = None"),
    ],
    ("jaxacct/core/verify.py", "tests/core/test_verify.py"): [
        ("job = _job_digest(claim, stop, proposal, again)", "job = _job_digest(claim, stop, proposal)"),
    ],
    ("jaxacct/core/check.py", "tests/core/test_loading.py"): [
        ('        if not verdict.certified:\n            flaws.append(f"{direction}: {verdict.outcome}")\n', ""),
        ("    check_margin(side.margin, of.margin)\n", "    pass\n"),
        ("if evidence.rule not in data.RULES:", "if False:"),
        ('if (rule == "anytime") != bool(side.bets):', "if False:"),
        ("if not bound <= target.budget.delta:", "if not bound <= target.delta:"),
    ],
    ("jaxacct/core/check.py", "tests/core/test_plan.py"): [
        ("if not _fit_together(", "if False and not _fit_together("),
        ("if keys[0] is not None and keys[0] == keys[1]:", "if False:"),
    ],
    ("jaxacct/core/check.py", "tests/conformance/test_claims.py"): [
        ("evidence.claim != claim.digest:", "False:"),
        ("math.isfinite(margin) and margin >=", "margin >="),
    ],
    ("jaxacct/core/blocks.py", "tests/verification/test_executors.py"): [
        ("    if piece.version != VERSION:", "    if False:"),
        ("    if flaws:", "    if False:"),
        ("counts.min() >= 0 and ", ""),
        (" and counts.sum() == samples", ""),
        ("field(repr=False)", "field()"),
        ("            future.cancel()", "            pass"),
        ("if piece.first != first or piece.last > last:", "if False:"),
    ],
    ("jaxacct/core/check.py", "tests/core/test_guards.py"): [
        ("if dominated != isinstance(side, data.Dominated):", "if False:"),
        ("if dominated != isinstance(side, data.Dominated):", "if dominated > isinstance(side, data.Dominated):"),
    ],
    ("jaxacct/mechanisms/mechanism.py", "tests/core/test_guards.py"): [
        ("(Direction.REMOVE,) if self.scheme.side_information is None else DIRECTIONS", "(Direction.REMOVE,)"),
    ],
    ("jaxacct/core/check.py", "tests/core/test_loading.py tests/core/test_guards.py"): [
        ("not terms.sum() or terms.sum() != losses.sum() or terms", "not terms.sum() or terms"),
        ("terms.sum() != losses.sum() or terms.sum() % randomness.BLOCK_SIZE:", "terms.sum() != losses.sum():"),
        ("if not terms.sum() or terms.sum() != losses", "if terms.sum() != losses"),
    ],
    ("jaxacct/core/verify.py", "tests/core/test_allowances.py"): [
        ('proposal.draw_metadata | {"margin": margin}', "proposal.draw_metadata"),
    ],
    ("jaxacct/statistics/composed.py", "tests/core/test_composed.py"): [
        ("(heights[place] - heights[place + 1])", "0 * heights[place]"),
        ("participation * math.exp(epsilon)", "participation"),
        ("if self.profile.of_gaussians or", "if True or"),
    ],
    ("jaxacct/accountants/composition.py", "tests/core/test_composed.py"): [
        ("return all(isinstance(remove, OfGaussians)", "return any(isinstance(remove, OfGaussians)"),
    ],
    ("jaxacct/proposals/base.py", "tests/core/test_composed.py"): [
        ("left_out=setting.composed.exchanged(setting.epsilon, setting.mechanism.scheme)", "left_out=0.0"),
    ],
    ("jaxacct/schemes/replicas/joint.py", "tests/proposals/test_proposals.py"): [
        ("attraction[0] ** (j * (j - 1) // 2)", "attraction[0] ** (j // 2)"),
        ("* attracted**j", "* attracted"),
        ("return ways * p**j", "return p**j"),
        ("scheme.sampling_probability < 1 and", "True and"),
        ("type(scheme) is BMinSep", "hasattr(scheme, 'sampling_probability')"),
        ("largest * (1 + 1e-6)", "largest * 0.9"),
        ("return max(relative, _needed(mechanism, m)),", "return relative,"),
        ("hazard[i, : len(part)] = np.where(share", "hazard[i, : len(part)] = 0.97 * np.where(share"),
        ("distribution[first] * chance * reach", "distribution[first] * chance * reach[0]"),
        ("level <= reached", "level <= hazard"),
        ("here = jnp.minimum(at, n - 1)", "here = jnp.minimum(step, n - 1)"),
        ("jnp.where(left > 0, left + b - 1, 0)", "left"),
    ],
    ("jaxacct/proposals/families/joint_replicas.py", "tests/proposals/test_proposals.py"): [
        ("mechanism.pair_adjacency != ZERO_OUT", "False"),
        ('tables["log_z"] + (1 - tables["m"]) * loss', 'tables["log_z"] - loss'),
        ("replicas=m,", "replicas=1,"),
        ("log_scale=log_scale(log_z, m, setting.epsilon)", "log_scale=log_scale(log_z, m, setting.epsilon) - 1"),
    ],
}
