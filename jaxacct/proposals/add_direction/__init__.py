"""Proposals for the add direction, H(Q, P).

Read in this order:

* `plain_bounded`: samples of Q with terms of at most `1 - e^epsilon P(x = 0)`;
* `half_space`: noise along one coordinate, drawn where a tangent of the loss lies;
* `mean_overlaps`: the same for units of several examples, whose loss is bounded;
* `extrapolation`: half-spaces found on short runs, for long ones.
"""
